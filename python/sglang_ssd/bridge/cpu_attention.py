"""CPU attention for target and draft: extend, decode, TARGET_VERIFY and forking paths.

Every row of a forward belongs to a group; a group reads each key of its prefix once, with all its query rows and all
query heads that share a key head as one tile (``sglang_ssd_kernel.fork_attention``). A request is one group, and so are
the forking paths of one request: they share the request's prefix and add their own tails. A row's bits depend on its own
keys alone, so neither the batch nor the split of a prompt into chunks changes them.

Seam: ``AttentionBackend`` of SGLang. The backend takes the name ``torch_native``, since SGLang chooses its slot
allocator's helper by that name (srt/mem_cache/allocation.py, get_last_loc) and page sizes above 1 need the torch one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_ssd_kernel import ForkLayout, ForkPlan, fork_attention, is_compiled, make_plan

logger = logging.getLogger(__name__)


class RowKeys(NamedTuple):
    """Which keys each row of a forward sees: the arguments of ``make_plan``, all of them int32 tensors."""

    prefix_slots: torch.Tensor
    prefix_starts: torch.Tensor
    row_groups: torch.Tensor
    prefix_lens: torch.Tensor
    tail_slots: torch.Tensor
    tail_lens: torch.Tensor


class CpuAttentionBackend(TorchNativeAttnBackend):
    """Grouped attention over the paged KV pool, any page size (slots are token ids).

    Layers with sliding windows, encoders, cross attention or a KV pool of another type go to SGLang's torch_native loops.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner) -> None:
        super().__init__(model_runner)
        #: How the rows of the next decode forward share prefixes; each forward takes it. (SGLang copies the forward
        #: batch on its way here, so it cannot carry this.)
        self.next_fork_layout: ForkLayout | None = None
        #: Called before each layer: a forward takes long on a CPU, and its process has messages to look at.
        self.before_layer: Callable[[], None] | None = None
        self._row_keys: RowKeys | None = None
        self._plan: ForkPlan | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._row_keys, self._plan = self._keys_of_rows(forward_batch), None

    def _keys_of_rows(self, batch: ForwardBatch) -> RowKeys | None:
        if batch.forward_mode.is_idle():
            return None
        tables = self.req_to_token_pool.req_to_token
        pool_rows = batch.req_pool_indices.tolist()
        if batch.forward_mode.is_decode():
            layout, self.next_fork_layout = self.next_fork_layout, None
            return keys_of_forks(
                tables, layout or ForkLayout.without_forks(pool_rows, batch.seq_lens.tolist())
            )
        if batch.forward_mode.is_target_verify():
            width = batch.spec_info.draft_token_num
            prefixes, extends = batch.seq_lens.tolist(), [width] * len(pool_rows)
        else:
            prefixes, extends = batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist()
        return keys_of_extends(tables, pool_rows, prefixes, extends)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if not self._is_plain(q, layer, forward_batch):
            return super().forward_extend(q, k, v, layer, _as_extend(forward_batch), save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if not self._is_plain(q, layer, forward_batch):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _is_plain(self, q: torch.Tensor, layer, forward_batch: ForwardBatch) -> bool:
        return (
            is_plain_layer(layer)
            and forward_batch.encoder_lens is None
            and not self.use_sliding_window_kv_pool
            and self.token_to_kv_pool.dtype == q.dtype
        )

    def _attend(self, q, k, v, layer, forward_batch: ForwardBatch, save_kv_cache: bool) -> torch.Tensor:
        if self.before_layer is not None:
            self.before_layer()
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, _write_location(forward_batch), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if self._plan is None:
            self._plan = make_plan(*self._row_keys, num_slots=keys.shape[0])
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return fork_attention(queries, keys, values, self._plan, layer.scaling).flatten(1)


def is_plain_layer(layer) -> bool:
    """Whether the kernel serves this attention layer: causal over all keys."""
    window = layer.sliding_window_size
    is_full = window is None or window < 0
    return is_full and not layer.is_cross_attention and layer.attn_type != AttentionType.ENCODER_ONLY


def keys_of_extends(
    tables: torch.Tensor, pool_rows: list[int], prefixes: list[int], extends: list[int]
) -> RowKeys:
    """Rows that extend their requests: each sees the prefix and the new rows up to itself.

    tables: int [pool rows, width], slot of each token. The three lists are [requests].
    """
    lens = [prefix + extend for prefix, extend in zip(prefixes, extends, strict=True)]
    groups = [group for group, extend in enumerate(extends) for _ in range(extend)]
    return RowKeys(
        torch.cat([tables[row, :n] for row, n in zip(pool_rows, lens, strict=True)]),
        _int32([0, *accumulate(lens)]),
        _int32(groups),
        _int32([n for prefix, last in zip(prefixes, lens, strict=True) for n in range(prefix + 1, last + 1)]),
        torch.zeros(len(groups), 0, dtype=torch.int32),
        _int32([0] * len(groups)),
    )


def keys_of_forks(tables: torch.Tensor, layout: ForkLayout) -> RowKeys:
    """Decode rows that fork: each sees its part of the shared prefix, then its own tail.

    tables: int [pool rows, width].
    """
    groups = [group for group, size in enumerate(layout.group_sizes) for _ in range(size)]
    shared = [0] * len(layout.group_sizes)
    for group, n in zip(groups, layout.shared_lens, strict=True):
        shared[group] = max(shared[group], n)
    tail_lens = [n - s for n, s in zip(layout.lens, layout.shared_lens, strict=True)]
    tail_slots = torch.zeros(len(groups), max(tail_lens), dtype=torch.int32)
    for i, (row, n, s) in enumerate(zip(layout.rows, layout.lens, layout.shared_lens, strict=True)):
        tail_slots[i, : n - s] = tables[row, s:n]
    return RowKeys(
        torch.cat([tables[row, :n] for row, n in zip(layout.base_rows, shared, strict=True)]),
        _int32([0, *accumulate(shared)]),
        _int32(groups),
        _int32(layout.shared_lens),
        tail_slots,
        _int32(tail_lens),
    )


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _write_location(forward_batch: ForwardBatch):
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    return KVWriteLoc(forward_batch.out_cache_loc, None)


def _as_extend(forward_batch: ForwardBatch) -> ForwardBatch:
    """A verify batch carries no extend lengths; SGLang's loops need them (seam: torch_native_backend.forward_extend)."""
    if not forward_batch.forward_mode.is_target_verify():
        return forward_batch
    import copy

    width = forward_batch.spec_info.draft_token_num
    extend = copy.copy(forward_batch)
    extend.extend_prefix_lens = forward_batch.seq_lens
    extend.extend_seq_lens = torch.full_like(forward_batch.seq_lens, width)
    extend.seq_lens = forward_batch.seq_lens + width
    return extend


def install_cpu_attention() -> None:
    """Serve ``--attention-backend torch_native`` (the default on a CPU) with this backend."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS["torch_native"] = CpuAttentionBackend
    if is_compiled() is None:
        logger.warning(
            "the CPU kernels are not compiled here (no C++ compiler at install): attention is slow"
        )
