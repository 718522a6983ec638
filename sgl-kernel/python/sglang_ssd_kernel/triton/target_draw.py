"""The target's draws and the verification of a proposal, without a temporary of the vocabulary's size.

Shared noise: ``draw_and_agree``. Residual sampling: ``verify_residual``. The decisions are those of
``sglang_ssd.algorithm.shared_noise.draw``, ``.verification.agree`` and ``.verification.verify_residual``: what decides is
computed in float64. Sums over a vocabulary run in another order, so that a uniform within about 1e-15 of a boundary may
fall on its other side. Tensors on a CPU go to the torch references, which are not sparing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..cpu.target_draw import Drawn, check_call, check_rows, check_tensor, reference
from .device import has_kernels
from .noise import gumbel, hashes, row_state

#: Tokens of one program.
BLOCK = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_Q = 128
_INT32_MAX = tl.constexpr((1 << 31) - 1)
_NOISE_OF_HASH_0 = tl.constexpr(-709.782712893384)
#: How far from 1 the float32 probabilities of a shipped q may sum.
_SUM_TOLERANCE = tl.constexpr(1e-3)


class Verified(NamedTuple):
    """num_accepted: int64 [B], drafts, 0..K; bonus_tokens: int64 [B], the token after them; num_malformed: int64 [B],
    proposed positions whose q could not be used as shipped."""

    num_accepted: torch.Tensor
    bonus_tokens: torch.Tensor
    num_malformed: torch.Tensor


def draw_and_agree(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    proposed: torch.Tensor,
    lengths: torch.Tensor,
    temperatures: torch.Tensor | None = None,
) -> Drawn:
    """``dispatch.draw_and_agree`` for tensors on a GPU."""
    columns = (seeds, positions, is_greedy, proposed, lengths, temperatures)
    check_call(scores, *columns)
    _check_dtype("scores", scores)
    if not has_kernels(scores):
        return reference(scores, *columns)
    batch_size, width, vocab_size = scores.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    block_scores = scores.new_empty((batch_size, width, num_blocks), dtype=torch.float64)
    block_tokens = scores.new_empty((batch_size, width, num_blocks), dtype=torch.int32)
    token_ids = scores.new_empty((batch_size, width), dtype=torch.int64)
    num_accepted, bonus_tokens = scores.new_empty((2, batch_size), dtype=torch.int64)
    first, second = draw_constants(vocab_size)
    _block_draw_kernel[(num_blocks, width, batch_size)](
        *(scores, temperatures, seeds, positions, is_greedy, block_scores, block_tokens),
        *(*scores.stride()[:2], vocab_size, num_blocks),
        **first,
    )
    _agree_kernel[(batch_size,)](
        *(block_scores, block_tokens, proposed, lengths, token_ids, num_accepted, bonus_tokens),
        *(width, num_blocks),
        **second,
    )
    return Drawn(token_ids, num_accepted, bonus_tokens)


def verify_residual(
    p: torch.Tensor,
    proposed: torch.Tensor,
    lengths: torch.Tensor,
    is_one_hot: torch.Tensor,
    q_ids: torch.Tensor,
    q_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
) -> Verified:
    """Accept x iff u * q(x) < p(x); at the first rejection draw the bonus from max(p - q, 0), normalised.

    p:          float [B, K + 1, V], contiguous in V; NaN, infinite and negative values count as 0.
    proposed:   int64 [B, K]; lengths: int64 [B], 0..K.
    is_one_hot: bool [B], rows verified with q = 1 at x.
    q_ids:      int64 [B, K, M], q_probs float32 [B, K, M]: the laws of other rows, padded with probability 0. M from 1
                to 128 (the check for duplicates compares all pairs).
    accept_uniforms: float64 [B, K]; bonus_uniforms: float64 [B], in [0, 1).

    A q that its token cannot have been drawn from is counted and not used, as ``sglang_ssd.algorithm`` says. Raises
    ValueError, with the shape, for arguments that do not fit.
    """
    batch_size, width, vocab_size = check_rows("p", p)
    _check_dtype("p", p)
    num_q = q_ids.shape[-1]
    check_tensor("lengths", lengths, torch.int64, (batch_size,), p)
    check_tensor("is_one_hot", is_one_hot, torch.bool, (batch_size,), p)
    check_tensor("bonus_uniforms", bonus_uniforms, torch.float64, (batch_size,), p)
    check_tensor("proposed", proposed, torch.int64, (batch_size, width - 1), p)
    check_tensor("accept_uniforms", accept_uniforms, torch.float64, (batch_size, width - 1), p)
    check_tensor("q_ids", q_ids, torch.int64, (batch_size, width - 1, num_q), p)
    check_tensor("q_probs", q_probs, torch.float32, (batch_size, width - 1, num_q), p)
    if not 1 <= num_q <= MOST_Q:
        raise ValueError(f"1 to {MOST_Q} tokens of q: q_ids {tuple(q_ids.shape)}")
    if not has_kernels(p):
        return reference_residual(
            p, proposed, lengths, is_one_hot, q_ids, q_probs, accept_uniforms, bonus_uniforms
        )
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    num_accepted, bonus_tokens, num_malformed = p.new_empty((3, batch_size), dtype=torch.int64)
    law_ids = p.new_empty((batch_size, num_q + 1), dtype=torch.int64)
    law_probs = p.new_empty((batch_size, num_q + 1), dtype=torch.float64)
    # Of the residual, and of p, which is drawn from where rounding left no residual.
    sums = p.new_empty((batch_size, 2, num_blocks), dtype=torch.float64)
    accept, block, bonus = residual_constants(vocab_size, num_q)
    p_and_strides = (p, *p.stride()[:2], vocab_size)
    _accept_kernel[(batch_size,)](
        *p_and_strides,
        *(proposed, lengths, is_one_hot, q_ids, q_probs, accept_uniforms),
        *(num_accepted, num_malformed, law_ids, law_probs, width - 1, num_q),
        **accept,
    )
    _block_sums_kernel[(num_blocks, batch_size)](
        *(*p_and_strides, num_accepted, law_ids, law_probs, sums, num_q, num_blocks), **block
    )
    _bonus_kernel[(batch_size,)](
        *(*p_and_strides, num_accepted, law_ids, law_probs, sums, bonus_uniforms, bonus_tokens, num_q),
        num_blocks,
        **bonus,
    )
    return Verified(num_accepted, bonus_tokens, num_malformed)


def draw_constants(vocab_size: int) -> tuple[dict, dict]:
    """The compile-time arguments of ``draw_and_agree``'s kernels, with ``num_warps`` and ``num_stages``."""
    blocks = triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))
    return {"BLOCK": BLOCK, "num_warps": 8, "num_stages": 1}, {
        "BLOCKS": blocks,
        "num_warps": 1,
        "num_stages": 1,
    }


