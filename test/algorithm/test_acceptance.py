"""Online estimates: recovery of known laws, forgetting, and survival of junk."""

from __future__ import annotations

import json
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.acceptance import Ewma, SpeculationEstimator, fit_power_law
from sglang_ssd.algorithm.fan_out import FanOutQuery, GeometricFanOut, MeasuredFanOut
from sglang_ssd.algorithm.theory import (
    curve_hit_rate,
    position_probabilities,
    power_law_hit_rate,
    power_law_miss_rate,
)

K, RANKS = 4, 16


def estimator(**changes) -> SpeculationEstimator:
    return SpeculationEstimator(**{"max_lookahead": K, "max_rank": RANKS, **changes})


def play(est, rng, num_rounds, acceptance, r, *, source="hit", lookahead=K, r_accepted=None):
    """Rounds of a pair whose acceptance a position and rank law (1 + F)^-r are known."""
    for _ in range(num_rounds):
        num_accepted = 0
        while num_accepted < lookahead and rng.random() < acceptance[num_accepted]:
            num_accepted += 1
        law = r if num_accepted < lookahead or r_accepted is None else r_accepted
        # P(rank >= F) = (1 + F)^-r, by inversion.
        rank = int(min(rng.random() ** (-1.0 / law) - 1.0, 1e6))
        est.observe_round(source=source, num_proposed=lookahead, num_accepted=num_accepted, bonus_rank=rank)


def test_known_laws_are_recovered():
    est, rng = estimator(half_life_rounds=20_000), numpy.random.default_rng(0)
    acceptance = [0.9, 0.8, 0.7, 0.6]
    play(est, rng, 20_000, acceptance, 1.3)
    assert est.acceptance(after_hit=True) == pytest.approx(acceptance, abs=0.02)
    assert est.power_law_r(after_hit=True) == pytest.approx(1.3, abs=0.05)
    misses = [power_law_miss_rate(f, 1.3) for f in range(1, RANKS + 1)]
    assert est.miss_rates(after_hit=True) == pytest.approx(misses, abs=0.02)


def test_hit_curves_are_the_joint_law_of_position_and_rank():
    est, rng = estimator(half_life_rounds=20_000), numpy.random.default_rng(1)
    play(est, rng, 20_000, [0.7] * K, 1.0, r_accepted=2.0)
    curves = est.hit_curves(K, after_hit=True)
    assert [len(curve) for curve in curves] == [RANKS] * (K + 1)
    at = position_probabilities(0.7, K)
    for k, curve in enumerate(curves):
        law = 2.0 if k == K else 1.0
        expected = [
            at[k] * (power_law_miss_rate(j, law) - power_law_miss_rate(j + 1, law)) for j in range(RANKS)
        ]
        assert curve == pytest.approx(expected, abs=0.01)


def test_the_measured_lists_beat_a_wrong_model_and_the_curves_say_by_how_much():
    """Ranks that differ between rejection and acceptance: one power law for all cannot know that."""
    est, rng = estimator(half_life_rounds=10_000), numpy.random.default_rng(2)
    play(est, rng, 10_000, [0.5] * K, 0.6, r_accepted=6.0)
    query = FanOutQuery(K, 12, True)
    exact, at = [], position_probabilities(0.5, K)
    for k in range(K + 1):
        law = 6.0 if k == K else 0.6
        exact.append(
            [at[k] * (power_law_miss_rate(j, law) - power_law_miss_rate(j + 1, law)) for j in range(RANKS)]
        )
    measured = MeasuredFanOut(est.hit_curves)(query)
    assert curve_hit_rate(measured, exact) > curve_hit_rate(GeometricFanOut(0.9, 1.0)(query), exact) + 0.03
    estimate = curve_hit_rate(measured, est.hit_curves(K, after_hit=True))
    assert estimate == pytest.approx(curve_hit_rate(measured, exact), abs=0.02)


