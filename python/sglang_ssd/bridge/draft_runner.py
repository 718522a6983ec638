"""A SGLang ``ModelRunner`` outside any scheduler: weights, KV pool and attention backend of the draft.

Seams: ``ServerArgs`` resolution and ``publish``; ``bootstrap.init_parallel_runtime`` / ``init_layer_runtime``;
``ModelRunner`` and its pools; hand-built ``ForwardBatch`` with ``KVIndexTranslator.plan().bind()``.
SGLang's runtime context is one record per process, so the draft lives in a process of its own.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ssd.bridge.memory import bytes_per_kv_token

if TYPE_CHECKING:
    from sglang_ssd.bridge.prefix_cache import Prefix
    from sglang_ssd_kernel import ForkLayout

logger = logging.getLogger(__name__)


#: A path may bring several tokens to one forward (MAX_LOOKAHEAD and two more at most), so a draft that serves few rows needs
#: buffers for more.
_MIN_DECODE_TOKENS = 128


class DraftRunnerConfig(NamedTuple):
    """What the draft process needs to load its model.

    device: ``cpu`` or ``cuda``. dtype: as SGLang's flag. attention_backend: as SGLang's flag or ``triton-fork``, None for
    the default.
    max_rows: rows of ``req_to_token``, sessions and branches together. kv_tokens: KV slots, None for what fits.
    context_length: longest sequence in tokens including the lookahead.
    """

    model_path: str
    device: str
    dtype: str
    attention_backend: str | None
    max_rows: int
    kv_tokens: int | None
    context_length: int | None
    trust_remote_code: bool = False
    mem_fraction_static: float | None = None


class Capacity(NamedTuple):
    """Free and total KV slots and rows."""

    free_slots: int
    total_slots: int
    free_rows: int
    total_rows: int


class DraftModelRunner:
    """Forwards of the draft model over rows that this class hands out.

    A row is one line of ``req_to_token``: the KV slot of each token of a path. Row 0 is SGLang's padding row.
    """

    def __init__(self, config: DraftRunnerConfig) -> None:
        self.runner = _load(config)
        self.vocab_size = self.runner.model_config.vocab_size
        self.context_length = self.runner.model_config.context_len
        self.device = self.runner.device
        #: Tokens of one decode forward: SGLang copies them into buffers of this size.
        self.max_decode_tokens = max(config.max_rows, _MIN_DECODE_TOKENS)
        #: Backends without read the prefix of each row.
        self._takes_forks = hasattr(self.runner.attn_backend, "next_fork_layout")
        self._tables = self.runner.req_to_token_pool.req_to_token
        self._allocator = self.runner.token_to_kv_pool_allocator
        self._num_rows = self._tables.shape[0] - 1
        self._free_rows = list(range(self._num_rows, 0, -1))
        self._total_slots = self._allocator.available_size()
        from sglang_ssd.bridge.prefix_cache import PrefixCache

        self._prefixes = PrefixCache(self.runner.req_to_token_pool, self._allocator)

    # -- rows and slots ------------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Slots of prefixes that nobody reads count as free."""
        free_slots = self._allocator.available_size() + self._prefixes.num_evictable()
        return Capacity(free_slots, self._total_slots, len(self._free_rows), self._num_rows)

    def take_row(self) -> int | None:
        """A free row, None when all are taken."""
        return self._free_rows.pop() if self._free_rows else None

    def give_row(self, row: int) -> None:
        self._free_rows.append(row)

    def take_slots(self, num_slots: int) -> torch.Tensor | None:
        """int64 [num_slots], None when the pool has fewer."""
        missing = num_slots - self._allocator.available_size()
        if missing > 0:
            self._prefixes.evict(missing)
        return self._allocator.alloc(num_slots)

    def take_prefix(self, row: int, token_ids: list[int]) -> Prefix:
        """Let a row begin with the longest prefix of these tokens whose KV an ended request left. The slots stay the
        cache's; ``keep_prefix`` ends the loan."""
        prefix = self._prefixes.lock(token_ids)
        self.write_slots(row, 0, prefix.slots)
        return prefix

    def keep_prefix(self, row: int, token_ids: list[int], prefix: Prefix) -> None:
        """A row that began with ``prefix`` ends: leave the KV of its tokens to later ones."""
        num_held = self._prefixes.insert(token_ids, self._tables[row, : len(token_ids)].long())
        self.give_slots(row, prefix.slots.numel(), num_held)
        self._prefixes.unlock(prefix)

    def give_slots(self, row: int, start: int, end: int) -> None:
        """Free the slots of tokens ``start`` to ``end`` (exclusive) of a row."""
        if end > start:
            self._allocator.free(self._tables[row, start:end].long())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Slots given back inside go to the pool at once, at the end: each call alone copies the whole free list."""
        self._allocator.free_group_begin()
        try:
            yield
        finally:
            self._allocator.free_group_end()

    def write_slots(self, row: int, start: int, slots: torch.Tensor) -> None:
        self._tables[row, start : start + slots.numel()] = slots.to(self._tables.dtype)

    def copy_slots(self, source: int, target: int, start: int, end: int) -> None:
        """Let tokens ``start`` to ``end`` of row ``target`` be those of row ``source``: shared, not copied, KV."""
        self._tables[target, start:end] = self._tables[source, start:end]

    def call_during_forwards(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called between the layers of every forward. An exception it raises ends the forward, whose
        KV then counts as never computed. CPU only: elsewhere the host waits for no forward."""
        if self.device == "cpu":
            self.runner.attn_backend.before_layer = callback

    # -- forwards ------------------------------------------------------------------------------------------------

    def extend(self, rows: list[int], prefix_lens: list[int], chunks: list[list[int]]) -> torch.Tensor:
        """Forward a chunk of a prompt in each row, whose slots are written. Returns the logits of each chunk's last token,
        float [rows, V]."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        new_lens = [len(chunk) for chunk in chunks]
        spans = [(start, start + n) for start, n in zip(prefix_lens, new_lens, strict=True)]
        ends = [end for _, end in spans]
        batch = self._forward_batch(
            ForwardMode.EXTEND,
            token_ids=[token for chunk in chunks for token in chunk],
            rows=rows,
            seq_lens=self._int64(ends),
            seq_lens_cpu=torch.tensor(ends),
            plan_lens=self._int64(prefix_lens),
            plan_lens_cpu=torch.tensor(prefix_lens),
            slots=torch.cat([self._tables[row, a:b].long() for row, (a, b) in zip(rows, spans, strict=True)]),
            positions=torch.cat([torch.arange(a, b, device=self.device) for a, b in spans]),
            extend_num_tokens=sum(new_lens),
            extend_seq_lens=self._int64(new_lens),
            extend_prefix_lens=self._int64(prefix_lens),
            extend_start_loc=self._int64([0, *accumulate(new_lens[:-1])]),
            extend_seq_lens_cpu=new_lens,
            extend_prefix_lens_cpu=prefix_lens,
            extend_logprob_start_lens_cpu=new_lens,
        )
        return self._forward(batch)

    def decode(self, layout: ForkLayout, token_ids: list[int]) -> torch.Tensor:
        """Forward one token in each row, its last (a row of the pool may appear more than once, at increasing lengths).

        Its slot must be written. Returns logits, float [rows, V].
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        row_ids, lens = self._int64(layout.rows), self._int64(layout.lens)
        position_ids = lens - 1
        batch = self._forward_batch(
            ForwardMode.DECODE,
            token_ids=token_ids,
            rows=layout.rows,
            seq_lens=lens,
            seq_lens_cpu=torch.tensor(layout.lens),
            plan_lens=position_ids,
            plan_lens_cpu=torch.tensor(layout.lens) - 1,
            slots=self._tables[row_ids, position_ids].long(),
            positions=position_ids,
        )
        if self._takes_forks:
            self.runner.attn_backend.next_fork_layout = layout
        return self._forward(batch)

    def _forward_batch(
        self,
        mode,
        *,
        token_ids,
        rows,
        seq_lens,
        seq_lens_cpu,
        plan_lens,
        plan_lens_cpu,
        slots,
        positions,
        **extend,
    ):
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        row_ids = self._int64(rows)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=self._int64(token_ids),
            req_pool_indices=row_ids,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            orig_seq_lens=seq_lens,
            positions=positions,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **extend,
        )
        translator = self.runner.kv_index_translator
        plan = translator.plan(
            req_pool_indices=row_ids, seq_lens=plan_lens, seq_lens_cpu=plan_lens_cpu, write_virtual=slots
        )
        plan.bind(batch, translator)
        return batch

    def _forward(self, batch) -> torch.Tensor:
        with torch.inference_mode():
            return self.runner.forward(batch).logits_output.next_token_logits

    def _int64(self, values: list[int]) -> torch.Tensor:
        # Pinned, since the host waits for copies of other memory.
        values = torch.tensor(values, dtype=torch.int64, pin_memory=self.device != "cpu")
        return values.to(self.device, non_blocking=True)


