"""Fan-out lists: exact sums, Theorem 12, and optimality against enumeration and random search."""

from __future__ import annotations

import itertools

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.fan_out import (
    FanOutQuery,
    GeometricFanOut,
    MeasuredFanOut,
    UniformFanOut,
    non_increasing_fit,
    theorem_12,
)
from sglang_ssd.algorithm.theory import (
    curve_hit_rate,
    position_probabilities,
    power_law_hit_rate,
    power_law_miss_rate,
)

NUM_TRIES = 10_000

lookaheads = st.integers(0, 8)
budgets = st.integers(0, 40)
acceptances = st.floats(0.0, 1.0)
exponents = st.floats(0.1, 3.0)


def all_lists(num_positions: int, budget: int):
    """Every list of ``num_positions`` whole numbers, 0 or more, with sum ``budget``."""
    for bars in itertools.combinations(range(budget + num_positions - 1), num_positions - 1):
        edges = (-1, *bars, budget + num_positions - 1)
        yield [right - left - 1 for left, right in itertools.pairwise(edges)]


@st.composite
def curve_sets(draw, max_positions: int = 4, max_rank: int = 5):
    """Joint hit curves with sum at most 1, in any order of ranks."""
    num_positions = draw(st.integers(1, max_positions))
    curves = [draw(st.lists(st.floats(0.0, 1.0), max_size=max_rank)) for _ in range(num_positions)]
    total = max(1.0, sum(map(sum, curves)))
    return [[value / total for value in curve] for curve in curves]


@given(lookaheads, budgets, st.booleans(), acceptances, exponents, st.data())
def test_every_list_has_a_position_each_and_the_exact_sum(lookahead, budget, after_hit, acceptance, r, data):
    curves = data.draw(
        st.lists(st.lists(st.floats(0.0, 1.0), max_size=6), min_size=lookahead + 1, max_size=lookahead + 1)
    )
    for allocator in (UniformFanOut(), GeometricFanOut(acceptance, r), MeasuredFanOut(lambda *_: curves)):
        fan_out = allocator(FanOutQuery(lookahead, budget, after_hit))
        assert len(fan_out) == lookahead + 1
        assert all(isinstance(f, int) and f >= 0 for f in fan_out)
        assert sum(fan_out) == budget


def test_uniform_is_even_and_gives_the_rest_to_the_first_positions():
    assert UniformFanOut()(FanOutQuery(3, 10, True)) == [3, 3, 2, 2]


@pytest.mark.parametrize("query", [FanOutQuery(-1, 3, True), FanOutQuery(3, -1, True)])
def test_a_negative_query_is_refused_by_name(query):
    for allocator in (UniformFanOut(), GeometricFanOut(0.8, 1.0), MeasuredFanOut(lambda *_: [[]] * 4)):
        with pytest.raises(ValueError, match=r"(lookahead|budget) must be 0 or more, got -1"):
            allocator(query)


def test_bad_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match=r"acceptance .* got 1\.5"):
        GeometricFanOut(1.5, 1.0)
    with pytest.raises(ValueError, match=r"power_law_r .* got 0"):
        GeometricFanOut(0.5, 0.0)
    with pytest.raises(ValueError, match="curves must give 3 positions, got 2"):
        MeasuredFanOut(lambda *_: [[0.5], [0.5]])(FanOutQuery(2, 4, True))


def test_theorem_12_gives_the_published_list():
    # K=7, B=24, r=1, a=.85
    expected = [3.4, 3.2, 2.9, 2.7, 2.5, 2.3, 2.1, 5.0]
    assert theorem_12(7, 24, 0.85, 1.0) == pytest.approx(expected, abs=0.06)


@given(st.integers(1, 10), st.floats(1.0, 64.0), st.floats(0.01, 0.99), exponents)
def test_theorem_12_is_the_papers_formula(lookahead, budget, a, r):
    fan_out = theorem_12(lookahead, budget, a, r)
    assert sum(fan_out) == pytest.approx(budget)
    for k in range(lookahead):
        assert fan_out[k] == pytest.approx(fan_out[0] * a ** (k / (1 + r)))
    assert fan_out[lookahead] == pytest.approx(
        fan_out[0] * a ** (lookahead / (1 + r)) * (1 - a) ** (-1 / (1 + r))
    )


