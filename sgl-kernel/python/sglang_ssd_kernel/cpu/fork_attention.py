"""Attention of decode rows that share prefixes, for forks, verification and plain decode on a CPU.

A row's result depends on its own query and keys alone: bit for bit the same whatever other rows are in the batch, and
however its keys are split between prefix and tail. csrc/cpu/fork_attention.cpp says how. (The torch reference, which
answers where nothing is compiled, keeps that promise as well: it takes row by row.)
"""

from __future__ import annotations

import ctypes
from collections import Counter
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from .library import DTYPE_CODES, kernel_for


class ForkPlan(NamedTuple):
    """Which keys each row of a forward attends to, from ``make_plan``; all layers use the same one.

    Row i sees ``prefix[:prefix_lens[i]] + tail_slots[i, :tail_lens[i]]`` with the prefix of its group. All tensors
    are int32, contiguous, on the CPU.

    prefix_slots:  [sum of prefixes], KV slots of the groups' prefixes, one group after the other.
    prefix_starts: [groups + 1], where each prefix starts in them.
    row_groups:    [rows], group of each row.
    prefix_lens:   [rows], leading slots that a row takes from its group's prefix.
    tail_slots:    [rows, depth], KV slots that only this row sees, after those of the prefix.
    tail_lens:     [rows], how many of them count.
    row_order:     [rows], rows by group, and by falling ``prefix_lens`` within each.
    group_starts:  [groups + 1], where each group starts in that order.
    num_slots:     slots that the pools must have at least.
    """

    prefix_slots: torch.Tensor
    prefix_starts: torch.Tensor
    row_groups: torch.Tensor
    prefix_lens: torch.Tensor
    tail_slots: torch.Tensor
    tail_lens: torch.Tensor
    row_order: torch.Tensor
    group_starts: torch.Tensor
    num_slots: int


class ForkLayout(NamedTuple):
    """Decode rows whose slots stand in a table [table rows, width], such as SGLang's ``req_to_token``, and which of them
    share a prefix: row i sees ``shared_lens[i]`` slots of its group's base row, and the next ones, up to ``lens[i]`` in
    all, of its own row.

    group_sizes: [groups], rows of each; they stand side by side.
    base_rows:   [groups], row of the table that holds the shared prefix.
    rows:        [rows], row of the table that holds the rest.
    shared_lens: [rows].
    lens:        [rows], the token of this forward included.
    """

    group_sizes: list[int]
    base_rows: list[int]
    rows: list[int]
    shared_lens: list[int]
    lens: list[int]

    @classmethod
    def without_forks(cls, rows: list[int], lens: list[int]) -> ForkLayout:
        """Plain decoding: every row on its own."""
        return cls([1] * len(rows), rows, rows, lens, lens)


def make_plan(
    prefix_slots: torch.Tensor,
    prefix_starts: torch.Tensor,
    row_groups: torch.Tensor,
    prefix_lens: torch.Tensor,
    tail_slots: torch.Tensor,
    tail_lens: torch.Tensor,
    num_slots: int,
) -> ForkPlan:
    """Check the six tensors of a ``ForkPlan`` (int32 or int64, CPU) against each other, and order the rows.

    ``num_slots`` is the size of the pools. Raises ValueError, naming what does not fit.
    """
    vectors = {
        "prefix_slots": prefix_slots, "prefix_starts": prefix_starts, "row_groups": row_groups,
        "prefix_lens": prefix_lens, "tail_lens": tail_lens,
    }  # fmt: skip
    for name, tensor in vectors.items():
        _check_indices(name, tensor, 1)
    _check_indices("tail_slots", tail_slots, 2)
    # A few dozen rows are quicker as lists; slots, which may be thousands, stay tensors.
    starts, groups, lens = prefix_starts.tolist(), row_groups.tolist(), prefix_lens.tolist()
    _check_prefixes(prefix_slots, starts, num_slots)
    _check_rows(starts, groups, lens)
    _check_tails(lens, prefix_slots, tail_slots, tail_lens, num_slots)
    tensors = (prefix_slots, prefix_starts, row_groups, prefix_lens, tail_slots, tail_lens)
    tensors = (tensor.to(torch.int32).contiguous() for tensor in tensors)
    return ForkPlan(*tensors, *_order_rows(groups, lens, len(starts) - 1), num_slots)


