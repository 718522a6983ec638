"""Sampling with noise that target and draft share, so that the draft can predict the target's draws.

The token at a position is ``argmax_t [log p(t) + g(seed, position, t)]`` with Gumbel noise g from a counter-based
hash: exact for every p (Gumbel-max), and drafter-invariant because both sides compute the same g (Daliri, Musco,
Suresh 2024, arXiv 2408.07978). Greedy rows are the same rule with g = 0. Ties go to the lowest token id.

The noise is that of SGLang's own seeded sampler (``sglang.srt.layers.sampler.multinomial_with_seed``), so that plain
SGLang with the same ``sampling_seed`` is an independent oracle. MurmurHash3 of 32 bits reads four blocks: the low
and the high half of the seed, the position, the token id. With h its value, in float64 throughout,

    g = -log(E),   E = -log(h / (2^32 - 1)) clamped to [2^-32, largest float64]

SGLang's position of a draw is that of the last token before it: the first token after a prompt of n tokens is drawn
at n - 1. Between position and token id the state of the hash has 32 bits, so two of 2^32 (seed, position) pairs
share all their noise, which is harmless between unrelated requests.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import torch

# MurmurHash3_x86_32 (Austin Appleby, public domain); int32 tensors wrap modulo 2^32 as the hash wants.
_MODULUS = 1 << 32
_KEY_MULTIPLIER_1, _KEY_MULTIPLIER_2 = 0xCC9E2D51, 0x1B873593
_STATE_MULTIPLIER, _STATE_INCREMENT = 5, 0xE6546B64
_FINAL_MULTIPLIER_1, _FINAL_MULTIPLIER_2 = 0x85EBCA6B, 0xC2B2AE35
_NUM_HASHED_BYTES = 16

# The winning score of a normalised row is a standard Gumbel variable: below this with probability 2e-9.
_ALMOST_SURELY_REACHED = -3.0
# Covers the 16 hash bits that the pruning test leaves unmixed (2^16) and its float32 rounding (below 2^13).
_HASH_SLACK = 1 << 17
# Tokens hashed at once, over all rows: few enough on a CPU for temporaries to stay in its cache.
_NUM_TOKENS_AT_ONCE = 1 << 18
_NUM_TOKENS_AT_ONCE_ON_DEVICE = 1 << 26


def _signed(constant: int) -> int:
    """The int32 with the bits of ``constant``."""
    return (constant + (1 << 31)) % _MODULUS - (1 << 31)


def _xor_shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """bits ^ (bits >> count), in place."""
    return bits.bitwise_xor_(_shift_right(bits, count))


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _rotate_left(bits: torch.Tensor, count: int) -> torch.Tensor:
    return (bits << count).bitwise_or_(_shift_right(bits, 32 - count))


# The hash rotates (state ^ scrambled block) by 13. Rotation distributes over XOR: both come rotated here, so that the
# vocabulary is rotated once and not once a row.
def _scramble(block: torch.Tensor) -> torch.Tensor:
    bits = _rotate_left(block.to(torch.int32) * _signed(_KEY_MULTIPLIER_1), 15)
    return _rotate_left(bits.mul_(_signed(_KEY_MULTIPLIER_2)), 13)


def _absorb(states: torch.Tensor, scrambled_block: torch.Tensor) -> torch.Tensor:
    return (states ^ scrambled_block).mul_(_STATE_MULTIPLIER).add_(_signed(_STATE_INCREMENT))


def _finalise_high_bits(states: torch.Tensor) -> torch.Tensor:
    """The hash before its last step, which mixes the high 16 bits into the low and leaves the high as they are.

    In place.
    """
    bits = _xor_shifted(states.bitwise_xor_(_NUM_HASHED_BYTES), 16).mul_(_signed(_FINAL_MULTIPLIER_1))
    return _xor_shifted(bits, 13).mul_(_signed(_FINAL_MULTIPLIER_2))


def _row_states(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """State of the hash, rotated, before it reads the token id; int32 ``[N]``."""
    seeds = seeds.to(torch.int64)
    states = torch.zeros_like(seeds, dtype=torch.int32)
    for block in (seeds, seeds >> 32, positions):
        states = _rotate_left(_absorb(states, _scramble(block)), 13)
    return states


def _hashes(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The hashes, int64 in [0, 2^32), of row states and token ids of one shape, or of shapes that broadcast."""
    bits = _xor_shifted(_finalise_high_bits(_absorb(states, _scramble(token_ids))), 16)
    return bits.to(torch.int64) & (_MODULUS - 1)


