"""Tensor-parallel ranks: who speaks to the draft, and how all ranks see the same proposals."""

from __future__ import annotations

import functools
from typing import TypeVar

from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.runtime_context import get_parallel

T = TypeVar("T")


def speak_gloo_only() -> None:
    """Let ranks on a CPU start where torch was built with CUDA: SGLang then gives every group an NCCL communicator, which
    needs a GPU. Collectives of CPU tensors go through gloo in any case (seam: ``GroupCoordinator.__init__``)."""
    init = GroupCoordinator.__init__
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def init_without_nccl(self, *args, **kwargs) -> None:
        init(self, *args, **(kwargs | {"use_pynccl": False}))

    GroupCoordinator.__init__ = init_without_nccl


def is_first_rank() -> bool:
    """Whether this rank speaks to the draft."""
    return get_parallel().tp_rank == 0


def broadcast_from_first_rank(value: T) -> T:
    """The first TP rank's value, on every rank. One small host broadcast, none at all without tensor parallelism."""
    if get_parallel().tp_size == 1:
        return value
    return get_parallel().tp_group.broadcast_object(value, src=0)
