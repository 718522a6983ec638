"""SGLang's speculative seams: the registered algorithm and the worker's base.

Contract of a worker (SGLang's "spec v2"): ``batch.seq_lens`` counts committed KV and excludes the pending bonus token;
a verify forwards ``[bonus, d1..dK]`` at positions ``seq_lens .. seq_lens + K``; rejected slots are overwritten by the
next round, so a chain needs no KV movement at any page size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ssd.algorithm.host_values import constant, no_columns

ALGORITHM_NAME = "SSD"


class SSDAlgorithm(CustomSpecAlgo):
    """The algorithm as SGLang sees it, with the three methods its plug-in class lacks and the scheduler calls."""

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False
    ):
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def has_draft_kv(self) -> bool:
        # The draft's KV lives in another process.
        return False

    def handle_server_args(self, server_args) -> None:
        # A chunk that decodes beside a prefill would verify nothing; SGLang's own algorithms refuse it as well.
        server_args.enable_mixed_chunk = False


def register_algorithm(worker_class: type) -> None:
    """Register ``worker_class`` under ``--speculative-algorithm SSD``. Doing it twice is harmless."""
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(ALGORITHM_NAME) is None:
        SpeculativeAlgorithm.register(ALGORITHM_NAME, supports_overlap=True, spec_class=SSDAlgorithm)(
            lambda server_args: worker_class
        )


class Verified(NamedTuple):
    """One forward of the target. logits: float [B, W, V], row j is the target's law of the token after input j (W is
    K+1 or less in a verify, 1 after a prompt); token_ids: int64 [B, W], what a verify read: the pending tokens and the
    proposals."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    result: GenerationBatchResult


def emitted_tokens(result: GenerationBatchResult) -> list[list[int]]:
    """The tokens that each row emits, on the host. Waits for the device; in the overlapped loop for the copy that SGLang
    began when the worker returned (seam: ``GenerationBatchResult.copy_to_cpu``)."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    token_ids = result.next_token_ids.tolist()
    if result.accept_lens is None:
        return [[token] for token in token_ids]
    width = result.speculative_num_draft_tokens
    return [token_ids[i * width : i * width + n] for i, n in enumerate(result.accept_lens.tolist())]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is there once ``emitted_tokens`` of the same forward has answered."""
    return tensor.to("cpu", non_blocking=True)


