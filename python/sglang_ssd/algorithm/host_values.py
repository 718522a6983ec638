"""Numbers of the host as tensors of a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch


def from_host(values: Sequence, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``values`` as a tensor on ``device``, without waiting for what it still computes."""
    return to_device(torch.tensor(values, dtype=dtype), device)


@lru_cache(maxsize=1024)
def constant(values: tuple, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``from_host`` for values that come again round after round, such as the laws of the same rows: one tensor, made once,
    and never to be written to. Made and read on one stream."""
    return from_host(values, dtype, device)


@lru_cache(maxsize=256)
def no_columns(num_rows: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """[num_rows, 0], for what takes columns where there are none."""
    return torch.empty(num_rows, 0, dtype=dtype, device=device)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy of a tensor of the host; itself where ``device`` is the CPU. From pinned memory, since a copy from any other
    waits for all that the stream holds."""
    device = torch.device(device)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
