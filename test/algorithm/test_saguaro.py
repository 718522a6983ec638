from __future__ import annotations

import math

import pytest
import torch
from black_box import law
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.algorithm.saguaro import saguaro_probs, sample_sparse

LOGITS = st.lists(st.floats(-20, 20), min_size=1, max_size=10).map(lambda z: sorted(z, reverse=True))


@settings(max_examples=200, deadline=None)
@given(LOGITS, st.integers(0, 12), st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]))
def test_formula(logits: list[float], fan_out: int, c: float) -> None:
    whole = fan_out >= len(logits)
    weights = [
        (c if rank < fan_out and not whole else 1.0) * math.exp(z - logits[0])
        for rank, z in enumerate(logits)
    ]
    expected = torch.tensor([[weight / sum(weights) for weight in weights]])
    probs = saguaro_probs(torch.tensor([logits], dtype=torch.float64), torch.tensor([fan_out]), c)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, expected, rtol=1e-6, atol=1e-30)


def test_rows_have_their_own_fan_out() -> None:
    logits = torch.zeros(3, 4)
    probs = saguaro_probs(logits, torch.tensor([0, 1, 3]), 0.0)
    thirds = [0.0, 1 / 3, 1 / 3, 1 / 3]
    torch.testing.assert_close(probs, torch.tensor([[0.25] * 4, thirds, [0.0, 0.0, 0.0, 1.0]]))


def test_residual_concentrates_on_the_cached_tokens() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])
    p = logits.softmax(-1)
    cached_shares = []
    for c in (1e-3, 0.3, 0.9):
        residual = (p * 0.9 + 0.02 - saguaro_probs(logits, torch.tensor([2]), c)).clamp(min=0)
        cached_shares.append((residual[:, :2].sum() / residual.sum()).item())
    assert cached_shares[0] == 1.0 and cached_shares == sorted(cached_shares, reverse=True)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, 0.0, math.nan, -math.inf], [0.5, 0.5, 0.0, 0.0]),
        ([math.inf, 3.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
        ([math.nan] * 4, [0.25] * 4),
        ([-math.inf] * 4, [0.25] * 4),
    ],
)
def test_logits_that_are_not_finite(logits: list[float], expected: list[float]) -> None:
    probs = saguaro_probs(torch.tensor([logits]), torch.tensor([0]), 1.0)
    torch.testing.assert_close(probs, torch.tensor([expected]))


def test_no_scaling_where_only_cached_tokens_have_weight() -> None:
    probs = saguaro_probs(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([2]), 0.0)
    torch.testing.assert_close(probs, torch.tensor([[0.5, 0.5, 0.0]]))


@pytest.mark.parametrize("c", [-0.1, 1.1, math.nan])
def test_c_out_of_range(c: float) -> None:
    with pytest.raises(ValueError, match=r"c must be in \[0, 1\], got"):
        saguaro_probs(torch.zeros(1, 2), torch.tensor([1]), c)


@settings(max_examples=50, deadline=None)
@given(LOGITS, st.integers(0, 4), st.sampled_from([0.05, 0.5, 1.0]))
def test_sampled_law_is_exactly_the_shipped_one(logits: list[float], fan_out: int, c: float) -> None:
    probs = saguaro_probs(torch.tensor([logits]), torch.tensor([fan_out]), c)
    measured = law(lambda rows, uniforms: sample_sparse(probs[rows], uniforms), 1, len(logits))
    torch.testing.assert_close(measured, probs.double() / probs.double().sum(), rtol=0, atol=1e-8)
