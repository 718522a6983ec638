"""Linear layers on the CPU through oneDNN's packed weights.

torch's linear reorders a bf16 or fp32 weight at every call, which at one to sixteen rows costs as much as the product
itself. Packing once (torch's own oneDNN operators) removes that. Fewer than four rows are padded to four: oneDNN is
faster there, and a row then gets the same bits whatever the number of rows beside it.

Seams: ``quant_method`` of SGLang's linear and embedding layers, replaced after the weights are loaded; the model's
``_derived_weight_cache_error``, with which SGLang refuses to update weights.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

#: Rows below this are padded (see the module's docstring).
MIN_ROWS = 4
#: Row count that oneDNN chooses its packing for; measured flat from 2 to 32 rows.
_PACKED_FOR_ROWS = 8
_WHY_NOT_UPDATED = "the weights are packed and cannot be updated: start with --no-ssd-pack-weights"
#: oneDNN packs these on every x86 host; float16 needs instructions that few have, and stays unpacked.
_PACKABLE = (torch.bfloat16, torch.float32)


class PackedLinear(UnquantizedLinearMethod):
    """Applies a layer whose weight was packed by ``pack_linears``."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] -> [..., out] in the dtype of x."""
        return linear_packed(x, layer.ssd_packed_weight, bias)

    def apply_into(self, layer, x, output, bias=None) -> torch.Tensor:
        return output.copy_(self.apply(layer, x, bias))

    def apply_with_addend(self, layer, x, addend, bias=None) -> torch.Tensor:
        return self.apply(layer, x, bias).add_(addend)


class PackedLMHead(UnquantizedEmbeddingMethod):
    """The output projection through a packed copy; the embedding lookup keeps the plain weight."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear_packed(x.to(layer.weight.dtype), layer.ssd_packed_weight, bias)


def linear_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times a packed weight [out, in]^T -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if num_rows < MIN_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
    out = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out[:num_rows].view(*x.shape[:-1], out.shape[-1])


def pack_linears(model: torch.nn.Module) -> int:
    """Pack the weights of every plain linear layer and of the output projection in place.

    Returns the number of layers packed. The plain weight of a linear layer is freed (a meta tensor keeps its shape),
    so weights cannot be updated afterwards; that of an embedding stays, for the lookup.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    num_packed = 0
    for module in model.modules():
        if (
            isinstance(module, LinearBase)
            and type(module.quant_method) is UnquantizedLinearMethod
            and module.weight.dtype in _PACKABLE
        ):
            module.quant_method = PackedLinear()
            _pack(module)
            module.weight = torch.nn.Parameter(module.weight.to("meta"), requires_grad=False)
            num_packed += 1
    for module in output_projections(model):
        if (
            type(module.quant_method) is not UnquantizedEmbeddingMethod
            or module.weight.dtype not in _PACKABLE
        ):
            continue
        module.quant_method = PackedLMHead()
        _pack(module)
        num_packed += 1
    if num_packed:
        model._derived_weight_cache_error = _WHY_NOT_UPDATED
    return num_packed


def _pack(module: torch.nn.Module) -> None:
    module.ssd_packed_weight = torch.ops.mkldnn._reorder_linear_weight(
        module.weight.data.contiguous(), _PACKED_FOR_ROWS
    )


def output_projections(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that turn hidden states into logits: ``lm_head``, which may be the tied embedding."""
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    tied = getattr(model, "lm_head", None)
    if isinstance(tied, VocabParallelEmbedding) and tied not in heads:
        heads.append(tied)
    return heads
