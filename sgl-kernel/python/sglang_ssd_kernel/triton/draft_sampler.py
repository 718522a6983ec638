"""The draft's token, fork candidates and law from its logits, in one pass over the vocabulary.

The first kernel reads the logits once and leaves the maximum of every GROUP neighbours. The top M tokens lie in the M
groups of the largest maxima (were one in another group, M tokens would exceed it), so that the second kernel reads
those groups alone: it picks the top M, then draws by the law of each row.

Everywhere NaN counts as -inf and ties go to the lowest token id. Selection is exact; the noise and q are computed in
float64, as in ``sglang_ssd.algorithm.shared_noise`` and ``.saguaro``. Tensors on a CPU go to the torch reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..cpu_stand_in.functions import murmur_hash32_cpu
from .device import has_kernels
from .noise import gumbel, reference_gumbel, row_state, uniform

#: Neighbouring tokens of which the first pass keeps the maximum.
GROUP = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_TOP_M = 128
_MOST_GROUPS = 8192
_GROUPS_AT_ONCE = 64
#: The stream of uniforms that residual sampling draws with, as ``sglang_ssd.algorithm.shared_noise.Stream.DRAFT``.
_DRAFT_STREAM = tl.constexpr(0)
_INT32_MAX = tl.constexpr((1 << 31) - 1)
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


class Drafted(NamedTuple):
    """What was drawn for each row.

    token_ids:  int64 [rows], the token to propose.
    ranked_ids: int64 [rows, num_ranked], fork candidates, best first: by perturbed score under shared noise (so that the
                first is the token), by logit in greedy rows and under Saguaro.
    scores:     float64 [rows, num_ranked], what they are ranked by: logit over temperature, plus noise where it is
                shared. Greedy rows have the logits.
    top_ids:    int64 [rows, top_m], tokens of the largest logits, largest first.
    top_logits: float32 [rows, top_m].
    q:          float32 [rows, top_m], the law of the token over ``top_ids``, exactly as it was drawn from; greedy rows
                have 1 at the first. None under shared noise.
    """

    token_ids: torch.Tensor
    ranked_ids: torch.Tensor
    scores: torch.Tensor
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    q: torch.Tensor | None


def sample_shared_noise(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    *,
    num_ranked: int,
    top_m: int,
) -> Drafted:
    """The draft's guesses of the target's draws: logit / temperature + g over the top M tokens; in greedy rows logits.

    logits:       [rows, V] float32, bfloat16 or float16, contiguous in V, V up to 524,288.
    temperatures: float64 [rows], positive, not read in greedy rows.
    seeds, positions: int64 [rows], of the noise; a position is that of the last token before the draw.
    is_greedy:    bool [rows].
    top_m:        1 to 128, cut to V; num_ranked: 1 to that.

    Raises ValueError, with the shape, for anything else.
    """
    return _sample(logits, temperatures, seeds, positions, is_greedy, num_ranked, top_m)


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
) -> Drafted:
    """A draw from sigma_{F,C} (arXiv 2603.03251) of the top M tokens, with a uniform of seed and position.

    fan_out: int64 [rows], F: the leading tokens that are scaled. c: float64 [rows], C in [0, 1], which is not checked
    (that would wait for the device). Others as in ``sample_shared_noise``, as what is raised.
    """
    return _sample(logits, temperatures, seeds, positions, is_greedy, num_ranked, top_m, fan_out, c)


def reference(
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
    """Both samplers in torch, on the CPU: Saguaro if ``fan_out`` and ``c`` are given."""
    clean = logits.float().masked_fill(logits.isnan(), -torch.inf)
    top = clean.sort(dim=-1, descending=True, stable=True)
    top_ids, top_logits = top.indices[:, :top_m], top.values[:, :top_m]
    scores = top_logits.double() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    if fan_out is None:
        noise = reference_gumbel(seeds, positions, torch.arange(logits.shape[1])).gather(1, top_ids)
        scores = scores + noise * ~is_greedy[:, None]
        # By id first, so that the stable sort breaks ties by it.
        ids, order = top_ids.sort()
        ranked = scores.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ranked_ids = ids.gather(1, ranked.indices)
        results = (
            ranked_ids[:, 0],
            ranked_ids[:, :num_ranked],
            ranked.values[:, :num_ranked],
            top_ids,
            top_logits,
        )
        return Drafted(*(tensor.contiguous() for tensor in results), None)
    q = _reference_q(scores, fan_out, c)
    q = torch.where(is_greedy[:, None], torch.eye(q.shape[1])[0], q)
    token_ids = top_ids.gather(1, reference_draw(q, seeds, positions))[:, 0]
    results = token_ids, top_ids[:, :num_ranked], scores[:, :num_ranked], top_ids, top_logits, q
    return Drafted(*(tensor.contiguous() for tensor in results))


def _reference_q(scores: torch.Tensor, fan_out: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float32).max
    weights = scores.clamp(-limit, limit).softmax(-1)
    is_cached = torch.arange(scores.shape[1]) < fan_out[:, None]
    has_rest = weights.masked_fill(is_cached, 0.0).sum(-1, keepdim=True) > 0
    weights = torch.where(is_cached & has_rest, c[:, None] * weights, weights)
    return (weights / weights.sum(-1, keepdim=True)).float()


def reference_draw(q: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What is drawn from the float32 ``q`` [rows, M] that is emitted: its place in it, int64 [rows, 1]. On the CPU."""
    stream_id = torch.tensor([-1 - _DRAFT_STREAM.value])
    uniforms = murmur_hash32_cpu(seeds, positions, stream_id).double() / (1 << 32)
    running = q.double().cumsum(-1)
    return torch.searchsorted(running, uniforms * running[:, -1:], right=True)


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


def _sample(
    logits, temperatures, seeds, positions, is_greedy, num_ranked, top_m, fan_out=None, c=None
) -> Drafted:
    top_m = _check(logits, temperatures, seeds, positions, is_greedy, num_ranked, top_m, fan_out, c)
    columns = (temperatures, seeds, positions, is_greedy, fan_out, c)
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


def _check(logits, temperatures, seeds, positions, is_greedy, num_ranked, top_m, fan_out, c) -> int:
    """``top_m`` cut to the vocabulary; raises ValueError for what does not fit."""
    if logits.dim() != 2 or 0 in logits.shape or logits.dtype not in DTYPES or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float [rows, V], contiguous in V: {tuple(logits.shape)} {logits.dtype}"
        )
    if logits.shape[1] > GROUP * _MOST_GROUPS:
        raise ValueError(f"At most {GROUP * _MOST_GROUPS} tokens: logits {tuple(logits.shape)}")
    columns = {
        "temperatures": (temperatures, torch.float64), "seeds": (seeds, torch.int64),
        "positions": (positions, torch.int64), "is_greedy": (is_greedy, torch.bool),
    }  # fmt: skip
    if fan_out is not None:
        columns |= {"fan_out": (fan_out, torch.int64), "c": (c, torch.float64)}
    for name, (column, dtype) in columns.items():
        if column.shape != logits.shape[:1] or column.dtype != dtype or not column.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} ({logits.shape[0]},): {column.dtype} {tuple(column.shape)}"
            )
        if column.device != logits.device:
            raise ValueError(f"{name} is on {column.device}, logits {tuple(logits.shape)} on {logits.device}")
    top_m = min(top_m, logits.shape[1])
    if not 1 <= num_ranked <= top_m <= MOST_TOP_M:
        raise ValueError(
            f"1 <= num_ranked <= top_m <= {MOST_TOP_M}: {num_ranked}, {top_m}, logits {tuple(logits.shape)}"
        )
    return top_m


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