def _gumbel(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    exponential = -(_hashes(states, token_ids).to(torch.float64) / (_MODULUS - 1)).log()
    return -exponential.clamp(1 / _MODULUS, torch.finfo(torch.float64).max).log()


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise g, float64 ``[N, M]``.

    ``seeds`` int64 ``[N]``, read as 64 bits; ``positions`` integers ``[N]``, read modulo 2^32; ``token_ids`` integers
    ``[N, M]``, or ``[M]`` for the same ids in every row. Always finite: at most 32 log 2 = 22.2, at least -709.8 (for
    one hash of 2^32; the next gives -3.1).
    """
    return _gumbel(_row_states(seeds, positions)[:, None], token_ids)


class Stream(IntEnum):
    """Streams of uniforms for residual sampling, where draft and verifier must not share noise."""

    DRAFT = 0
    ACCEPT = 1
    BONUS = 2


def seeded_uniforms(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """One uniform for each seed and position, float64 in [0, 1) in steps of 2^-32, of the shape of ``seeds``.

    ``seeds`` int64 and ``positions`` integers of one shape. The streams are hashes of ids that no vocabulary reaches,
    so they are independent of each other and of :func:`gumbel_noise`.
    """
    states = _row_states(seeds, positions)
    return _hashes(states, torch.full_like(states, -1 - stream)).to(torch.float64) / _MODULUS


class _Contenders(NamedTuple):
    """Tokens that may win their row: parallel int64 ``[C]``."""

    rows: torch.Tensor
    token_ids: torch.Tensor


def _contenders(log_probs: torch.Tensor, states: torch.Tensor, must_reach: float) -> _Contenders:
    """All tokens with log p + g >= ``must_reach`` and few others; never one whose log p is NaN.

    Costs integer hashes and one float32 comparison a token: E >= 1 - h / (2^32 - 1), so a score that reaches the bound
    needs (2^32 - 1) - h <= 2^32 * exp(log p - bound). Both sides are compared 2^31 lower, where the left one is the
    signed value of h with its lower 31 bits inverted.
    """
    num_rows, vocab_size = log_probs.shape
    device = log_probs.device
    scrambled_ids = _scramble(torch.arange(vocab_size, dtype=torch.int32, device=device))
    num_tokens_at_once = _NUM_TOKENS_AT_ONCE if device.type == "cpu" else _NUM_TOKENS_AT_ONCE_ON_DEVICE
    num_rows_at_once = max(1, num_tokens_at_once // vocab_size)

    found = []
    for start in range(0, num_rows, num_rows_at_once):
        chunk = slice(start, start + num_rows_at_once)
        hashes = _finalise_high_bits(_absorb(states[chunk, None], scrambled_ids))
        quietness = hashes.bitwise_xor_((1 << 31) - 1).to(torch.float32)
        quietest = (log_probs[chunk].to(torch.float32) + (32 * math.log(2) - must_reach)).exp_()
        rows, token_ids = torch.where(quietness <= quietest.sub_((1 << 31) - _HASH_SLACK))
        found.append(_Contenders(rows.add_(start), token_ids))
    return _Contenders(*map(torch.cat, zip(*found)))


def _draw_with_noise(log_probs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """:func:`draw` for rows that are not greedy, with logarithms only for tokens that may win."""
    num_rows, vocab_size = log_probs.shape
    for must_reach in (_ALMOST_SURELY_REACHED, -math.inf):
        rows, ids = _contenders(log_probs, states, must_reach)
        scores = log_probs[rows, ids].to(torch.float64) + _gumbel(states[rows], ids)
        best = scores.new_full((num_rows,), -torch.inf).scatter_reduce(0, rows, scores, "amax")
        if bool((best >= must_reach).all()):
            break
    wins = scores == best[rows]
    tokens = ids.new_full((num_rows,), vocab_size).scatter_reduce(0, rows[wins], ids[wins], "amin")
    return tokens.masked_fill(tokens == vocab_size, 0)


def draw(
    log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, is_greedy: torch.Tensor
) -> torch.Tensor:
    """The target's token of each row: argmax of log p + g over the whole vocabulary, with g = 0 in greedy rows.

    ``log_probs`` float ``[N, V]``, normalised, -inf for tokens that p excludes (unnormalised scores change the cost,
    not the result; greedy rows had better hold logits, as the rounding of a softmax can make ties); ``seeds`` int64
    ``[N]`` and ``positions`` ``[N]`` as in :func:`gumbel_noise`; ``is_greedy`` bool ``[N]``. Returns int64 ``[N]``.

    NaN is never drawn, +inf always; a row of only NaN or -inf gives token 0. Raises ValueError when an argument does
    not have one value a row.
    """
    num_rows = log_probs.shape[0]
    for name, argument in (("seeds", seeds), ("positions", positions), ("is_greedy", is_greedy)):
        if argument.shape != (num_rows,):
            raise ValueError(f"{name} must have shape ({num_rows},), got {tuple(argument.shape)}")
    if bool(is_greedy.all()):
        return _argmax(log_probs)
    states = _row_states(seeds, positions)
    if not bool(is_greedy.any()):
        return _draw_with_noise(log_probs, states)
    tokens = torch.empty_like(states, dtype=torch.int64)
    tokens[is_greedy] = _argmax(log_probs[is_greedy])
    tokens[~is_greedy] = _draw_with_noise(log_probs[~is_greedy], states[~is_greedy])
    return tokens


def _without_nan(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores.isnan(), -torch.inf)


# argmax and topk rank NaN highest, so one look at the result tells whether a masked copy is needed.
def _argmax(scores: torch.Tensor) -> torch.Tensor:
    tokens = scores.argmax(-1)
    if bool(scores.gather(-1, tokens[:, None]).isnan().any()):
        tokens = _without_nan(scores).argmax(-1)
    return tokens


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids int64 ``[N, count]`` of the highest scores, in the order of the ids. Ties at the cut go to the lowest ids."""
    values = scores.topk(min(count + 1, scores.shape[-1])).values
    if bool(values.isnan().any()):
        scores = _without_nan(scores)
        values = scores.topk(values.shape[-1]).values
    least = values[:, count - 1, None]
    is_kept = scores >= least
    if values.shape[-1] > count and bool((values[:, count, None] == least).any()):
        tied = scores == least
        num_above = (values[:, :count] > least).sum(-1, keepdim=True)
        is_kept &= ~tied | (tied.cumsum(-1) <= count - num_above)
    return is_kept.nonzero()[:, 1].view(-1, count)


class RankedTokens(NamedTuple):
    """Tokens of each row by falling score: ids int64 ``[N, F]`` and scores float64 ``[N, F]``."""

    token_ids: torch.Tensor
    scores: torch.Tensor


def perturbed_top(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    *,
    num_ranked: int,
    top_m: int,
) -> RankedTokens:
    """The draft's guesses of the target's draws: rank 0 is the token to propose, the next ranks are fork candidates.

    Perturbs only the ``top_m`` likeliest tokens of ``logits`` float ``[N, V]`` over ``temperatures`` ``[N]`` (positive,
    not read in greedy rows) and returns the ``num_ranked`` best. Any guess is exact, so truncation costs acceptance
    only. Other arguments as in :func:`draw`; ``positions`` are those of the tokens to be drawn, as the target counts
    them. NaN ranks last. Raises ValueError when ``num_ranked`` exceeds ``top_m`` or the vocabulary.
    """
    top_m = min(top_m, logits.shape[-1])
    if not 1 <= num_ranked <= top_m:
        raise ValueError(f"num_ranked must be from 1 to {top_m} (top_m or vocabulary), got {num_ranked}")
    # In the order of their ids, so that the stable sort breaks ties by the lowest id.
    ids = _top(logits, top_m)
    temperatures = torch.where(is_greedy, 1.0, temperatures.to(torch.float64))
    noise = gumbel_noise(seeds, positions, ids) * ~is_greedy[:, None]
    scores = logits.gather(-1, ids).to(torch.float64) / temperatures[:, None] + noise
    ranked = _without_nan(scores).sort(dim=-1, descending=True, stable=True)
    return RankedTokens(ids.gather(-1, ranked.indices)[:, :num_ranked], ranked.values[:, :num_ranked])
