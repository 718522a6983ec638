"""The CPU stand-in against SGLang's Triton kernels, which Triton's interpreter runs on the CPU.

``test_cpu_stand_in.py`` runs this file with ``TRITON_INTERPRET=1`` and ``SGLANG_USE_CPU_ENGINE=1``.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
from sglang.kernels.ops.speculative.cache_locs import (
    assign_draft_cache_locs_contiguous,
    assign_extend_cache_locs,
)
from sglang.kernels.ops.speculative.eagle import fill_accept_out_cache_loc, fill_bonus_tokens
from sglang.kernels.ops.speculative.multi_layer_eagle import rotate_input_ids_kernel
from sglang.kernels.ops.speculative.spec_tree import (
    sgl_build_tree_kernel_efficient_triton,
    verify_tree_greedy_kernel_triton,
)
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool
from test_cpu_stand_in import Tree, verify

from sglang_ssd_kernel.cpu_stand_in import functions


def test_twins_of_slot_functions():
    rows = torch.tensor([4, 1, 3])
    starts, ends = torch.tensor([0, 7, 40]), torch.tensor([50, 7, 43])
    slots = torch.randperm(53)
    expected = torch.zeros(5, 64, dtype=torch.int32)
    table = expected.clone()
    assign_req_to_token_pool[(3,)](rows, expected, starts, ends, slots, 64, 4)
    functions.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, 64)
    assert torch.equal(table, expected)

    expected_slots, got_slots = torch.zeros(53, dtype=torch.int64), torch.zeros(53, dtype=torch.int64)
    assign_extend_cache_locs[(3,)](rows, table, starts, ends, expected_slots, 64, 4)
    functions.assign_extend_cache_locs_cpu(rows, table, starts, ends, got_slots, 64)
    assert torch.equal(got_slots, expected_slots)
    assert torch.equal(got_slots, slots)

    expected_slots, got_slots = torch.zeros(18, dtype=torch.int64), torch.zeros(18, dtype=torch.int64)
    assign_draft_cache_locs_contiguous[(3,)](rows, table, starts, expected_slots, 64, 2, 3)
    functions.assign_draft_cache_locs_contiguous_cpu(rows, table, starts, got_slots, 64, 2, 3)
    assert torch.equal(got_slots, expected_slots)


def test_twins_of_copies_and_accepted_tokens():
    buffers = torch.randn(2, 6, 4)
    expected = buffers.clone()
    strides = torch.full((2,), buffers[0, 0].nbytes)
    targets, sources = torch.tensor([1, 2, 5]), torch.tensor([2, 3, 1])
    copy_all_layer_kv_cache_tiled[(2, 1)](
        torch.tensor([layer.data_ptr() for layer in expected], dtype=torch.uint64),
        strides,
        targets,
        sources,
        3,
        4,
        64,
    )
    functions.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in buffers], dtype=torch.uint64), strides, targets, sources
    )
    assert torch.equal(buffers, expected)

    tokens = torch.randperm(12).int().view(3, 4)
    lengths = torch.tensor([4, 1, 2], dtype=torch.int32)
    expected, got = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    fill_bonus_tokens[(3,)](tokens, lengths, expected, 4)
    functions.fill_bonus_tokens_cpu(tokens, lengths, got, 4)
    assert torch.equal(got, expected)

    accept_index = torch.tensor([0, -1, 4, 5, -1, 2], dtype=torch.int32)
    slots = torch.randperm(6)
    expected, got = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    fill_accept_out_cache_loc[(6,)](accept_index, slots, expected, 8)
    functions.fill_accept_out_cache_loc_cpu(accept_index, slots, got)
    assert torch.equal(got, expected)

    for select in (None, torch.tensor([4, 5, 6])):
        expected, got = torch.arange(10), torch.arange(10)
        arguments = (
            torch.tensor([0, 5, 6]),
            torch.tensor([5, 1, 4]),
            torch.tensor([[50], [51], [52]]),
            select,
        )
        # A block covers a whole part: the interpreter runs blocks one after the other, as the GPU does.
        rotate_input_ids_kernel[(3,)](expected, *arguments, 8)
        functions.rotate_input_ids_cpu(got, *arguments)
        assert torch.equal(got, expected)


@st.composite
def drafted_trees(draw):
    """Trees as EAGLE drafts them: per level ``topk`` nodes are continued by ``topk`` candidates each."""
    topk, depth = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_candidates = topk + (depth - 1) * topk * topk
    num_selected = draw(st.integers(1, num_candidates))
    batch_size = draw(st.integers(1, 2))
    parent_lists, selections = [], []
    for _ in range(batch_size):
        parents, level = [-1], list(range(topk))
        for deeper in range(depth - 1):
            parents += draw(st.permutations(level))[:topk]
            first = topk + deeper * topk * topk
            level = list(range(first, first + topk * topk))
        parent_lists.append(parents)
        selections.append(sorted(draw(st.permutations(range(num_candidates)))[:num_selected]))
    seq_lens = [draw(st.integers(0, 3)) for _ in range(batch_size)]
    mode = draw(st.sampled_from([functions.TREE_MASK_FULL, functions.TREE_MASK_QUERY_ONLY]))
    return lambda: Tree(parent_lists, selections, seq_lens, topk, depth, mode)


@settings(deadline=None, max_examples=30)
@given(drafted_trees(), st.data())
def test_twins_of_tree_functions(make_tree, data):
    expected, got = make_tree(), make_tree()
    parents, selected, seq_lens, *outputs, topk, depth, num_tokens, mode = expected.arguments
    batch_size = seq_lens.numel()
    sgl_build_tree_kernel_efficient_triton[(batch_size,)](
        parents,
        selected,
        seq_lens,
        seq_lens.cumsum(0) - seq_lens,
        *outputs,
        topk=topk,
        depth=depth,
        draft_token_num=num_tokens,
        tree_mask_mode=mode,
        batch_size=batch_size,
        parent_list_stride=parents.stride(0),
        selected_index_stride=selected.stride(0),
    )
    functions.build_tree_kernel_efficient_cpu(*got.arguments)
    assert got.outputs() == expected.outputs()

    tokens = st.lists(st.integers(0, 1), min_size=batch_size * num_tokens, max_size=batch_size * num_tokens)
    candidates, target = (torch.tensor(data.draw(tokens)).view(batch_size, num_tokens) for _ in range(2))

    def walk_twin(**arguments):
        verify_tree_greedy_kernel_triton[(batch_size,)](
            *arguments.values(),
            batch_size=batch_size,
            num_speculative_tokens=depth + 1,
            num_draft_tokens=num_tokens,
        )

    assert verify(got, candidates, target, depth + 1) == verify(
        got, candidates, target, depth + 1, function=walk_twin
    )


def test_twin_of_the_hash():
    seed = torch.tensor([0, -1, 2**63 - 1, -(2**40) - 3]).to(torch.uint64)
    positions, columns = torch.tensor([0, 7, 2**31 - 1, 4095]), torch.arange(50)
    expected = torch.zeros(4, 50, dtype=torch.uint32)
    murmur_hash32_kernel[(4, 1)](seed, positions, columns, expected, 4, 50, 64)
    assert functions.murmur_hash32_cpu(seed, positions, columns).tolist() == expected.tolist()
