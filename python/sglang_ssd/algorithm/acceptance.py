"""What a running pair of models is measured to do: acceptance, ranks of the bonus token, hits and times.

Everything forgets exponentially, so the estimates follow the traffic; everything starts from a prior, so they
are usable from the first round. Outcomes are forgotten by rounds that pass, whoever proposed in them: what was found
long ago of a source that is no longer asked gives way to the prior, so that a draft that was useless is tried again. Observations that make no sense (NaN or negative times, counts out of range)
are ignored and counted, because some of them come from another process: a bad report must not stop the one
that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ssd.algorithm.theory import check_probability, power_law_miss_rate, survival

# Where a verified proposal came from. "none" is a round without a proposal, which yields a bonus token only.
SOURCES = ("hit", "neural", "ngram", "none")
_BY_DRAFT = ("hit", "neural")
_MAX_SIZES = 256
_RESCALE_ABOVE = 1e100


class Ewma:
    """Mean of a stream, forgotten by half every ``half_life`` observations, without start-up bias."""

    def __init__(self, half_life: float):
        self._decay = 0.5 ** (1.0 / half_life)
        self._sum = 0.0
        self._weight = 0.0

    def observe(self, value: float) -> None:
        self._sum = self._sum * self._decay + value
        self._weight = self._weight * self._decay + 1.0

    @property
    def value(self) -> float | None:
        """The mean, or None before the first observation."""
        return self._sum / self._weight if self._weight else None


class Snapshot(NamedTuple):
    """All estimates as plain values; ``_asdict()`` is ready for JSON. None stands for "not measured yet".

    ``acceptance`` is one number for the draft model, ``acceptance_after_hit`` and ``_after_miss`` hold one a
    position for proposals from the cache and from any backup. Exponents r belong to the miss rate (1 + F)^-r.
    The ``_by_`` mappings hold milliseconds by number of tokens or rows in one forward.
    """

    num_rounds: int
    num_ignored: int
    acceptance: float
    acceptance_after_hit: list[float]
    acceptance_after_miss: list[float]
    power_law_r: float
    power_law_r_after_hit: float
    power_law_r_after_miss: float
    hit_rate: float | None
    hit_rate_after_hit: float | None
    hit_rate_after_miss: float | None
    tokens_per_round: dict[str, float]
    verify_ms: float | None
    verify_ms_by_tokens: dict[int, float]
    draft_depth_ms: float | None
    draft_depth_ms_by_rows: dict[int, float]
    backup_ms: dict[str, float]


class SpeculationEstimator:
    """Online estimates of one pair of models. Observe every row of every round; read at any time.

    Positions count from 0. The rank of a bonus token is its place, from 0, among the candidates of its
    position in the draft's order; at a rejection the drafted token is no candidate, after K acceptances every
    token is one.

    Sparse data is shrunk, with the weight of ``prior_rounds`` observations: a position towards all positions,
    these towards ``prior_acceptance`` and the power law with ``prior_power_law_r``. So an unseen position (K
    was smaller) follows those that are seen, and without any data ``MeasuredFanOut(estimator.hit_curves)``
    allocates as ``GeometricFanOut(prior_acceptance, prior_power_law_r)`` does: the change to measured lists
    needs no switch.
    """

    def __init__(
        self,
        *,
        max_lookahead: int,
        max_rank: int,
        half_life_rounds: float = 512.0,
        prior_acceptance: float = 0.7,
        prior_power_law_r: float = 1.0,
        prior_rounds: float = 16.0,
    ):
        """Raises ValueError, naming the argument, for sizes below 1, weights not above 0 and bad priors."""
        for name, size in (("max_lookahead", max_lookahead), ("max_rank", max_rank)):
            if size < 1:
                raise ValueError(f"{name} must be 1 or more, got {size}")
        for name, weight in (("half_life_rounds", half_life_rounds), ("prior_rounds", prior_rounds)):
            if not 0.0 < weight < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {weight}")
        check_probability("prior_acceptance", prior_acceptance)
        self.max_lookahead = max_lookahead
        self.max_rank = max_rank
        self.half_life_rounds = half_life_rounds
        self.prior_acceptance = prior_acceptance
        self.prior_rounds = prior_rounds
        misses = [power_law_miss_rate(f, prior_power_law_r) for f in range(max_rank + 1)]
        self._prior_ranks = [misses[j] - misses[j + 1] for j in range(max_rank)] + [misses[max_rank]]
        self.reset()

    def reset(self) -> None:
        """Forget everything, as when a model is replaced."""
        self._counts = {source: _Counts(self.max_lookahead, self.max_rank) for source in SOURCES}
        # Newer rounds weigh more instead of older ones less, so a round costs O(K).
        self._growth, self._weight = 2.0 ** (1.0 / self.half_life_rounds), 1.0
        self._tokens = {source: Ewma(self.half_life_rounds) for source in SOURCES}
        self._hits = {after_hit: Ewma(self.half_life_rounds) for after_hit in (True, False)}
        self._all_hits = Ewma(self.half_life_rounds)
        self._backup_ms = {source: Ewma(self.half_life_rounds) for source in SOURCES}
        self._verify_ms = _TimesBySize(self.half_life_rounds)
        self._draft_depth_ms = _TimesBySize(self.half_life_rounds)
        self.num_rounds = 0
        self.num_ignored = 0

    # -- what happened --------------------------------------------

    def observe_round(
        self,
        *,
        source: str,
        num_proposed: int,
        num_accepted: int,
        bonus_rank: int | None = None,
        hit: bool | None = None,
    ) -> None:
        """One verified row: ``num_accepted`` of the ``num_proposed`` tokens that ``source`` had proposed.

        ``bonus_rank`` is the bonus token's rank, None where the observer does not know it; any rank of
        ``max_rank`` or more means "further down". ``hit`` says whether this outcome was then found in the
        cache.
        """
        if (
            source not in SOURCES
            or not 0 <= num_accepted <= num_proposed <= self.max_lookahead
            or (bonus_rank is not None and bonus_rank < 0)
        ):
            self.num_ignored += 1
            return
        self.num_rounds += 1
        self.observe_passing()
        self._counts[source].observe(self._weight, num_proposed, num_accepted, bonus_rank)
        self._tokens[source].observe(num_accepted + 1)
        if hit is not None:
            self._hits[source == "hit"].observe(hit)
            self._all_hits.observe(hit)

    def observe_guess(self, bonus_rank: int | None) -> None:
        """One row that verified no proposal, such as the first token of a prompt. Where the draft had candidates for the
        bonus token, the first of them is what it would have proposed."""
        if bonus_rank is not None and bonus_rank < 0:
            self.num_ignored += 1
            return
        self.observe_passing()
        if bonus_rank is not None:
            is_right = bonus_rank == 0
            self._counts["neural"].observe(
                self._weight, 1, int(is_right), None if is_right else bonus_rank - 1
            )

    def observe_passing(self) -> None:
        """A row's round that teaches nothing of any source: what is known gets older."""
        self._weight *= self._growth
        if self._weight > _RESCALE_ABOVE:
            for counts in self._counts.values():
                counts.divide(self._weight)
            self._weight = 1.0

    def observe_tokens(self, source: str, num_tokens: float) -> None:
        """Tokens a round would have yielded with this source: for a backup that is compared, not used."""
        if source in SOURCES and _is_measurement(num_tokens):
            self._tokens[source].observe(num_tokens)
        else:
            self.num_ignored += 1

    def observe_verify(self, ms: float, num_tokens: int) -> None:
        """One target forward over ``num_tokens`` tokens, all rows together."""
        self.num_ignored += not self._verify_ms.observe(ms, num_tokens)

    def observe_draft_depth(self, ms: float, num_rows: int) -> None:
        """One draft forward over ``num_rows`` branches, all requests together."""
        self.num_ignored += not self._draft_depth_ms.observe(ms, num_rows)

    def observe_backup(self, source: str, ms: float) -> None:
        """One answer of a backup, from the lookup that missed to the proposal's departure."""
        if source in SOURCES and _is_measurement(ms):
            self._backup_ms[source].observe(ms)
        else:
            self.num_ignored += 1

    # -- what is known now --------------------------------------------

    def acceptance(self, after_hit: bool) -> list[float]:
        """Acceptance of each position, given that those before were accepted: ``max_lookahead`` floats."""
        return self._acceptance(_sources(after_hit))

    def draft_acceptance(self) -> list[float]:
        """Acceptance of each position of what the draft model proposed, ahead or just in time."""
        return self._acceptance(_BY_DRAFT)

    def hit_curves(self, lookahead: int, after_hit: bool) -> list[list[float]]:
        """The measured joint chance of (position, rank): ``lookahead + 1`` curves of ``max_rank`` floats.

        Raises ValueError for a ``lookahead`` outside 0..max_lookahead.
        """
        if not 0 <= lookahead <= self.max_lookahead:
            raise ValueError(f"lookahead must be in 0..{self.max_lookahead}, got {lookahead}")
        sources = _sources(after_hit)
        alive = survival(self._acceptance(sources), lookahead)
        rejected, accepted = self._ranks(sources)
        pooled = self._shrunk(_sum_lists(rejected), self._prior_ranks)
        curves = []
        for k in range(lookahead):
            at_k = alive[k] - alive[k + 1]
            curves.append([at_k * p for p in self._shrunk(rejected[k], pooled)[:-1]])
        curves.append([alive[lookahead] * p for p in self._shrunk(accepted, self._prior_ranks)[:-1]])
        return curves

    def miss_rates(self, after_hit: bool) -> list[float]:
        """P(bonus token not among the first F candidates) for F = 1..max_rank, all positions pooled."""
        return self._miss_rates(_sources(after_hit))[0]

    def power_law_r(self, after_hit: bool) -> float:
        """The exponent r for which (1 + F)^-r fits ``miss_rates`` best; the prior's before any data."""
        return fit_power_law(*self._miss_rates(_sources(after_hit)))

    def hit_rate(self, after_hit: bool) -> float | None:
        """Share of outcomes that were in the cache, after a proposal from the cache or after a backup's."""
        return self._hits[after_hit].value

    def tokens_per_round(self, source: str) -> float | None:
        """Mean tokens, bonus token included, of rounds whose proposal came from ``source``."""
        return self._tokens[source].value

    def backup_ms(self, source: str) -> float | None:
        """Mean milliseconds until a backup's answer leaves."""
        return self._backup_ms[source].value

    def verify_ms_by_tokens(self) -> dict[int, float]:
        """Mean milliseconds of a target forward by its number of tokens, smallest first."""
        return self._verify_ms.by_size()

    def draft_depth_ms_by_rows(self) -> dict[int, float]:
        """Mean milliseconds of a draft forward by its number of branches, smallest first."""
        return self._draft_depth_ms.by_size()

    def snapshot(self) -> Snapshot:
        """Everything, for ``/server_info`` and the planner."""
        pooled_accepted, pooled_trials = (sum(c) for c in self._acceptance_counts(_BY_DRAFT))
        return Snapshot(
            num_rounds=self.num_rounds,
            num_ignored=self.num_ignored,
            acceptance=self._rate(pooled_accepted, pooled_trials, self.prior_acceptance),
            acceptance_after_hit=self.acceptance(True),
            acceptance_after_miss=self.acceptance(False),
            power_law_r=fit_power_law(*self._miss_rates(SOURCES)),
            power_law_r_after_hit=self.power_law_r(True),
            power_law_r_after_miss=self.power_law_r(False),
            hit_rate=self._all_hits.value,
            hit_rate_after_hit=self.hit_rate(True),
            hit_rate_after_miss=self.hit_rate(False),
            tokens_per_round=_known(self._tokens),
            verify_ms=self._verify_ms.overall.value,
            verify_ms_by_tokens=self.verify_ms_by_tokens(),
            draft_depth_ms=self._draft_depth_ms.overall.value,
            draft_depth_ms_by_rows=self.draft_depth_ms_by_rows(),
            backup_ms=_known(self._backup_ms),
        )

    # -- shrinkage --------------------------------------------

    def _rate(self, successes: float, trials: float, towards: float) -> float:
        # Rounding may carry a rate of exactly 1 above it.
        return min(1.0, (successes + self.prior_rounds * towards) / (trials + self.prior_rounds))

    def _shrunk(self, ranks: Sequence[float], towards: Sequence[float]) -> list[float]:
        prior, total = self.prior_rounds, sum(ranks) + self.prior_rounds
        return [(count + prior * p) / total for count, p in zip(ranks, towards, strict=True)]

    def _acceptance_counts(self, sources: Sequence[str]) -> tuple[list[float], list[float]]:
        counts = [self._counts[source] for source in sources]
        return (
            _scaled(_sum_lists([c.accepted for c in counts]), self._weight),
            _scaled(_sum_lists([c.trials for c in counts]), self._weight),
        )

    def _acceptance(self, sources: Sequence[str]) -> list[float]:
        accepted, trials = self._acceptance_counts(sources)
        pooled = self._rate(sum(accepted), sum(trials), self.prior_acceptance)
        return [self._rate(a, t, pooled) for a, t in zip(accepted, trials, strict=True)]

    def _ranks(self, sources: Sequence[str]) -> tuple[list[list[float]], list[float]]:
        """Rank histograms of rejections, one a position, and of bonus tokens after full acceptance."""
        counts = [self._counts[source] for source in sources]
        rejected = [
            _scaled(_sum_lists([c.rejected_ranks[k] for c in counts]), self._weight)
            for k in range(self.max_lookahead)
        ]
        return rejected, _scaled(_sum_lists([c.accepted_ranks for c in counts]), self._weight)

    def _miss_rates(self, sources: Sequence[str]) -> tuple[list[float], list[float]]:
        """Miss rates for F = 1..max_rank and the inverse variance of the logarithm of each."""
        rejected, accepted = self._ranks(sources)
        ranks = _sum_lists([*rejected, accepted])
        shares = self._shrunk(ranks, self._prior_ranks)
        num_rounds = sum(ranks) + self.prior_rounds
        misses = [math.fsum(shares[f:]) for f in range(1, self.max_rank + 1)]
        return misses, [num_rounds * miss / max(1.0 - miss, 1e-9) for miss in misses]


