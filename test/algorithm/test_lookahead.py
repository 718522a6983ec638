"""The choice of K and B from measured times: what fits, what a useless draft leads to, and no flicker."""

from __future__ import annotations

import functools
import itertools

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.acceptance import SpeculationEstimator
from sglang_ssd.algorithm.fallback import Fallback
from sglang_ssd.algorithm.fan_out import GeometricFanOut, MeasuredFanOut, UniformFanOut
from sglang_ssd.algorithm.lookahead import (
    DraftQuality,
    Prediction,
    RoundCosts,
    affine_cost,
    choose,
    measured_cost,
    measured_hit_rate,
    modelled_hit_rate,
    predict_ar,
    predict_sd,
    predict_ssd,
    predict_threshold,
)
from sglang_ssd.algorithm.theory import expected_tokens, power_law_hit_rate

LOOKAHEADS, BUDGETS = (1, 2, 3, 4, 5, 6, 7), (0, 4, 8, 16, 32)
H100 = RoundCosts(affine_cost(11.5), affine_cost(2.54), fork_ms=2.8, service_ms=0.7, ngram_ms=0.02)


def quality(acceptance: float, r: float = 1.0, ngram_acceptance: float = 0.0) -> DraftQuality:
    return DraftQuality(
        acceptance, ngram_acceptance, modelled_hit_rate(GeometricFanOut(acceptance, r), acceptance, r)
    )


def candidates(costs: RoundCosts, draft: DraftQuality, batch_size: int = 1) -> list[Prediction]:
    return [predict_ssd(k, b, batch_size, costs, draft) for k in LOOKAHEADS for b in BUDGETS]


def pair(prediction: Prediction) -> tuple[int, int]:
    return prediction.lookahead, prediction.budget


def a_prediction(lookahead: int, budget: int, speed: float) -> Prediction:
    return Prediction(lookahead, budget, Fallback.NEURAL, lookahead, 0.9, 3.0, speed)


def test_the_draft_round_is_chosen_to_fit_the_verify():
    for verify_ms, fits in ((8.7, 2), (11.5, 3), (14.0, 4), (16.5, 5)):
        best = choose(candidates(H100._replace(verify_ms=affine_cost(verify_ms)), quality(0.75)))
        assert best.lookahead in (fits, fits + 1)
    assert choose(candidates(H100._replace(verify_ms=affine_cost(60.0)), quality(0.9))).lookahead == 7


@pytest.mark.parametrize("ngram_ms", [0.02, 50.0])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_useless_draft_drives_both_to_the_minimum_and_costs_little(ngram_ms, batch_size):
    costs = H100._replace(ngram_ms=ngram_ms)
    running = candidates(costs, quality(0.0), batch_size)
    for current in (None, (7, 32), (4, 16), (1, 32), (7, 0)):
        best = choose(running, current)
        assert pair(best)[0] == 1
        if ngram_ms < 1.0:
            assert pair(best) == (1, 0)
            assert best.tokens_per_ms > 0.9 * predict_ar(batch_size, costs)


def test_a_measured_useless_draft_does_the_same_and_recovers():
    est, rng = (
        SpeculationEstimator(max_lookahead=7, max_rank=32, half_life_rounds=200),
        numpy.random.default_rng(0),
    )

    def play(acceptance: float, lookahead: int) -> None:
        for _ in range(2000):
            run = int(rng.geometric(1.0 - acceptance)) - 1
            rank = int(min(rng.random() ** -1.0 - 1.0, 1e6))
            est.observe_round(
                source="hit" if rng.random() < 0.7 else "neural",
                num_proposed=lookahead,
                num_accepted=min(run, lookahead),
                bonus_rank=rank,
            )

    def chosen(current):
        curves = functools.cache(est.hit_curves)
        draft = DraftQuality(est.draft_acceptance(), 0.0, measured_hit_rate(MeasuredFanOut(curves), curves))
        return pair(choose(candidates(H100, draft), current))

    play(0.0, 7)
    assert chosen((7, 32)) == (1, 0)
    play(0.8, 1)
    lookahead, budget = chosen((1, 0))
    assert lookahead >= 3 and budget >= 16


