"""The draft's token, fork candidates and law from its logits, in one pass over the vocabulary.

The first kernel reads the logits once and leaves the maximum of every GROUP neighbours. The top M tokens lie in the M
groups of the largest maxima (were one in another group, M tokens would exceed it), so that the second kernel reads
those groups alone: it picks the top M, then draws by the law of each row.

Everywhere NaN counts as -inf and ties go to the lowest token id. Selection is exact; the noise and q are computed in
float64, as in ``sglang_ssd.algorithm.shared_noise`` and ``.saguaro``. Tensors on a CPU go to the torch reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cpu.draft_sampler import Drafted, check_call, reference
from .device import has_kernels
from .noise import gumbel, row_state, uniform

#: Neighbouring tokens of which the first pass keeps the maximum.
GROUP = 64
MOST_TOP_M = 128
_MOST_GROUPS = 8192
_GROUPS_AT_ONCE = 64
#: The stream of uniforms that residual sampling draws with, as ``sglang_ssd.algorithm.shared_noise.Stream.DRAFT``.
_DRAFT_STREAM = tl.constexpr(0)
_INT32_MAX = tl.constexpr((1 << 31) - 1)
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


# --- launches ---------------------------------------------------------------------------------------------------------


def constants(vocab_size: int, num_ranked: int, top_m: int, is_saguaro: bool) -> tuple[dict, dict]:
    """The compile-time arguments of the two kernels, with ``num_warps`` and ``num_stages``."""
    num_groups = triton.cdiv(vocab_size, GROUP)
    num_taken = min(top_m, num_groups)
    first = {"GROUP": GROUP, "GROUPS": _GROUPS_AT_ONCE, "num_warps": 4, "num_stages": 1}
    second = {
        "GROUP": GROUP,
        "NUM_GROUPS": num_groups,
        "GROUPS": triton.next_power_of_2(num_groups),
        "NUM_TAKEN": num_taken,
        "TAKEN": triton.next_power_of_2(num_taken),
        "TOP_M": top_m,
        "LANES": triton.next_power_of_2(top_m),
        "NUM_RANKED": num_ranked,
        "IS_SAGUARO": is_saguaro,
    }
    return first, second | {"num_warps": 8, "num_stages": 1}


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    fan_out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    *,
    num_ranked: int,
    top_m: int,
) -> Drafted:
    """Both samplers of ``dispatch``, for tensors on a GPU: Saguaro if ``fan_out`` and ``c`` are given."""
    columns = (temperatures, seeds, positions, is_greedy, fan_out, c)
    top_m = check_call(logits, *columns, num_ranked, top_m)
    if top_m > MOST_TOP_M or logits.shape[1] > GROUP * _MOST_GROUPS:
        raise ValueError(
            f"top_m to {MOST_TOP_M} of {GROUP * _MOST_GROUPS} tokens: {top_m}, logits {tuple(logits.shape)}"
        )
    if not has_kernels(logits):
        return reference(logits, *columns, num_ranked=num_ranked, top_m=top_m)
    is_saguaro = fan_out is not None
    num_rows, vocab_size = logits.shape
    first, second = constants(vocab_size, num_ranked, top_m, is_saguaro)
    num_groups = second["NUM_GROUPS"]
    group_maxima = logits.new_empty((num_rows, num_groups), dtype=torch.float32)
    taken = logits.new_empty((num_rows, second["TAKEN"]), dtype=torch.int32)
    chosen = logits.new_empty((num_rows, top_m), dtype=torch.int32)
    drafted = Drafted(
        token_ids=logits.new_empty(num_rows, dtype=torch.int64),
        ranked_ids=logits.new_empty((num_rows, num_ranked), dtype=torch.int64),
        scores=logits.new_empty((num_rows, num_ranked), dtype=torch.float64),
        top_ids=logits.new_empty((num_rows, top_m), dtype=torch.int64),
        top_logits=logits.new_empty((num_rows, top_m), dtype=torch.float32),
        q=logits.new_empty((num_rows, top_m), dtype=torch.float32) if is_saguaro else None,
    )
    _maxima_kernel[(triton.cdiv(num_groups, _GROUPS_AT_ONCE), num_rows)](
        logits, group_maxima, logits.stride(0), vocab_size, num_groups, **first
    )
    _draw_kernel[(num_rows,)](
        *(logits, group_maxima, taken, chosen),
        *columns,
        *drafted,
        *(logits.stride(0), vocab_size),
        **second,
    )
    return drafted


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _clean(logits):
    """float32 without NaN."""
    logits = logits.to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def _maxima_kernel(
    logits, group_maxima, row_stride, vocab_size, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scores = _clean(tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=float("-inf")))
    tl.store(group_maxima + row * num_groups + group, tl.max(scores, 1), mask=group < num_groups)


@triton.jit
def _order(values):
    """int64 in [0, 2^32), in the order of the float32 ``values``; 0 and -0 are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _INT32_MAX, bits).to(tl.int64) + (1 << 31)


