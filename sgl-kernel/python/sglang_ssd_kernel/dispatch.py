"""Operations that exist for the CPU and for GPUs, by the device of their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .cpu import fork_attention as cpu

if TYPE_CHECKING:
    from .triton.fork_attention import DevicePlan


def fork_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: cpu.ForkPlan | DevicePlan,
    scaling: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scaling q k) v of each row over its keys in the plan. Accumulates in float32.

    q:      [rows, Hq, D], any strides but contiguous in D; float32, bfloat16 or float16.
    k_pool: [slots, Hkv, D], v_pool: [slots, Hkv, Dv], the same dtype as q, likewise strided. Hkv divides Hq.
    plan:   a ``ForkPlan`` for tensors on the CPU, a ``DevicePlan`` for those on a GPU.
    out:    [rows, Hq, Dv], contiguous, is written and returned; made here if None.

    Raises ValueError, with the shapes, when tensors and plan do not fit each other.
    """
    if q.device.type == "cpu":
        return cpu.fork_attention(q, k_pool, v_pool, plan, scaling, out)
    from .triton import fork_attention as gpu

    return gpu.fork_attention(q, k_pool, v_pool, plan, scaling, out)
