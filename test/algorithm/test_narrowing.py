"""The early-narrowing rule against every policy, and against simulated rounds."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.narrowing import Readiness, further_depths, steady_state
from sglang_ssd.algorithm.theory import expected_tokens

acceptances = st.floats(0.0, 1.0) | st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5)


def policy_speed(rounds, depths, *, max_tokens, acceptance, depth_ms, verify_ms):
    """Long-run tokens a millisecond of a policy: mean tokens of a round over its mean time."""
    tokens = sum(
        r.probability * sum(expected_tokens(acceptance, min(n + m, max_tokens)) for n in r.num_ready)
        for r, m in zip(rounds, depths, strict=True)
    )
    return tokens / (
        verify_ms + depth_ms * sum(r.probability * m for r, m in zip(rounds, depths, strict=True))
    )


@st.composite
def round_kinds(draw, max_tokens: int):
    shares = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    rows = draw(st.integers(1, 3))
    ready = st.lists(st.integers(0, max_tokens), min_size=rows, max_size=rows)
    return [Readiness(share / sum(shares), draw(ready)) for share in shares]


@given(st.data(), st.integers(0, 5), acceptances, st.floats(0.0, 20.0), st.floats(0.5, 20.0))
def test_no_policy_is_faster(data, max_tokens, acceptance, depth_ms, verify_ms):
    rounds = data.draw(round_kinds(max_tokens))
    setting = {
        "max_tokens": max_tokens,
        "acceptance": acceptance,
        "depth_ms": depth_ms,
        "verify_ms": verify_ms,
    }
    best = steady_state(rounds, **setting)
    assert policy_speed(rounds, best.further_depths, **setting) == pytest.approx(best.tokens_per_ms)
    for depths in itertools.product(range(max_tokens + 1), repeat=len(rounds)):
        assert policy_speed(rounds, depths, **setting) <= best.tokens_per_ms * (1.0 + 1e-12)


@given(st.integers(0, 6), st.floats(0.01, 0.99), st.floats(0.1, 9.0), st.floats(0.01, 1.0))
def test_one_row_drafts_on_while_the_next_token_is_worth_its_time(num_ready, a, depth_ms, tokens_per_ms):
    found = further_depths(
        [num_ready], max_tokens=6, acceptance=a, depth_ms=depth_ms, tokens_per_ms=tokens_per_ms
    )
    price = tokens_per_ms * depth_ms
    assert all(a ** (num_ready + i) >= price * (1 - 1e-9) for i in range(1, found + 1))
    if num_ready + found < 6:
        assert a ** (num_ready + found + 1) <= price * (1 + 1e-9)


def test_acting_on_the_measured_speed_leads_to_the_best_one():
    rounds = [Readiness(0.9, [4]), Readiness(0.1, [0])]
    setting = {"max_tokens": 7, "acceptance": 0.8, "depth_ms": 2.54, "verify_ms": 11.5}
    speed, seen = policy_speed(rounds, [0, 0], **setting), []
    for _ in range(5):
        depths = [
            further_depths(r.num_ready, max_tokens=7, acceptance=0.8, depth_ms=2.54, tokens_per_ms=speed)
            for r in rounds
        ]
        speed = policy_speed(rounds, depths, **setting)
        seen.append(speed)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(steady_state(rounds, **setting).tokens_per_ms)


@pytest.mark.parametrize(("a", "depth_ms"), [(0.9, 2.54), (0.75, 2.54), (0.6, 1.0)])
def test_simulated_rounds_agree(a, depth_ms):
    """Rounds drawn one by one: acceptance coin by coin, hits (4 ready) and misses (none ready) at random."""
    rng = numpy.random.default_rng(5)
    num_rounds, max_tokens, verify_ms, hit_share = 100_000, 7, 11.5, 0.85
    rounds = [Readiness(hit_share, [4]), Readiness(1.0 - hit_share, [0])]
    best = steady_state(rounds, max_tokens=max_tokens, acceptance=a, depth_ms=depth_ms, verify_ms=verify_ms)
    coins = rng.random((num_rounds, max_tokens)) < a
    run = numpy.cumprod(coins, axis=1).sum(axis=1)  # drafted tokens that would be accepted, were there enough
    is_hit = rng.random(num_rounds) < hit_share
    speeds = {}
    for after_hit, after_miss in itertools.product(range(4), range(8)):
        proposed = numpy.where(is_hit, 4 + after_hit, after_miss)
        tokens = numpy.minimum(run, proposed) + 1
        time_ms = verify_ms + depth_ms * numpy.where(is_hit, after_hit, after_miss)
        speeds[after_hit, after_miss] = tokens.sum() / time_ms.sum()
    noise = 4.0 * max_tokens / math.sqrt(num_rounds) / verify_ms
    assert speeds[tuple(best.further_depths)] == pytest.approx(best.tokens_per_ms, abs=noise)
    # All policies saw the same coins, so their order is far less noisy than their speeds.
    assert speeds[tuple(best.further_depths)] >= max(speeds.values()) * (1.0 - 0.002)


@given(st.integers(0, 6), st.integers(0, 6), acceptances, st.floats(0.1, 9.0), st.floats(0.0, 1.0))
def test_more_ready_tokens_never_draft_on_for_longer(one, other, acceptance, depth_ms, tokens_per_ms):
    fewer, more = sorted((one, other))
    setting = {
        "max_tokens": 6,
        "acceptance": acceptance,
        "depth_ms": depth_ms,
        "tokens_per_ms": tokens_per_ms,
    }
    assert further_depths([more], **setting) <= further_depths([fewer], **setting)


def test_free_depths_fill_the_proposal_and_useless_ones_are_not_drafted():
    assert further_depths([2], max_tokens=6, acceptance=0.5, depth_ms=0.0, tokens_per_ms=0.3) == 4
    assert further_depths([2], max_tokens=6, acceptance=0.0, depth_ms=0.0, tokens_per_ms=0.3) == 0
    assert further_depths([6], max_tokens=6, acceptance=1.0, depth_ms=0.0, tokens_per_ms=0.3) == 0
    assert further_depths([0], max_tokens=0, acceptance=1.0, depth_ms=1.0, tokens_per_ms=0.3) == 0


def test_rows_of_a_batch_share_the_price_of_a_depth():
    setting = {"max_tokens": 6, "acceptance": 0.8, "depth_ms": 2.0, "tokens_per_ms": 0.45}
    assert further_depths([0], **setting) == 0
    assert further_depths([0, 0, 0, 0], **setting) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ready": []}, "num_ready must hold at least one row"),
        ({"num_ready": [7]}, r"num_ready must be in 0\.\.6 \(max_tokens\), got \[7\]"),
        ({"num_ready": [-1]}, r"num_ready must be in 0\.\.6"),
        ({"depth_ms": math.nan}, "depth_ms must be 0 or more, got nan"),
        ({"tokens_per_ms": -1.0}, "tokens_per_ms must be 0 or more"),
        ({"acceptance": 2.0}, "acceptance must be a probability"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    arguments = {"num_ready": [1], "max_tokens": 6, "acceptance": 0.8, "depth_ms": 2.0, "tokens_per_ms": 0.2}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        further_depths(arguments.pop("num_ready"), **arguments)


def test_bad_rounds_are_refused():
    setting = {"max_tokens": 3, "acceptance": 0.5, "depth_ms": 1.0}
    with pytest.raises(ValueError, match="probabilities that sum to 1"):
        steady_state([Readiness(0.5, [1])], verify_ms=1.0, **setting)
    with pytest.raises(ValueError, match="verify_ms must be above 0"):
        steady_state([Readiness(1.0, [1])], verify_ms=0.0, **setting)
