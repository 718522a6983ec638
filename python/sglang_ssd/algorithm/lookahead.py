"""How long proposals should be (K) and how many branches to prepare (B), from measured times and hit rates.

A draft round runs beside the verify as long as it fits: K tokens a branch cost K + 1 forwards, so a larger K
yields more tokens a round until the draft becomes the slower side, and a larger B more hits until its rows
slow the draft down. ``predict_ssd`` puts one (K, B) into Theorem 7; ``choose`` picks among allowed pairs
without flickering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy

from sglang_ssd.algorithm.fallback import Fallback, fallback_threshold
from sglang_ssd.algorithm.fan_out import Allocator, FanOutQuery, HitCurves
from sglang_ssd.algorithm.theory import (
    Acceptance,
    curve_hit_rate,
    expected_tokens,
    power_law_hit_rate,
    sd_tokens_per_ms,
    ssd_tokens_per_ms,
    stationary_hit_rate,
)

# Milliseconds of one forward over so many tokens (target) or rows (draft).
Cost = Callable[[int], float]
# (lookahead, budget) -> long-run hit rate of one row.
HitRate = Callable[[int, int], float]


def affine_cost(fixed_ms: float, per_row_ms: float = 0.0) -> Cost:
    """``fixed_ms`` for one row, ``per_row_ms`` more for every further one."""
    return lambda size: fixed_ms + per_row_ms * (size - 1)


def measured_cost(ms_by_size: Mapping[int, float]) -> Cost:
    """Linear between the measured sizes and flat outside them. Raises ValueError for an empty mapping."""
    if not ms_by_size:
        raise ValueError("ms_by_size must hold at least one measurement, got none")
    sizes = sorted(ms_by_size)
    times = [ms_by_size[size] for size in sizes]
    return lambda size: float(numpy.interp(size, sizes, times))


class Size(NamedTuple):
    """How much is drafted for one request and round: K tokens a path, B branches."""

    lookahead: int
    budget: int


class RoundCosts(NamedTuple):
    """Times of one pair on its devices.

    ``fork_ms`` is what a draft round costs beside its K depths: choosing the forks and the forward that
    carries the last drafted token. ``service_ms`` passes between an outcome and the start of the draft
    model's work on it. ``ngram_ms`` passes between a miss and the n-gram backup's proposals for the batch,
    wherever its index lives.
    """

    verify_ms: Cost
    depth_ms: Cost
    fork_ms: float
    service_ms: float
    ngram_ms: float


class DraftQuality(NamedTuple):
    """How well the target is predicted: acceptance of the draft model and of the n-gram backup, and hits."""

    acceptance: Acceptance
    ngram_acceptance: Acceptance
    hit_rate: HitRate


class Prediction(NamedTuple):
    """The expected round of one (K, B) and one batch size.

    ``backup_lookahead`` is how many tokens the backup best proposes: on a miss the verifier waits for each of
    the neural backup's depths, so fewer than K may be best. Tokens are those of one row.
    """

    lookahead: int
    budget: int
    fallback: Fallback
    backup_lookahead: int
    hit_rate: float
    tokens_per_round: float
    tokens_per_ms: float

    @property
    def size(self) -> Size:
        return Size(self.lookahead, self.budget)

    @property
    def work(self) -> int:
        """Draft tokens prepared in a round: what a smaller pair saves when it is as fast."""
        return self.lookahead * (self.budget + 1)


def modelled_hit_rate(allocator: Allocator, acceptance: Acceptance, power_law_r: float) -> HitRate:
    """The hit rate of an allocator's lists under the power law."""

    def hit_rate(lookahead: int, budget: int) -> float:
        return power_law_hit_rate(allocator(FanOutQuery(lookahead, budget, True)), acceptance, power_law_r)

    return hit_rate


def measured_hit_rate(allocator: Allocator, curves: HitCurves) -> HitRate:
    """The long-run hit rate of an allocator's lists under measured curves, which differ after hit and miss.

    Every (K, B) asks for curves: for one choice among many, ``functools.cache(estimator.hit_curves)`` keeps
    them, here and in the allocator.
    """

    def hit_rate(lookahead: int, budget: int) -> float:
        after_hit, after_miss = (
            min(1.0, curve_hit_rate(allocator(FanOutQuery(lookahead, budget, hit)), curves(lookahead, hit)))
            for hit in (True, False)
        )
        return stationary_hit_rate(after_hit, after_miss)

    return hit_rate


def predict_ar(batch_size: int, costs: RoundCosts) -> float:
    """Tokens a millisecond of one row in plain decoding."""
    return 1.0 / costs.verify_ms(batch_size)


def predict_sd(lookahead: int, batch_size: int, costs: RoundCosts, quality: DraftQuality) -> float:
    """Tokens a millisecond of one row in ordinary speculative decoding: the same draft, and no wire."""
    return sd_tokens_per_ms(
        expected_tokens(quality.acceptance, lookahead),
        _verify_ms(lookahead, batch_size, costs),
        lookahead * costs.depth_ms(batch_size),
    )