def fit_power_law(miss_rates: Sequence[float], weights: Sequence[float], offset: float = 1.0) -> float:
    """Exponent r of the miss rate (offset + F)^-r by weighted regression of log miss rate on log(offset + F).

    ``miss_rates[i]`` belongs to F = i + 1 and must be above 0; ``weights`` are inverse variances of the
    logarithms. The line goes through the origin, as the law does. ``offset=0`` fits the paper's law, to which
    F = 1 adds nothing. Raises ValueError when no point has weight.
    """
    xs = [math.log(offset + f) for f in range(1, len(miss_rates) + 1)]
    norm = math.fsum(w * x * x for w, x in zip(weights, xs, strict=True))
    if not norm > 0.0:
        raise ValueError("weights must hold a point above 0 with offset + F above 1")
    ys = [math.log(miss) for miss in miss_rates]
    return -math.fsum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True)) / norm


class _Counts:
    """Weighted outcome counts of one source."""

    def __init__(self, max_lookahead: int, max_rank: int):
        self._max_rank = max_rank
        self.trials = [0.0] * max_lookahead
        self.accepted = [0.0] * max_lookahead
        self.rejected_ranks = [[0.0] * (max_rank + 1) for _ in range(max_lookahead)]
        self.accepted_ranks = [0.0] * (max_rank + 1)

    def observe(self, weight: float, num_proposed: int, num_accepted: int, bonus_rank: int | None) -> None:
        for k in range(num_accepted):
            self.trials[k] += weight
            self.accepted[k] += weight
        rejected = num_accepted < num_proposed
        if rejected:
            self.trials[num_accepted] += weight
        if bonus_rank is not None:
            ranks = self.rejected_ranks[num_accepted] if rejected else self.accepted_ranks
            ranks[min(bonus_rank, self._max_rank)] += weight

    def divide(self, by: float) -> None:
        for counts in (self.trials, self.accepted, self.accepted_ranks, *self.rejected_ranks):
            counts[:] = _scaled(counts, by)


