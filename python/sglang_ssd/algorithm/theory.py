"""The paper's formulas (arXiv 2603.03251) for acceptance, hits and speed, as functions of plain numbers.

Times are milliseconds and speeds tokens per millisecond, for one request of the batch. A speed-up over plain
decoding is ``tokens_per_ms`` times the milliseconds of one plain target forward; with ``verify_ms=1`` the
results are the paper's own, which are relative to one verify.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# The chance that a drafted token is accepted: one number for every position (the paper's geometric model), or
# one number for each position, given that all before it were accepted. The last one stands for all positions
# after it.
Acceptance = float | Sequence[float]


def survival(acceptance: Acceptance, lookahead: int) -> list[float]:
    """P(the first k drafted tokens are all accepted) for k = 0..lookahead: lookahead + 1 floats.

    Raises ValueError for a negative ``lookahead``, an empty sequence or a probability outside [0, 1].
    """
    if lookahead < 0:
        raise ValueError(f"lookahead must be 0 or more, got {lookahead}")
    per_position = [acceptance] if isinstance(acceptance, int | float) else list(acceptance)
    if not per_position:
        raise ValueError("acceptance must hold at least one probability, got an empty sequence")
    for value in per_position:
        check_probability("acceptance", value)
    alive = [1.0]
    for position in range(lookahead):
        alive.append(alive[-1] * per_position[min(position, len(per_position) - 1)])
    return alive


def expected_tokens(acceptance: Acceptance, lookahead: int) -> float:
    """Expected tokens of one round, bonus token included: (1 - a^(K+1)) / (1 - a) in the geometric model."""
    return math.fsum(survival(acceptance, lookahead))


def position_probabilities(acceptance: Acceptance, lookahead: int) -> list[float]:
    """P(exactly k drafted tokens are accepted) for k = 0..lookahead: lookahead + 1 floats that sum to 1."""
    alive = survival(acceptance, lookahead)
    return [alive[k] - alive[k + 1] for k in range(lookahead)] + [alive[lookahead]]


def power_law_miss_rate(fan_out: float, power_law_r: float, offset: float = 1.0) -> float:
    """Chance that none of ``fan_out`` guesses at one position is the bonus token: (offset + F)^-r, at most 1.

    ``offset=0`` is the paper's law F^-r, which holds for large F and says that one guess never hits.
    ``offset=1`` is the law used for integers here: it has the same tail, is right at F = 0, where nothing can
    hit, and its gains fall from the first guess on. The hits that the test pair's rejections gave (.53, .70,
    .79, .86, .94 for F = 1, 2, 3, 4 and 8) lie within .04 of it for one r.
    """
    if not power_law_r > 0.0:
        raise ValueError(f"power_law_r must be above 0, got {power_law_r}")
    if fan_out < 0:
        raise ValueError(f"fan_out must be 0 or more, got {fan_out}")
    base = offset + fan_out
    return base**-power_law_r if base > 1.0 else 1.0


def power_law_hit_rate(fan_out: Sequence[int], acceptance: Acceptance, power_law_r: float) -> float:
    """Hit rate of a fan-out list F_0..F_K under the power law with offset 1; ``len(fan_out)`` is K + 1."""
    at = position_probabilities(acceptance, len(fan_out) - 1)
    return math.fsum(
        p * (1.0 - power_law_miss_rate(f, power_law_r)) for p, f in zip(at, fan_out, strict=True)
    )


def curve_hit_rate(fan_out: Sequence[int], curves: Sequence[Sequence[float]]) -> float:
    """Hit rate of a fan-out list under hit curves: ``curves[k][j]`` is the chance of the outcome whose bonus
    token is candidate j (0 is the draft's first choice) of position k."""
    return math.fsum(math.fsum(curve[:f]) for f, curve in zip(fan_out, curves, strict=True))


def stationary_hit_rate(after_hit: float, after_miss: float) -> float:
    """Long-run hit rate, given the hit rates after a proposal from the cache and after a backup's.

    The stationary law of the two-state chain. A chain that never leaves a miss stays there: 0.
    """
    check_probability("after_hit", after_hit)
    check_probability("after_miss", after_miss)
    return after_miss / (1.0 - after_hit + after_miss) if after_miss > 0 else 0.0


def sd_tokens_per_ms(tokens: float, verify_ms: float, draft_ms: float) -> float:
    """Speed of ordinary speculative decoding: draft, then verify; ``tokens`` are expected ones a round."""
    return tokens / (verify_ms + draft_ms)


def ssd_tokens_per_ms(
    *,
    hit_rate: float,
    tokens_hit: float,
    tokens_miss: float,
    verify_ms: float,
    primary_ms: float,
    backup_ms: float,
    batch_size: int = 1,
) -> float:
    """Speed of speculative speculative decoding, tokens of one row: Theorem 7, and its form for a batch.

    A round of hits lasts max(verify, primary), ``primary_ms`` being the draft's whole round, which runs
    beside the verify. A round of misses lasts verify + backup. A batch with both waits for the slower of the
    two; while the draft round fits into the verify, which is the paper's case, that is its denominator p^b *
    verify + (1 - p^b) * (verify + backup). With no hits this is ordinary speculative decoding with the
    backup.

    Raises ValueError for a hit rate outside [0, 1] and a batch size below 1.
    """
    check_probability("hit_rate", hit_rate)
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    hit_ms, miss_ms = max(verify_ms, primary_ms), verify_ms + backup_ms
    all_hit, all_miss = hit_rate**batch_size, (1.0 - hit_rate) ** batch_size
    mixed = max(0.0, 1.0 - all_hit - all_miss)
    tokens = hit_rate * tokens_hit + (1.0 - hit_rate) * tokens_miss
    return tokens / (all_hit * hit_ms + all_miss * miss_ms + mixed * max(hit_ms, miss_ms))


def check_probability(name: str, value: float) -> None:
    """Raise ValueError, naming the argument, unless ``value`` is a number in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a probability in [0, 1], got {value}")