def test_rows_that_cost_time_limit_the_budget():
    free, dear = H100, H100._replace(depth_ms=affine_cost(2.54, 0.5))
    assert choose(candidates(dear, quality(0.75))).budget < choose(candidates(free, quality(0.75))).budget


def test_an_expensive_wide_verify_limits_the_lookahead():
    wide = H100._replace(verify_ms=affine_cost(11.5, 4.0), depth_ms=affine_cost(0.5), fork_ms=0.5)
    narrow = wide._replace(verify_ms=affine_cost(11.5))
    assert (
        choose(candidates(wide, quality(0.7))).lookahead < choose(candidates(narrow, quality(0.7))).lookahead
    )


@given(st.floats(0.0, 0.99), st.sampled_from(LOOKAHEADS), st.integers(1, 64), st.floats(0.1, 9.0))
def test_no_budget_is_ordinary_speculative_decoding(acceptance, lookahead, batch_size, depth_ms):
    costs = H100._replace(depth_ms=affine_cost(depth_ms), service_ms=0.0, ngram_ms=1e9)
    found = predict_ssd(lookahead, 0, batch_size, costs, quality(acceptance))
    assert found.hit_rate == 0.0 and found.fallback is Fallback.NEURAL
    tokens = expected_tokens(acceptance, found.backup_lookahead)
    assert found.tokens_per_ms == pytest.approx(tokens / (11.5 + found.backup_lookahead * depth_ms))
    # At its best length it is at least as fast as drafting all K.
    assert found.tokens_per_ms >= predict_sd(lookahead, batch_size, costs, quality(acceptance)) * (1 - 1e-12)


@given(st.floats(0.0, 0.99), st.sampled_from(LOOKAHEADS), st.sampled_from(BUDGETS), st.integers(1, 64))
def test_ssd_is_never_slower_than_sd_while_the_draft_round_fits(acceptance, lookahead, budget, batch_size):
    costs = H100._replace(depth_ms=affine_cost(1.0), fork_ms=1.0, service_ms=0.0)
    found = predict_ssd(lookahead, budget, batch_size, costs, quality(acceptance))
    assert found.tokens_per_ms >= predict_sd(lookahead, batch_size, costs, quality(acceptance)) * (1 - 1e-12)


@given(st.floats(0.0, 0.99), st.sampled_from(LOOKAHEADS), st.floats(0.2, 3.0), st.integers(1, 16))
def test_free_branches_never_slow_a_round_that_fits(acceptance, lookahead, r, batch_size):
    costs = H100._replace(depth_ms=affine_cost(1.0), fork_ms=1.0)
    speeds = [
        predict_ssd(lookahead, budget, batch_size, costs, quality(acceptance, r)).tokens_per_ms
        for budget in BUDGETS[1:]
    ]
    assert all(more >= less * (1 - 1e-9) for less, more in itertools.pairwise(speeds))


@given(st.floats(0.05, 0.95), st.integers(1, 64), st.sampled_from(LOOKAHEADS), st.floats(0.0, 0.6))
def test_the_predicted_backup_follows_theorem_17(acceptance, batch_size, lookahead, ngram_acceptance):
    costs = H100._replace(depth_ms=affine_cost(1.0), fork_ms=1.0)  # every draft round fits into the verify
    draft = quality(acceptance, ngram_acceptance=ngram_acceptance)
    threshold = predict_threshold(lookahead, 16, batch_size, costs, draft)
    found = predict_ssd(lookahead, 16, batch_size, costs, draft)
    if abs(batch_size - threshold) > 1e-6 * batch_size:
        assert found.fallback is (Fallback.NEURAL if batch_size < threshold else Fallback.NGRAM)