def predict_ssd(
    lookahead: int, budget: int, batch_size: int, costs: RoundCosts, quality: DraftQuality
) -> Prediction:
    """Theorem 7 for a batch, with the better backup at its best length.

    Raises ValueError for a ``lookahead`` or ``batch_size`` below 1, a negative ``budget``, and qualities that
    the formulas refuse.
    """
    if lookahead < 1:
        raise ValueError(f"lookahead must be 1 or more, got {lookahead}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    hit_rate = quality.hit_rate(lookahead, budget)
    tokens_hit = expected_tokens(quality.acceptance, lookahead)

    def with_backup(fallback: Fallback, backup_lookahead: int) -> Prediction:
        tokens_miss, backup_ms = _backup(fallback, backup_lookahead, batch_size, costs, quality)
        return Prediction(
            lookahead=lookahead,
            budget=budget,
            fallback=fallback,
            backup_lookahead=backup_lookahead,
            hit_rate=hit_rate,
            tokens_per_round=hit_rate * tokens_hit + (1.0 - hit_rate) * tokens_miss,
            tokens_per_ms=ssd_tokens_per_ms(
                hit_rate=hit_rate,
                tokens_hit=tokens_hit,
                tokens_miss=tokens_miss,
                verify_ms=_verify_ms(lookahead, batch_size, costs),
                primary_ms=_primary_ms(lookahead, budget, batch_size, costs),
                backup_ms=backup_ms,
                batch_size=batch_size,
            ),
        )

    neural = [with_backup(Fallback.NEURAL, length) for length in range(1, lookahead + 1)]
    return max([*neural, with_backup(Fallback.NGRAM, lookahead)], key=lambda p: p.tokens_per_ms)


def predict_threshold(
    lookahead: int, budget: int, batch_size: int, costs: RoundCosts, quality: DraftQuality
) -> float:
    """b* of Theorem 17 for one (K, B) at the times of ``batch_size``: from there on the n-gram backup beats
    the neural one of any length up to K."""
    verify_ms = _verify_ms(lookahead, batch_size, costs)
    round_ms = max(verify_ms, _primary_ms(lookahead, budget, batch_size, costs))
    # A long draft round makes the batch wait anyway: only what a backup takes beyond it is added.
    hidden_ms = round_ms - verify_ms
    tokens_fast, fast_ms = _backup(Fallback.NGRAM, lookahead, batch_size, costs, quality)
    fast_ms = max(0.0, fast_ms - hidden_ms)
    thresholds = []
    for length in range(1, lookahead + 1):
        tokens_slow, slow_ms = _backup(Fallback.NEURAL, length, batch_size, costs, quality)
        thresholds.append(
            fallback_threshold(
                hit_rate=quality.hit_rate(lookahead, budget),
                tokens_hit=expected_tokens(quality.acceptance, lookahead),
                tokens_miss_slow=tokens_slow,
                tokens_miss_fast=tokens_fast,
                slow_ms=max(fast_ms, slow_ms - hidden_ms),
                fast_ms=fast_ms,
                round_ms=round_ms,
            )
        )
    return max(thresholds)


def _verify_ms(lookahead: int, batch_size: int, costs: RoundCosts) -> float:
    return costs.verify_ms(batch_size * (lookahead + 1))


def _primary_ms(lookahead: int, budget: int, batch_size: int, costs: RoundCosts) -> float:
    """The draft's whole round beside the verify; without branches there is none."""
    if budget == 0:
        return 0.0
    return costs.service_ms + costs.fork_ms + lookahead * costs.depth_ms(batch_size * budget)


def _backup(
    fallback: Fallback, length: int, batch_size: int, costs: RoundCosts, quality: DraftQuality
) -> tuple[float, float]:
    """Expected tokens of a round with a backup's proposal, and the milliseconds until it is there."""
    if fallback is Fallback.NGRAM:
        return expected_tokens(quality.ngram_acceptance, length), costs.ngram_ms
    return expected_tokens(quality.acceptance, length), costs.service_ms + length * costs.depth_ms(batch_size)


def choose(
    candidates: Iterable[Prediction],
    current: Size | None = None,
    *,
    tolerance: float = 0.01,
    margin: float = 0.05,
) -> Prediction:
    """The prediction whose (K, B) should run next, ``current`` being the (K, B) that runs now.

    The aim is the least work within ``tolerance`` of the best speed: with a useless draft every pair is as
    slow as the next, and the smallest is taken. The current pair is kept unless the aim is less work, or the
    best is faster by more than ``margin``. As ``margin`` exceeds ``tolerance``, the same predictions never
    lead back and forth. Raises ValueError for no candidates and unless 0 <= tolerance < margin.
    """
    if not 0.0 <= tolerance < margin:
        raise ValueError(f"tolerance must be in [0, margin), got {tolerance} with margin {margin}")
    predictions = list(candidates)
    if not predictions:
        raise ValueError("candidates must hold at least one prediction, got none")
    best_speed = max(p.tokens_per_ms for p in predictions)
    aim = min(
        (p for p in predictions if p.tokens_per_ms >= best_speed * (1.0 - tolerance)),
        key=lambda p: (p.work, -p.tokens_per_ms),
    )
    running = next((p for p in predictions if p.size == current), None)
    if running is None or aim.work < running.work or best_speed > running.tokens_per_ms * (1.0 + margin):
        return aim
    return running