def residual_constants(vocab_size: int, num_q: int) -> tuple[dict, dict, dict]:
    """The compile-time arguments of ``verify_residual``'s kernels, with ``num_warps`` and ``num_stages``."""
    blocks = triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))
    launch = {"num_warps": 8, "num_stages": 1}
    return (
        {"LANES": triton.next_power_of_2(num_q)} | launch,
        {"BLOCK": BLOCK} | launch,
        {"BLOCK": BLOCK, "BLOCKS": blocks} | launch,
    )


def _check_dtype(name: str, rows: torch.Tensor) -> None:
    if rows.dtype not in DTYPES:
        raise ValueError(f"No kernel for {name} {rows.dtype} {tuple(rows.shape)}")


# --- reference --------------------------------------------------------------------------------------------------------


def reference_residual(
    p, proposed, lengths, is_one_hot, q_ids, q_probs, accept_uniforms, bonus_uniforms
) -> Verified:
    """``verify_residual`` in torch, on the CPU, position by position."""
    results = []
    p = p.double().nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
    for b in range(p.shape[0]):
        laws = [
            _reference_law(p.shape[2], int(proposed[b, j]), bool(is_one_hot[b]), q_ids[b, j], q_probs[b, j])
            for j in range(int(lengths[b]))
        ]
        num_accepted = 0
        for token, uniform, (q, _) in zip(proposed[b].tolist(), accept_uniforms[b], laws):
            if not (q.any() and q[token] > 0 and uniform * q[token] < p[b, num_accepted, token]):
                break
            num_accepted += 1
        weights = p[b, num_accepted]
        if num_accepted < len(laws) and (residual := (weights - laws[num_accepted][0]).clamp(min=0.0)).any():
            weights = residual
        running = weights.cumsum(0)
        bonus = int((running <= bonus_uniforms[b] * running[-1]).sum()) if running[-1] > 0 else 0
        results.append((num_accepted, bonus, sum(is_malformed for _, is_malformed in laws)))
    return Verified(*torch.tensor(results).unbind(1))


