"""Whether the logits of a request depend, to the bit, on the rows beside it: checked at start on the model's own shapes.

Where they do not, all modes, batches and lookaheads give the same tokens in any dtype. Attention, norms, activations and
rotary embeddings keep to that by how their kernels sum (``sglang_ssd_kernel``), and linear layers if oneDNN sums a row in
the same order for every row count; that is measured here, since it depends on shape, dtype, threads and processor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.pooler import Pooler
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_ssd.bridge.cpu_attention import is_plain_layer
from sglang_ssd.bridge.cpu_layers import has_kernel
from sglang_ssd.bridge.cpu_linear import output_projections
from sglang_ssd_kernel import is_compiled

logger = logging.getLogger(__name__)

#: Rows of the forwards that are compared: batches of plain decoding, and of verifies.
ROW_COUNTS = (*range(1, 17), 24, 32, 64)
#: And of prompts, whose rows all pass the linear layers, but only the last ones the output projection.
PROMPT_ROW_COUNTS = (100, 256)
#: Ranks whose partial sums an all-reduce adds in an order that does not depend on the number of rows.
_MOST_RANKS = 2
#: Modules that compute row by row, or nothing.
_ROW_BY_ROW = (VocabParallelEmbedding, LogitsProcessor, Pooler, torch.nn.Identity)


class BitEquality(NamedTuple):
    """What a start found. ``holds`` for the ROW_COUNTS, up to ``num_rows``, on ``num_shapes`` different linear layers.
    ``reason``: what breaks it or cannot be checked, empty where it holds."""

    holds: bool
    reason: str
    num_shapes: int
    num_rows: int
    check_ms: float


def check_bit_equality(model_runner) -> BitEquality:
    """Check the loaded model of a ``ModelRunner`` on the CPU, after ``cpu_layers.prepare_model``."""
    started = time.perf_counter()
    linears = _different_linears(model_runner.model)
    reason = next(chain(_obstacles(model_runner), _differing_linears(linears)), "")
    check_ms = (time.perf_counter() - started) * 1e3
    return BitEquality(not reason, reason, len(linears), max(ROW_COUNTS), check_ms)


def report(found: BitEquality) -> None:
    """Say once how a start under ``--ssd-bit-equal auto`` turned out."""
    if found.holds:
        logger.info(
            "bit-equal: rows of %d linear shapes keep their bits in batches of 1 to %d rows (%.0f ms)",
            found.num_shapes, found.num_rows, found.check_ms,
        )  # fmt: skip
    else:
        logger.warning("not bit-equal, tokens may differ between modes and batches: %s", found.reason)


def _obstacles(model_runner) -> Iterator[str]:
    """What does not even need a look at the layers' results."""
    model, args = model_runner.model, model_runner.server_args
    if is_compiled() is None:
        yield "the CPU kernels are not compiled"
    if args.tp_size > _MOST_RANKS:
        yield f"--tp-size {args.tp_size}: the sum over more than {_MOST_RANKS} ranks depends on the number of rows"
    if args.attention_backend != "torch_native":
        yield f"--attention-backend {args.attention_backend}: only torch_native sums keys in their order"
    if model_runner.kv_cache_dtype != model_runner.dtype:
        yield f"--kv-cache-dtype {args.kv_cache_dtype}: the attention kernel wants KV in the model's {model_runner.dtype}"
    unknown = sorted({type(module).__name__ for module in model.modules() if not _is_known(module)})
    if unknown:
        yield f"not known to compute row by row: {', '.join(unknown)}"


def _is_known(module: torch.nn.Module) -> bool:
    if isinstance(module, LinearBase):
        return isinstance(module.quant_method, UnquantizedLinearMethod)
    if isinstance(module, RadixAttention):
        return is_plain_layer(module)
    has_own_weights = any(True for _ in module.parameters(recurse=False))
    is_container = not has_own_weights and any(True for _ in module.children())
    is_empty_list = isinstance(module, torch.nn.ModuleList)
    return is_container or is_empty_list or isinstance(module, _ROW_BY_ROW) or has_kernel(module)


def _different_linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    """One linear layer or output projection of each shape, dtype and method."""
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    layers = {}
    for layer in [*linears, *output_projections(model)]:
        has_bias = getattr(layer, "bias", None) is not None
        layers.setdefault((type(layer.quant_method), layer.weight.shape, layer.weight.dtype, has_bias), layer)
    return list(layers.values())


def _differing_linears(layers: list[torch.nn.Module]) -> Iterator[str]:
    for layer in layers:
        is_projection = isinstance(layer, VocabParallelEmbedding)
        counts = ROW_COUNTS if is_projection else (*ROW_COUNTS, *PROMPT_ROW_COUNTS)
        num_rows = _differing_row_count(layer, counts)
        if num_rows is not None:
            (num_out, num_in), dtype = layer.weight.shape, str(layer.weight.dtype).removeprefix("torch.")
            yield (
                f"{type(layer).__name__} {num_in} -> {num_out} in {dtype}: {num_rows} rows give other bits than "
                f"{max(counts)} rows"
            )


@torch.inference_mode()
def _differing_row_count(layer: torch.nn.Module, counts: Sequence[int]) -> int | None:
    """The first of ``counts`` at which some row has other bits than among the most rows, with other rows and in another
    place; None where there is none."""
    most = max(counts)
    x = torch.randn(most, layer.weight.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.to(layer.weight.dtype)
    bias = getattr(layer, "bias", None)
    expected = layer.quant_method.apply(layer, x, bias)
    for number, count in enumerate(counts):
        rows = (torch.arange(count) + 7 * number) % most
        if not torch.equal(layer.quant_method.apply(layer, x[rows], bias), expected[rows]):
            return count
    return None