@triton.jit
def _is_top(values, index, is_valid, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Which of SIZE ``values`` are the COUNT largest, those of lower ``index`` in [0, SIZE) first.

    Finds the largest bound that COUNT keys reach, bit by bit. Keys are unique.
    """
    keys = tl.where(is_valid, _order(values) * SIZE + (SIZE - 1 - index), -1)
    bound = tl.full((), 0, tl.int64)
    bit = tl.full((), 1 << 31, tl.int64) * SIZE
    while bit > 0:
        reached = tl.sum((keys >= bound + bit).to(tl.int32), 0)
        bound = tl.where(reached >= COUNT, bound + bit, bound)
        bit = bit // 2
    return keys >= bound


@triton.jit
def _store_packed(pointer, values, is_kept):
    """Store the kept values side by side in their order, and let all threads of the program see them."""
    place = tl.cumsum(is_kept.to(tl.int32), 0) - 1
    tl.store(pointer + place, values, mask=is_kept)
    tl.debug_barrier()


@triton.jit
def _ranks(scores, is_valid, LANES: tl.constexpr):
    """The rank of each lane by falling score; ties by lane."""
    lane = tl.arange(0, LANES)
    ties = (scores[None, :] == scores[:, None]) & (lane[None, :] < lane[:, None])
    is_better = (scores[None, :] > scores[:, None]) | ties
    return tl.sum((is_better & is_valid[None, :]).to(tl.int32), 1)


@triton.jit
def _saguaro_law(scores, ranks, is_valid, fan_out, c):
    """q of the lanes, float32: C times the softmax in the first F ranks, normalised. Unscaled if nothing is left else."""
    finite = tl.minimum(tl.maximum(scores, -_FLOAT32_MAX), _FLOAT32_MAX)
    finite = tl.where(is_valid, finite, float("-inf"))
    weights = tl.exp(finite - tl.max(finite, 0))
    weights = weights / tl.sum(weights, 0)
    is_cached = ranks < fan_out
    scale = tl.where(tl.sum(tl.where(is_cached, 0.0, weights), 0) > 0, c, 1.0)
    weights = tl.where(is_cached, scale * weights, weights)
    return (weights / tl.sum(weights, 0)).to(tl.float32)


@triton.jit
def _draw_by_rank(q, ranks, uniform_value, LANES: tl.constexpr):
    """The rank at which the running sum of q, by rank and in float64, first exceeds u times its total."""
    precedes = ranks[None, :] <= ranks[:, None]
    running = tl.sum(tl.where(precedes, q.to(tl.float64)[None, :], 0.0), 1)
    exceeds = running > uniform_value * tl.max(running, 0)
    return tl.min(tl.where(exceeds, ranks, LANES), 0)


@triton.jit
def _draw_kernel(
    logits, group_maxima, taken, chosen, temperatures, seeds, positions, is_greedy, fan_out, c,
    token_ids, ranked_ids, out_scores, top_ids, top_logits, q, row_stride, vocab_size,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, NUM_TAKEN: tl.constexpr,
    TAKEN: tl.constexpr, TOP_M: tl.constexpr, LANES: tl.constexpr, NUM_RANKED: tl.constexpr,
    IS_SAGUARO: tl.constexpr,
):  # fmt: skip
    """One row. Lanes are its top M tokens in the order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride

    group = tl.arange(0, GROUPS)
    has_group = group < NUM_GROUPS
    maxima = tl.load(group_maxima + row * NUM_GROUPS + group, mask=has_group, other=float("-inf"))
    _store_packed(taken + row * TAKEN, group, _is_top(maxima, group, has_group, NUM_TAKEN, GROUPS))

    index = tl.arange(0, TAKEN * GROUP)
    is_taken = index < NUM_TAKEN * GROUP
    token = tl.load(taken + row * TAKEN + index // GROUP, mask=is_taken, other=0) * GROUP + index % GROUP
    is_token = is_taken & (token < vocab_size)
    scores = _clean(tl.load(logits + token, mask=is_token, other=float("-inf")))
    _store_packed(chosen + row * TOP_M, token, _is_top(scores, index, is_token, TOP_M, TAKEN * GROUP))

    lane = tl.arange(0, LANES)
    is_lane = lane < TOP_M
    token = tl.load(chosen + row * TOP_M + lane, mask=is_lane, other=0).to(tl.int64)
    lane_logits = _clean(tl.load(logits + token, mask=is_lane, other=float("-inf")))
    logit_ranks = _ranks(lane_logits, is_lane, LANES)
    tl.store(top_ids + row * TOP_M + logit_ranks, token, mask=is_lane)
    tl.store(top_logits + row * TOP_M + logit_ranks, lane_logits, mask=is_lane)

    greedy = tl.load(is_greedy + row)
    state = row_state(tl.load(seeds + row), tl.load(positions + row))
    scores = lane_logits.to(tl.float64)
    if not greedy:
        scores = scores / tl.load(temperatures + row)
    ranks = logit_ranks
    if IS_SAGUARO:
        law = _saguaro_law(scores, ranks, is_lane, tl.load(fan_out + row), tl.load(c + row))
        if greedy:
            law = (ranks == 0).to(tl.float32)
        drawn = _draw_by_rank(tl.where(is_lane, law, 0.0), ranks, uniform(state, _DRAFT_STREAM), LANES)
        tl.store(q + row * TOP_M + ranks, law, mask=is_lane)
    else:
        if not greedy:
            scores += gumbel(state, token)
            ranks = _ranks(scores, is_lane, LANES)
        drawn = 0
    is_ranked = is_lane & (ranks < NUM_RANKED)
    tl.store(ranked_ids + row * NUM_RANKED + ranks, token, mask=is_ranked)
    tl.store(out_scores + row * NUM_RANKED + ranks, scores, mask=is_ranked)
    tl.store(token_ids + row + tl.zeros_like(lane), token, mask=is_lane & (ranks == drawn))