@pytest.mark.parametrize("ngram_acceptance", [0.0, 0.1, 0.2, 0.3])
def test_the_threshold_counts_only_what_a_long_draft_round_does_not_hide(ngram_acceptance):
    late = H100._replace(depth_ms=affine_cost(1.0), fork_ms=5.0)  # 1.2 ms longer than the verify
    draft = quality(0.8, r=1.5, ngram_acceptance=ngram_acceptance)
    threshold = predict_threshold(7, 32, 4, late, draft)
    assert 2.0 < threshold < 7.0
    for batch_size in range(1, 33):
        found = predict_ssd(7, 32, batch_size, late, draft)
        assert found.fallback is (Fallback.NEURAL if batch_size < threshold else Fallback.NGRAM)


def test_the_current_pair_stays_inside_the_margin():
    small, large = a_prediction(2, 8, 1.0), a_prediction(4, 16, 1.04)
    assert choose([small, large]) is large
    assert choose([small, large], (2, 8)) is small
    assert choose([small, large._replace(tokens_per_ms=1.06)], (2, 8)).lookahead == 4
    assert choose([small, large], (4, 16)) is large
    # Within the tolerance the smaller one is as good: work is given up at once.
    assert choose([small, large._replace(tokens_per_ms=1.005)], (4, 16)) is small
    assert choose([small, large], (9, 9)) is large


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 7), st.integers(0, 32)), st.floats(0.01, 1.0), min_size=1, max_size=12
    ),
    st.data(),
)
def test_the_same_predictions_settle_after_one_choice(speeds, data):
    predictions = [a_prediction(k, b, speed) for (k, b), speed in speeds.items()]
    current = data.draw(st.sampled_from(sorted(speeds)))
    once = choose(predictions, current)
    assert choose(predictions, pair(once)) == once
    assert once.tokens_per_ms * 1.05 >= max(speeds.values()) * (1 - 1e-9) or once.tokens_per_ms >= 0.99 * max(
        speeds.values()
    )


def test_noise_inside_the_margin_causes_no_flicker():
    rng = numpy.random.default_rng(1)
    current, changes = (3, 16), 0
    for _ in range(300):
        predictions = [
            a_prediction(k, 16, speed * (1 + rng.uniform(-0.01, 0.01)))
            for k, speed in ((3, 1.0), (4, 1.02), (2, 0.95))
        ]
        chosen = pair(choose(predictions, current))
        changes, current = changes + (chosen != current), chosen
    assert changes == 0


def test_measured_times_are_interpolated():
    cost = measured_cost({8: 12.0, 1: 10.0, 4: 11.0})
    assert [cost(size) for size in (1, 2, 4, 6, 8, 100)] == pytest.approx(
        [10.0, 10.0 + 1 / 3, 11.0, 11.5, 12.0, 12.0]
    )
    with pytest.raises(ValueError, match="ms_by_size must hold at least one measurement"):
        measured_cost({})


def test_hit_rates_come_from_the_allocators_own_lists():
    assert modelled_hit_rate(UniformFanOut(), 0.8, 1.0)(3, 8) == pytest.approx(
        power_law_hit_rate([2, 2, 2, 2], 0.8, 1.0)
    )
    after_hit, after_miss = [[0.5, 0.3], [0.2]], [[0.4], [0.1]]
    rate = measured_hit_rate(UniformFanOut(), lambda lookahead, hit: after_hit if hit else after_miss)
    # One guess at each of two positions: .7 after a hit, .5 after a miss.
    assert rate(1, 2) == pytest.approx(0.5 / (1 - 0.7 + 0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 1), "lookahead must be 1 or more, got 0"),
        ((3, 8, 0), "batch_size must be 1 or more, got 0"),
        ((3, -8, 1), "budget must be 0 or more, got -8"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict_ssd(*arguments, H100, quality(0.8))


def test_a_choice_needs_candidates_and_a_margin():
    with pytest.raises(ValueError, match="candidates must hold at least one"):
        choose([])
    with pytest.raises(ValueError, match="tolerance must be in"):
        choose([a_prediction(1, 1, 1.0)], tolerance=0.1, margin=0.1)
