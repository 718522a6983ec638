"""Triton's fork attention in Triton's interpreter. ``test_triton_kernels.py`` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import (
    ATTENTION_ERROR,
    LAYOUTS,
    Pools,
    assert_bits_are_those_of_rows_alone,
    assert_close_to_float64,
    assert_large_scores_do_not_overflow,
    assert_unseen_keys_leave_no_trace,
    assert_views_may_be_strided,
    plan_of,
    ragged_layouts,
    slots_from,
)

from sglang_ssd_kernel.cpu.fork_attention import make_plan
from sglang_ssd_kernel.triton.fork_attention import (
    BLOCK_KEYS,
    DevicePlan,
    PlanLimits,
    fork_attention,
    tile_rows,
    to_device,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
#: Small, so that short prefixes have several splits.
SPLIT_KEYS = 2 * BLOCK_KEYS


class DevicePools(Pools):
    """With few heads: the interpreter takes its time for each program."""

    def __init__(self, num_rows, dtype, heads=(2, 1), widths=(64, 64)):
        super().__init__(num_rows, dtype, heads, widths)

    def run(self, q, plan, out):
        if not isinstance(plan, DevicePlan):
            plan = to_device(plan, "cpu", SPLIT_KEYS)
        return fork_attention(q, self.k, self.v, plan, self.scaling, out)


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    prefixes, rows = LAYOUTS[layout]
    assert_close_to_float64(DevicePools(len(rows), dtype), plan_of(prefixes, rows))


@dtypes
@pytest.mark.parametrize(
    ("heads", "width"), [((1, 1), 64), ((6, 3), 80), ((14, 2), 96), ((8, 1), 128), ((16, 1), 256)]
)
def test_shapes(heads, width, dtype):
    prefixes, rows = [slots_from(5, 70), slots_from(6, 40)], [(1, 40, []), (0, 70, [1, 2]), (0, 66, [3])]
    assert_close_to_float64(DevicePools(3, dtype, heads, (width, width)), plan_of(prefixes, rows))


@dtypes
def test_keys_wider_than_values(dtype):
    prefixes, rows = LAYOUTS["forks"]
    assert_close_to_float64(DevicePools(len(rows), dtype, widths=(72, 40)), plan_of(prefixes, rows))


@pytest.mark.parametrize(
    ("num_rows", "width", "height"),
    [(4, 64, 16), (9, 64, 32), (20, 64, 32), (33, 64, 128), (65, 64, 128), (33, 160, 32)],
)
def test_tile_heights(num_rows, width, height):
    """Rows of one group in tiles of every height, of which some groups need more than one."""
    plan = plan_of([slots_from(0, 64)], [(0, 64, slots_from(i, i % 3)) for i in range(num_rows)])
    assert tile_rows(to_device(plan, "cpu").limits, torch.float16, 2, width) == height
    assert_close_to_float64(DevicePools(num_rows, torch.float16, widths=(width, width)), plan)


@settings(max_examples=6)
@given(ragged_layouts(), st.sampled_from(DTYPES))
def test_ragged(layout, dtype):
    prefixes, rows = layout
    assert_close_to_float64(DevicePools(len(rows), dtype), plan_of(prefixes, rows))


@settings(max_examples=5)
@given(ragged_layouts(), st.sampled_from(DTYPES))
def test_bits_are_those_of_the_row_alone(layout, dtype):
    """Under one kind of tile, in the same splits."""
    prefixes, rows = layout
    assert_bits_are_those_of_rows_alone(DevicePools(len(rows), dtype), prefixes, rows, count=3)


@dtypes
def test_keys_a_row_does_not_see_leave_no_trace(dtype):
    assert_unseen_keys_leave_no_trace(DevicePools, dtype)


@dtypes
def test_strided_views(dtype):
    prefixes, rows = LAYOUTS["forks"]
    assert_views_may_be_strided(DevicePools(len(rows), dtype, heads=(4, 2)), plan_of(prefixes, rows))


def test_large_scores_do_not_overflow():
    prefixes, rows = LAYOUTS["forks"]
    assert_large_scores_do_not_overflow(DevicePools(len(rows), torch.float32), plan_of(prefixes, rows))


LIMITS = PlanLimits(
    rows=12, groups=5, depth=80, prefix_slots=400, prefix_len=300, group_rows=9, split_keys=SPLIT_KEYS
)


def test_one_set_of_buffers_serves_every_plan_within_its_limits():
    """What a captured graph needs: plans come and go in the same tensors; what they do not fill gives zeros."""
    device_plan = DevicePlan(LIMITS, "cpu")
    addresses = [tensor.data_ptr() for tensor in device_plan.tensors]
    pools = DevicePools(LIMITS.rows, torch.float32)
    assert not pools.attend(device_plan).any()
    for layout in ("several groups", "forks", "one key", "verify"):
        prefixes, rows = LAYOUTS[layout]
        plan = plan_of(prefixes, rows)
        device_plan.update(plan)
        result = pools.attend(device_plan)
        exact = pools.exact(plan)
        assert (result[: len(rows)].double() - exact).abs().max() < (
            ATTENTION_ERROR[torch.float32] * exact.abs().max()
        )
        assert not result[len(rows) :].any()
    assert [tensor.data_ptr() for tensor in device_plan.tensors] == addresses


@pytest.mark.parametrize("limit", ["rows", "groups", "depth", "prefix_slots", "prefix_len", "group_rows"])
def test_plans_beyond_a_limit_are_refused(limit):
    plan = plan_of(*LAYOUTS["several groups"])
    tight = to_device(plan, "cpu").limits
    DevicePlan(tight, "cpu").update(plan)
    with pytest.raises(ValueError, match=f"{limit}={getattr(tight, limit) - 1}"):
        DevicePlan(tight._replace(**{limit: getattr(tight, limit) - 1}), "cpu").update(plan)


@pytest.mark.parametrize(
    ("change", "message"), [({"rows": 0}, "rows=0"), ({"depth": -1}, "depth=-1"), ({"split_keys": 50}, "50")]
)
def test_bad_limits(change, message):
    with pytest.raises(ValueError, match=message):
        DevicePlan(LIMITS._replace(**change), "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 4, 8)}, r"3 rows.*\(2, 4, 8\)"),
        ({"q": torch.zeros(3, 32)}, r"Three dimensions.*\(3, 32\)"),
        ({"q": torch.zeros(3, 34, 8)}, r"No kernel.*\(3, 34, 8\)"),
        ({"q": torch.zeros(3, 5, 8)}, r"divide.*\(3, 5, 8\)"),
        ({"q": torch.zeros(3, 4, 8, dtype=torch.bfloat16)}, r"Dtypes .*bfloat16"),
        ({"k_pool": torch.zeros(8, 2, 8), "v_pool": torch.zeros(8, 2, 6)}, r"9 slots.*\(8, 2, 8\)"),
        ({"out": torch.zeros(3, 4, 8)}, r"out .*\(3, 4, 6\): \(3, 4, 8\)"),
        ({"plan": None}, r"DevicePlan: NoneType, q \(3, 4, 8\)"),
    ],
)
def test_bad_calls(changes, message):
    plan = make_plan(
        torch.tensor([1, 2]), torch.tensor([0, 2]), torch.zeros(3, dtype=torch.int64), torch.full((3,), 2),
        torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 9,
    )  # fmt: skip
    good = {"q": torch.zeros(3, 4, 8), "k_pool": torch.zeros(9, 2, 8), "v_pool": torch.zeros(9, 2, 6)}
    good["plan"] = to_device(plan, "cpu")
    fork_attention(**good, scaling=1.0)
    with pytest.raises(ValueError, match=message):
        fork_attention(**(good | changes), scaling=1.0)


def test_doubles_are_refused():
    pools = DevicePools(1, torch.float64)
    with pytest.raises(ValueError, match="float64"):
        pools.attend(plan_of(*LAYOUTS["one key"]))
