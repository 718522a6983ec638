"""Triton's fork attention in Triton's interpreter. ``test_triton_kernels.py`` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import LAYOUTS, NUM_SLOTS, Pools, plan_of, ragged_layouts, slots_from

from sglang_ssd_kernel.cpu.fork_attention import make_plan, reference
from sglang_ssd_kernel.triton.fork_attention import (
    BLOCK_KEYS,
    DevicePlan,
    PlanLimits,
    fork_attention,
    tile_rows,
    to_device,
)

ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest element
dtypes = pytest.mark.parametrize("dtype", ERROR, ids=["float32", "bfloat16", "float16"])
#: Small, so that short prefixes have several splits.
SPLIT_KEYS = 2 * BLOCK_KEYS


class DevicePools(Pools):
    def attend(self, plan, rows=slice(None)):
        """As ``Pools.attend``, of a ``ForkPlan`` or ``DevicePlan``, with NaN wherever no slot of the plan is."""
        if not isinstance(plan, DevicePlan):
            plan = to_device(plan, "cpu", SPLIT_KEYS)
        q = self.q[rows]
        out = q.new_full((q.shape[0], q.shape[1], self.v.shape[-1]), torch.nan)
        result = fork_attention(q, self.k, self.v, plan, self.scaling, out)
        assert result is out
        assert not out.isnan().any()
        return out


def assert_close_to_float64(pools, plan, dtype):
    exact = reference(pools.q.double(), pools.k.double(), pools.v.double(), plan, pools.scaling)
    error = (pools.attend(plan).double() - exact).abs().max() / exact.abs().max()
    assert error < ERROR[dtype]


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    prefixes, rows = LAYOUTS[layout]
    assert_close_to_float64(DevicePools(len(rows), dtype), plan_of(prefixes, rows), dtype)


@dtypes
@pytest.mark.parametrize(
    ("heads", "width"), [((1, 1), 64), ((6, 3), 80), ((14, 2), 96), ((8, 1), 128), ((16, 1), 256)]
)
def test_shapes(heads, width, dtype):
    prefixes, rows = [slots_from(5, 70), slots_from(6, 40)], [(1, 40, []), (0, 70, [1, 2]), (0, 66, [3])]
    assert_close_to_float64(DevicePools(3, dtype, heads, (width, width)), plan_of(prefixes, rows), dtype)


@dtypes
def test_keys_wider_than_values(dtype):
    prefixes, rows = LAYOUTS["forks"]
    pools = DevicePools(len(rows), dtype, widths=(72, 40))
    assert_close_to_float64(pools, plan_of(prefixes, rows), dtype)


@pytest.mark.parametrize(
    ("num_rows", "width", "height"),
    [(4, 64, 16), (9, 64, 32), (24, 64, 32), (40, 64, 128), (70, 64, 128), (40, 160, 32)],
)
def test_tile_heights(num_rows, width, height):
    """Rows of one group in tiles of every height, of which some groups need more than one."""
    plan = plan_of([slots_from(0, 64)], [(0, 64, slots_from(i, i % 3)) for i in range(num_rows)])
    assert tile_rows(to_device(plan, "cpu").limits, torch.float16, 2, width) == height
    assert_close_to_float64(DevicePools(num_rows, torch.float16, widths=(width, width)), plan, torch.float16)


@settings(max_examples=10)
@given(ragged_layouts(), st.sampled_from(list(ERROR)))
def test_ragged(layout, dtype):
    prefixes, rows = layout
    assert_close_to_float64(DevicePools(len(rows), dtype), plan_of(prefixes, rows), dtype)


@settings(max_examples=8)
@given(ragged_layouts(), st.sampled_from(list(ERROR)))
def test_bits_are_those_of_the_row_alone(layout, dtype):
    """With all its keys in its prefix, or all in its tail: under one kind of tile, in the same splits."""
    prefixes, rows = layout
    pools = DevicePools(len(rows), dtype)
    together = pools.attend(plan_of(prefixes, rows))
    for i, (group, prefix_len, tail) in list(enumerate(rows))[:3]:
        keys, row = [*prefixes[group][:prefix_len], *tail], slice(i, i + 1)
        assert torch.equal(pools.attend(plan_of([keys], [(0, len(keys), [])]), row), together[row])
        assert torch.equal(pools.attend(plan_of([[]], [(0, 0, keys)]), row), together[row])


@dtypes
def test_keys_a_row_does_not_see_leave_no_trace(dtype):
    """NaN in the slots of other rows, of the unread part of the prefix, and nowhere else."""
    prefix = slots_from(0, 100)
    rows = [(0, 90, prefix[95:97]), (0, 100, []), (0, 99, [prefix[2]])]
    pools = DevicePools(3, dtype)
    plan = to_device(plan_of([prefix], rows), "cpu")
    expected = pools.attend(plan)[0]
    unseen = sorted(set(range(NUM_SLOTS)) - {*prefix[:90], *prefix[95:97]})
    pools.k[unseen] = torch.nan
    pools.v[unseen] = torch.nan
    result = fork_attention(pools.q, pools.k, pools.v, plan, pools.scaling)
    assert torch.equal(result[0], expected)
    assert result[1].isnan().all()  # and a NaN that is seen is not hidden


@dtypes
def test_strided_views(dtype):
    prefixes, rows = LAYOUTS["forks"]
    pools, plan = DevicePools(len(rows), dtype), plan_of(prefixes, rows)
    expected = pools.attend(plan)
    for name in ("q", "k", "v"):
        tensor = getattr(pools, name)
        wide = torch.full((tensor.shape[0], tensor.shape[1] + 3, tensor.shape[2] + 7), torch.nan, dtype=dtype)
        view = wide[:, 2:-1, 5:-2]
        setattr(pools, name, view.copy_(tensor))
    assert torch.equal(pools.attend(plan), expected)


def test_large_scores_do_not_overflow():
    prefixes, rows = LAYOUTS["forks"]
    pools, plan = DevicePools(len(rows), torch.float32), plan_of(prefixes, rows)
    pools.q *= 300
    exact = reference(pools.q.double(), pools.k.double(), pools.v.double(), plan, pools.scaling)
    torch.testing.assert_close(pools.attend(plan).double(), exact, rtol=0, atol=2e-3)


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
        exact = reference(pools.q.double(), pools.k.double(), pools.v.double(), plan, pools.scaling)
        assert (result[: len(rows)].double() - exact).abs().max() < 1e-5 * exact.abs().max()
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
        ({"plan": None}, "DevicePlan: NoneType"),
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
