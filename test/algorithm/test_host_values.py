"""Numbers of the host on a device."""

from __future__ import annotations

import pytest
import torch

from sglang_ssd.algorithm.host_values import constant, from_host


def test_a_constant_is_made_once():
    assert constant((1, 2), torch.int64, "cpu") is constant((1, 2), torch.int64, "cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64])
def test_equal_values_of_other_dtypes_are_other_constants(dtype):
    for values in ((1, 0), (True, False), (1.0, 0.0)):
        assert torch.equal(constant(values, dtype, "cpu"), from_host(list(values), dtype, "cpu"))
        assert constant(values, dtype, "cpu").dtype == dtype