class _TimesBySize:
    """Mean milliseconds by size of the forward, for at most ``_MAX_SIZES`` sizes: the last seen."""

    def __init__(self, half_life: float):
        self._half_life = half_life
        self._by_size: dict[int, Ewma] = {}
        self.overall = Ewma(half_life)

    def observe(self, ms: float, size: int) -> bool:
        if not _is_measurement(ms) or size < 1:
            return False
        ewma = self._by_size.pop(size, None) or Ewma(self._half_life)
        self._by_size[size] = ewma  # re-inserted last: the first key is the one not seen for longest
        if len(self._by_size) > _MAX_SIZES:
            del self._by_size[next(iter(self._by_size))]
        ewma.observe(ms)
        self.overall.observe(ms)
        return True

    def by_size(self) -> dict[int, float]:
        return {size: ewma.value for size, ewma in sorted(self._by_size.items())}


def _sources(after_hit: bool) -> tuple[str, ...]:
    return ("hit",) if after_hit else ("neural", "ngram", "none")


def _is_measurement(value: float) -> bool:
    return math.isfinite(value) and value >= 0.0


def _known(ewmas: dict[str, Ewma]) -> dict[str, float]:
    return {name: ewma.value for name, ewma in ewmas.items() if ewma.value is not None}


def _scaled(counts: Sequence[float], weight: float) -> list[float]:
    return [count / weight for count in counts]


def _sum_lists(lists: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*lists, strict=True)]
