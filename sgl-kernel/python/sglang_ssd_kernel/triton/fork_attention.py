"""Attention of decode rows that share prefixes, on a GPU: the operation of ``cpu.fork_attention``.

Two launches. The first reads each group's prefix once for a tile of its rows and query heads, as far as all rows of the
group see whole blocks of it, and leaves the state of the online softmax of every row. The second continues each row
over its own keys, which are the rest of its prefix and its tail, and merges.

What a row's bits depend on: its query and keys, their shapes and dtypes, ``PlanLimits.split_keys``, and whether
the tiles have 128 rows (``tile_rows``: those are multiplied in another way). Not on other rows, nor on how
its keys are divided between prefix and tail, because
- keys are cut into blocks of BLOCK_KEYS, and these into splits, by their place in the row's own sequence;
- both kernels take in a block by the same ``_attend`` with tiles of one kind, and the second one starts from the state
  that the first has left in the middle of a split;
- the states of splits are merged in their order.
"""

from __future__ import annotations

import math
from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..cpu.fork_attention import ForkLayout, ForkPlan, check_call
from .device import has_kernels

#: Keys of one step. Few, because each row reads its last block alone.
BLOCK_KEYS = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEADS_PER_KV = 16
# The second kernel has few rows, but two accumulators: it takes lower tiles and fewer columns. Heights are those that fit
# the registers and for which the compiler adds up a row in the same way in both kernels: by four warps in tiles of 16 or
# 32 rows, by one in tiles of 128 here and 64 there. test_triton_compile.py looks whether it does.
_HIGH_TILE, _HIGH_FINISH_TILE = 128, 64
_MAX_COLUMNS, _MAX_FINISH_COLUMNS = 128, 64


class PlanLimits(NamedTuple):
    """Sizes that a ``DevicePlan`` is made for. They fix its tensors and the grids of the kernels, so that a CUDA graph
    runs every plan within them.

    rows, groups, depth: as in ``ForkPlan``. Rows and groups that a plan does not fill are padding.
    prefix_slots:        slots of all prefixes together.
    prefix_len:          the longest prefix.
    group_rows:          the most rows of one group.
    split_keys:          keys that one program takes, a multiple of BLOCK_KEYS. Fewer are quicker for a small batch;
                         each split of each row costs a float32 state to write and read.
    """

    rows: int
    groups: int
    depth: int
    prefix_slots: int
    prefix_len: int
    group_rows: int
    split_keys: int = 512


#: The tensors of a ``DevicePlan``, int32: those of ``ForkPlan``, and
#: tail_starts: [rows], where each row's tail starts in ``tail_slots``, whatever its shape.
#: shared_lens: [groups], the leading keys of a group that the first kernel takes in for all its rows.
#: parts:       [groups * splits], what there is for it to do: group * splits + split. num_parts: [1], how many of them count.
PlanTensors = namedtuple(
    "PlanTensors", (*ForkPlan._fields[:-1], "tail_starts", "shared_lens", "parts", "num_parts")
)