@given(st.integers(0, K), st.integers(0, RANKS), st.floats(0.0, 1.0), st.floats(0.2, 3.0))
def test_without_data_the_measured_lists_are_as_good_as_geometric_ones(lookahead, budget, a, r):
    est = estimator(prior_acceptance=a, prior_power_law_r=r)
    for after_hit in (True, False):
        query = FanOutQuery(lookahead, budget, after_hit)
        measured, geometric = MeasuredFanOut(est.hit_curves)(query), GeometricFanOut(a, r)(query)
        assert power_law_hit_rate(measured, a, r) == pytest.approx(
            power_law_hit_rate(geometric, a, r), abs=1e-9
        )
        assert est.power_law_r(after_hit) == pytest.approx(r, rel=1e-6)


def mixed(with_ngram: bool) -> SpeculationEstimator:
    """Rounds of all sources in turns; without the n-gram backup as many pass that teach nothing."""
    est = estimator()
    by_hit, by_draft, by_ngram = (numpy.random.default_rng(seed) for seed in (3, 4, 5))
    for _ in range(200):
        play(est, by_hit, 10, [0.9] * K, 2.0, source="hit")
        play(est, by_draft, 5, [0.3] * K, 0.5, source="neural")
        if with_ngram:
            play(est, by_ngram, 5, [0.1] * K, 0.5, source="ngram")
        else:
            for _ in range(5):
                est.observe_passing()
    return est


def test_hits_and_misses_have_their_own_statistics():
    est = mixed(with_ngram=True)
    assert est.acceptance(True)[0] == pytest.approx(0.9, abs=0.05)
    assert est.acceptance(False)[0] == pytest.approx(0.2, abs=0.07)
    assert est.power_law_r(True) > 1.5
    assert est.power_law_r(False) < 0.8
    # What the n-gram backup proposed says nothing about the draft model.
    only_draft = mixed(with_ngram=False)
    assert est.draft_acceptance() == only_draft.draft_acceptance()
    assert est.snapshot().acceptance == only_draft.snapshot().acceptance
    assert est.tokens_per_round("ngram") == pytest.approx(1.1, abs=0.1)


def test_a_source_that_is_not_asked_is_forgotten_for_the_prior():
    """So a draft that was found useless, and replaced by the n-gram backup since, is tried again."""
    est = estimator(half_life_rounds=100, prior_acceptance=0.7)
    play(est, numpy.random.default_rng(6), 500, [0.0] * K, 1.0, source="neural")
    assert est.draft_acceptance()[0] < 0.1
    for _ in range(1000):
        est.observe_passing()
    assert est.draft_acceptance()[0] > 0.65


def test_positions_that_were_never_tried_follow_the_others():
    est, rng = estimator(prior_acceptance=0.2), numpy.random.default_rng(4)
    play(est, rng, 3000, [0.9] * K, 1.0, lookahead=1)
    assert est.draft_acceptance() == pytest.approx([0.9] * K, abs=0.05)


def test_rounds_without_a_proposal_count_the_bonus_only():
    est = estimator(prior_rounds=0.01)
    for _ in range(50):
        est.observe_round(source="none", num_proposed=0, num_accepted=0, bonus_rank=2)
    assert est.tokens_per_round("none") == pytest.approx(1.0)
    [curve] = est.hit_curves(0, after_hit=False)
    assert curve[2] == pytest.approx(1.0, abs=0.01)


def test_ranks_past_the_last_are_misses_at_every_fan_out():
    est = estimator(prior_rounds=0.01)
    for _ in range(50):
        est.observe_round(source="hit", num_proposed=1, num_accepted=0, bonus_rank=RANKS + 1000)
    assert est.miss_rates(True) == pytest.approx([1.0] * RANKS, abs=0.01)
    assert sum(map(sum, est.hit_curves(1, True))) == pytest.approx(0.0, abs=0.01)
    assert 0.0 < est.power_law_r(True) < 0.01


