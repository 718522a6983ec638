"""Gated activation of an MLP, as SGLang's ``SiluAndMul.forward_native``."""

from __future__ import annotations

import torch

from .library import DTYPE_CODES, kernel_for


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. x: [rows, 2 I], gate then up, contiguous in a row. Result: [rows, I], new, of x's dtype.

    silu(gate) is rounded to the dtype before the product.
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x must be [rows, 2 I]: {tuple(x.shape)}")
    kernel = kernel_for(x, "ssd_silu_and_mul") if x.stride(1) == 1 else None
    if kernel is None:
        return reference(x)
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    kernel(x.data_ptr(), out.data_ptr(), rows, width, x.stride(0), DTYPE_CODES[x.dtype])
    return out


def reference(x):
    """The same in torch."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
