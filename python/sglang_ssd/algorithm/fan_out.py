"""How many bonus tokens to guess at each position: fan-out allocators behind one callable.

An allocator is any ``Callable[[FanOutQuery], list[int]]``. Given the length K of the proposal under
verification and a budget B of branches it returns F_0..F_K, each 0 or more, with sum exactly B. Only
positions and ranks enter, so the lists can be made before the draft's logits are known. B = 0 gives zeros:
nothing is prepared, every round misses, and what runs is ordinary speculative decoding with the backup.

``GeometricFanOut`` and ``MeasuredFanOut`` give the next branch to the position where it raises the hit rate
most. When the gain at each position never rises with the number of guesses there, which the power law
guarantees and the isotonic fit restores for measured curves, that greedy list is the exact optimum among all
lists with sum B (separable concave allocation: Gross 1956, Fox 1966); and the list for B + 1 is the list for
B with one more branch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_ssd.algorithm.theory import check_probability, position_probabilities, power_law_miss_rate


class FanOutQuery(NamedTuple):
    """What an allocator is asked: ``lookahead`` drafted tokens are being verified (0 is legal: only a bonus
    token will come), ``budget`` branches may be prepared, ``after_hit`` says that the proposal came from the
    cache."""

    lookahead: int
    budget: int
    after_hit: bool


Allocator = Callable[[FanOutQuery], list[int]]


class UniformFanOut:
    """The same number of guesses at every position; what does not divide goes to the first positions."""

    def __call__(self, query: FanOutQuery) -> list[int]:
        _check(query)
        each, rest = divmod(query.budget, query.lookahead + 1)
        return [each + (k < rest) for k in range(query.lookahead + 1)]


class GeometricFanOut:
    """Theorem 12 for integers: the exact optimum for one acceptance and a rejection power law.

    The paper's law F^-r forces a hit rate of 0 for a single guess, so its integer optimum would put all of a
    small budget on one or two positions, which measured hit curves contradict. This allocator uses (1 + F)^-r
    (see ``theory.power_law_miss_rate``), under which the optimum over the reals is Theorem 12 for F_k + 1 and
    budget B + K + 1; for large budgets the two agree.
    """

    def __init__(self, acceptance: float, power_law_r: float):
        """Raises ValueError for an acceptance outside [0, 1] or an exponent that is not above 0."""
        check_probability("acceptance", acceptance)
        power_law_miss_rate(1, power_law_r)
        self.acceptance = acceptance
        self.power_law_r = power_law_r

    def __call__(self, query: FanOutQuery) -> list[int]:
        _check(query)
        at = position_probabilities(self.acceptance, query.lookahead)
        miss = [power_law_miss_rate(f, self.power_law_r) for f in range(query.budget + 1)]
        return _greedy([[p * (miss[f] - miss[f + 1]) for f in range(query.budget)] for p in at], query.budget)


# (lookahead, after_hit) -> one curve a position, K + 1 of them; curve[j] is the joint chance that the outcome
# is at this position and its bonus token is candidate j. Ranks past the end of a curve count as never hit.
HitCurves = Callable[[int, bool], Sequence[Sequence[float]]]


class MeasuredFanOut:
    """The exact optimum under measured hit curves, such as ``SpeculationEstimator.hit_curves``.

    Each curve is replaced by its non-increasing least-squares fit first: a candidate that the draft ranks
    higher is never less likely in truth, so a rise is sampling noise.
    """

    def __init__(self, curves: HitCurves):
        self.curves = curves

    def __call__(self, query: FanOutQuery) -> list[int]:
        _check(query)
        curves = self.curves(query.lookahead, query.after_hit)
        if len(curves) != query.lookahead + 1:
            raise ValueError(f"curves must give {query.lookahead + 1} positions, got {len(curves)}")
        return _greedy([non_increasing_fit(curve) for curve in curves], query.budget)


def theorem_12(lookahead: int, budget: float, acceptance: float, power_law_r: float) -> list[float]:
    """The paper's geometric fan-out over the reals: ``lookahead + 1`` floats with sum ``budget``.

    F_k is proportional to a^(k/(1+r)) for k < K and to a^(K/(1+r)) * (1-a)^(-1/(1+r)) at K. It maximises
    sum_k P(k) * (1 - F_k^-r) over all F > 0 with that sum, P(k) being a^k (1-a), and a^K at K; F_k
    proportional to P(k)^(1/(1+r)) is the same rule and also holds for a = 0 and a = 1.
    """
    check_probability("acceptance", acceptance)
    power_law_miss_rate(1, power_law_r)
    shares = [p ** (1.0 / (1.0 + power_law_r)) for p in position_probabilities(acceptance, lookahead)]
    return [budget * share / sum(shares) for share in shares]


def non_increasing_fit(values: Sequence[float]) -> list[float]:
    """The non-increasing sequence closest to ``values`` in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # (sum, count), means falling from block to block
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] * count < total * blocks[-1][1]:
            earlier_total, earlier_count = blocks.pop()
            total, count = total + earlier_total, count + earlier_count
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


def _greedy(gains: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Spend ``budget`` one by one where the next gain is largest; past the end of a list the gain is 0.

    Of equal gains the position with fewer guesses comes first, then the earlier one, so that what is left
    when no gain remains is spread evenly.
    """
    fan_out = [0] * len(gains)
    heap = [(-gain[0] if gain else 0.0, 0, k) for k, gain in enumerate(gains)]
    heapq.heapify(heap)
    for _ in range(budget):
        _, _, k = heap[0]
        fan_out[k] += 1
        taken = fan_out[k]
        heapq.heapreplace(heap, (-gains[k][taken] if taken < len(gains[k]) else 0.0, taken, k))
    return fan_out


def _check(query: FanOutQuery) -> None:
    if query.lookahead < 0:
        raise ValueError(f"lookahead must be 0 or more, got {query.lookahead}")
    if query.budget < 0:
        raise ValueError(f"budget must be 0 or more, got {query.budget}")
