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
    deal,
    plan_of,
    ragged_layouts,
)

from sglang_ssd_kernel.cpu.fork_attention import ForkLayout, make_plan
from sglang_ssd_kernel.triton.fork_attention import (
    BLOCK_KEYS,
    DevicePlan,
    PlanLimits,
    TablePlan,
    fork_attention,
    rows_of_a_tile,
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
    prefixes, rows = deal([70, 40], [(1, 40, 0), (0, 70, 2), (0, 66, 1)])
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
    plan = plan_of(*deal([64], [(0, 64, i % 3) for i in range(num_rows)]))
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


@st.composite
def table_layouts(draw):
    """Forks of several requests, and the table with their slots."""
    width, sizes, bases, own, shared, lens = 200, [], [], [], [], []
    num_groups = draw(st.integers(1, 3))
    table = torch.randperm(40 * width, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    table = table.view(40, width).to(torch.int32)
    table_rows = iter(draw(st.permutations(range(1, 40))))
    for _ in range(num_groups):
        sizes.append(draw(st.integers(1, 7)))
        bases.append(next(table_rows))
        for _ in range(sizes[-1]):
            own.append(next(table_rows))
            shared.append(draw(st.one_of(st.just(0), st.integers(1, 180))))
            lens.append(max(1, shared[-1] + draw(st.integers(0, 20))))
    return ForkLayout(sizes, bases, own, shared, lens), table


def plan_of_table(layout, table):
    groups = [group for group, size in enumerate(layout.group_sizes) for _ in range(size)]
    longest = [
        max(n for n, of in zip(layout.shared_lens, groups) if of == group)
        for group in range(len(layout.group_sizes))
    ]
    tails = [table[row, a:b] for row, a, b in zip(layout.rows, layout.shared_lens, layout.lens)]
    tail_lens = torch.tensor([tail.numel() for tail in tails])
    tail_slots = torch.zeros(len(tails), int(tail_lens.max()), dtype=torch.int32)
    for slots, tail in zip(tail_slots, tails):
        slots[: tail.numel()] = tail
    return make_plan(
        torch.cat([table[row, :n] for row, n in zip(layout.base_rows, longest)]),
        torch.tensor([0, *longest]).cumsum(0),
        torch.tensor(groups),
        torch.tensor(layout.shared_lens),
        tail_slots,
        tail_lens,
        table.numel(),
    )


TABLE_LIMITS = PlanLimits(
    rows=24, groups=24, depth=0, prefix_slots=0, prefix_len=200, group_rows=4, split_keys=SPLIT_KEYS
)


@settings(max_examples=8)
@given(table_layouts(), st.sampled_from(DTYPES))
def test_slots_that_stand_in_a_table(layout_and_table, dtype):
    """As the same plan with slots of its own, to the bit; groups are cut at ``group_rows``, buffers are larger."""
    layout, table = layout_and_table
    pools = DevicePools(len(layout.lens), dtype)
    pools.k, pools.v = (torch.randn(table.numel(), *pool.shape[1:]).to(dtype) for pool in (pools.k, pools.v))
    expected = pools.attend(plan_of_table(layout, table))
    plan = TablePlan(TABLE_LIMITS, table)
    plan.update_layout(layout)
    q = torch.cat((pools.q, torch.randn(24 - len(pools.q), *pools.q.shape[1:]).to(dtype)))
    result = fork_attention(q, pools.k, pools.v, plan, pools.scaling)
    assert torch.equal(result[: len(layout.lens)], expected)
    assert not result[len(layout.lens) :].any()


def test_tables_are_read_when_the_kernel_runs():
    """And plans come and go in the same tensors, none of which holds a slot."""
    table = torch.arange(400, dtype=torch.int32).view(2, 200)
    pools, plan = DevicePools(1, torch.float32), TablePlan(TABLE_LIMITS._replace(rows=1, groups=1), table)
    pools.k, pools.v = torch.randn(2, 400, 1, 64)
    plan.update_layout(ForkLayout([1], [1], [1], [100], [103]))
    before = [tensor.data_ptr() for tensor in plan.tensors]
    first = pools.run(pools.q, plan, None)
    table.copy_(table.flip(0))
    second = pools.run(pools.q, plan, None)
    assert not torch.equal(first, second)
    plan.update_layout(ForkLayout([1], [0], [0], [100], [103]))
    assert torch.equal(pools.run(pools.q, plan, None), first)
    assert [tensor.data_ptr() for tensor in plan.tensors] == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_per_kv", range(1, 17))
@pytest.mark.parametrize("width", [64, 256])
def test_groups_of_a_tile_fill_it(dtype, heads_per_kv, width):
    limits = TABLE_LIMITS._replace(group_rows=1000)
    rows = rows_of_a_tile(limits, dtype, heads_per_kv, width)
    height = tile_rows(limits, dtype, heads_per_kv, width)
    assert tile_rows(limits._replace(group_rows=rows), dtype, heads_per_kv, width) == height
    assert rows * heads_per_kv <= height


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_sizes": [1]}, "All rows need a group"),
        ({"base_rows": []}, "needs rows and a base row"),
        ({"rows": [0, 2]}, r"table \(2, 200\)"),
        ({"lens": [3, 2]}, "0 <= shared_lens <= lens"),
        ({"lens": [3, 201]}, "lens <= 200"),
    ],
)
def test_bad_layouts(changes, message):
    plan = TablePlan(TABLE_LIMITS, torch.zeros(2, 200, dtype=torch.int32))
    layout = ForkLayout([2], [1], [0, 1], [3, 3], [3, 4])
    plan.update_layout(layout)
    with pytest.raises(ValueError, match=message):
        plan.update_layout(layout._replace(**changes))


def test_layouts_beyond_a_limit_are_refused():
    layout = ForkLayout([5, 4], [1, 0], [1] * 9, [3] * 9, [3] * 9)
    table = torch.zeros(2, 200, dtype=torch.int32)
    TablePlan(TABLE_LIMITS._replace(rows=9, groups=3, prefix_len=3), table).update_layout(layout)
    for limit, value in {"rows": 8, "groups": 2, "prefix_len": 2}.items():
        plan = TablePlan(TABLE_LIMITS._replace(**{limit: value}), table)
        with pytest.raises(ValueError, match=f"{limit}={value}"):
            plan.update_layout(layout)


@pytest.mark.parametrize(
    ("table", "message"),
    [(torch.zeros(2, 3), "float32"), (torch.zeros(4, dtype=torch.int32), r"\(4,\)"),
     (torch.zeros(1, 1, dtype=torch.int32).expand(1 << 16, 1 << 15), "contiguous"),
     (torch.empty(1 << 16, 1 << 15, dtype=torch.int32, device="meta"), "2\\^31")],
)  # fmt: skip
def test_bad_tables(table, message):
    with pytest.raises(ValueError, match=message):
        TablePlan(TABLE_LIMITS, table)
