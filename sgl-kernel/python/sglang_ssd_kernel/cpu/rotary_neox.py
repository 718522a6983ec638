"""Rotary position embedding in neox style, in place, as SGLang's ``RotaryEmbedding.forward_native``."""

from __future__ import annotations

import torch

from .library import DTYPE_CODES, kernel_for


def rotary_neox(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    rotary_dim: int,
) -> None:
    """Turn the first ``rotary_dim`` elements of every head of q and k, in place.

    positions:     int64 [rows], within the cache (checked, as an index that is off would read foreign memory).
    q, k:          [rows, heads * head_size] of one dtype; slices of a wider qkv are fine.
    cos_sin_cache: [max position, rotary_dim], cosines then sines, float32 or q's dtype; rounded to q's dtype.
    """
    _check(positions, q, k, cos_sin_cache, head_size, rotary_dim)
    kernel = kernel_for(q, "ssd_rotary_neox")
    for x in (q, k):
        if kernel is None:
            x.copy_(reference(positions, x, cos_sin_cache, head_size, rotary_dim))
            continue
        kernel(
            positions.data_ptr(), x.data_ptr(), cos_sin_cache.data_ptr(),
            x.shape[0], x.shape[1] // head_size, head_size, rotary_dim, x.stride(0),
            DTYPE_CODES[x.dtype], DTYPE_CODES[cos_sin_cache.dtype],
        )  # fmt: skip


def reference(positions, x, cos_sin_cache, head_size, rotary_dim):
    """x [rows, heads * head_size] turned, in torch, as a new tensor."""
    heads = x.unflatten(-1, (-1, head_size))
    cos, sin = cos_sin_cache[positions].to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, heads[..., rotary_dim:])
    return torch.cat(turned, dim=-1).flatten(1)


def _check(positions, q, k, cache, head_size: int, rotary_dim: int) -> None:
    if positions.dim() != 1 or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(f"positions must be int64 [rows]: {positions.dtype} {tuple(positions.shape)}")
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 2 or x.shape[0] != positions.shape[0] or x.shape[1] % head_size or x.stride(1) != 1:
            expected = f"[{positions.shape[0]}, heads * {head_size}] and contiguous in a row"
            raise ValueError(f"{name} must be {expected}: {tuple(x.shape)}")
    if not 0 < rotary_dim <= head_size or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and at most {head_size}: {rotary_dim}")
    if cache.dim() != 2 or cache.shape[1] != rotary_dim or not cache.is_contiguous():
        raise ValueError(f"cos_sin_cache must be [positions, {rotary_dim}], contiguous: {tuple(cache.shape)}")
    if q.dtype != k.dtype or cache.dtype not in (q.dtype, torch.float32):
        raise ValueError(f"Dtypes do not fit: q {q.dtype}, k {k.dtype}, cos_sin_cache {cache.dtype}")
    if not (positions.device == q.device == k.device == cache.device):
        raise ValueError(f"Devices differ: {positions.device}, {q.device}, {k.device}, {cache.device}")
    if positions.numel():
        low, high = torch.aminmax(positions)
        if low < 0 or high >= cache.shape[0]:
            raise ValueError(f"positions {int(low)} to {int(high)} pass cos_sin_cache {tuple(cache.shape)}")