class SpecWorkerBase(BaseSpecWorker):
    """What a worker needs from SGLang, in four verbs: prefill, verify, and what completes the result of each."""

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker) -> None:
        super().__init__()
        from sglang.srt.runtime_context import get_spec

        self.server_args = server_args
        self.device = target_worker.device
        self._target_worker = target_worker
        #: Tokens of one verify, K+1.
        self.verify_width: int = get_spec().speculative_num_draft_tokens

    @property
    def draft_worker(self):
        # The draft is another process: SGLang has no pools or weights of it to manage.
        return None

    @property
    def lookahead(self) -> int:
        return self.verify_width - 1

    @property
    def can_narrow(self) -> bool:
        """Whether a verify may have fewer than K+1 tokens a row. CUDA graphs are captured for one width."""
        return self.device == "cpu"

    @property
    def is_overlapped(self) -> bool:
        """Whether SGLang runs a batch before it looks at the result of the one before."""
        from sglang.srt.runtime_context import get_schedule

        return not get_schedule().disable_overlap_schedule

    def run_plain(self, batch, pp_proxy_tensors=None) -> GenerationBatchResult:
        """The target's own forward with SGLang's own ending: for batches that draw no token."""
        return self.target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)

    def run_prefill(self, batch) -> Verified:
        """Forward prompts, or chunks of them, without drawing a token."""
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        logits = result.logits_output.next_token_logits
        return Verified(logits.unsqueeze(1), batch.input_ids[:0], result)

    def complete_prefill(self, batch, result: GenerationBatchResult, on_publish) -> GenerationBatchResult:
        if batch.return_logprob and not batch.is_prefill_only and not batch.forward_mode.is_idle():
            compute_spec_logprobs(batch, result.logits_output, result.next_token_ids, chain_stride=1)
            # A prompt's result holds one token a request, not a run of them.
            result.logits_output.next_token_logprobs = result.logits_output.next_token_logprobs.view(-1)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.next_draft_input = self._next_input(result.next_token_ids, batch.seq_lens)
        result.new_seq_lens = batch.seq_lens
        return result

    def run_verify(self, batch, draft_tokens: torch.Tensor) -> Verified:
        """Forward the pending bonus token and K proposed tokens of each row.

        draft_tokens: int64 [B, K], or fewer columns where ``can_narrow``; padding must hold valid ids. Edits of ``batch``
        are undone by the scheduler.
        """
        num_rows, width = batch.seq_lens.shape[0], draft_tokens.shape[1] + 1
        token_ids = batch.spec_info.bonus_tokens.view(-1, 1)
        if width > 1:
            token_ids = torch.cat([token_ids, draft_tokens], dim=1)
        depths = constant(tuple(range(width)), torch.int64, batch.seq_lens.device)
        positions = batch.seq_lens.view(-1, 1) + depths
        slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices.view(-1, 1), positions]
        batch.out_cache_loc = slots.view(-1).to(torch.int64)
        if batch.seq_lens_cpu is not None:
            # Host-planned backends (FlashInfer) split KV by these lengths and drop what lies beyond them.
            batch.seq_lens_cpu = batch.seq_lens_cpu + width
            batch.seq_lens_sum = None  # SGLang sums what is there.
        verify_input = DFlashVerifyInput(
            draft_token=token_ids.view(-1),
            positions=positions.view(-1),
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        # The forward lays out its attention itself, eagerly or for a graph: once.
        forward_batch, _ = verify_input.prepare_for_verify(
            batch, self.target_worker, defer_metadata_init=True
        )
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        logits = result.logits_output.next_token_logits
        return Verified(logits.view(num_rows, width, -1), token_ids, result)

    def verify_result(
        self, verified: Verified, token_ids: torch.Tensor, num_accepted: torch.Tensor
    ) -> GenerationBatchResult:
        """What a verify emits. token_ids: int64 [B, W], of which ``num_accepted + 1`` count; num_accepted: [B]."""
        return GenerationBatchResult(
            logits_output=verified.result.logits_output,
            next_token_ids=token_ids.reshape(-1),
            accept_lens=num_accepted + 1,
            can_run_cuda_graph=verified.result.can_run_cuda_graph,
            speculative_num_draft_tokens=token_ids.shape[1],
        )

    def complete_verify(
        self, batch, result: GenerationBatchResult, bonus_tokens: torch.Tensor, on_publish
    ) -> GenerationBatchResult:
        """Add what the scheduler needs for the next round to a ``verify_result``. bonus_tokens: int64 [B], the last that each
        row emits."""
        width = result.speculative_num_draft_tokens
        new_seq_lens = batch.seq_lens + result.accept_lens
        if batch.return_logprob:
            compute_spec_logprobs(batch, result.logits_output, result.next_token_ids, chain_stride=width)
        if on_publish is not None:
            on_publish(new_seq_lens)
        result.next_draft_input = self._next_input(bonus_tokens, new_seq_lens)
        result.new_seq_lens = new_seq_lens
        return result

    def _next_input(self, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor) -> DFlashDraftInputV2:
        # The fields of SGLang's in-process drafts stay empty: ours is asked over the wire.
        num_rows, device = bonus_tokens.shape[0], bonus_tokens.device
        empty = no_columns(num_rows, torch.float32, device)
        return DFlashDraftInputV2(
            topk_p=empty,
            topk_index=no_columns(num_rows, torch.int64, device),
            bonus_tokens=bonus_tokens.to(torch.int64),
            new_seq_lens=new_seq_lens,
            hidden_states=empty,
        )