@pytest.mark.parametrize(
    ("lookahead", "budget", "a", "r"), [(7, 24, 0.85, 1.0), (3, 8, 0.6, 0.5), (5, 40, 0.95, 2.0)]
)
def test_no_perturbation_of_theorem_12_has_more_hits_under_its_model(lookahead, budget, a, r):
    rng = numpy.random.default_rng(12)
    at = numpy.array(position_probabilities(a, lookahead))
    best = numpy.array(theorem_12(lookahead, budget, a, r))
    # Small to large steps along the plane of equal budget, and lists unrelated to the optimum.
    steps = rng.normal(size=(NUM_TRIES // 2, lookahead + 1)) * rng.uniform(0.001, 2.0, (NUM_TRIES // 2, 1))
    near = best + steps - steps.mean(axis=1, keepdims=True)
    anywhere = budget * rng.dirichlet(numpy.ones(lookahead + 1), NUM_TRIES - NUM_TRIES // 2)
    others = numpy.concatenate([near, anywhere])
    others = others[(others > 0).all(axis=1)]
    assert len(others) > NUM_TRIES // 2
    hits = (at * (1.0 - others**-r)).sum(axis=1)
    assert hits.max() <= (at * (1.0 - best**-r)).sum() + 1e-12


@pytest.mark.parametrize("budget", [1, 4, 8, 24, 64])
@pytest.mark.parametrize(
    ("lookahead", "a", "r"), [(7, 0.85, 1.0), (3, 0.6, 0.5), (5, 0.95, 2.0), (4, 0.3, 1.2)]
)
def test_no_perturbation_of_the_integer_list_has_more_hits_under_its_model(lookahead, budget, a, r):
    rng = numpy.random.default_rng(budget)
    at = numpy.array(position_probabilities(a, lookahead))
    best = numpy.array(GeometricFanOut(a, r)(FanOutQuery(lookahead, budget, True)))
    num_positions = lookahead + 1
    # Single branches moved from one position to another, up to eight times, and lists unrelated to the
    # optimum.
    near = numpy.tile(best, (NUM_TRIES // 2, 1))
    rows = numpy.arange(len(near))
    for step in range(8):
        source, sink = rng.integers(num_positions, size=(2, len(near)))
        moves = (near[rows, source] > 0) & (rng.integers(1, 9, len(near)) > step)
        near[rows[moves], source[moves]] -= 1
        near[rows[moves], sink[moves]] += 1
    shares = rng.dirichlet(numpy.ones(num_positions), NUM_TRIES - len(near))
    others = numpy.concatenate([near, rng.multinomial(budget, shares)])
    assert (others.sum(axis=1) == budget).all() and (others >= 0).all()
    hits = (at * (1.0 - (1.0 + others) ** -r)).sum(axis=1)
    assert hits.max() <= (at * (1.0 - (1.0 + best) ** -r)).sum() + 1e-12


@given(st.integers(0, 4), st.integers(0, 8), acceptances, exponents)
def test_geometric_is_the_best_of_all_lists(lookahead, budget, a, r):
    found = GeometricFanOut(a, r)(FanOutQuery(lookahead, budget, True))
    best = max(power_law_hit_rate(fan_out, a, r) for fan_out in all_lists(lookahead + 1, budget))
    assert power_law_hit_rate(found, a, r) == pytest.approx(best, abs=1e-12)


def test_geometric_follows_theorem_12_for_large_budgets():
    integers = GeometricFanOut(0.85, 1.0)(FanOutQuery(7, 2000, True))
    assert integers == pytest.approx(theorem_12(7, 2000, 0.85, 1.0), rel=0.02, abs=1.5)


def test_the_papers_law_for_integers_would_starve_positions_that_hit():
    """Why the integer model is (1 + F)^-r: of 4 guesses on 4 positions, F^-r wants none at three of them.

    Under the hit rates that the test pair's rejections and full acceptances showed for F = 1..4, one guess at
    each position finds far more outcomes.
    """
    a, r = 0.8, 1.0
    at = position_probabilities(a, 3)

    def papers_law(fan_out):
        return sum(
            p * (1.0 - power_law_miss_rate(f, r, offset=0.0)) for p, f in zip(at, fan_out, strict=True)
        )

    rejected, accepted = [0.0, 0.53, 0.70, 0.79, 0.86], [0.0, 0.78, 0.90, 0.93, 0.96]

    def measured(fan_out):
        return (
            sum(p * rejected[f] for p, f in zip(at[:3], fan_out[:3], strict=True))
            + at[3] * accepted[fan_out[3]]
        )

    best_by_papers_law = max(all_lists(4, 4), key=papers_law)
    assert best_by_papers_law == [0, 0, 0, 4]
    ours = GeometricFanOut(a, r)(FanOutQuery(3, 4, True))
    assert measured(ours) > measured(best_by_papers_law) + 0.1


def test_certain_rejection_and_certain_acceptance_need_one_position():
    assert GeometricFanOut(0.0, 1.0)(FanOutQuery(3, 5, True)) == [5, 0, 0, 0]
    assert GeometricFanOut(1.0, 1.0)(FanOutQuery(3, 5, True)) == [0, 0, 0, 5]


@given(curve_sets(), st.integers(0, 8))
def test_measured_is_the_best_of_all_lists_under_the_fitted_curves(curves, budget):
    found = MeasuredFanOut(lambda *_: curves)(FanOutQuery(len(curves) - 1, budget, True))
    fitted = [non_increasing_fit(curve) for curve in curves]
    best = max(curve_hit_rate(fan_out, fitted) for fan_out in all_lists(len(curves), budget))
    assert curve_hit_rate(found, fitted) == pytest.approx(best, abs=1e-12)


@given(curve_sets(), st.integers(0, 8), acceptances, exponents)
def test_measured_hits_at_least_as_often_as_the_others_under_falling_curves(curves, budget, a, r):
    curves = [sorted(curve, reverse=True) for curve in curves]
    query = FanOutQuery(len(curves) - 1, budget, True)
    measured = curve_hit_rate(MeasuredFanOut(lambda *_: curves)(query), curves)
    for other in (UniformFanOut(), GeometricFanOut(a, r)):
        assert measured >= curve_hit_rate(other(query), curves) - 1e-12


@given(curve_sets(), st.integers(0, 12), acceptances, exponents)
def test_one_more_branch_only_adds(curves, budget, a, r):
    for allocator in (MeasuredFanOut(lambda *_: curves), GeometricFanOut(a, r), UniformFanOut()):
        smaller = allocator(FanOutQuery(len(curves) - 1, budget, True))
        larger = allocator(FanOutQuery(len(curves) - 1, budget + 1, True))
        assert sum(more - less for less, more in zip(smaller, larger, strict=True)) == 1
        assert all(less <= more for less, more in zip(smaller, larger, strict=True))


def test_measured_asks_for_the_curves_of_the_query():
    after_hit, after_miss = [[0.1], [0.9]], [[0.9], [0.1]]
    allocator = MeasuredFanOut(lambda lookahead, hit: after_hit if hit else after_miss)
    assert allocator(FanOutQuery(1, 1, True)) == [0, 1]
    assert allocator(FanOutQuery(1, 1, False)) == [1, 0]


def test_what_no_curve_asks_for_is_spread_evenly():
    assert MeasuredFanOut(lambda *_: [[0.4], [0.2], []])(FanOutQuery(2, 8, True)) == [3, 3, 2]


@given(st.lists(st.floats(0.0, 1.0), max_size=8), st.randoms(use_true_random=False))
def test_the_non_increasing_fit_is_the_closest(values, random):
    fit = non_increasing_fit(values)
    assert len(fit) == len(values)
    assert sum(fit) == pytest.approx(sum(values))
    assert all(left >= right - 1e-12 for left, right in itertools.pairwise(fit))

    def distance(candidate):
        return sum((c - v) ** 2 for c, v in zip(candidate, values, strict=True))

    for _ in range(20):
        moved = sorted((f + random.uniform(-0.2, 0.2) for f in fit), reverse=True)
        assert distance(fit) <= distance(moved) + 1e-9