class DevicePlan:
    """A ``ForkPlan`` in fixed buffers on a device. Rows that no plan has filled are padding: their output is 0."""

    def __init__(self, limits: PlanLimits, device: torch.device | str) -> None:
        """Raises ValueError when a limit is not positive (0 where there may be none of it) or splits are no whole
        blocks."""
        may_be_none = ("depth", "prefix_slots", "prefix_len")
        if any(value < (name not in may_be_none) for name, value in limits._asdict().items()):
            raise ValueError(f"Limits must be positive: {limits}")
        if limits.split_keys % BLOCK_KEYS:
            raise ValueError(f"split_keys must be a multiple of {BLOCK_KEYS}: {limits.split_keys}")
        self.limits = limits
        #: Slots that the pools must have at least.
        self.num_slots = 0
        #: Programs of the first kernel a kv head: it has a fixed grid, and a plan may have less to do than the limits.
        self.num_programs = min(limits.groups * self.num_splits, _programs_at_once(device))
        self._storage = torch.zeros(sum(map(math.prod, _shapes(limits))), dtype=torch.int32, device=device)
        self.tensors = _views(self._storage, limits)

    @property
    def num_splits(self) -> int:
        """Splits that the first kernel may reach."""
        return _num_splits(self.limits)

    def update(self, plan: ForkPlan) -> None:
        """Put ``plan`` (from ``make_plan``) into the buffers: one copy, on the current stream, which is not waited for.

        Raises ValueError when it exceeds the limits.
        """
        self._check_sizes(_limits_of(plan, self.limits.split_keys))
        with self._refill() as views:
            _fill(views, plan)
            self._fill_parts(views)
        self.num_slots = plan.num_slots

    def _check_sizes(self, sizes: PlanLimits) -> None:
        if any(size > limit for size, limit in zip(sizes, self.limits)):
            raise ValueError(f"The plan needs {sizes}, the buffers hold {self.limits}")

    @contextmanager
    def _refill(self) -> Iterator[PlanTensors]:
        """Zeros to be filled, which go to the device at the end."""
        # Fresh each time: torch reuses pinned memory only after the copy that reads it.
        staging = torch.zeros(
            self._storage.shape, dtype=torch.int32, pin_memory=self._storage.device.type == "cuda"
        )
        yield _views(staging, self.limits)
        self._storage.copy_(staging, non_blocking=True)

    def _fill_parts(self, views: PlanTensors) -> None:
        """What the first kernel has to do, from ``row_groups``, ``prefix_lens`` and ``group_starts``."""
        num_rows = int(views.group_starts[-1])
        shortest = torch.full_like(views.shared_lens, torch.iinfo(torch.int32).max)
        shortest.scatter_reduce_(0, views.row_groups[:num_rows].long(), views.prefix_lens[:num_rows], "amin")
        has_rows = views.group_starts[1:] > views.group_starts[:-1]
        views.shared_lens.copy_(torch.where(has_rows, shortest // BLOCK_KEYS * BLOCK_KEYS, 0))
        splits = torch.arange(self.num_splits, dtype=torch.int32)
        is_part = splits * self.limits.split_keys < views.shared_lens[:, None]
        parts = is_part.flatten().nonzero()[:, 0]
        views.parts[: parts.numel()] = parts
        views.num_parts[0] = parts.numel()


class TablePlan(DevicePlan):
    """A plan of rows whose slots the kernels read in the table where they stand, at the time they run: none is copied.

    Its groups have at most ``limits.group_rows`` rows; larger ones are cut, and read their prefix more than once.
    """

    def __init__(self, limits: PlanLimits, table: torch.Tensor) -> None:
        """table: int32 [rows, width], contiguous, of fewer than 2^31 slots, on the plan's device. ``depth`` and
        ``prefix_slots`` of the limits mean nothing here. Raises ValueError for another table."""
        if table.dtype != torch.int32 or table.dim() != 2 or not table.is_contiguous():
            raise ValueError(
                f"The table must be int32 [rows, width], contiguous: {table.dtype} {tuple(table.shape)}"
            )
        if table.numel() >= 2**31:
            raise ValueError(f"The table must have fewer than 2^31 slots: {tuple(table.shape)}")
        super().__init__(limits._replace(depth=0, prefix_slots=0), table.device)
        slots = table.view(-1)
        self.tensors = self.tensors._replace(prefix_slots=slots, tail_slots=slots)
        self._table_shape = table.shape

    def update_layout(self, layout: ForkLayout) -> None:
        """Put ``layout`` into the buffers: one copy, on the current stream, which is not waited for. The output of a row
        of length 0 is 0.

        Raises ValueError when it exceeds the limits or the table. What stands in the table is not checked.
        """
        _check_layout(layout, self._table_shape)
        cut = [
            (min(size - start, self.limits.group_rows), base_row)
            for size, base_row in zip(layout.group_sizes, layout.base_rows)
            for start in range(0, size, self.limits.group_rows)
        ]
        sizes, base_rows = ([pair[i] for pair in cut] for i in range(2))
        num_rows, num_groups, width = len(layout.lens), len(sizes), self._table_shape[1]
        self._check_sizes(
            self.limits._replace(rows=num_rows, groups=num_groups, prefix_len=max(layout.shared_lens))
        )
        with self._refill() as views:
            for view, values in (
                (views.prefix_starts, [row * width for row in base_rows]),
                (views.row_groups, [group for group, size in enumerate(sizes) for _ in range(size)]),
                (views.prefix_lens, layout.shared_lens),
                (views.tail_starts, [row * width + n for row, n in zip(layout.rows, layout.shared_lens)]),
                (views.tail_lens, [n - shared for n, shared in zip(layout.lens, layout.shared_lens)]),
                (views.row_order, range(num_rows)),
                (views.group_starts, [0, *accumulate(sizes)]),
            ):
                view[: len(values)] = torch.tensor(values, dtype=torch.int32)
            views.group_starts[num_groups:] = num_rows
            self._fill_parts(views)


def to_device(plan: ForkPlan, device: torch.device | str, split_keys: int = 512) -> DevicePlan:
    """``plan`` in buffers of just its size."""
    device_plan = DevicePlan(_limits_of(plan, split_keys), device)
    device_plan.update(plan)
    return device_plan


def tile_rows(limits: PlanLimits, dtype: torch.dtype, heads_per_kv: int, width: int) -> int:
    """Rows times query heads that one program of the first kernel takes at once: 16, 32 or 128.

    ``width`` is that of keys or values, whichever is more.
    """
    num_pairs = limits.group_rows * heads_per_kv
    if num_pairs <= 16 or dtype == torch.float32:
        return 16
    return 32 if num_pairs <= 64 or width > _MAX_COLUMNS else _HIGH_TILE


def rows_of_a_tile(limits: PlanLimits, dtype: torch.dtype, heads_per_kv: int, width: int) -> int:
    """``group_rows`` with which every plan has the tile of ``limits``, and a group just fits it: for a ``TablePlan``, whose
    bits then do not depend on its other limits."""
    return max(1, tile_rows(limits, dtype, heads_per_kv, width) // heads_per_kv)


def fork_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: DevicePlan,
    scaling: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scaling q k) v of each row over its keys in the plan. Accumulates in float32, waits for nothing.

    q:      [rows, Hq, D], any strides but contiguous in D; float32, bfloat16 or float16. Hq is 1 to 16 times Hkv.
    k_pool: [slots, Hkv, D], v_pool: [slots, Hkv, Dv], the same dtype as q, likewise strided.
    out:    [rows, Hq, Dv], contiguous, is written and returned; made here if None. Rows of padding become 0.

    Raises ValueError, with the shapes, when tensors and plan do not fit each other.
    """
    if not isinstance(plan, DevicePlan):
        raise ValueError(
            f"Kernels need a DevicePlan: {type(plan).__name__}, q {tuple(q.shape)} on {q.device}"
        )
    out_shape = (q.shape[0], q.shape[1], v_pool.shape[-1]) if q.dim() == 3 else ()
    if out is None:
        out = q.new_empty(out_shape)
    check_call(q, k_pool, v_pool, plan.limits.rows, plan.num_slots, out, out_shape)
    heads_per_kv = q.shape[1] // k_pool.shape[1]
    if not has_kernels(q) or q.dtype not in DTYPES or heads_per_kv > MAX_HEADS_PER_KV:
        raise ValueError(
            f"No kernel for {q.device}, {q.dtype}: q {tuple(q.shape)}, k_pool {tuple(k_pool.shape)}"
        )
    if q.device != plan.tensors.row_groups.device:
        raise ValueError(f"The plan is on {plan.tensors.row_groups.device}: q {tuple(q.shape)} on {q.device}")
    _launch(q, k_pool, v_pool, plan, scaling, out)
    return out


def constants(
    dtype: torch.dtype,
    heads_per_kv: int,
    key_width: int,
    value_width: int,
    limits: PlanLimits,
    is_hip: bool = torch.version.hip is not None,
) -> tuple[dict, dict]:
    """The compile-time arguments of the two kernels, with ``num_warps`` and ``num_stages``."""
    common = {
        "HEADS": heads_per_kv,
        "KEY_WIDTH": key_width,
        "VALUE_WIDTH": value_width,
        "KEY_COLUMNS": max(16, triton.next_power_of_2(key_width)),
        "BLOCK_KEYS": BLOCK_KEYS,
        "SPLIT_KEYS": limits.split_keys,
        # The interpreter holds bfloat16 as integers, which it cannot multiply.
        "WIDEN": triton.knobs.runtime.interpret and dtype == torch.bfloat16,
    }
    columns = max(16, triton.next_power_of_2(value_width))
    tile_width = max(key_width, value_width)
    tile = tile_rows(limits, dtype, heads_per_kv, tile_width)
    finish_tile = min(tile, _HIGH_FINISH_TILE)
    # Two stages each for slots and for what lies there; on ROCm and in float32 a second buffer would not fit.
    num_stages, num_warps, finish_warps = (2 if is_hip else 5), max(4, tile // 16), 4
    if dtype == torch.float32:  # without tensor cores; wider than 128 the second kernel spills even so
        num_stages = 2 if tile_width <= _MAX_COLUMNS else 1
        num_warps = finish_warps = 4 if tile_width <= 64 else 8
    shared = common | {"TILE": tile, "VALUE_COLUMNS": columns}
    finish = common | {"TILE": finish_tile, "VALUE_COLUMNS": min(columns, _MAX_FINISH_COLUMNS)}
    return (
        shared | {"num_warps": num_warps, "num_stages": num_stages},
        finish | {"num_warps": finish_warps, "num_stages": min(2, num_stages)},
    )


def _launch(q, k_pool, v_pool, plan: DevicePlan, scaling: float, out) -> None:
    num_rows, num_heads, key_width = q.shape
    num_kv_heads, value_width = v_pool.shape[1:]
    heads_per_kv = num_heads // num_kv_heads
    shared, finish = constants(q.dtype, heads_per_kv, key_width, value_width, plan.limits)
    states = q.new_empty((num_rows, num_heads, plan.num_splits, value_width), dtype=torch.float32)
    maxima, sums = q.new_empty((2, num_rows, num_heads, plan.num_splits), dtype=torch.float32)
    strides = (*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2])
    pools = (q, k_pool, v_pool, states, maxima, sums)
    rest = (plan.num_splits, scaling * math.log2(math.e), num_kv_heads)
    tensors = plan.tensors
    if plan.num_splits:
        num_tiles = triton.cdiv(plan.limits.group_rows * heads_per_kv, shared["TILE"])
        # Tiles of one split stand side by side: those after the first find its keys in the cache.
        _shared_kernel[(num_tiles, plan.num_programs, num_kv_heads)](
            *pools,
            *(tensors.prefix_slots, tensors.prefix_starts, tensors.row_order),
            *(tensors.group_starts, tensors.shared_lens, tensors.parts, tensors.num_parts),
            *strides,
            *rest,
            **shared,
        )
    _finish_kernel[(num_rows, num_kv_heads, triton.cdiv(value_width, finish["VALUE_COLUMNS"]))](
        *pools,
        out,
        *(tensors.prefix_slots, tensors.prefix_starts, tensors.row_groups, tensors.prefix_lens),
        *(tensors.tail_slots, tensors.tail_starts, tensors.tail_lens, tensors.shared_lens),
        *strides,
        *rest,
        **finish,
    )


# --- plans ------------------------------------------------------------------------------------------------------------


def _num_splits(limits: PlanLimits) -> int:
    return triton.cdiv(limits.prefix_len, limits.split_keys)


def _programs_at_once(device: torch.device | str) -> int:
    """Several for each processor of the device, whichever share of them runs at a time."""
    if torch.device(device).type == "cpu":  # the interpreter: few, so that programs have several parts each
        return 2
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def _check_layout(layout: ForkLayout, table_shape: tuple[int, int]) -> None:
    height, width = table_shape
    if not len(layout.lens) == len(layout.rows) == len(layout.shared_lens) == sum(layout.group_sizes):
        raise ValueError(f"All rows need a group, a row of the table and two lengths: {layout}")
    if len(layout.base_rows) != len(layout.group_sizes) or min(layout.group_sizes, default=0) < 1:
        raise ValueError(f"Each group needs rows and a base row: {layout}")
    if not all(0 <= row < height for row in (*layout.base_rows, *layout.rows)):
        raise ValueError(f"Rows must lie in the table {tuple(table_shape)}: {layout}")
    if not all(0 <= shared <= n <= width for shared, n in zip(layout.shared_lens, layout.lens)):
        raise ValueError(f"0 <= shared_lens <= lens <= {width}: {layout}")


def _shapes(limits: PlanLimits) -> PlanTensors:
    return PlanTensors(
        prefix_slots=(limits.prefix_slots,),
        prefix_starts=(limits.groups + 1,),
        row_groups=(limits.rows,),
        prefix_lens=(limits.rows,),
        tail_slots=(limits.rows, limits.depth),
        tail_lens=(limits.rows,),
        row_order=(limits.rows,),
        group_starts=(limits.groups + 1,),
        tail_starts=(limits.rows,),
        shared_lens=(limits.groups,),
        parts=(limits.groups * _num_splits(limits),),
        num_parts=(1,),
    )


def _views(storage: torch.Tensor, limits: PlanLimits) -> PlanTensors:
    shapes = _shapes(limits)
    parts = storage.split([math.prod(shape) for shape in shapes])
    return PlanTensors(*(part.view(shape) for part, shape in zip(parts, shapes)))


def _limits_of(plan: ForkPlan, split_keys: int) -> PlanLimits:
    return PlanLimits(
        rows=plan.row_groups.numel(),
        groups=plan.group_starts.numel() - 1,
        depth=plan.tail_slots.shape[1],
        prefix_slots=plan.prefix_slots.numel(),
        prefix_len=int(plan.prefix_lens.max()),
        group_rows=max(Counter(plan.row_groups.tolist()).values()),
        split_keys=split_keys,
    )


def _fill(views: PlanTensors, plan: ForkPlan) -> None:
    for view, tensor in zip(views, plan[:-1]):
        view[tuple(map(slice, tensor.shape))] = tensor
    views.tail_starts.copy_(torch.arange(views.tail_starts.numel()) * views.tail_slots.shape[1])
    # Groups of padding hold no rows.
    views.group_starts[plan.group_starts.numel() :] = plan.row_groups.numel()


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _multiply(left, right, WIDEN: tl.constexpr):
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _attend(
    maxima, sums, acc, q, k_pool, v_pool, prefix, tail, prefix_len, first, last, k_slot_stride, v_slot_stride, scale,
    first_column, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, BLOCK_KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Take keys [first, last) of the rows into the state of their softmax. ``first`` starts a block.

    A key's slot is ``prefix[place]``, from ``prefix_len`` on ``tail[place - prefix_len]``. The state: ``maxima`` [TILE]
    of the scores in powers of 2, ``sums`` [TILE] of the weights, ``acc`` [TILE, VALUE_COLUMNS] of weighted values.
    """
    key_column, column = tl.arange(0, KEY_COLUMNS), first_column + tl.arange(0, VALUE_COLUMNS)
    for start in range(first, last, BLOCK_KEYS):
        place = start + tl.arange(0, BLOCK_KEYS)
        is_key, in_prefix = place < last, place < prefix_len
        slots = tl.load(prefix + place, mask=is_key & in_prefix, other=0)
        slots += tl.load(tail + (place - prefix_len), mask=is_key & (place >= prefix_len), other=0)
        slots = slots.to(tl.int64)
        keys = tl.load(
            k_pool + slots[None, :] * k_slot_stride + key_column[:, None],
            mask=is_key[None, :] & (key_column < KEY_WIDTH)[:, None],
            other=0.0,
        )
        scores = tl.where(is_key[None, :], _multiply(q, keys, WIDEN) * scale, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maxima[:, None])
        shrink = tl.exp2(maxima - new_maxima)
        maxima, sums = new_maxima, sums * shrink + tl.sum(weights, 1)
        values = tl.load(
            v_pool + slots[:, None] * v_slot_stride + column[None, :],
            mask=is_key[:, None] & (column < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        acc = acc * shrink[:, None] + _multiply(weights.to(values.dtype), values, WIDEN)
    return maxima, sums, acc


@triton.jit
def _merge(maxima, sums, acc, split_maxima, split_sums, split_acc):
    """The state of the keys of both, of which the second may hold none, but not both."""
    new_maxima = tl.maximum(maxima, split_maxima)
    shrink, split_shrink = tl.exp2(maxima - new_maxima), tl.exp2(split_maxima - new_maxima)
    sums = sums * shrink + split_sums * split_shrink
    return new_maxima, sums, acc * shrink[:, None] + split_acc * split_shrink[:, None]


@triton.jit
def _shared_kernel(
    q, k_pool, v_pool, states, all_maxima, all_sums, prefix_slots, prefix_starts, row_order, group_starts, shared_lens,
    parts, num_parts, q_row_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride,
    num_splits, scale, num_kv_heads,
    HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Splits of groups' shared keys, one after the other, for one kv head and TILE pairs of row and query head."""
    tile, kv_head = tl.program_id(0), tl.program_id(2)
    key_column, column = tl.arange(0, KEY_COLUMNS), tl.arange(0, VALUE_COLUMNS)
    for index in range(tl.program_id(1), tl.load(num_parts), tl.num_programs(1)):
        part = tl.load(parts + index)
        group, split = part // num_splits, part % num_splits
        first = split * SPLIT_KEYS
        last = tl.minimum(first + SPLIT_KEYS, tl.load(shared_lens + group))
        first_row = tl.load(group_starts + group)
        num_pairs = (tl.load(group_starts + group + 1) - first_row) * HEADS
        if tile * TILE < num_pairs:
            pair = tile * TILE + tl.arange(0, TILE)
            is_pair = pair < num_pairs
            row = tl.load(row_order + first_row + pair // HEADS, mask=is_pair, other=0).to(tl.int64)
            head = kv_head * HEADS + pair % HEADS
            queries = tl.load(
                q + (row * q_row_stride + head * q_head_stride)[:, None] + key_column[None, :],
                mask=is_pair[:, None] & (key_column < KEY_WIDTH)[None, :],
                other=0.0,
            )
            prefix = prefix_slots + tl.load(prefix_starts + group)
            maxima, sums, acc = _attend(
                tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32),
                tl.zeros((TILE, VALUE_COLUMNS), tl.float32), queries,
                k_pool + kv_head * k_head_stride, v_pool + kv_head * v_head_stride, prefix, prefix, last, first, last,
                k_slot_stride, v_slot_stride, scale, 0,
                KEY_WIDTH, VALUE_WIDTH, KEY_COLUMNS, VALUE_COLUMNS, BLOCK_KEYS, WIDEN,
            )  # fmt: skip
            state = (row * (num_kv_heads * HEADS) + head) * num_splits + split
            tl.store(all_maxima + state, maxima, mask=is_pair)
            tl.store(all_sums + state, sums, mask=is_pair)
            tl.store(
                states + state[:, None] * VALUE_WIDTH + column[None, :],
                acc,
                mask=is_pair[:, None] & (column < VALUE_WIDTH)[None, :],
            )


@triton.jit
def _finish_kernel(
    q, k_pool, v_pool, states, all_maxima, all_sums, out, prefix_slots, prefix_starts, row_groups, prefix_lens,
    tail_slots, tail_starts, tail_lens, shared_lens,
    q_row_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride,
    num_splits, scale, num_kv_heads,
    HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The keys of one row after the shared ones, and its output, for one kv head and some columns of the values."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_column = tl.program_id(2) * VALUE_COLUMNS
    prefix_len = tl.load(prefix_lens + row)
    num_keys = prefix_len + tl.load(tail_lens + row)
    group = tl.load(row_groups + row)
    shared_len = tl.load(shared_lens + group)

    lane = tl.arange(0, TILE)
    is_head = lane < HEADS
    head = kv_head * HEADS + lane
    key_column, column = tl.arange(0, KEY_COLUMNS), first_column + tl.arange(0, VALUE_COLUMNS)
    in_state = is_head[:, None] & (column < VALUE_WIDTH)[None, :]
    state = (row * (num_kv_heads * HEADS) + head) * num_splits
    acc_state = state[:, None] * VALUE_WIDTH + column[None, :]

    maxima, sums = tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, VALUE_COLUMNS), tl.float32)
    num_whole = tl.minimum(shared_len, num_keys) // SPLIT_KEYS
    for split in tl.range(0, num_whole, num_stages=3):
        split_maxima = tl.load(all_maxima + state + split, mask=is_head, other=0.0)
        split_sums = tl.load(all_sums + state + split, mask=is_head, other=0.0)
        split_acc = tl.load(states + acc_state + split * VALUE_WIDTH, mask=in_state, other=0.0)
        maxima, sums, acc = _merge(maxima, sums, acc, split_maxima, split_sums, split_acc)

    queries = tl.load(
        q + row * q_row_stride + (head * q_head_stride)[:, None] + key_column[None, :],
        mask=is_head[:, None] & (key_column < KEY_WIDTH)[None, :],
        other=0.0,
    )
    prefix = prefix_slots + tl.load(prefix_starts + group)
    tail = tail_slots + tl.load(tail_starts + row)
    for split in range(num_whole, tl.cdiv(num_keys, SPLIT_KEYS)):
        first, last = split * SPLIT_KEYS, tl.minimum((split + 1) * SPLIT_KEYS, num_keys)
        begun = first < shared_len
        split_maxima = tl.load(all_maxima + state + split, mask=is_head & begun, other=float("-inf"))
        split_sums = tl.load(all_sums + state + split, mask=is_head & begun, other=0.0)
        split_acc = tl.load(states + acc_state + split * VALUE_WIDTH, mask=in_state & begun, other=0.0)
        split_maxima, split_sums, split_acc = _attend(
            split_maxima, split_sums, split_acc, queries,
            k_pool + kv_head * k_head_stride, v_pool + kv_head * v_head_stride, prefix, tail, prefix_len,
            tl.maximum(first, shared_len), last, k_slot_stride, v_slot_stride, scale, first_column,
            KEY_WIDTH, VALUE_WIDTH, KEY_COLUMNS, VALUE_COLUMNS, BLOCK_KEYS, WIDEN,
        )  # fmt: skip
        maxima, sums, acc = _merge(maxima, sums, acc, split_maxima, split_sums, split_acc)

    result = acc / tl.where(sums == 0, 1.0, sums)[:, None]  # 0 for a row without keys
    out_row = out + (row * (num_kv_heads * HEADS) + head)[:, None] * VALUE_WIDTH
    tl.store(out_row + column[None, :], result.to(out.dtype.element_ty), mask=in_state)