def fork_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: ForkPlan,
    scaling: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scaling q k) v of each row over its keys in the plan. Accumulates in float32.

    q:      [rows, Hq, D], any strides but contiguous in D.
    k_pool: [slots, Hkv, D], v_pool: [slots, Hkv, Dv], the same dtype as q, likewise strided. Hkv divides Hq.
    out:    [rows, Hq, Dv], contiguous, is written and returned; made here if None.

    Raises ValueError, with the shapes, when tensors and plan do not fit each other.
    """
    if not isinstance(plan, ForkPlan):
        raise ValueError(f"Tensors on a CPU need a ForkPlan: {type(plan).__name__}, q {tuple(q.shape)}")
    out_shape = (q.shape[0], q.shape[1], v_pool.shape[-1]) if q.dim() == 3 else ()
    if out is None:
        out = q.new_empty(out_shape)
    check_call(q, k_pool, v_pool, plan.row_groups.numel(), plan.num_slots, out, out_shape)
    kernel = kernel_for(q, "ssd_fork_attention")
    if kernel is None:
        return out.copy_(reference(q, k_pool, v_pool, plan, scaling))
    kernel(ctypes.byref(_arguments(q, k_pool, v_pool, plan, scaling, out)))
    return out


def reference(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, plan: ForkPlan, scaling: float
) -> torch.Tensor:
    """What ``fork_attention`` computes, in torch and row by row, in float32 (float64 for such a q)."""
    heads_per_kv = q.shape[1] // k_pool.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    results = []
    for row, slots in enumerate(row_slots(plan)):
        slots = slots.to(k_pool.device)
        keys = k_pool[slots].to(dtype).repeat_interleave(heads_per_kv, dim=1)
        values = v_pool[slots].to(dtype).repeat_interleave(heads_per_kv, dim=1)
        weights = torch.einsum("hd,khd->hk", q[row].to(dtype) * scaling, keys).softmax(-1)
        results.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(results).to(q.dtype)


def row_slots(plan: ForkPlan) -> list[torch.Tensor]:
    """The KV slots of each row in order, int64."""
    starts, groups = plan.prefix_starts.tolist(), plan.row_groups.tolist()
    return [
        torch.cat((plan.prefix_slots[starts[group] :][:prefix_len], tail[:tail_len])).long()
        for group, prefix_len, tail, tail_len in zip(
            groups, plan.prefix_lens.tolist(), plan.tail_slots, plan.tail_lens.tolist()
        )
    ]


class ForkAttentionArguments(ctypes.Structure):
    """Arguments of the compiled kernel, field by field as in csrc/cpu/fork_attention.cpp. Every field has 8 bytes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k_pool", "v_pool", "out")),
        *((name, ctypes.c_void_p) for name in ("prefix_slots", "prefix_starts", "prefix_lens")),
        *((name, ctypes.c_void_p) for name in ("tail_slots", "tail_lens", "row_order", "group_starts")),
        *((name, ctypes.c_int64) for name in ("q_row_stride", "q_head_stride")),
        *((name, ctypes.c_int64) for name in ("k_slot_stride", "k_head_stride")),
        *((name, ctypes.c_int64) for name in ("v_slot_stride", "v_head_stride")),
        *((name, ctypes.c_int64) for name in ("num_groups", "tail_depth")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_width", "value_width")),
        ("scaling", ctypes.c_double),
        ("dtype", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    ]


def _arguments(q, k_pool, v_pool, plan: ForkPlan, scaling: float, out) -> ForkAttentionArguments:
    return ForkAttentionArguments(
        *(tensor.data_ptr() for tensor in (q, k_pool, v_pool, out)),
        *(tensor.data_ptr() for tensor in (plan.prefix_slots, plan.prefix_starts, plan.prefix_lens)),
        *(tensor.data_ptr() for tensor in (plan.tail_slots, plan.tail_lens)),
        *(tensor.data_ptr() for tensor in (plan.row_order, plan.group_starts)),
        *q.stride()[:2],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        plan.group_starts.numel() - 1,
        plan.tail_slots.shape[1],
        q.shape[1],
        *k_pool.shape[1:],
        v_pool.shape[2],
        scaling,
        DTYPE_CODES[q.dtype],
        torch.get_num_threads(),
    )


def check_call(q, k_pool, v_pool, num_rows: int, num_slots: int, out, out_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless tensors and plan fit each other. Looks at no element: this runs in every layer."""
    shapes = f"q {tuple(q.shape)}, k_pool {tuple(k_pool.shape)}, v_pool {tuple(v_pool.shape)}"
    if not q.dim() == k_pool.dim() == v_pool.dim() == 3:
        raise ValueError(f"Three dimensions each are needed: {shapes}")
    if q.shape[0] != num_rows:
        raise ValueError(f"The plan has {num_rows} rows: {shapes}")
    if k_pool.shape[:2] != v_pool.shape[:2] or k_pool.shape[2] != q.shape[2]:
        raise ValueError(f"Pools must have the same slots and heads, and keys the width of q: {shapes}")
    if k_pool.shape[0] < num_slots:
        raise ValueError(f"The plan is for {num_slots} slots: {shapes}")
    if not (0 < k_pool.shape[1] <= q.shape[1] and q.shape[1] % k_pool.shape[1] == 0):
        raise ValueError(f"Key heads must divide query heads: {shapes}")
    if not (q.dtype == k_pool.dtype == v_pool.dtype == out.dtype):
        raise ValueError(f"Dtypes differ: {q.dtype}, {k_pool.dtype}, {v_pool.dtype}, out {out.dtype}")
    if not (q.device == k_pool.device == v_pool.device == out.device):
        raise ValueError(f"Devices differ: {q.device}, {k_pool.device}, {v_pool.device}, out {out.device}")
    if not (q.stride(2) == k_pool.stride(2) == v_pool.stride(2) == 1):
        raise ValueError(f"The last dimension must be contiguous: {shapes}")
    if tuple(out.shape) != out_shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous and {out_shape}: {tuple(out.shape)}")


def _check_indices(name: str, tensor: torch.Tensor, num_dims: int) -> None:
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be int32 or int64 on the CPU: {tensor.dtype}, {tensor.device}")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions: {tuple(tensor.shape)}")


def _check_slots(name: str, slots: torch.Tensor, num_slots: int) -> None:
    if slots.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low < 0 or high >= num_slots:
        raise ValueError(f"{name} must lie in [0, {num_slots}): {low} to {high}, shape {tuple(slots.shape)}")


def _check_prefixes(slots: torch.Tensor, starts: list[int], num_slots: int) -> None:
    if not 0 < num_slots < 2**31:
        raise ValueError(f"num_slots must be positive and fit int32: {num_slots}")
    _check_slots("prefix_slots", slots, num_slots)
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != slots.numel() or starts != sorted(starts):
        raise ValueError(f"prefix_starts must rise from 0 to {slots.numel()}: {starts}")


def _check_rows(starts: list[int], groups: list[int], prefix_lens: list[int]) -> None:
    num_rows, num_groups = len(groups), len(starts) - 1
    if num_rows == 0:
        raise ValueError("No rows: row_groups (0,)")
    if len(prefix_lens) != num_rows:
        raise ValueError(f"prefix_lens must have {num_rows} rows: ({len(prefix_lens)},)")
    if min(groups) < 0 or max(groups) >= num_groups:
        raise ValueError(f"row_groups must lie in [0, {num_groups}): {groups}")
    num_runs = 1 + sum(left != right for left, right in pairwise(groups))
    if num_runs != len(set(groups)):
        raise ValueError(f"Rows of one group must stand side by side: row_groups {groups}")
    for row, (group, prefix_len) in enumerate(zip(groups, prefix_lens)):
        group_len = starts[group + 1] - starts[group]
        if not 0 <= prefix_len <= group_len:
            raise ValueError(f"prefix_lens[{row}] is {prefix_len}, its group's prefix has {group_len}")


def _check_tails(
    prefix_lens: list[int],
    prefix_slots: torch.Tensor,
    tail_slots: torch.Tensor,
    tail_lens: torch.Tensor,
    num_slots: int,
) -> None:
    num_rows, depth = len(prefix_lens), tail_slots.shape[1]
    if tail_slots.shape[0] != num_rows or tail_lens.numel() != num_rows:
        shapes = f"tail_slots {tuple(tail_slots.shape)}, tail_lens {tuple(tail_lens.shape)}"
        raise ValueError(f"Tails must have {num_rows} rows: {shapes}")
    for row, (prefix_len, tail_len) in enumerate(zip(prefix_lens, tail_lens.tolist())):
        if not 0 <= tail_len <= depth:
            raise ValueError(f"tail_lens[{row}] is {tail_len}, tail_slots is {tuple(tail_slots.shape)}")
        if prefix_len + tail_len == 0:
            raise ValueError(f"Row {row} has no key: prefix_lens and tail_lens are 0")
    # What stands after the end of a tail does not count and may be anything.
    in_tail = torch.arange(depth) < tail_lens.unsqueeze(1)
    in_tails = tail_slots[in_tail]
    _check_slots("tail_slots", in_tails, num_slots)
    _check_tails_are_private(prefix_slots, in_tails, num_slots)


def _check_tails_are_private(prefix_slots: torch.Tensor, in_tails: torch.Tensor, num_slots: int) -> None:
    """A slot of a tail is in no other tail, nor in a prefix: whoever writes it would change what another row sees. (Prefixes
    of two groups may share slots, as requests with a common beginning do.)"""
    if in_tails.numel() == 0:
        return
    is_in_tail = torch.zeros(num_slots, dtype=torch.bool)
    is_in_tail[in_tails] = True
    slots, counts = in_tails.unique(return_counts=True)
    if slots.numel() != in_tails.numel():
        shape = tuple(in_tails.shape)
        raise ValueError(f"tail_slots overlap: slot {int(slots[counts.argmax()])} counts twice in {shape}")
    overlap = is_in_tail[prefix_slots]
    if overlap.any():
        slot, shapes = int(prefix_slots[overlap][0]), (tuple(prefix_slots.shape), tuple(in_tails.shape))
        raise ValueError(f"tail_slots overlap prefix_slots: slot {slot} is in both, shapes {shapes}")


def _order_rows(
    groups: list[int], prefix_lens: list[int], num_groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``row_order`` and ``group_starts`` of the plan."""
    order = sorted(range(len(groups)), key=lambda row: (groups[row], -prefix_lens[row]))
    sizes = Counter(groups)
    starts = accumulate((sizes[group] for group in range(num_groups)), initial=0)
    return torch.tensor(order, dtype=torch.int32), torch.tensor(list(starts), dtype=torch.int32)
