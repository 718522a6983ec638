"""Guesses are verified where they pay for the wider verify, and are tried again once in a while where they do not."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_ssd.algorithm.guess_worth import MIN_ROUNDS, TRY_AGAIN_EVERY, GuessWorth


def after(
    num_rounds: int, *, added: int, num_guesses: int = 1, wide_ms: float, narrow_ms: float
) -> GuessWorth:
    worth = GuessWorth()
    for _ in range(num_rounds):
        worth.observe(num_guesses, added, wide_ms)
        worth.observe(0, 0, narrow_ms)
    return worth


def test_all_is_worth_trying_while_too_little_is_known():
    worth = after(MIN_ROUNDS - 1, added=0, wide_ms=9.0, narrow_ms=1.0)
    assert all(worth.is_worth(1, 8) for _ in range(2 * TRY_AGAIN_EVERY))


def test_only_one_kind_of_round_tells_nothing():
    worth = GuessWorth()
    for _ in range(4 * MIN_ROUNDS):
        worth.observe(1, 0, 9.0)
    assert worth.is_worth(1, 1)


@given(
    added=st.integers(0, 7),
    num_guesses=st.integers(1, 16),
    more_rows=st.integers(0, 16),
    wide_ms=st.floats(1.0, 100.0),
    narrow_ms=st.floats(1.0, 100.0),
)
def test_guesses_are_held_back_just_where_they_lower_the_throughput(
    added, num_guesses, more_rows, wide_ms, narrow_ms
):
    num_rows = num_guesses + more_rows
    with_guesses = (num_rows + added) / wide_ms
    without = num_rows / narrow_ms
    assume(abs(with_guesses / without - 1) > 1e-6)
    worth = after(40, added=added, num_guesses=num_guesses, wide_ms=wide_ms, narrow_ms=narrow_ms)
    answers = [worth.is_worth(num_guesses, num_rows) for _ in range(2 * TRY_AGAIN_EVERY)]
    expected = (
        [True] * len(answers) if with_guesses > without else ([False] * (TRY_AGAIN_EVERY - 1) + [True]) * 2
    )
    assert answers == expected


@given(
    drift=st.floats(0.998, 1.002),
    guess_every=st.integers(5, 60),
    longer=st.floats(1.0, 1.5),
    added=st.integers(0, 2),
)
def test_a_machine_that_becomes_slower_or_faster_is_not_the_doing_of_guesses(
    drift, guess_every, longer, added
):
    """Rounds with guesses are rare, so a mean of theirs is older than one of the others."""
    num_rows = 4
    assume(abs(added / num_rows - (longer - 1)) > 0.06)
    worth, round_ms = GuessWorth(), 5.0
    for i in range(60 * guess_every):
        round_ms *= drift
        has_guess = i % guess_every == 0
        worth.observe(int(has_guess), added * has_guess, round_ms * (longer if has_guess else 1.0))
    answers = [worth.is_worth(1, num_rows) for _ in range(TRY_AGAIN_EVERY - 1)]
    assert answers == [added / num_rows > longer - 1] * len(answers)


def test_what_was_learnt_is_outweighed_by_what_is_new():
    worth = after(200, added=0, wide_ms=2.0, narrow_ms=1.0)
    assert not worth.is_worth(1, 1)
    for _ in range(60):
        worth.observe(1, 3, 2.0)
    assert worth.is_worth(1, 1)


def test_what_is_forgotten_is_tried_anew():
    worth = after(40, added=0, wide_ms=2.0, narrow_ms=1.0)
    worth.forget()
    assert worth.is_worth(1, 1)
