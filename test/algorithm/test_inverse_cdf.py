from __future__ import annotations

import torch
from black_box import law
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.algorithm.inverse_cdf import inverse_cdf

ALMOST_ONE = 1.0 - 2.0**-53


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any))
def test_law_is_the_weights_over_their_sum(weights: list[int]) -> None:
    row = torch.tensor([weights], dtype=torch.float32)
    measured = law(lambda rows, uniforms: inverse_cdf(row[rows], uniforms), 1, len(weights))
    torch.testing.assert_close(measured, row.double() / row.double().sum(), rtol=0, atol=1e-8)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=8).filter(any),
    st.one_of(st.floats(0, ALMOST_ONE), st.sampled_from([0.0, ALMOST_ONE])),
)
def test_nothing_without_weight_is_drawn(weights: list[float], uniform: float) -> None:
    index = inverse_cdf(
        torch.tensor([weights], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64)
    )
    assert weights[index.item()] > 0


def test_a_row_without_weight_gives_zero() -> None:
    assert inverse_cdf(torch.zeros(1, 5), torch.tensor([0.9])).tolist() == [0]
