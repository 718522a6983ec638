"""Where kernels run."""

from __future__ import annotations

import torch
import triton


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels take tensors of this device; those of a CPU only in Triton's interpreter."""
    return tensor.device.type != "cpu" or triton.knobs.runtime.interpret
