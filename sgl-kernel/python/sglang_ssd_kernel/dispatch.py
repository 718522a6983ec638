"""Operations that exist for the CPU and for GPUs, by the device of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .cpu import draft_sampler as cpu_sampler
from .cpu import fork_attention as cpu_attention
from .cpu import target_draw as cpu_draw

if TYPE_CHECKING:
    from .triton.fork_attention import DevicePlan


def fork_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: cpu_attention.ForkPlan | DevicePlan,
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
        return cpu_attention.fork_attention(q, k_pool, v_pool, plan, scaling, out)
    from .triton import fork_attention as gpu

    return gpu.fork_attention(q, k_pool, v_pool, plan, scaling, out)


def largest_top_m(device_type: str) -> int | None:
    """The largest M that the samplers take on such a device, None where only the vocabulary limits it."""
    if device_type == "cpu":
        return None
    from .triton.draft_sampler import MOST_TOP_M

    return MOST_TOP_M


def sample_shared_noise(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    *,
    num_ranked: int,
    top_m: int,
) -> cpu_sampler.Drafted:
    """The draft's guesses of the target's draws: logit / temperature + g over the top M tokens; in greedy rows logits.

    logits:       [rows, V] float32, bfloat16 or float16, contiguous in V (on a GPU up to 524,288).
    temperatures: float64 [rows], positive, not read in greedy rows.
    seeds, positions: int64 [rows], of the noise; a position is that of the last token before the draw.
    is_greedy:    bool [rows].
    top_m:        from 1 (on a GPU to 128), cut to V; num_ranked: 1 to that.

    NaN counts as -inf, ties go to the lowest id. Raises ValueError, with the shape, for anything else.
    """
    columns = (temperatures, seeds, positions, is_greedy)
    return _sampler(logits)(logits, *columns, num_ranked=num_ranked, top_m=top_m)


def sample_saguaro(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    fan_out: torch.Tensor,
    c: torch.Tensor,
    *,
    num_ranked: int,
    top_m: int,
) -> cpu_sampler.Drafted:
    """A draw from sigma_{F,C} (arXiv 2603.03251) of the top M tokens, with a uniform of seed and position.

    fan_out: int64 [rows], F: the leading tokens that are scaled. c: float64 [rows], C in [0, 1], which is not checked
    (on a GPU that would wait for the device). Others as in ``sample_shared_noise``, as what is raised.
    """
    columns = (temperatures, seeds, positions, is_greedy, fan_out, c)
    return _sampler(logits)(logits, *columns, num_ranked=num_ranked, top_m=top_m)


def _sampler(logits: torch.Tensor) -> Callable[..., cpu_sampler.Drafted]:
    if logits.device.type == "cpu":
        return cpu_sampler.sample
    from .triton import draft_sampler as gpu

    return gpu.sample


def draw_and_agree(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    proposed: torch.Tensor,
    lengths: torch.Tensor,
    temperatures: torch.Tensor | None = None,
) -> cpu_draw.Drawn:
    """argmax of score + g at every position (g = 0 in greedy rows), and how far a proposal agrees with it.

    scores:    [B, K + 1, V] float, contiguous in V: log p or, with ``temperatures`` float64 [B] (positive, not read in
               greedy rows), logits. The normaliser of log p is the same for a whole row and so changes no argmax. NaN is
               never drawn, +inf always; a row of only NaN or -inf gives token 0.
    seeds, positions: int64 [B]; positions are those of the tokens before the first draw, the next draws follow.
    is_greedy: bool [B].
    proposed:  int64 [B, K]; lengths: int64 [B], 0..K: what lies beyond is padding. K = 0 draws only.

    Raises ValueError, with the shape, for anything else.
    """
    columns = (seeds, positions, is_greedy, proposed, lengths, temperatures)
    if scores.device.type == "cpu":
        return cpu_draw.draw_and_agree(scores, *columns)
    from .triton import target_draw as gpu

    return gpu.draw_and_agree(scores, *columns)
