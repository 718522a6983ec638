"""Tensor-parallel ranks: who speaks to the draft, and how all ranks see the same proposals."""

from __future__ import annotations

from typing import TypeVar

from sglang.srt.runtime_context import get_parallel

T = TypeVar("T")


def is_first_rank() -> bool:
    """Whether this rank speaks to the draft."""
    return get_parallel().tp_rank == 0


def broadcast_from_first_rank(value: T) -> T:
    """The first TP rank's value, on every rank. One small host broadcast, none at all without tensor parallelism."""
    if get_parallel().tp_size == 1:
        return value
    return get_parallel().tp_group.broadcast_object(value, src=0)