def _reference_law(vocab_size: int, token: int, is_one_hot: bool, ids, probs) -> tuple[torch.Tensor, bool]:
    """q to verify with, float64 [V], and whether it is not the one that was shipped."""
    probs = probs.double()
    held, q = ids[probs != 0], torch.zeros(vocab_size, dtype=torch.float64)
    is_law = bool((probs >= 0).all()) and abs(float(probs.sum()) - 1) <= _SUM_TOLERANCE.value
    is_law &= held.unique().numel() == held.numel() and bool(((held >= 0) & (held < vocab_size)).all())
    q_of_token = float(probs[ids == token].sum())
    is_token = 0 <= token < vocab_size
    may_propose = is_token and 0 < q_of_token <= 1 + _SUM_TOLERANCE.value
    if is_token and (is_one_hot or (may_propose and not is_law)):
        q[token] = 1.0
    elif may_propose and not is_one_hot:
        q[held] = probs[probs != 0] / probs.sum()
    return q, not is_one_hot and not (is_law and may_propose) or is_one_hot and not is_token


# --- kernels: shared noise --------------------------------------------------------------------------------------------


@triton.jit
def _rough_gumbel(hashed):
    """g in float32, within 1e-5 for every hash but 0."""
    from_one = tl.maximum((hashed ^ tl.full((), 0xFFFFFFFF, tl.uint32)).to(tl.float32) * 2.0**-32, 2.0**-32)
    from_zero = tl.maximum(hashed.to(tl.float32) * 2.0**-32, 2.0**-32)
    # -log(1 - x) by its series where 1 - x would lose the digits of x.
    series = from_one * (1 + from_one * (1 / 2 + from_one * (1 / 3 + from_one * (1 / 4))))
    logarithm = -tl.log(tl.where(from_one > 0.5, from_zero, 1 - from_one))
    return -tl.log(tl.where(from_one < 1 / 16, series, logarithm))


@triton.jit
def _load_clean(scores, token, vocab_size):
    """float32, or float64 where the scores are; -inf for NaN and beyond the end."""
    values = tl.load(scores + token, mask=token < vocab_size, other=float("-inf"))
    if scores.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _block_draw_kernel(
    scores, temperatures, seeds, positions, is_greedy, block_scores, block_tokens,
    batch_stride, row_stride, vocab_size, num_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of one block of one row: its score in float64, and the lowest id that has it.

    Float32 leaves the few tokens that may be best; those are compared in float64, in the order of their ids.
    """
    block, offset, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    scores += request * batch_stride + offset * row_stride
    token = block * BLOCK + tl.arange(0, BLOCK)
    greedy = tl.load(is_greedy + request)
    temperature = tl.full((), 1.0, tl.float64)
    if temperatures is not None:  # noqa: SIM102 - the compiler decides this, the device that
        if not greedy:
            temperature = tl.load(temperatures + request)
    values = _load_clean(scores, token, vocab_size)
    rough = values.to(tl.float32) * (1 / temperature).to(tl.float32)
    margin = tl.where(tl.abs(rough) < float("inf"), 1e-4 + 1e-6 * tl.abs(rough), 0.0)
    state = row_state(tl.load(seeds + request), tl.load(positions + request) + offset)
    if not greedy:
        hashed = hashes(state, token)
        rough += tl.where(hashed == 0, _NOISE_OF_HASH_0, _rough_gumbel(hashed))
    enough = tl.max(rough - margin, 0)
    is_contender = (rough + margin >= enough) & (rough > float("-inf"))
    if greedy:  # of any number of ties the first
        is_contender = is_contender & (
            token == tl.min(tl.where(values == tl.max(values, 0), token, _INT32_MAX), 0)
        )

    best, best_token = tl.full((), float("-inf"), tl.float64), tl.full((), _INT32_MAX, tl.int32)
    contender = tl.min(tl.where(is_contender, token, _INT32_MAX), 0)
    while contender < _INT32_MAX:
        score = tl.load(scores + contender).to(tl.float64) / temperature
        if not greedy:
            score += gumbel(state, contender)
        is_better = (score > best) | (best_token == _INT32_MAX)
        best, best_token = tl.where(is_better, score, best), tl.where(is_better, contender, best_token)
        contender = tl.min(tl.where(is_contender & (token > contender), token, _INT32_MAX), 0)
    place = (request * tl.num_programs(1) + offset) * num_blocks + block
    tl.store(block_scores + place, best)
    tl.store(block_tokens + place, best_token)


@triton.jit
def _agree_kernel(
    block_scores, block_tokens, proposed, lengths, token_ids, num_accepted, bonus_tokens, width, num_blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """All positions of one request."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    length = tl.load(lengths + request)
    accepted, bonus = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for offset in range(width):
        place = (request * width + offset) * num_blocks + block
        scores = tl.load(block_scores + place, mask=block < num_blocks, other=float("-inf"))
        tokens = tl.load(block_tokens + place, mask=block < num_blocks, other=_INT32_MAX)
        token = tl.min(tl.where(scores == tl.max(scores, 0), tokens, _INT32_MAX), 0).to(tl.int64)
        token = tl.where(token == _INT32_MAX, 0, token)
        tl.store(token_ids + request * width + offset, token)
        bonus = tl.where(accepted == offset, token, bonus)
        is_proposed = (offset < length) & (offset < width - 1)
        draft = tl.load(proposed + request * (width - 1) + offset, mask=is_proposed, other=-1)
        accepted += ((accepted == offset) & (draft == token)).to(tl.int64)
    tl.store(num_accepted + request, accepted)
    tl.store(bonus_tokens + request, bonus)


# --- kernels: residual sampling ---------------------------------------------------------------------------------------


@triton.jit
def _mass(p):
    """float64, 0 for NaN, infinite and negative values."""
    p = p.to(tl.float64)
    return tl.where((p > 0) & (p < float("inf")), p, 0.0)


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32), 0) > 0