def _load(config: DraftRunnerConfig):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish
    from sglang.srt.server_args import ServerArgs

    from sglang_ssd.bridge.server_args import TRITON_FORK

    if config.device == "cpu":
        from sglang_ssd.bridge.cpu_attention import install_cpu_attention

        install_cpu_attention()
    if config.attention_backend == TRITON_FORK:
        from sglang_ssd.bridge.fork_attention_backend import install_fork_attention

        install_fork_attention()
    options = dict(
        model_path=config.model_path,
        device=config.device,
        dtype=config.dtype,
        attention_backend=config.attention_backend or ("torch_native" if config.device == "cpu" else None),
        max_running_requests=max(config.max_rows, _MIN_DECODE_TOKENS),
        max_total_tokens=config.kv_tokens,
        context_length=config.context_length,
        trust_remote_code=config.trust_remote_code,
        mem_fraction_static=config.mem_fraction_static,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        page_size=1,
    )
    server_args = ServerArgs(**{name: value for name, value in options.items() if value is not None})
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()
    model_config = ModelConfig.from_server_args(server_args)
    port = _free_port()
    bootstrap.init_parallel_runtime(server_args=server_args, device=config.device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=get_schedule().mem_fraction_static,
        gpu_id=0,
        nccl_port=port,
        server_args=server_args,
    )
    if config.device == "cpu":
        from sglang_ssd.bridge.cpu_layers import prepare_model

        prepare_model(runner.model, pack_weights=True)
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    if config.attention_backend == TRITON_FORK and not hasattr(runner.attn_backend, "next_fork_layout"):
        raise ValueError(
            f"attention backend {TRITON_FORK}: the model wraps it in {type(runner.attn_backend).__name__}; choose another"
        )
    runner.init_cuda_graphs()
    logger.info(
        "draft %s: %d KV slots of %d bytes, %d rows, context of %d tokens",
        config.model_path,
        runner.max_total_num_tokens,
        bytes_per_kv_token(model_config.hf_text_config, runner.kv_cache_dtype.itemsize),
        runner.req_to_token_pool.req_to_token.shape[0] - 1,
        model_config.context_len,
    )
    return runner


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
