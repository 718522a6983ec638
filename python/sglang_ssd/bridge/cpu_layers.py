"""Norms, activations and rotary embeddings of a model on the CPU through fused kernels: one pass each where SGLang's native
path takes five to fifteen small operations, which at a few rows cost as much as the attention.

Seam: ``BaseFusedOp._forward_method``, which SGLang resolves at the first call unless it is set.
"""

from __future__ import annotations

from functools import partial

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding

from sglang_ssd.bridge.cpu_linear import pack_linears
from sglang_ssd_kernel import is_compiled, rms_norm, rotary_neox, silu_and_mul

_DTYPES = (torch.bfloat16, torch.float32)


def prepare_model(model: torch.nn.Module, pack_weights: bool) -> None:
    """Make a loaded model fast on the CPU: fused kernels for the small layers, packed weights for the linear ones."""
    use_cpu_kernels(model)
    if pack_weights:
        pack_linears(model)


def use_cpu_kernels(model: torch.nn.Module) -> int:
    """Let every layer that the kernels can serve use them. Returns how many; 0 where nothing is compiled."""
    if is_compiled() is None:
        return 0
    num_layers = 0
    for module in model.modules():
        forward = _fused_forward(module)
        if forward is not None:
            module._forward_method = partial(forward, module)
            num_layers += 1
    return num_layers


def has_kernel(module: torch.nn.Module) -> bool:
    """Whether the kernels, where they are compiled, serve this layer: row by row, each to the same bits in any batch."""
    return _fused_forward(module) is not None


def _fused_forward(module: torch.nn.Module):
    return next((forward for serves, forward in _FORWARDS if serves(module)), None)


def _is_norm(module) -> bool:
    return (
        type(module) is RMSNorm
        and module.variance_size_override is None
        and module.override_orig_dtype is None
        and not module.cast_x_before_out_mul
        and not module.fp32_residual
        and module.weight.dtype in _DTYPES
    )


def _norm(module, x, residual=None, post_residual_addition=None, quant_linear=None):
    if post_residual_addition is not None or x.dim() != 2 or x.dtype != module.weight.dtype:
        return module.forward_native(x, residual, post_residual_addition, quant_linear)
    return rms_norm(x, module.weight.data, module.variance_epsilon, residual)


def _is_activation(module) -> bool:
    return type(module) is SiluAndMul


def _activation(module, x):
    if x.dim() != 2 or x.dtype not in _DTYPES:
        return module.forward_native(x)
    return silu_and_mul(x)


def _is_rotary(module) -> bool:
    return (
        isinstance(module, RotaryEmbedding)
        and type(module).forward_native is RotaryEmbedding.forward_native
        and module.is_neox_style
        and not hasattr(module, "sin_cos_cache")
    )


def _rotary(module, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """In place, as SGLang's device kernels do it."""
    cache = module.cos_sin_cache
    is_served = (
        offsets is None
        and fused_set_kv_buffer_arg is None
        and positions.dim() == 1
        and query.dim() == key.dim() == 2
        and query.dtype in _DTYPES
        and cache.dtype in (torch.float32, query.dtype)
    )
    if not is_served:
        return module.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    rotary_neox(positions, query, key, cache, module.head_size, module.rotary_dim)
    return query, key


_FORWARDS = ((_is_norm, _norm), (_is_activation, _activation), (_is_rotary, _rotary))
