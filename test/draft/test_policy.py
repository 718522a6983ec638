"""The draft's decisions: where to fork and when to answer."""

from __future__ import annotations

import random

import pytest

from sglang_ssd.algorithm.fallback import Fallback
from sglang_ssd.algorithm.fan_out import FanOutQuery
from sglang_ssd.algorithm.lookahead import Size
from sglang_ssd.draft.policy import _LONGEST_ROUND_S, DraftPolicy, sizes_between

K = 3


def learned(outcomes, fan_out="measured", budget=8) -> DraftPolicy:
    policy = DraftPolicy(Size(K, budget), fan_out)
    for accepted, rank in outcomes:
        policy.observe_outcome(
            source="hit",
            num_proposed=K,
            num_accepted=accepted,
            bonus_rank=rank,
            hit=rank is not None and rank < 2,
        )
    return policy


@pytest.mark.parametrize("fan_out", ["uniform", "geometric", "measured"])
@pytest.mark.parametrize("length", range(K + 1))
def test_the_whole_budget_is_spent(fan_out, length):
    for budget in (0, 1, 5, 12):
        policy = DraftPolicy(Size(K, budget), fan_out)
        counts = policy.allocate(FanOutQuery(length, budget, after_hit=False))
        assert len(counts) == length + 1 and sum(counts) == budget


def test_measured_goes_where_outcomes_were():
    query = FanOutQuery(K, 8, after_hit=True)
    always_all = learned([(K, 0)] * 200 + [(K, 3)] * 100)
    counts = always_all.allocate(query)
    assert counts[K] >= 5 and counts[K] == max(counts)
    always_first = learned([(0, rank % 6) for rank in range(600)])
    counts = always_first.allocate(query)
    assert counts[0] >= 5 and counts[0] == max(counts)
    assert learned([(K, 0)] * 300, "uniform").allocate(query) == [2, 2, 2, 2]


def test_lists_are_refreshed_as_outcomes_come():
    policy = DraftPolicy(Size(K, 8))
    query = FanOutQuery(K, 8, after_hit=True)
    before = policy.allocate(query)
    for _ in range(400):
        policy.observe_outcome(source="hit", num_proposed=K, num_accepted=0, bonus_rank=random.Random(1).randrange(8), hit=True)  # fmt: skip
    assert policy.allocate(query) != before


def timed(round_ms: float, tokens: int, depth_ms: float, accepted: int) -> DraftPolicy:
    policy = learned([(accepted, 0)] * 400)
    for i in range(20):
        policy.observe_round(tokens, now_s=i * round_ms / 1e3)
    policy.observe_depth(depth_ms, 1)
    return policy


def test_waiting_must_pay():
    # 3 tokens in 300 ms: a depth of 10 ms is worth it, one of 290 ms is not.
    assert not timed(300, 3, depth_ms=10, accepted=K).answers_now([1])
    assert timed(300, 3, depth_ms=290, accepted=K).answers_now([1])
    # A draft that is never right is not worth waiting for at all.
    assert timed(300, 1, depth_ms=50, accepted=0).answers_now([0])


def test_short_answers_that_make_rounds_slower_are_given_up():
    """Where a depth takes as long as a round, nothing is ready after a short answer, and so on for ever."""
    policy = learned([(K, 0)] * 400)
    policy.observe_depth(290.0, 1)
    now_s, was_short = 0.0, []
    for _ in range(300):
        is_short = policy.answers_now([1])
        was_short.append(is_short)
        now_s += 0.150 if is_short else 0.300
        policy.observe_round(1 if is_short else 3, now_s=now_s)
    assert any(was_short) and sum(was_short[-200:]) == 0


def test_an_idle_time_says_nothing_of_the_speed():
    policy = timed(300, 3, depth_ms=10, accepted=K)
    speed = policy.tokens_per_ms()
    policy.observe_round(1, now_s=1000.0)
    policy.observe_round(1, now_s=1000.0 + _LONGEST_ROUND_S + 1)
    assert policy.tokens_per_ms() == speed == pytest.approx(0.01)


def test_ordinary_speculative_decoding_always_drafts_all():
    policy = DraftPolicy(Size(K, 0))
    for i in range(50):
        policy.observe_round(1, now_s=i * 0.3)
    policy.observe_depth(1000.0, 1)
    assert not policy.answers_now([0])


def test_unknown_times_mean_patience():
    assert not DraftPolicy(Size(K, 8)).answers_now([1])


# -- how much is drafted -------------------------------------------------------------------------------------------


def adapted(
    accepted: float, verify_ms: float, depth_ms: float, policy: DraftPolicy | None = None
) -> DraftPolicy:
    """A policy that may choose any size up to K=4, B=16, after a thousand rounds of one request: each drafted token is
    accepted with probability ``accepted``, and the bonus token is mostly the first candidate."""
    rng = random.Random(0)
    policy = policy or DraftPolicy(Size(4, 16), smallest=Size(1, 0))
    for i in range(1000):
        num_proposed = policy.size.lookahead
        num_accepted = next((k for k in range(num_proposed) if rng.random() >= accepted), num_proposed)
        rank = min(int(rng.expovariate(1.0)), 15)
        policy.observe_outcome(
            source="hit", num_proposed=num_proposed, num_accepted=num_accepted, bonus_rank=rank, hit=rank < 3
        )
        policy.observe_depth(depth_ms, 1)
        policy.estimator.observe_draft_depth(depth_ms, 16)
        policy.observe_round(num_accepted + 1, num_rows=1, verify_ms=verify_ms, now_s=i * 0.1)
    return policy


