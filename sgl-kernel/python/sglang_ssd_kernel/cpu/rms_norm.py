"""Root-mean-square norm with optional residual addition, as SGLang's ``RMSNorm.forward_native``."""

from __future__ import annotations

import torch

from .library import DTYPE_CODES, kernel_for


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * weight, or with ``residual``: that of x + residual, and this sum as the next residual.

    x, residual: [rows, H]; weight: [H], of x's dtype or float32. Results are new tensors [rows, H] of x's dtype.
    The norm goes on with the float32 sum, not with the rounded residual.
    """
    _check(x, weight, residual)
    kernel = kernel_for(x, "ssd_rms_norm") if weight.dtype == x.dtype else None
    if kernel is None:
        return reference(x, weight, eps, residual)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    if residual is None:
        addresses = (None, weight.data_ptr(), out.data_ptr(), None)
    else:
        residual, new_residual = residual.contiguous(), torch.empty_like(x)
        addresses = (residual.data_ptr(), weight.data_ptr(), out.data_ptr(), new_residual.data_ptr())
    kernel(x.data_ptr(), *addresses, *x.shape, eps, DTYPE_CODES[x.dtype])
    return out if residual is None else (out, new_residual)


def reference(x, weight, eps, residual=None):
    """The same in torch."""
    total = x.float() if residual is None else x.float() + residual.float()
    factor = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    out = (total * factor * weight).to(x.dtype)
    return out if residual is None else (out, total.to(x.dtype))


def _check(x, weight, residual) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x must be [rows, H] and weight [H]: {tuple(x.shape)}, {tuple(weight.shape)}")
    if weight.dtype not in (x.dtype, torch.float32) or weight.device != x.device:
        raise ValueError(f"weight {weight.dtype} on {weight.device} does not fit x {x.dtype} on {x.device}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} must have the shape of x {tuple(x.shape)}")
    if residual is not None and (residual.dtype != x.dtype or residual.device != x.device):
        raise ValueError(f"residual {residual.dtype} on {residual.device}, but x {x.dtype} on {x.device}")
