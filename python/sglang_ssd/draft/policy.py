"""What one verifier's rounds teach the draft, and the decisions that follow from it.

Where to fork: guesses go to the positions and ranks where outcomes were found (``MeasuredFanOut``, which starts as
Theorem 12's list). When to answer: a verifier that waits gets a shorter proposal when the next depth would cost more
than it brings (``narrowing``), as long as rounds are measured to be faster that way. Who answers a miss: the model, or
a suffix match that takes no time (Theorem 17). And how much is drafted at all (``lookahead``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache

from sglang_ssd.algorithm.acceptance import Ewma, SpeculationEstimator
from sglang_ssd.algorithm.fallback import Fallback, choose_fallback, fallback_threshold
from sglang_ssd.algorithm.fan_out import (
    Allocator,
    FanOutQuery,
    GeometricFanOut,
    MeasuredFanOut,
    UniformFanOut,
)
from sglang_ssd.algorithm.lookahead import (
    DraftQuality,
    RoundCosts,
    Size,
    choose,
    measured_cost,
    measured_hit_rate,
    predict_ssd,
)
from sglang_ssd.algorithm.narrowing import further_depths
from sglang_ssd.algorithm.online_choice import OnlineChoice
from sglang_ssd.algorithm.theory import expected_tokens
from sglang_ssd.wire.messages import FallbackName, FanOutName, Source

#: Lists are made anew after so many outcomes; between them they are looked up.
_REFRESH_OUTCOMES = 32
#: So often the best K and B are looked for.
_RESIZE_ROUNDS = 64
#: Rounds further apart than this say nothing of the verifier's speed: it was idle or read a long prompt.
_LONGEST_ROUND_S = 5.0
_HALF_LIFE_ROUNDS = 256.0
_PRIOR_ACCEPTANCE, _PRIOR_POWER_LAW_R = 0.7, 1.0


class DraftPolicy:
    """Decisions for one verifier. ``limit``: the largest K and B, which are in force at first, and for good unless
    ``smallest`` leaves a choice. ``fan_out`` names the allocator, ``fallback`` who answers misses."""

    def __init__(
        self,
        limit: Size,
        fan_out: FanOutName = "measured",
        fallback: FallbackName = "neural",
        smallest: Size | None = None,
    ) -> None:
        self.estimator = SpeculationEstimator(
            max_lookahead=limit.lookahead,
            max_rank=max(1, limit.budget),
            half_life_rounds=_HALF_LIFE_ROUNDS,
            prior_acceptance=_PRIOR_ACCEPTANCE,
            prior_power_law_r=_PRIOR_POWER_LAW_R,
        )
        #: K and B of the proposals to come.
        self.size = limit
        self._verify_width = limit.lookahead + 1
        self._sizes = sizes_between(smallest or limit, limit)
        self._num_rounds = 0
        # The rule of ``narrowing`` takes for granted that the next proposal is prepared beside the verify. A draft that is
        # hardly faster than its target prepares nothing in that time, and one short answer would follow another.
        self._may_answer_short = OnlineChoice((True, False) if limit.budget else (False,), keep_rounds=512)
        self._allocator = self._make_allocator(fan_out)
        self._lists: dict[FanOutQuery, list[int]] = {}
        self._num_outcomes = 0
        self._tokens_a_round, self._round_ms = Ewma(_HALF_LIFE_ROUNDS), Ewma(_HALF_LIFE_ROUNDS)
        self._depth_ms = Ewma(_HALF_LIFE_ROUNDS)
        self._is_fallback_fixed = fallback != "auto"
        self._fallback = Fallback.NGRAM if fallback == "ngram" else Fallback.NEURAL
        #: Rounds in which no row waited for the model.
        self._free_round_ms = Ewma(_HALF_LIFE_ROUNDS)
        self._is_waiting = False
        self._last_round_s: float | None = None

    def _make_allocator(self, fan_out: FanOutName) -> Allocator:
        if fan_out == "uniform":
            return UniformFanOut()
        if fan_out == "geometric":
            return lambda query: GeometricFanOut(
                self.acceptance(), self.estimator.power_law_r(query.after_hit)
            )(query)
        return MeasuredFanOut(self.estimator.hit_curves)

    # -- what happened -------------------------------------------------------------------------------------------

    def observe_round(
        self, num_tokens: int, num_rows: int = 1, verify_ms: float = 0.0, now_s: float | None = None
    ) -> None:
        """A verifier's round ended with ``num_tokens`` emitted, all rows together."""
        now_s = time.monotonic() if now_s is None else now_s
        if self._last_round_s is not None and now_s - self._last_round_s <= _LONGEST_ROUND_S:
            round_ms = (now_s - self._last_round_s) * 1e3
            self._tokens_a_round.observe(num_tokens)
            self._round_ms.observe(round_ms)
            self._may_answer_short.observe(num_tokens, round_ms)
            if not self._is_waiting:
                self._free_round_ms.observe(round_ms)
        self._last_round_s = now_s
        if verify_ms:
            self.estimator.observe_verify(verify_ms, num_rows * self._verify_width)
        self._num_rounds += 1
        if len(self._sizes) > 1 and self._num_rounds % _RESIZE_ROUNDS == 0:
            self.size = self._best_size(num_rows)

    def observe_outcome(
        self, *, source: Source, num_proposed: int, num_accepted: int, bonus_rank: int | None, hit: bool
    ) -> None:
        """One row's outcome, and the rank that its bonus token had among the candidates. ``source``: who proposed."""
        if num_proposed == 0:
            return  # A first token: it says nothing of later positions.
        self.estimator.observe_round(
            source=source,
            num_proposed=num_proposed,
            num_accepted=num_accepted,
            bonus_rank=bonus_rank,
            hit=hit,
        )
        self._num_outcomes += 1
        if self._num_outcomes % _REFRESH_OUTCOMES == 0:
            self._lists.clear()

    def observe_depth(self, ms: float, num_rows: int) -> None:
        """One forward that a verifier waited for."""
        self._depth_ms.observe(ms)
        self.estimator.observe_draft_depth(ms, num_rows)

    def observe_waiting(self, is_waiting: bool) -> None:
        """Whether rows of the round that just came wait for the model."""
        self._is_waiting = is_waiting

    def observe_ngram(self, proposal: Sequence[int], committed: Sequence[int]) -> None:
        """What the n-gram backup would have proposed where the model did, and what was committed then."""
        if proposal:
            matches = (i for i, (a, b) in enumerate(zip(proposal, committed, strict=False)) if a != b)
            num_matching = next(matches, min(len(proposal), len(committed)))
            self.estimator.observe_tokens("ngram", min(num_matching, self.size.lookahead) + 1)

    def observe_ngram_ms(self, ms: float) -> None:
        """One look-up of the n-gram backup."""
        self.estimator.observe_backup("ngram", ms)

    # -- what follows from it ------------------------------------------------------------------------------------

    def allocate(self, query: FanOutQuery) -> list[int]:
        """How many bonus tokens to guess at each position."""
        if query not in self._lists:
            self._lists[query] = self._allocator(query)
        return self._lists[query]

    def answers_now(self, num_ready: Sequence[int]) -> bool:
        """Whether a verifier that waits is better served by what is ready than by one more depth. ``num_ready``: tokens
        drafted in each row it waits for. Ordinary speculative decoding always drafts all K."""
        speed = self.tokens_per_ms()
        if not self._may_answer_short.current or speed is None or self._depth_ms.value is None:
            return False
        depths = further_depths(
            num_ready,
            # Rows that began before the size shrank may hold more.
            max_tokens=max(self.size.lookahead, *num_ready),
            acceptance=self.estimator.draft_acceptance(),
            depth_ms=self._depth_ms.value,
            tokens_per_ms=speed,
        )
        return depths == 0

    @property
    def compares_fallbacks(self) -> bool:
        """Whether the backup that is not in use should be asked as well, so that it can be compared."""
        return not self._is_fallback_fixed

    def choose_fallback(self, batch_size: int) -> Fallback:
        """Who answers the misses of a round of so many rows."""
        if not self._is_fallback_fixed and (threshold := self._threshold()) is not None:
            self._fallback = choose_fallback(self._fallback, batch_size, threshold)
        return self._fallback

    def fallback_threshold(self) -> float | None:
        """b* of Theorem 17 for the measured times; None while something was not measured, and where it is infinite."""
        threshold = self._threshold()
        return None if threshold is None or math.isinf(threshold) else threshold

    def _threshold(self) -> float | None:
        estimator, depth_ms = self.estimator, self._depth_ms.value
        round_ms = self._free_round_ms.value
        hit_rate = estimator.snapshot().hit_rate
        if depth_ms is None or hit_rate is None:
            return None
        if round_ms is None:  # Some row has waited in every round.
            if self._round_ms.value is None:
                return None
            round_ms = max(depth_ms, self._round_ms.value - self.size.lookahead * depth_ms)
        by_model = expected_tokens(estimator.draft_acceptance(), self.size.lookahead)
        slow_ms = self.size.lookahead * depth_ms
        return fallback_threshold(
            hit_rate=min(1.0, hit_rate),
            tokens_hit=by_model,
            tokens_miss_slow=by_model,
            tokens_miss_fast=estimator.tokens_per_round("ngram") or 1.0,
            slow_ms=slow_ms,
            fast_ms=min(slow_ms, estimator.backup_ms("ngram") or 0.0),
            round_ms=round_ms,
        )

    def _best_size(self, batch_size: int) -> Size:
        """The K and B that the measured times, acceptance and hit curves say are fastest for so many rows; what is in
        force while something was not measured."""
        estimator = self.estimator
        verify_ms, depth_ms = estimator.snapshot().verify_ms, estimator.draft_depth_ms_by_rows()
        if verify_ms is None or not depth_ms:
            return self.size
        draft_ms = measured_cost(depth_ms)
        curves = cache(estimator.hit_curves)
        tokens_by_ngram = estimator.tokens_per_round("ngram") or 1.0
        costs = RoundCosts(
            # The verifier's width is fixed: a smaller K makes it no faster.
            verify_ms=lambda num_tokens: verify_ms,
            depth_ms=draft_ms,
            fork_ms=draft_ms(batch_size),
            service_ms=0.0,
            ngram_ms=estimator.backup_ms("ngram") or 0.0,
        )
        quality = DraftQuality(
            acceptance=estimator.draft_acceptance(),
            # A chain of so many tokens a round, were it endless.
            ngram_acceptance=1.0 - 1.0 / tokens_by_ngram,
            hit_rate=measured_hit_rate(MeasuredFanOut(curves), curves),
        )
        predictions = [predict_ssd(*size, batch_size, costs, quality) for size in self._sizes]
        return choose(predictions, self.size).size

    def tokens_per_ms(self) -> float | None:
        """The verifier's speed, all requests together; None before it is known."""
        tokens, ms = self._tokens_a_round.value, self._round_ms.value
        return tokens / ms if tokens is not None and ms else None

    def acceptance(self) -> float:
        """Acceptance of one drafted token, all positions together."""
        return self.estimator.snapshot().acceptance


def sizes_between(smallest: Size, largest: Size) -> list[Size]:
    """Sizes worth comparing: every K, and budgets that double."""
    budgets = {smallest.budget, largest.budget, *(1 << i for i in range(largest.budget.bit_length()))}
    return [
        Size(lookahead, budget)
        for lookahead in range(smallest.lookahead, largest.lookahead + 1)
        for budget in sorted(budgets)
        if smallest.budget <= budget <= largest.budget
    ]
