"""Grammar masks and custom logit processors of a batch, for every position of a verified run.

Seams: ``GrammarTree`` and ``build_grammar_vocab_mask`` (a chain is a degenerate tree; the masks follow the grammar
through the proposal and leave its state as it was); ``SamplingBatchInfo.custom_logit_processor``.
"""

from __future__ import annotations

from typing import Any

import torch


def mask_grammars(batch, verify_ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Mask in place what grammars forbid.

    verify_ids: int64 [B, W], column 0 the token that is committed already, then the proposal. logits: float [B, W, V].
    """
    if not any(request.grammar is not None for request in batch.reqs):
        return
    from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=GrammarTree.from_linear_chain(verify_ids),
        sampling_info=batch.sampling_info,
        device=logits.device,
        barrier=None,
    )
    if mask is not None:
        mask.apply(logits.view(-1, logits.shape[-1]))


def why_processor_unusable(serialized: str | None) -> str | None:
    """One line about a custom logit processor that cannot be loaded, None for one that can or for none. Loading it later,
    in the middle of a batch, would end the scheduler."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    if serialized is None:
        return None
    try:
        CustomLogitProcessor.from_str(serialized)
    except Exception as error:  # noqa: BLE001  (user code: it may raise anything)
        return f"custom_logit_processor: cannot be loaded: {type(error).__name__}: {error}"
    return None


def has_processors(batch) -> bool:
    """Whether a request of the batch brings a custom logit processor, which may read its output."""
    return batch.sampling_info.has_custom_logit_processor


def apply_processors(batch, outputs: list[tuple[list[int], list[int]]], logits: torch.Tensor) -> None:
    """Apply custom logit processors in place, row by row as plain decoding would.

    outputs: [B], each request's output and its proposal; a processor that reads the request's output sees it up to its own
    position. logits: float [B, W, V].
    """
    if not has_processors(batch):
        return
    info = batch.sampling_info
    for entry in info.custom_logit_processor.values():
        for row in entry.rows:
            output_ids, run = outputs[row]
            for j in range(min(len(run), logits.shape[1] - 1) + 1):
                params = _params_at(info.custom_params[row], output_ids, run[:j])
                logits[row, j] = entry.processor(logits[row, j : j + 1], [params])[0].to(logits.dtype)


def _params_at(params: dict[str, Any] | None, output_ids: list[int], run: list[int]) -> dict[str, Any] | None:
    """The processor's parameters with the request as it will be after ``run``."""
    request = (params or {}).get("__req__")
    if request is None or len(request.output_ids) == len(output_ids) + len(run):
        return params
    return {**params, "__req__": _RequestAt(request, [*output_ids, *run])}


class _RequestAt:
    """A request as it will be with this output: everything else is read from the request itself."""

    def __init__(self, request, output_ids: list[int]) -> None:
        self._request = request
        self.output_ids = output_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