@triton.jit
def _is_distribution(ids, probs, total, vocab_size, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    has_mass = probs != 0
    is_unknown = has_mass & ((ids < 0) | (ids >= vocab_size))
    held = tl.where(has_mass, ids, -1 - lane)  # all different where nothing is held
    is_repeated = (held[:, None] == held[None, :]) & (lane[:, None] != lane[None, :]) & has_mass[:, None]
    repeats = tl.max(tl.max((is_repeated & has_mass[None, :]).to(tl.int32), 1), 0) > 0
    sums_to_one = (total >= 1 - _SUM_TOLERANCE) & (total <= 1 + _SUM_TOLERANCE)
    return sums_to_one & (_any((probs >= 0) == 0) == 0) & (_any(is_unknown) == 0) & (repeats == 0)


@triton.jit
def _accept_kernel(
    p, batch_stride, row_stride, vocab_size, proposed, lengths, is_one_hot, q_ids, q_probs, accept_uniforms,
    num_accepted, num_malformed, law_ids, law_probs, lookahead, num_q, LANES: tl.constexpr,
):  # fmt: skip
    """All positions of one request. Leaves the q of the first rejected one, or 0: last the token, for one-hot laws."""
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    in_q = lane < num_q
    length, one_hot = tl.load(lengths + request), tl.load(is_one_hot + request)
    accepted, malformed = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    bonus_ids, bonus_q = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.float64)
    bonus_token, bonus_one_hot = tl.full((), 0, tl.int64), tl.full((), 0.0, tl.float64)
    for offset in range(lookahead):
        place = request * lookahead + offset
        token = tl.load(proposed + place)
        ids = tl.load(q_ids + place * num_q + lane, mask=in_q, other=0)
        probs = tl.load(q_probs + place * num_q + lane, mask=in_q, other=0.0).to(tl.float64)
        total = tl.sum(probs, 0)
        shipped_of_token = tl.sum(tl.where(in_q & (ids == token), probs, 0.0), 0)

        is_proposed, is_token = offset < length, (token >= 0) & (token < vocab_size)
        may_propose = is_token & (shipped_of_token > 0) & (shipped_of_token <= 1 + _SUM_TOLERANCE)
        is_law = _is_distribution(ids, probs, total, vocab_size, LANES)
        is_declared = is_proposed & one_hot & is_token
        is_usable = is_proposed & (one_hot == 0) & may_propose & is_law
        is_substituted = is_proposed & (one_hot == 0) & may_propose & (is_law == 0)
        malformed += (is_proposed & (is_usable == 0) & (is_declared == 0)).to(tl.int64)

        q = tl.where(in_q & is_usable, probs / total, 0.0)
        one_hot_q = (is_declared | is_substituted).to(tl.float64)
        q_of_token = tl.sum(tl.where(ids == token, q, 0.0), 0) + one_hot_q
        p_of_token = tl.load(
            p + request * batch_stride + offset * row_stride + token, mask=is_token, other=0.0
        )
        accepts = (q_of_token > 0) & (tl.load(accept_uniforms + place) * q_of_token < _mass(p_of_token))
        is_first_rejected = (accepted == offset) & (accepts == 0)
        bonus_ids, bonus_q = (
            tl.where(is_first_rejected, ids, bonus_ids),
            tl.where(is_first_rejected, q, bonus_q),
        )
        bonus_token = tl.where(is_first_rejected, token, bonus_token)
        bonus_one_hot = tl.where(is_first_rejected, one_hot_q, bonus_one_hot)
        accepted += ((accepted == offset) & accepts).to(tl.int64)
    tl.store(num_accepted + request, accepted)
    tl.store(num_malformed + request, malformed)
    law = request * (num_q + 1)
    tl.store(law_ids + law + lane, bonus_ids, mask=in_q)
    tl.store(law_probs + law + lane, bonus_q, mask=in_q)
    tl.store(law_ids + law + num_q, bonus_token)
    tl.store(law_probs + law + num_q, bonus_one_hot)


