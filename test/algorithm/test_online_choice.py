"""A setting chosen by measured speed."""

from __future__ import annotations

import pytest

from sglang_ssd.algorithm.online_choice import OnlineChoice


def test_the_option_with_most_tokens_a_millisecond_is_kept_and_others_are_tried_again():
    speed = {1.0: 0.01, 0.5: 0.03, 0.1: 0.02}
    choice = OnlineChoice(tuple(speed), trial_rounds=4, keep_rounds=8)
    seen = []
    for _ in range(400):
        seen.append(choice.current)
        choice.observe(3, 3 / speed[choice.current])
    assert set(seen) == set(speed)
    late = seen[100:]
    assert late.count(0.5) > 0.6 * len(late) and len(set(late)) == 3
    speed[0.1] = 0.09
    for _ in range(200):
        seen.append(choice.current)
        choice.observe(3, 3 / speed[choice.current])
    assert seen[-100:].count(0.1) > 50


def test_all_are_tried_anew_once_what_was_measured_is_forgotten():
    choice, fresh = (OnlineChoice((1.0, 0.5, 0.1), trial_rounds=4, keep_rounds=8) for _ in range(2))
    for _ in range(50):
        choice.observe(3, 1.0 + choice.current)
    choice.forget()
    for _ in range(100):
        assert choice.current == fresh.current
        for each in (choice, fresh):
            each.observe(3, 2.0 - each.current)


def test_one_option_is_never_left():
    choice = OnlineChoice((0.3,), trial_rounds=1)
    for _ in range(10):
        choice.observe(1, 1.0)
    assert choice.current == 0.3


def test_no_options_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        OnlineChoice(())