def test_a_good_and_fast_draft_drafts_much():
    size = adapted(0.9, verify_ms=100.0, depth_ms=10.0).size
    assert size.lookahead == 4 and size.budget >= 4


def test_a_slow_draft_drafts_what_fits_beside_the_verify():
    assert adapted(0.9, verify_ms=100.0, depth_ms=45.0).size.lookahead < 3


def test_a_useless_draft_drafts_as_little_as_it_may_and_recovers():
    policy = adapted(0.0, verify_ms=100.0, depth_ms=10.0)
    assert policy.size == Size(1, 0)
    assert adapted(0.9, verify_ms=100.0, depth_ms=10.0, policy=policy).size.lookahead == 4


def test_a_size_without_a_choice_stays():
    policy = adapted(0.0, 100.0, 10.0, DraftPolicy(Size(4, 16)))
    assert policy.size == Size(4, 16)
    assert sizes_between(Size(3, 5), Size(3, 5)) == [Size(3, 5)]
    assert sizes_between(Size(1, 0), Size(2, 5)) == [Size(k, b) for k in (1, 2) for b in (0, 1, 2, 4, 5)]


# -- decisions and times act on each other ----------------------------------------------------------------------------


class Loop:
    """One request, a verifier that takes ``VERIFY_MS`` and a draft whose depths take ``DEPTH_MS``. Where nothing was
    proposed and nothing is forked, the draft runs no forward and knows no rank."""

    VERIFY_MS, DEPTH_MS = 23.0, 5.0
    PLAIN_TOKENS_PER_S = 1e3 / VERIFY_MS

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy
        self.rng = random.Random(0)
        self.now_s = 0.0
        self.source, self.num_proposed = "none", 0

    def tokens_per_s(self, num_rounds: int, acceptance: float) -> float:
        """Of so many rounds with a draft of this acceptance; a useless one never has the bonus token either."""
        started_s, num_tokens = self.now_s, 0
        for _ in range(num_rounds):
            num_tokens += self._round(acceptance)
        return num_tokens / (self.now_s - started_s)

    def _round(self, acceptance: float) -> int:
        policy, rng = self.policy, self.rng
        misses = (k for k in range(self.num_proposed) if rng.random() >= acceptance)
        num_accepted = next(misses, self.num_proposed)
        rank = int(rng.expovariate(1.0)) if acceptance else 10_000
        policy.observe_round(num_accepted + 1, 1, self.VERIFY_MS, self.now_s)
        counts = policy.allocate(FanOutQuery(self.num_proposed, policy.size.budget, self.source == "hit"))
        is_hit = rank < counts[num_accepted]
        policy.observe_outcome(
            source=self.source,
            num_proposed=self.num_proposed,
            num_accepted=num_accepted,
            bonus_rank=rank if self.num_proposed or policy.size.budget else None,
            hit=is_hit,
        )
        waited_ms = self._propose(is_hit)
        self.now_s += (self.VERIFY_MS + waited_ms) / 1e3
        return num_accepted + 1

    def _propose(self, is_hit: bool) -> float:
        """The next proposal. Returns the milliseconds that the verifier waits for it."""
        policy, (lookahead, budget) = self.policy, self.policy.size
        is_neural = not is_hit and policy.choose_fallback(1) is Fallback.NEURAL
        policy.observe_waiting(is_neural)
        if budget:
            policy.estimator.observe_draft_depth(self.DEPTH_MS, budget)
        if is_hit:
            self.source, self.num_proposed = "hit", lookahead
            return max(0.0, (lookahead + 1) * self.DEPTH_MS - self.VERIFY_MS)
        num_drafted = 0
        while is_neural and num_drafted < lookahead and not policy.answers_now([num_drafted]):
            num_drafted += 1
            policy.observe_depth(self.DEPTH_MS, 1)
        self.source, self.num_proposed = ("neural" if num_drafted else "none"), num_drafted
        return num_drafted * self.DEPTH_MS


@pytest.mark.parametrize("fallback", ["neural", "ngram", "auto"])
def test_a_useless_draft_costs_little_and_a_good_one_is_noticed(fallback):
    """It may cost 10% of plain decoding at most."""
    policy = DraftPolicy(Size(4, 16), fallback=fallback, smallest=Size(1, 0))
    loop = Loop(policy)
    loop.tokens_per_s(512, acceptance=0.0)
    sizes = set()
    for _ in range(8):
        assert loop.tokens_per_s(256, acceptance=0.0) > 0.9 * loop.PLAIN_TOKENS_PER_S
        sizes.add(policy.size)
    assert Size(1, 0) in sizes
    loop.tokens_per_s(2048, acceptance=0.8)
    assert loop.tokens_per_s(512, acceptance=0.8) > 2.2 * loop.PLAIN_TOKENS_PER_S
    assert policy.size.lookahead >= 3 and policy.size.budget >= 8
    loop.tokens_per_s(1024, acceptance=0.0)
    assert loop.tokens_per_s(512, acceptance=0.0) > 0.9 * loop.PLAIN_TOKENS_PER_S