@pytest.mark.parametrize("half_life", [1, 7, 100])
def test_after_one_half_life_the_new_weighs_as_much_as_the_old(half_life):
    est = estimator(half_life_rounds=half_life, prior_rounds=1e-9)
    for _ in range(100 * half_life):  # with a half-life of 1 the weights pass 2^100 a few times
        est.observe_round(source="hit", num_proposed=1, num_accepted=1, bonus_rank=0, hit=True)
    for _ in range(half_life):
        est.observe_round(source="hit", num_proposed=1, num_accepted=0, bonus_rank=3, hit=False)
    assert est.acceptance(True)[0] == pytest.approx(0.5)
    assert est.hit_rate(True) == pytest.approx(0.5)
    assert est.tokens_per_round("hit") == pytest.approx(1.5)


def test_a_long_run_neither_overflows_nor_drifts():
    est = estimator(half_life_rounds=2.0)
    for i in range(5000):
        est.observe_round(source="hit", num_proposed=2, num_accepted=2 * (i % 2), bonus_rank=0)
    fresh = estimator(half_life_rounds=2.0)
    for i in range(4000, 5000):
        fresh.observe_round(source="hit", num_proposed=2, num_accepted=2 * (i % 2), bonus_rank=0)
    assert est.acceptance(True) == pytest.approx(fresh.acceptance(True))
    assert all(math.isfinite(p) for curve in est.hit_curves(K, True) for p in curve)


def test_a_useless_draft_is_seen_as_such_and_its_recovery_too():
    est, rng = estimator(half_life_rounds=100), numpy.random.default_rng(6)
    play(est, rng, 2000, [0.0] * K, 1.0, source="neural")
    assert max(est.draft_acceptance()) < 0.15
    assert est.draft_acceptance()[0] < 0.02
    play(est, rng, 1000, [0.8] * K, 1.0, source="neural", lookahead=1)
    assert est.draft_acceptance()[0] == pytest.approx(0.8, abs=0.1)
    assert min(est.draft_acceptance()) > 0.6


@pytest.mark.parametrize(
    "round_",
    [
        {"source": "oracle", "num_proposed": 1, "num_accepted": 0},
        {"source": "hit", "num_proposed": 1, "num_accepted": 2},
        {"source": "hit", "num_proposed": -1, "num_accepted": -1},
        {"source": "hit", "num_proposed": K + 1, "num_accepted": 0},
        {"source": "hit", "num_proposed": 1, "num_accepted": 0, "bonus_rank": -1},
    ],
)
def test_rounds_that_make_no_sense_are_ignored_and_counted(round_):
    est = estimator()
    before = est.snapshot()
    est.observe_round(**round_)
    assert est.snapshot() == before._replace(num_ignored=1)


@pytest.mark.parametrize("ms", [math.nan, math.inf, -math.inf, -1.0])
def test_times_that_make_no_sense_are_ignored_and_counted(ms):
    est = estimator()
    est.observe_verify(11.5, 5)
    before = est.snapshot()
    est.observe_verify(ms, 5)
    est.observe_verify(1.0, 0)
    est.observe_draft_depth(ms, 8)
    est.observe_backup("neural", ms)
    est.observe_backup("oracle", 1.0)
    est.observe_tokens("ngram", ms)
    assert est.snapshot() == before._replace(num_ignored=6)


def test_times_are_kept_by_size():
    est = estimator()
    for ms, size in ((10.0, 5), (14.0, 9), (10.0, 5)):
        est.observe_verify(ms, size)
        est.observe_draft_depth(ms / 5, size)
    est.observe_backup("neural", 7.0)
    assert est.verify_ms_by_tokens() == pytest.approx({5: 10.0, 9: 14.0})
    assert est.draft_depth_ms_by_rows() == pytest.approx({5: 2.0, 9: 2.8})
    snapshot = est.snapshot()
    assert snapshot.verify_ms == pytest.approx(34.0 / 3, rel=0.01)
    assert snapshot.backup_ms == {"neural": 7.0}


def test_the_number_of_sizes_is_bounded_and_the_last_seen_stay():
    est = estimator()
    for size in range(1, 1000):
        est.observe_verify(1.0, size)
        est.observe_verify(2.0, 1)
    sizes = list(est.verify_ms_by_tokens())
    assert len(sizes) == 256
    assert {1, 999} <= set(sizes) and 2 not in sizes


