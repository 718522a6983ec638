"""Early narrowing: the outcome is known, the winning branch holds a few tokens; answer now or draft further?

The verifier waits while the draft goes on, so every further depth costs its milliseconds and buys one more
token, which counts only if all before it are accepted. Rounds repeat, so time is worth what it yields
elsewhere: by the renewal-reward theorem the best long-run speed is the rate for which the best round gains
exactly nothing,

    max over m of  sum_rows E(n + m) - rate * (verify_ms + m * depth_ms)  =  0  on average over rounds,

E(n) being the expected tokens of a proposal of length n. Given that rate, each round decides alone: draft on
while the next depth brings more tokens than its time is worth. How many tokens are ready at an outcome is
taken not to depend on what was decided the round before: the draft prepares the next round beside the verify,
which always takes as long. Nothing ready (``num_ready`` 0) is a miss, so the same rule says how far the
neural backup should draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ssd.algorithm.theory import Acceptance, expected_tokens


class Readiness(NamedTuple):
    """A kind of round: its share of all rounds, and the tokens ready in each row at the outcome."""

    probability: float
    num_ready: Sequence[int]


class SteadyState(NamedTuple):
    """The best policy: its long-run speed, all rows together, and the further depths for each kind."""

    tokens_per_ms: float
    further_depths: list[int]


def further_depths(
    num_ready: Sequence[int],
    *,
    max_tokens: int,
    acceptance: Acceptance,
    depth_ms: float,
    tokens_per_ms: float,
) -> int:
    """How many depths to draft on before answering; 0 answers now.

    ``num_ready`` holds the tokens ready in each row of the batch; all rows are drafted on and answered
    together, and a row stops at ``max_tokens``. ``depth_ms`` is the time of one further depth on these rows
    alone, ``tokens_per_ms`` the long-run speed of the batch: measured (acting on the measured speed raises
    it, until it is the best one) or from ``steady_state``. A tie answers sooner. Raises ValueError for a row
    outside 0..max_tokens or no rows, and for times or speeds below 0.
    """
    if not num_ready:
        raise ValueError("num_ready must hold at least one row")
    if min(num_ready) < 0 or max(num_ready) > max_tokens:
        raise ValueError(f"num_ready must be in 0..{max_tokens} (max_tokens), got {list(num_ready)}")
    for name, value in (("depth_ms", depth_ms), ("tokens_per_ms", tokens_per_ms)):
        if not value >= 0.0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
    price = tokens_per_ms * depth_ms

    def gain(depths: int) -> float:
        return _tokens(num_ready, depths, max_tokens, acceptance) - price * depths

    return max(range(max_tokens - min(num_ready) + 1), key=lambda depths: (gain(depths), -depths))


def steady_state(
    rounds: Sequence[Readiness],
    *,
    max_tokens: int,
    acceptance: Acceptance,
    depth_ms: float,
    verify_ms: float,
) -> SteadyState:
    """The policy with the highest long-run speed when rounds are drawn independently from ``rounds``.

    Dinkelbach's iteration: the rate's best answers give a rate, which never falls and stops after finitely
    many steps, there being finitely many policies. With one kind of round of probability 1 this maximises E(n
    + m) / (verify_ms + m * depth_ms). Raises ValueError unless the probabilities are 0 or more and sum to 1
    and ``verify_ms`` is above 0, and as ``further_depths`` does.
    """
    if any(r.probability < 0.0 for r in rounds) or not math.isclose(sum(r.probability for r in rounds), 1.0):
        raise ValueError(
            f"rounds must have probabilities that sum to 1, got {[r.probability for r in rounds]}"
        )
    if not verify_ms > 0.0:
        raise ValueError(f"verify_ms must be above 0, got {verify_ms}")
    rate = 0.0
    while True:
        depths = [
            further_depths(
                r.num_ready,
                max_tokens=max_tokens,
                acceptance=acceptance,
                depth_ms=depth_ms,
                tokens_per_ms=rate,
            )
            for r in rounds
        ]
        tokens = sum(
            r.probability * _tokens(r.num_ready, m, max_tokens, acceptance)
            for r, m in zip(rounds, depths, strict=True)
        )
        new_rate = tokens / (
            verify_ms + depth_ms * sum(r.probability * m for r, m in zip(rounds, depths, strict=True))
        )
        if new_rate <= rate:
            return SteadyState(rate, depths)
        rate = new_rate


def _tokens(num_ready: Sequence[int], depths: int, max_tokens: int, acceptance: Acceptance) -> float:
    """Expected tokens of one round, all rows, after ``depths`` further depths."""
    return sum(expected_tokens(acceptance, min(n + depths, max_tokens)) for n in num_ready)