@triton.jit
def _residual(p, law_ids, law_probs, num_q, start, BLOCK: tl.constexpr):
    """max(p - q, 0) of the tokens of one block, from their p."""
    token = start + tl.arange(0, BLOCK)
    for place in range(num_q + 1):
        held = tl.load(law_ids + place)
        if (held >= start) & (held < start + BLOCK):
            p = tl.where(token == held, p - tl.load(law_probs + place), p)
    return tl.maximum(p, 0.0)


@triton.jit
def _block_sums_kernel(
    p, batch_stride, row_stride, vocab_size, num_accepted, law_ids, law_probs, sums, num_q, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of the residual and of p over one block of the row that the bonus is drawn from."""
    block, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = p + request * batch_stride + tl.load(num_accepted + request) * row_stride
    token = block * BLOCK + tl.arange(0, BLOCK)
    masses = _mass(tl.load(row + token, mask=token < vocab_size, other=0.0))
    law = request * (num_q + 1)
    residual = _residual(masses, law_ids + law, law_probs + law, num_q, block * BLOCK, BLOCK)
    sums += request * 2 * num_blocks + block
    tl.store(sums, tl.sum(residual, 0))
    tl.store(sums + num_blocks, tl.sum(masses, 0))


@triton.jit
def _bonus_kernel(
    p, batch_stride, row_stride, vocab_size, num_accepted, law_ids, law_probs, sums, bonus_uniforms, bonus_tokens,
    num_q, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token at which the running sum of the weights first exceeds u times their total: first its block."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    sums += request * 2 * num_blocks
    weights = tl.load(sums + block, mask=block < num_blocks, other=0.0)
    has_residual = tl.max(weights, 0) > 0
    if not has_residual:
        weights = tl.load(sums + num_blocks + block, mask=block < num_blocks, other=0.0)
    running = tl.cumsum(weights, 0)
    bound = tl.load(bonus_uniforms + request) * tl.max(running, 0)
    chosen = tl.min(tl.where((running > bound) & (weights > 0), block, BLOCKS - 1), 0)
    before = tl.sum(tl.where(block < chosen, weights, 0.0), 0)

    start = chosen * BLOCK
    token = start + tl.arange(0, BLOCK)
    row = p + request * batch_stride + tl.load(num_accepted + request) * row_stride
    masses = _mass(tl.load(row + token, mask=token < vocab_size, other=0.0))
    law = request * (num_q + 1)
    if has_residual:
        masses = _residual(masses, law_ids + law, law_probs + law, num_q, start, BLOCK)
    exceeds = (before + tl.cumsum(masses, 0) > bound) & (masses > 0)
    first = tl.min(tl.where(exceeds, token, _INT32_MAX), 0)
    # Sums of blocks and within them round differently: the bound may lie just behind the last weight.
    last = tl.max(tl.where(masses > 0, token, 0), 0)
    tl.store(bonus_tokens + request, tl.minimum(first, last).to(tl.int64))
