"""The CPU kernels, in every build this processor runs and as torch references, against SGLang's formulas and float64."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest
import torch
from cpu_builds import build  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd_kernel import fork_attention, is_compiled, make_plan, rms_norm, rotary_neox, silu_and_mul
from sglang_ssd_kernel.cpu.fork_attention import reference
from sglang_ssd_kernel.cpu.library import ISA_VARIABLE

DTYPES = [torch.float32, torch.bfloat16]
ATTENTION_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest element
NUM_SLOTS = 4096


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


# ---------------------------------------------------------------------------------------------------------------------
# Attention over shared prefixes
# ---------------------------------------------------------------------------------------------------------------------


class Pools:
    """Random queries for some rows, and random KV pools."""

    def __init__(self, num_rows, dtype, heads=(4, 2), widths=(64, 64), seed=0):
        random = torch.Generator().manual_seed(seed)
        (num_heads, num_kv_heads), (key_width, value_width) = heads, widths
        self.q = torch.randn(num_rows, num_heads, key_width, generator=random).to(dtype)
        self.k = torch.randn(NUM_SLOTS, num_kv_heads, key_width, generator=random).to(dtype)
        self.v = torch.randn(NUM_SLOTS, num_kv_heads, value_width, generator=random).to(dtype)
        self.scaling = key_width**-0.5

    def run(self, q, plan, out):
        return fork_attention(q, self.k, self.v, plan, self.scaling, out)

    def attend(self, plan, rows=slice(None), may_be_nan=False):
        """The attention of some of the rows. What the kernel leaves unwritten is NaN."""
        q = self.q[rows]
        out = q.new_full((q.shape[0], q.shape[1], self.v.shape[-1]), torch.nan)
        assert self.run(q, plan, out) is out
        assert may_be_nan or not out.isnan().any()
        return out

    def exact(self, plan):
        """In float64."""
        return reference(self.q.double(), self.k.double(), self.v.double(), plan, self.scaling)


def plan_of(prefixes, rows):
    """A plan from lists. prefixes: slots of each group; rows: (group, prefix_len, tail slots)."""
    depth = max(len(tail) for _, _, tail in rows)
    tails = [[*tail, *[-1] * (depth - len(tail))] for _, _, tail in rows]
    starts = [0]
    for prefix in prefixes:
        starts.append(starts[-1] + len(prefix))
    return make_plan(
        torch.tensor([slot for prefix in prefixes for slot in prefix], dtype=torch.int64),
        torch.tensor(starts),
        torch.tensor([group for group, _, _ in rows]),
        torch.tensor([prefix_len for _, prefix_len, _ in rows]),
        torch.tensor(tails, dtype=torch.int64).view(len(rows), depth),
        torch.tensor([len(tail) for _, _, tail in rows]),
        NUM_SLOTS,
    )


def deal(prefix_lens, rows):
    """(prefixes, rows) as ``plan_of`` takes them, with slots in no order of which no two are alike. rows: (group,
    prefix_len, tail_len)."""
    slots = iter(torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(0)).tolist())
    prefixes = [list(islice(slots, prefix_len)) for prefix_len in prefix_lens]
    return prefixes, [
        (group, prefix_len, list(islice(slots, tail_len))) for group, prefix_len, tail_len in rows
    ]


def assert_close_to_float64(pools, plan):
    exact = pools.exact(plan)
    error = (pools.attend(plan).double() - exact).abs().max() / exact.abs().max()
    assert error < ATTENTION_ERROR[pools.q.dtype]


def assert_bits_are_those_of_rows_alone(pools, prefixes, rows, count=None):
    """The first rows have the same bits alone, with all their keys in their prefix or all in their tail."""
    together = pools.attend(plan_of(prefixes, rows))
    for i, (group, prefix_len, tail) in list(enumerate(rows))[:count]:
        keys, row = [*prefixes[group][:prefix_len], *tail], slice(i, i + 1)
        assert torch.equal(pools.attend(plan_of([keys], [(0, len(keys), [])]), row), together[row])
        assert torch.equal(pools.attend(plan_of([[]], [(0, 0, keys)]), row), together[row])


def assert_unseen_keys_leave_no_trace(pools_of, dtype):
    """NaN in the slots of other rows, of the unread part of the prefix, and nowhere else."""
    [prefix], rows = deal([100], [(0, 90, 2), (0, 100, 0), (0, 99, 1)])
    pools, plan = pools_of(3, dtype), plan_of([prefix], rows)
    expected = pools.attend(plan)[0]
    unseen = sorted(set(range(NUM_SLOTS)) - {*prefix[:90], *rows[0][2]})
    pools.k[unseen] = torch.nan
    pools.v[unseen] = torch.nan
    result = pools.attend(plan, may_be_nan=True)
    assert torch.equal(result[0], expected)
    assert result[1].isnan().all()  # and a NaN that is seen is not hidden


def assert_views_may_be_strided(pools, plan):
    expected = pools.attend(plan)
    for name in ("q", "k", "v"):
        tensor = getattr(pools, name)
        wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + 3, tensor.shape[2] + 7), torch.nan)
        setattr(pools, name, wide[:, 2:-1, 5:-2].copy_(tensor))
    assert torch.equal(pools.attend(plan), expected)


def assert_large_scores_do_not_overflow(pools, plan):
    pools.q *= 300
    torch.testing.assert_close(pools.attend(plan).double(), pools.exact(plan), rtol=0, atol=2e-3)


#: (slots of prefixes, rows) by what is special about them.
LAYOUTS = {
    "one row": deal([100], [(0, 100, 0)]),
    "one key": deal([1], [(0, 1, 0)]),
    "no prefix": deal([0], [(0, 0, n) for n in (1, 64, 65, 130)]),
    "forks": deal([200], [(0, 200, 3)] * 9),
    "forks at a block's end": deal([192], [(0, 192, 3)] * 9),
    "verify": deal([131], [(0, 126 + i, 0) for i in range(6)]),
    "partial prefixes": deal([150], [(0, n, n % 5) for n in (1, 150, 63, 64, 65, 149, 128, 127, 12)]),
    "several groups": deal(
        [70, 0, 300, 1], [(2, 300, 0), (2, 130, 2), (0, 70, 1), (0, 70, 80), (1, 0, 1), (3, 1, 0)]
    ),
}


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_layouts(layout, dtype):
    prefixes, rows = LAYOUTS[layout]
    assert_close_to_float64(Pools(len(rows), dtype), plan_of(prefixes, rows))


@dtypes
@pytest.mark.parametrize("heads", [(1, 1), (6, 3), (14, 2), (8, 1), (16, 1)])
@pytest.mark.parametrize("widths", [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (72, 40), (5, 3)])
def test_attention_of_shapes(heads, widths, dtype):
    prefixes, rows = LAYOUTS["several groups"]
    assert_close_to_float64(Pools(len(rows), dtype, heads, widths), plan_of(prefixes, rows))


@st.composite
def ragged_layouts(draw):
    """(prefixes, rows) of up to three groups with arbitrary lengths."""
    lengths = st.one_of(st.integers(0, 200), st.sampled_from([0, 63, 64, 65, 128]))
    prefix_lens = [draw(lengths) for _ in range(draw(st.integers(1, 3)))]
    rows = []
    for group, longest in enumerate(prefix_lens):
        for _ in range(draw(st.integers(group == 0, 5))):
            prefix_len = draw(st.one_of(st.just(longest), st.integers(0, longest)))
            tail_len = draw(st.one_of(st.integers(0, 5), lengths))
            rows.append((group, prefix_len, tail_len or int(not prefix_len)))
    return deal(prefix_lens, rows)


@settings(deadline=None, max_examples=30)
@given(ragged_layouts(), st.sampled_from(DTYPES))
def test_ragged_attention_and_its_bits(layout, dtype):
    """Right results; and each row has the same bits alone, with all its keys in its tail or all in its prefix."""
    prefixes, rows = layout
    pools = Pools(len(rows), dtype)
    assert_close_to_float64(pools, plan_of(prefixes, rows))
    assert_bits_are_those_of_rows_alone(pools, prefixes, rows)


@dtypes
def test_bits_do_not_depend_on_neighbours(dtype):
    """One row among 0 to 12 rows of its group, which take more or less of the prefix and other tails."""
    others = [(0, (150, 170, 140, 20)[i % 4], i) for i in range(12)]
    prefixes, rows = deal([170], [(0, 150, 30), *others])
    pools = Pools(13, dtype, heads=(14, 2))
    alone = pools.attend(plan_of(prefixes, rows[:1]), slice(0, 1))
    for count in range(13):
        result = pools.attend(plan_of(prefixes, rows[: 1 + count]), slice(0, 1 + count))
        assert torch.equal(result[:1], alone)


@dtypes
def test_bits_do_not_depend_on_threads(dtype):
    prefixes, rows = LAYOUTS["several groups"]
    pools, plan = Pools(len(rows), dtype), plan_of(prefixes, rows)
    one_thread = pools.attend(plan)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(pools.attend(plan), one_thread)
    finally:
        torch.set_num_threads(num_threads)


@dtypes
def test_keys_a_row_does_not_see_leave_no_trace(dtype):
    assert_unseen_keys_leave_no_trace(Pools, dtype)


@dtypes
def test_attention_of_strided_views(dtype):
    prefixes, rows = LAYOUTS["forks"]
    assert_views_may_be_strided(Pools(len(rows), dtype), plan_of(prefixes, rows))


def test_large_scores_do_not_overflow():
    prefixes, rows = LAYOUTS["forks"]
    assert_large_scores_do_not_overflow(Pools(len(rows), torch.float32), plan_of(prefixes, rows))


def test_float16_goes_to_the_reference():
    prefixes, rows = LAYOUTS["forks"]
    pools, plan = Pools(len(rows), torch.float16), plan_of(prefixes, rows)
    expected = reference(pools.q, pools.k, pools.v, plan, pools.scaling)
    assert torch.equal(pools.attend(plan), expected)


PLAN = {
    "prefix_slots": [1, 2, 3, 4], "prefix_starts": [0, 3, 4], "row_groups": [0, 0, 1], "prefix_lens": [3, 1, 0],
    "tail_slots": [[5, 6], [7, -1], [8, -1]], "tail_lens": [2, 0, 1], "num_slots": 9,
}  # fmt: skip


def make_plan_with(**changes):
    values = {name: torch.tensor(value) for name, value in PLAN.items()} | {"num_slots": PLAN["num_slots"]}
    return make_plan(**(values | changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prefix_slots", [1.0, 2, 3, 4], r"prefix_slots .*float32"),
        ("prefix_slots", [[1, 2, 3, 4]], r"prefix_slots .*\(1, 4\)"),
        ("prefix_slots", [1, 2, 3, 9], r"prefix_slots .*1 to 9"),
        ("prefix_slots", [1, 2, 3, -1], r"prefix_slots .*-1 to 3"),
        ("prefix_starts", [0, 3, 5], r"prefix_starts .*\[0, 3, 5\]"),
        ("prefix_starts", [0, 5, 4], r"prefix_starts .*\[0, 5, 4\]"),
        ("prefix_starts", [0], r"prefix_starts .*\[0\]"),
        ("row_groups", [], r"row_groups"),
        ("row_groups", [0, 0, 2], r"row_groups .*\[0, 0, 2\]"),
        ("row_groups", [0, 1, 0], r"side by side.*\[0, 1, 0\]"),
        ("prefix_lens", [3, 1], r"prefix_lens .*\(2,\)"),
        ("prefix_lens", [3, 1, 2], r"prefix_lens\[2\] is 2"),
        ("prefix_lens", [3, -1, 0], r"prefix_lens\[1\] is -1"),
        ("tail_slots", [[5, 6], [7, 8]], r"tail_slots \(2, 2\)"),
        ("tail_slots", [[5, 9], [7, 8], [8, 8]], r"tail_slots .*5 to 9"),
        ("tail_slots", [[5, -1], [7, 8], [8, 8]], r"tail_slots .*-1 to 8"),
        ("tail_slots", [[5, 6], [7, -1], [6, -1]], r"tail_slots overlap: slot 6 .*\(3,\)"),
        ("tail_slots", [[5, 5], [7, -1], [8, -1]], r"tail_slots overlap: slot 5 .*\(3,\)"),
        ("tail_slots", [[5, 6], [7, -1], [2, -1]], r"overlap prefix_slots: slot 2 .*\(4,\), \(3,\)"),
        ("tail_lens", [3, 0, 1], r"tail_lens\[0\] is 3"),
        ("tail_lens", [2, 0, 0], r"Row 2 has no key"),
    ],
)
def test_bad_plans(name, value, message):
    dtype = None if value else torch.int64
    with pytest.raises(ValueError, match=message):
        make_plan_with(**{name: torch.tensor(value, dtype=dtype)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 4, 8)}, r"3 rows.*\(2, 4, 8\)"),
        ({"q": torch.zeros(3, 32)}, r"Three dimensions.*\(3, 32\)"),
        ({"q": torch.zeros(3, 5, 8)}, r"divide.*\(3, 5, 8\)"),
        ({"q": torch.zeros(3, 4, 7)}, r"width of q.*\(3, 4, 7\)"),
        ({"q": torch.zeros(3, 4, 16)[..., ::2]}, r"contiguous"),
        ({"q": torch.zeros(3, 4, 8, dtype=torch.bfloat16)}, r"Dtypes .*bfloat16"),
        ({"k_pool": torch.zeros(8, 2, 8), "v_pool": torch.zeros(8, 2, 6)}, r"9 slots.*\(8, 2, 8\)"),
        ({"v_pool": torch.zeros(9, 1, 6)}, r"same slots and heads.*\(9, 1, 6\)"),
        ({"out": torch.zeros(3, 4, 8)}, r"out .*\(3, 4, 6\): \(3, 4, 8\)"),
    ],
)
def test_bad_attention_calls(changes, message):
    good = {"q": torch.zeros(3, 4, 8), "k_pool": torch.zeros(9, 2, 8), "v_pool": torch.zeros(9, 2, 6)}
    fork_attention(**good, plan=make_plan_with(), scaling=1.0)
    with pytest.raises(ValueError, match=message):
        fork_attention(**(good | changes), plan=make_plan_with(), scaling=1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise kernels
# ---------------------------------------------------------------------------------------------------------------------

WIDTHS = [1, 15, 16, 37, 896]


def random(*shape, dtype=torch.float32, scale=1.0, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_one_step(actual, expected):
    """Within 1e-6 of the expected float32, or one bfloat16 step."""
    assert actual.dtype == expected.dtype
    step = 1e-6 if expected.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual.double(), expected.double(), rtol=step, atol=1e-30)


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width, dtype):
    x, residual = (random(5, width, dtype=dtype, seed=i) for i in range(2))
    weight, eps = random(width, dtype=dtype, seed=2), 1e-6

    def formula(total):
        factor = torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (total * factor * weight).to(dtype)

    assert_one_step(rms_norm(x, weight, eps), formula(x.float()))
    total = x.float() + residual.float()
    before = residual.clone()
    normed, new_residual = rms_norm(x, weight, eps, residual)
    assert_one_step(normed, formula(total))
    assert torch.equal(new_residual, total.to(dtype))
    assert torch.equal(residual, before)
    assert torch.equal(rms_norm(x[3:4], weight, eps), rms_norm(x, weight, eps)[3:4])


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(width, dtype):
    x = random(5, 2 * width + 3, dtype=dtype, scale=8.0)[:, 2:-1]
    gate, up = x.chunk(2, dim=-1)
    assert_one_step(silu_and_mul(x), torch.nn.functional.silu(gate) * up)


def test_silu_of_extreme_gates():
    gates = torch.tensor([[-1e30, -200.0, -88.0, -87.0, 0.0, 88.0, 200.0, 1e30, torch.nan, torch.inf]])
    result = silu_and_mul(torch.cat((gates, torch.ones_like(gates)), dim=1))
    torch.testing.assert_close(result, torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30, equal_nan=True)


@dtypes
@pytest.mark.parametrize("cache_dtype", [torch.float32, None], ids=["float32 cache", "same cache"])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 128), (80, 32), (10, 6)])
def test_rotary_neox(head_size, rotary_dim, cache_dtype, dtype):
    qkv = random(7, 8 * head_size, dtype=dtype)
    q, k, v = qkv.split([4 * head_size, 2 * head_size, 2 * head_size], dim=-1)
    angles = torch.arange(50.0).unsqueeze(1) * 10.0 ** -torch.linspace(0, 4, rotary_dim // 2)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(cache_dtype or dtype)
    positions = torch.tensor([0, 49, 3, 3, 17, 20, 1])
    cos, sin = cache[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)

    def formula(x):
        heads = x.unflatten(-1, (-1, head_size)).clone()
        first, second = heads[..., :rotary_dim].clone().chunk(2, dim=-1)
        heads[..., : rotary_dim // 2] = first * cos - second * sin
        heads[..., rotary_dim // 2 : rotary_dim] = second * cos + first * sin
        return heads.flatten(1)

    expected = torch.cat((formula(q), formula(k), v), dim=-1)
    rotary_neox(positions, q, k, cache, head_size, rotary_dim)
    assert torch.equal(qkv, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-6), r"\(2, 4\), \(3,\)"),
        (lambda: rms_norm(torch.zeros(2, 4), torch.zeros(4).half(), 1e-6), r"float16"),
        (lambda: rms_norm(torch.zeros(2, 4), torch.zeros(4), 1e-6, torch.zeros(1, 4)), r"residual \(1, 4\)"),
        (lambda: silu_and_mul(torch.zeros(2, 5)), r"\(2, 5\)"),
        (lambda: silu_and_mul(torch.zeros(4)), r"\(4,\)"),
        (lambda: rotate(q=torch.zeros(2, 17)), r"q .*\(2, 17\)"),
        (lambda: rotate(k=torch.zeros(3, 8)), r"k .*\(3, 8\)"),
        (lambda: rotate(rotary_dim=10), r"rotary_dim .*10"),
        (lambda: rotate(cos_sin_cache=torch.zeros(9, 6)), r"cos_sin_cache .*\(9, 6\)"),
        (lambda: rotate(positions=torch.tensor([0, 9])), r"positions 0 to 9"),
        (lambda: rotate(positions=torch.tensor([-1, 0])), r"positions -1 to 0"),
        (lambda: rotate(positions=torch.tensor([0, 1], dtype=torch.int32)), r"positions .*int32"),
    ],
)
def test_bad_elementwise_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def rotate(**changes):
    good = {
        "positions": torch.tensor([0, 1]), "q": torch.zeros(2, 16), "k": torch.zeros(2, 8),
        "cos_sin_cache": torch.zeros(9, 8), "head_size": 8, "rotary_dim": 8,
    }  # fmt: skip
    rotary_neox(**(good | changes))


# ---------------------------------------------------------------------------------------------------------------------
# The package
# ---------------------------------------------------------------------------------------------------------------------


def test_chosen_build(build):  # noqa: F811
    assert is_compiled() == (None if build == "none" else build)


def test_import_is_cheap():
    """Every python start imports the package: neither torch nor SGLang may come with it."""
    program = "import sys, sglang_ssd_kernel; sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_unknown_build_is_refused(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(ValueError, match=f"{ISA_VARIABLE}=avx1024"):
        is_compiled.__wrapped__()
