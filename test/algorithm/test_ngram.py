"""The n-gram backup against a naive search over the same window."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.ngram import NGramIndex


def naive_proposal(history, num_tokens, max_order, min_order, max_tokens):
    """What followed the most recent earlier occurrence of the longest suffix, searched from the back."""
    window = history[-max_tokens:]
    for order in range(max_order, min_order - 1, -1):
        for end in range(len(window) - 1, order - 1, -1):
            if len(window) > order and window[end - order : end] == window[-order:]:
                proposal = window[end:][:num_tokens]
                while len(proposal) < num_tokens:
                    proposal.append((window + proposal)[len(window) + len(proposal) - (len(window) - end)])
                return proposal
    return []


@st.composite
def index_sizes(draw):
    max_order = draw(st.integers(1, 4))
    return max_order, draw(st.integers(1, max_order)), draw(st.integers(max_order + 1, 12))


@given(
    index_sizes(),
    st.lists(st.lists(st.integers(0, 3), max_size=15), max_size=8),
    st.integers(0, 9),
)
def test_it_finds_what_a_naive_search_finds_after_every_extension(sizes, chunks, num_tokens):
    index, history = NGramIndex(*sizes), []
    for chunk in chunks:
        index.extend(chunk)
        history += chunk
        assert index.propose(num_tokens) == naive_proposal(history, num_tokens, *sizes)


@given(index_sizes(), st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_the_pieces_in_which_tokens_come_do_not_matter(sizes, history, num_tokens):
    at_once, one_by_one = NGramIndex(*sizes), NGramIndex(*sizes)
    at_once.extend(history)
    for token in history:
        one_by_one.extend([token])
    assert at_once.propose(num_tokens) == one_by_one.propose(num_tokens)


def test_a_long_history_against_the_naive_search():
    rng = random.Random(3)
    words = [[rng.randrange(500) for _ in range(rng.randrange(2, 9))] for _ in range(60)]
    history = [token for _ in range(700) for token in rng.choice(words)]
    index = NGramIndex(max_order=4, min_order=2, max_tokens=1024)
    num_found = 0
    for start in range(0, len(history), 13):
        index.extend(history[start : start + 13])
        expected = naive_proposal(history[: start + 13], 7, 4, 2, 1024)
        assert index.propose(7) == expected
        num_found += bool(expected)
    assert num_found > 100


def test_longest_match_wins_over_a_more_recent_shorter_one():
    index = NGramIndex(max_order=3, min_order=1, max_tokens=100)
    index.extend([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert index.propose(1) == [7]
    shorter = NGramIndex(max_order=1, min_order=1, max_tokens=100)
    shorter.extend([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert shorter.propose(1) == [8]


def test_a_period_is_continued():
    index = NGramIndex(max_order=3, min_order=2, max_tokens=100)
    index.extend([5, 1, 2, 3, 1, 2, 3])
    assert index.propose(7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_known_is_an_empty_proposal():
    index = NGramIndex(max_order=3, min_order=2, max_tokens=100)
    assert index.propose(4) == []
    index.extend([1, 2, 3, 4])
    assert index.propose(4) == []
    index.extend([1, 2])
    assert index.propose(0) == []


@pytest.mark.parametrize("period", [10**9, 37])
def test_memory_is_bounded(period):
    index = NGramIndex(max_order=4, min_order=2, max_tokens=50)
    for start in range(0, 2000, 7):
        index.extend(token % period for token in range(start, start + 7))
        assert len(index._tokens) <= 2 * 50
        assert len(index._next) <= 3 * 50
    index.extend(range(5000))
    assert len(index._tokens) <= 2 * 50


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 0, 10), r"min_order must be in 1\.\.max_order \(3\), got 0"),
        ((3, 4, 10), "min_order must be .* got 4"),
        ((3, 1, 3), r"max_tokens must be above max_order \(3\), got 3"),
    ],
)
def test_bad_sizes_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        NGramIndex(*sizes)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="num_tokens must be 0 or more, got -1"):
        NGramIndex(2, 1, 10).propose(-1)
