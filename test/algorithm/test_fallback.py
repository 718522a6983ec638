"""Theorem 17 against a search over batch sizes, and the hysteresis around its threshold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.fallback import Fallback, choose_fallback, fallback_threshold
from sglang_ssd.algorithm.theory import ssd_tokens_per_ms

CASE = {
    "hit_rate": 0.9,
    "tokens_hit": 3.3,
    "tokens_miss_slow": 3.3,
    "tokens_miss_fast": 1.2,
    "slow_ms": 4.0,
    "fast_ms": 0.1,
    "round_ms": 11.5,
}


def speed(case: dict, backup: str, batch_size: int) -> float:
    return ssd_tokens_per_ms(
        hit_rate=case["hit_rate"],
        tokens_hit=case["tokens_hit"],
        tokens_miss=case[f"tokens_miss_{backup}"],
        verify_ms=case["round_ms"],
        primary_ms=0.0,
        backup_ms=case[f"{backup}_ms"],
        batch_size=batch_size,
    )


@given(
    hit_rate=st.floats(0.0, 1.0),
    tokens=st.tuples(*[st.floats(1.0, 9.0)] * 3),
    times=st.tuples(*[st.floats(0.0, 40.0)] * 2),
    round_ms=st.floats(1.0, 30.0),
)
def test_the_faster_backup_changes_at_the_threshold(hit_rate, tokens, times, round_ms):
    case = {
        "hit_rate": hit_rate,
        "tokens_hit": tokens[0],
        "tokens_miss_slow": tokens[1],
        "tokens_miss_fast": tokens[2],
        "slow_ms": max(times),
        "fast_ms": min(times),
        "round_ms": round_ms,
    }
    threshold = fallback_threshold(**case)
    for batch_size in (*range(1, 40), 64, 128, 512):
        slow, fast = speed(case, "slow", batch_size), speed(case, "fast", batch_size)
        if batch_size < threshold:
            assert slow >= fast * (1.0 - 1e-9)
        else:
            assert fast >= slow * (1.0 - 1e-9)


def test_at_the_threshold_both_are_equally_fast():
    threshold = fallback_threshold(**CASE)
    assert 1.0 < threshold < 32.0
    at = {backup: speed(CASE, backup, threshold) for backup in ("slow", "fast")}
    assert at["slow"] == pytest.approx(at["fast"])


def test_the_papers_relative_form_is_the_same():
    n_slow = 0.9 * 3.3 + 0.1 * 3.3
    n_fast = 0.9 * 3.3 + 0.1 * 1.2
    t_slow, t_fast = 4.0 / 11.5, 0.1 / 11.5
    x = (n_slow - n_fast) / (n_fast * t_slow - n_slow * t_fast)
    assert fallback_threshold(**CASE) == pytest.approx(math.log(1.0 - x) / math.log(0.9))


def test_limits():
    assert fallback_threshold(**{**CASE, "tokens_miss_slow": 1.0}) == 0.0
    assert fallback_threshold(**{**CASE, "fast_ms": 4.0}) == math.inf
    assert fallback_threshold(**{**CASE, "hit_rate": 1.0}) == 0.0
    assert fallback_threshold(**{**CASE, "hit_rate": 0.0, "slow_ms": 100.0}) == 0.0
    assert fallback_threshold(**{**CASE, "hit_rate": 0.0, "slow_ms": 1.0}) == math.inf


@given(st.floats(0.0, 1.0), st.lists(st.floats(0.1, 20.0), min_size=2, max_size=2).map(sorted))
def test_a_slower_backup_is_given_up_for_smaller_batches(hit_rate, slow_ms):
    case = {**CASE, "hit_rate": hit_rate}
    assert fallback_threshold(**{**case, "slow_ms": slow_ms[1]}) <= fallback_threshold(
        **{**case, "slow_ms": slow_ms[0]}
    )


@given(st.floats(0.0, 1.0), st.lists(st.floats(1.0, 4.0), min_size=2, max_size=2).map(sorted))
def test_a_better_ngram_backup_takes_over_for_smaller_batches(hit_rate, tokens):
    case = {**CASE, "hit_rate": hit_rate}
    assert fallback_threshold(**{**case, "tokens_miss_fast": tokens[1]}) <= fallback_threshold(
        **{**case, "tokens_miss_fast": tokens[0]}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hit_rate": 1.5}, r"hit_rate .* got 1\.5"),
        ({"hit_rate": math.nan}, "hit_rate .* got nan"),
        ({"fast_ms": 9.0}, r"fast_ms must be at most slow_ms, got 9\.0 > 4\.0"),
        ({"round_ms": 0.0}, r"round_ms must be above 0, got 0\.0"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        fallback_threshold(**{**CASE, **change})


def test_the_choice_changes_beyond_the_band_only():
    chosen = [Fallback.NEURAL]
    for batch_size in (1, 9, 10, 11, 12, 11, 10, 9, 8, 11):
        chosen.append(choose_fallback(chosen[-1], batch_size, threshold=10.0, hysteresis=0.1))
    neural, ngram = Fallback.NEURAL, Fallback.NGRAM
    assert chosen[1:] == [neural, neural, neural, ngram, ngram, ngram, ngram, ngram, neural, ngram]


@given(st.lists(st.integers(9, 10), min_size=2, max_size=50), st.sampled_from(Fallback))
def test_a_batch_that_wanders_inside_the_band_never_switches(batch_sizes, current):
    assert {choose_fallback(current, b, threshold=9.5, hysteresis=0.1) for b in batch_sizes} == {current}


@pytest.mark.parametrize("current", Fallback)
def test_the_extremes_choose_at_once(current):
    assert choose_fallback(current, 1, threshold=0.0) is Fallback.NGRAM
    assert choose_fallback(current, 10_000, threshold=math.inf) is Fallback.NEURAL
    with pytest.raises(ValueError, match=r"hysteresis .* got 1\.0"):
        choose_fallback(current, 1, threshold=2.0, hysteresis=1.0)
