"""p of one token after everything a request asked for, against step-by-step references."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.algorithm.target_law import SamplingLaw, add_bias, log_probs, penalise_run, probabilities

VOCAB = 40


def reference(logits: list[float], law: SamplingLaw) -> list[float]:
    """Temper, rank, cut by top-k, top-p and min-p, in plain Python floats."""
    scaled = torch.tensor(logits, dtype=torch.float32) / law.temperature
    probs = scaled.softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda t: -probs[t])
    kept, mass = [], 0.0
    for place, token in enumerate(order):
        if (
            place < (law.top_k or len(probs))
            and mass <= law.top_p
            and probs[token] >= law.min_p * probs[order[0]]
        ):
            kept.append(token)
        mass += probs[token]
    return [p if t in kept else 0.0 for t, p in enumerate(probs)]


laws = st.builds(
    SamplingLaw,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 5, 20, VOCAB, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
)


@given(st.integers(0, 2**31), st.lists(laws, min_size=1, max_size=4))
def test_truncation_against_plain_python(seed, rows):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    found = probabilities(logits.clone(), rows)
    for row, law in enumerate(rows):
        assert found[row].tolist() == pytest.approx(reference(logits[row].tolist(), law), abs=1e-6)


def test_a_flat_law_over_a_large_vocabulary_is_cut_exactly():
    """More tokens stay than are ranked at first."""
    logits = torch.linspace(0, 1e-3, 5000)[None]
    probs = probabilities(logits.clone(), [SamplingLaw(temperature=1.0, top_p=0.9)])
    assert abs(int((probs > 0).sum()) - 4500) <= 2
    assert (probs[0, -4400:] > 0).all()


def test_all_tokens_that_tie_at_the_cut_stay():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    probs = probabilities(logits, [SamplingLaw(temperature=1.0, top_k=2)])
    assert (probs[0] > 0).tolist() == [True, True, True, True, False]


@given(
    st.integers(0, 2**31),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
def test_penalties_inside_a_run_are_those_of_one_token_at_a_time(seed, output, run):
    law = SamplingLaw(
        frequency_penalty=0.7,
        presence_penalty=-0.3,
        repetition_penalty=1.3,
        min_new_tokens=8,
        stop_token_ids=(3, 9),
    )
    logits = torch.randn(len(run) + 2, VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    for j in range(len(run) + 1):
        history = output + run[:j]
        for token, times in Counter(history).items():
            score = expected[j, token] - 0.7 * times + 0.3
            expected[j, token] = score * 1.3 if score < 0 else score / 1.3
        if len(history) < 8:
            expected[j, [3, 9]] = -torch.inf
    penalise_run(logits, law, output, run)
    torch.testing.assert_close(logits, expected)


def test_bias_is_added_at_every_position():
    logits = torch.zeros(2, 5)
    add_bias(logits, SamplingLaw(logit_bias=((1, 2.5), (4, -100.0))))
    assert logits.tolist() == [[0, 2.5, 0, 0, -100]] * 2


def test_greedy_rows_keep_their_logits_beside_sampled_ones():
    logits = torch.randn(3, VOCAB)
    scores = log_probs(logits, [SamplingLaw(), SamplingLaw(temperature=1.0), SamplingLaw()])
    assert torch.equal(scores[0], logits[0]) and torch.equal(scores[2], logits[2])
    torch.testing.assert_close(scores[1], logits[1].log_softmax(-1))


def test_nan_is_impossible_and_a_row_without_a_law_is_empty():
    logits = torch.tensor([[1.0, torch.nan, 0.0], [torch.nan, torch.nan, -torch.inf]])
    probs = probabilities(logits, [SamplingLaw(temperature=1.0)] * 2)
    assert probs[0, 1] == 0 and probs[0].sum() == pytest.approx(1) and probs[1].tolist() == [0, 0, 0]


UNUSUAL = st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0, -2.5, 1e30])


@given(
    seed=st.integers(0, 2**16),
    temperatures=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=5),
    unusual=st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, VOCAB - 1)), UNUSUAL, max_size=6),
)
def test_rows_score_beside_others_as_they_do_alone(seed, temperatures, unusual):
    """What a row scores does not depend on whose rows stand beside it, whatever its logits hold."""
    logits = torch.randn(len(temperatures), VOCAB, generator=torch.Generator().manual_seed(seed))
    for (row, token), value in unusual.items():
        if row < len(temperatures):
            logits[row, token] = value
    before = logits.clone()
    laws = [SamplingLaw(temperature=temperature) for temperature in temperatures]
    together = log_probs(logits, laws)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the caller's logits are read only"
    for i, law in enumerate(laws):
        alone = log_probs(logits[i : i + 1], [law])[0]
        # NaN is never drawn and +inf always: as -inf and as the largest number.
        assert torch.equal(
            *(row.nan_to_num(nan=-torch.inf, neginf=-torch.inf) for row in (alone, together[i]))
        )
