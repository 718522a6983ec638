"""The CPU side of the bridge: attention, packed linears, cores and memory."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ssd.bridge.environment import parse_cores, rank_cores, split_cores, use_cpu_engine
from sglang_ssd.bridge.memory import plan_pools
from sglang_ssd_kernel import ForkLayout, fork_attention, is_compiled, make_plan

use_cpu_engine()
attention = pytest.importorskip("sglang_ssd.bridge.cpu_attention")
linear = pytest.importorskip("sglang_ssd.bridge.cpu_linear")
layers = pytest.importorskip("sglang_ssd.bridge.cpu_layers")
from sglang.srt.layers.activation import SiluAndMul  # noqa: E402
from sglang.srt.layers.layernorm import RMSNorm  # noqa: E402
from sglang.srt.layers.rotary_embedding import RotaryEmbedding  # noqa: E402

GIB = 1 << 30


def pools(num_slots: int, num_kv_heads: int, head_dim: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_slots, num_kv_heads, head_dim, generator=generator) for _ in range(2))


def row_by_row(queries, keys, values, slots_of_row, scaling):
    """Each query against its own slots, head by head, in float64."""
    heads_per_kv = queries.shape[1] // keys.shape[1]
    out = torch.empty_like(queries, dtype=torch.float64)
    for row, slots in enumerate(slots_of_row):
        for head in range(queries.shape[1]):
            k, v = keys[slots, head // heads_per_kv].double(), values[slots, head // heads_per_kv].double()
            out[row, head] = (k @ queries[row, head].double() * scaling).softmax(0) @ v
    return out.float()


def attend(row_keys, queries, keys, values, scaling):
    plan = make_plan(*row_keys, num_slots=keys.shape[0])
    return fork_attention(queries, keys, values, plan, scaling, torch.full_like(queries, torch.nan))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.integers(0, 2**31),
)
def test_extends_see_their_prefix_and_themselves(requests, heads, seed):
    """Prompts, chunks, verifies and single tokens of ragged lengths, slots in any order."""
    num_heads, num_kv_heads = heads
    keys, values = pools(200, num_kv_heads, 8, seed)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(requests) + 1, 20, dtype=torch.int32)
    start, expected_slots = 0, []
    for i, (prefix, extend) in enumerate(requests):
        tables[i + 1, : prefix + extend] = slots[start : start + prefix + extend]
        start += prefix + extend
        expected_slots += [tables[i + 1, : prefix + j + 1].long() for j in range(extend)]
    row_keys = attention.keys_of_extends(
        tables, list(range(1, len(requests) + 1)), [p for p, _ in requests], [e for _, e in requests]
    )
    queries = torch.randn(
        len(expected_slots), num_heads, 8, generator=torch.Generator().manual_seed(seed + 1)
    )
    torch.testing.assert_close(
        attend(row_keys, queries, keys, values, 0.3), row_by_row(queries, keys, values, expected_slots, 0.3)
    )


@given(st.integers(1, 12), st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 2**31))
def test_forks_read_the_shared_prefix_and_their_own_tail(prefix, tail_lengths, seed):
    keys, values = pools(200, 2, 8, seed)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    tables = torch.zeros(len(tail_lengths) + 2, 40, dtype=torch.int32)
    tables[1, :prefix] = slots[:prefix]
    start, rows, lens, shared_lens = prefix, [1], [prefix], [prefix]
    for i, tail in enumerate(tail_lengths):
        shared = max(1, prefix - i % 3)
        tables[i + 2, :shared] = tables[1, :shared]
        tables[i + 2, shared : shared + tail + 1] = slots[start : start + tail + 1]
        start += tail + 1
        rows.append(i + 2)
        lens.append(shared + tail + 1)
        shared_lens.append(shared)
    row_keys = attention.keys_of_forks(tables, ForkLayout([len(rows)], [1], rows, shared_lens, lens))
    assert row_keys.prefix_slots.tolist() == tables[1, : max(shared_lens)].tolist(), "the prefix is read once"
    queries = torch.randn(len(rows), 4, 8, generator=torch.Generator().manual_seed(seed + 1))
    expected_slots = [tables[row, :n].long() for row, n in zip(rows, lens)]
    torch.testing.assert_close(
        attend(row_keys, queries, keys, values, 0.3), row_by_row(queries, keys, values, expected_slots, 0.3)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_layers_give_what_sglang_gives(dtype):
    torch.manual_seed(0)
    norm, rotary = RMSNorm(64, eps=1e-6, weight_dtype=dtype), RotaryEmbedding(16, 16, 128, 10000, True, dtype)
    model = torch.nn.ModuleList([norm, SiluAndMul(), rotary, torch.nn.Linear(4, 4)])
    torch.nn.init.uniform_(norm.weight)
    x, residual, wide = (
        torch.randn(5, 64).to(dtype),
        torch.randn(5, 64).to(dtype),
        torch.randn(5, 96).to(dtype),
    )
    query, key = wide[:, :64], wide[:, 64:]
    positions = torch.tensor([0, 3, 127, 5, 6])
    calls = [(norm, (x,)), (norm, (x, residual)), (model[1], (wide,)), (rotary, (positions, query, key))]
    expected = [module.forward_native(*(a.clone() for a in arguments)) for module, arguments in calls]
    assert layers.use_cpu_kernels(model) == (3 if is_compiled() else 0)
    found = [module(*(a.clone() for a in arguments)) for module, arguments in calls]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 33])
def test_packed_linear_equals_linear_and_does_not_depend_on_rows(dtype, num_rows):
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64, dtype=dtype), torch.randn(96, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    x = torch.randn(40, 64, dtype=dtype)
    found = linear.linear_packed(x[:num_rows], packed, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(x[:num_rows], weight, bias))
    assert found.shape == (num_rows, 96)
    assert torch.equal(found[:1], linear.linear_packed(x[:1], packed, bias)), (
        "a row's bits do not depend on others"
    )


def test_cores():
    available = sorted(os.sched_getaffinity(0))
    assert parse_cores(f"{available[0]}", "--x") == available[:1]
    assert split_cores(None, None).drafts == [available[-1:]]
    assert split_cores(None, None, num_drafts=0) == (available, [])
    assert set(split_cores(None, [str(available[0])]).target).isdisjoint(available[:1]) or len(available) == 1
    assert rank_cores([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert rank_cores([0], 2) == [[0], [0]]
    for text in ("a", "", "0-", "9999"):
        with pytest.raises(ValueError, match="^--x "):
            parse_cores(text, "--x")


@pytest.mark.parametrize(
    ("target", "drafts", "num_drafts", "expected"),
    [
        (None, None, 1, ([0, 1, 2, 3], [[4]])),
        (None, None, 2, ([0, 1, 2], [[3], [4]])),
        ("0-1", None, 3, ([0, 1], [[2], [3], [4]])),
        (None, ["1-4"], 2, ([0], [[1, 2], [3, 4]])),
        (None, ["4", "4"], 2, ([0, 1, 2, 3], [[4], [4]])),
        ("0-4", ["0", "1-4"], 2, ([0, 1, 2, 3, 4], [[0], [1, 2, 3, 4]])),
        (None, None, 5, "--ssd-num-drafts 5: 5 cores are too few"),
        ("0-3", None, 2, "--ssd-num-drafts 2: 1 cores are too few"),
        (None, ["4"], 2, "--ssd-draft-cores 4: 1 cores for 2 drafts"),
        (None, ["1", "2"], 3, "--ssd-draft-cores 2: 2 lists for 3 drafts"),
        (None, ["1", "2"], 1, "--ssd-draft-cores 2: 2 lists for 1 drafts"),
        (None, ["1", "9"], 2, "--ssd-draft-cores 9: "),
    ],
)
def test_cores_of_several_drafts(monkeypatch, target, drafts, num_drafts, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{expected}"):
            split_cores(target, drafts, num_drafts)
    else:
        assert split_cores(target, drafts, num_drafts) == expected


def test_every_draft_has_a_pool_for_all_requests():
    facts = dict(
        available_bytes=20 * GIB, target_token_bytes=28_672, draft_token_bytes=12_288, context_length=32_768
    )
    one, two = (plan_pools(**facts, weight_bytes=4 * GIB + n * GIB, num_drafts=n) for n in (1, 2))
    assert two.draft_tokens == two.target_tokens * 5 // 4 and two.target_tokens <= one.target_tokens


def test_ranks_share_the_memory_and_a_draft_has_room_for_all_of_them():
    facts = dict(
        available_bytes=20 * GIB,
        weight_bytes=6 * GIB,
        target_token_bytes=28_672,
        draft_token_bytes=12_288,
        context_length=32_768,
    )
    one, two = (plan_pools(**facts, num_replicas=n) for n in (1, 2))
    assert two.target_tokens == one.target_tokens // 2
    assert two.draft_tokens == 2 * two.target_tokens * 5 // 4


def test_pools_fit_and_say_so():
    plan = plan_pools(
        available_bytes=20 * GIB,
        weight_bytes=4 * GIB,
        target_token_bytes=28_672,
        draft_token_bytes=12_288,
        context_length=32_768,
    )
    assert plan.draft_tokens > plan.target_tokens > 0
    assert plan.weight_bytes + plan.target_pool_bytes + plan.draft_pool_bytes < 12 * GIB
    assert str(plan.target_tokens) in plan.describe()
    with pytest.raises(ValueError, match="not enough memory"):
        plan_pools(
            available_bytes=4 * GIB,
            weight_bytes=4 * GIB,
            target_token_bytes=28_672,
            draft_token_bytes=0,
            context_length=32_768,
        )
