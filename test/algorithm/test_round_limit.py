"""The round's limit: generous until it knows, and never so tight that a draft that is merely slow is taken for dead."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.round_limit import (
    CEILING_MS,
    FLOOR_MS,
    FORWARD_FACTOR,
    MIN_WAITS,
    RECENT,
    WAIT_FACTOR,
    RecentMaximum,
    RoundLimit,
    round_limit_ms,
)

times_ms = st.floats(0, 100_000)


@given(num_waits=st.integers(0, 10_000), wait_ms=times_ms, forward_ms=times_ms)
def test_it_stays_within_its_bounds_and_above_what_was_measured(num_waits, wait_ms, forward_ms):
    limit_ms = round_limit_ms(num_waits, wait_ms, forward_ms)
    assert FLOOR_MS <= limit_ms <= CEILING_MS
    if num_waits < MIN_WAITS:
        assert limit_ms == CEILING_MS
    elif limit_ms < CEILING_MS:
        assert limit_ms >= WAIT_FACTOR * wait_ms and limit_ms >= FORWARD_FACTOR * forward_ms


@given(waits_ms=st.lists(st.floats(0, CEILING_MS / WAIT_FACTOR), min_size=1, max_size=300))
def test_a_draft_whose_waits_vary_fourfold_never_flaps(waits_ms):
    """Whatever was seen lately may come again four times as slow."""
    limit = RoundLimit()
    for wait_ms in waits_ms:
        limit.observe_wait(wait_ms)
        assert (
            limit.ms >= WAIT_FACTOR * max(waits_ms[: waits_ms.index(wait_ms) + 1]) or limit.ms == CEILING_MS
        )


def test_it_learns_from_fast_rounds():
    limit = RoundLimit()
    for _ in range(MIN_WAITS):
        assert limit.ms == CEILING_MS
        limit.observe_wait(2.0)
        limit.observe_forward(20.0)
    assert limit.ms == FLOOR_MS
    limit.observe_wait(400.0)
    assert limit.ms == 1600.0
    limit.observe_forward(3000.0)
    assert limit.ms == 6000.0, "the draft may take as long for a long prompt"


def test_a_draft_that_becomes_slow_is_late_a_few_times_at_most():
    """Each wait in vain makes the limit four times as long."""
    limit = RoundLimit()
    for _ in range(MIN_WAITS):
        limit.observe_wait(1.0)
    num_late = 0
    while limit.ms < CEILING_MS:
        limit.observe_slow_draft()
        num_late += 1
    assert num_late == math.ceil(math.log(CEILING_MS / FLOOR_MS, WAIT_FACTOR))


def test_what_is_long_ago_is_forgotten():
    limit = RoundLimit()
    limit.observe_wait(2000.0)
    for _ in range(RECENT):
        assert limit.ms >= 8000.0
        limit.observe_wait(1.0)
    for _ in range(RECENT):
        limit.observe_wait(1.0)
    assert limit.ms == FLOOR_MS


@pytest.mark.parametrize("fixed_ms", [0.5, 60_000.0])
def test_what_the_user_named_stays(fixed_ms):
    limit = RoundLimit(fixed_ms)
    for _ in range(2 * MIN_WAITS):
        limit.observe_wait(3.0)
        limit.observe_slow_draft()
        limit.observe_forward(50.0)
    assert limit.ms == fixed_ms


@given(values=st.lists(st.floats(0, 1e6), max_size=60), window=st.integers(1, 10))
def test_the_recent_maximum_covers_its_window(values, window):
    recent = RecentMaximum(window)
    for value in values:
        recent.observe(value)
    assert recent.value >= max(values[-window:], default=0.0)
    assert recent.value <= max(values[-2 * window :], default=0.0)


def test_a_time_that_is_none_is_ignored():
    recent = RecentMaximum(4)
    for value in (1.0, math.nan, math.inf):
        recent.observe(value)
    assert recent.value == 1.0