def test_shadow_tokens_reach_the_backup_that_was_not_used():
    est = estimator()
    assert est.tokens_per_round("ngram") is None
    est.observe_tokens("ngram", 2.0)
    assert est.tokens_per_round("ngram") == 2.0
    assert est.num_rounds == 0


def test_reset_forgets_everything():
    est, rng = estimator(), numpy.random.default_rng(7)
    fresh = est.snapshot()
    play(est, rng, 50, [0.5] * K, 1.0)
    est.observe_verify(1.0, 2)
    est.observe_verify(math.nan, 2)
    assert est.snapshot() != fresh
    est.reset()
    assert est.snapshot() == fresh


def test_a_snapshot_is_json():
    est, rng = estimator(), numpy.random.default_rng(8)
    assert json.loads(json.dumps(est.snapshot()._asdict()))["verify_ms"] is None
    play(est, rng, 50, [0.5] * K, 1.0)
    est.observe_verify(11.5, 5)
    loaded = json.loads(json.dumps(est.snapshot()._asdict()))
    assert loaded["num_rounds"] == 50
    assert loaded["verify_ms_by_tokens"] == {"5": 11.5}
    assert len(loaded["acceptance_after_hit"]) == K


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_lookahead": 0}, "max_lookahead must be 1 or more, got 0"),
        ({"max_rank": 0}, "max_rank must be 1 or more, got 0"),
        ({"half_life_rounds": 0.0}, "half_life_rounds must be .* got 0"),
        ({"prior_rounds": math.inf}, "prior_rounds must be .* got inf"),
        ({"prior_acceptance": 1.1}, r"prior_acceptance .* got 1\.1"),
        ({"prior_power_law_r": -1.0}, r"power_law_r must be above 0, got -1\.0"),
    ],
)
def test_bad_settings_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        estimator(**change)


def test_a_lookahead_beyond_the_largest_has_no_curves():
    with pytest.raises(ValueError, match=r"lookahead must be in 0\.\.4, got 5"):
        estimator().hit_curves(K + 1, True)


@given(st.floats(0.05, 4.0), st.sampled_from([0.0, 1.0]))
def test_an_exact_power_law_is_fitted_exactly(r, offset):
    misses = [power_law_miss_rate(f, r, offset) for f in range(1, 9)]
    assert fit_power_law(misses, [1.0] * 8, offset) == pytest.approx(r)


def test_heavier_points_count_more():
    misses = [0.5, 0.1]  # r = 1 by the first, r = 2.1 by the second
    assert fit_power_law(misses, [1.0, 1e-6]) == pytest.approx(1.0, abs=1e-3)
    assert fit_power_law(misses, [1e-6, 1.0]) == pytest.approx(math.log(10) / math.log(3), abs=1e-3)
    with pytest.raises(ValueError, match="weights must hold a point above 0"):
        fit_power_law([0.5], [1.0], offset=0.0)


def test_the_law_with_offset_1_fits_measured_rejections_and_the_papers_cannot():
    """Hits of the Qwen2.5-Coder demo pair on a rejection, temperature 1, shared noise, for F = 1, 2, 3, 4,
    8."""
    hits = {1: 0.53, 2: 0.70, 3: 0.79, 4: 0.86, 8: 0.94}
    worst = {
        offset: min(
            max(abs(1.0 - power_law_miss_rate(f, r, offset) - hit) for f, hit in hits.items())
            for r in numpy.arange(0.3, 3.0, 0.01)
        )
        for offset in (0.0, 1.0)
    }
    assert worst[1.0] < 0.04
    assert worst[0.0] > 0.5  # one guess hits more than half of the time; F^-r says never


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30), st.floats(0.5, 50.0))
def test_the_mean_is_the_weighted_mean(values, half_life):
    ewma = Ewma(half_life)
    assert ewma.value is None
    for value in values:
        ewma.observe(value)
    weights = [0.5 ** (age / half_life) for age in range(len(values))][::-1]
    assert ewma.value == pytest.approx(numpy.average(values, weights=weights))
