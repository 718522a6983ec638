"""CPU attention for target and draft: extend, decode, TARGET_VERIFY and forking paths.

Every row of a forward belongs to a group; a group reads each of its keys once, with all its query rows and all query
heads that share a key head as one tile. A request is one group, and so are the forking paths of one request: they
share the request's prefix and add their own tails.

Seam: ``AttentionBackend`` of SGLang. The backend takes the name ``torch_native``, since SGLang chooses its slot
allocator's helper by that name (srt/mem_cache/allocation.py, get_last_loc) and page sizes above 1 need the torch one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch.nn.functional import scaled_dot_product_attention


class ForkLayout(NamedTuple):
    """Which rows of a decode forward fork from which request. Rows of one group stand side by side.

    group_sizes:  [groups], rows in each group.
    base_rows:    [groups], row of ``req_to_token`` that holds the shared prefix.
    shared_lens:  [rows], leading tokens that a row takes from the base row; the rest is its own tail.
    """

    group_sizes: list[int]
    base_rows: list[int]
    shared_lens: list[int]


class Group(NamedTuple):
    """One tile of attention.

    rows:  query rows, a slice of the forward's rows.
    slots: int64 [keys], KV slots read, each once.
    mask:  bool [rows, keys], True where a row sees a key. None: all see all, or causal.
    is_causal: True for a prompt without prefix, where the mask is a triangle.
    """

    rows: slice
    slots: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool = False


class CpuAttentionBackend(TorchNativeAttnBackend):
    """Grouped attention over the paged KV pool, any page size (slots are token ids).

    Layers with sliding windows, encoders or cross attention go to SGLang's torch_native loops.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner) -> None:
        super().__init__(model_runner)
        #: How the rows of the next decode forward share prefixes; each forward takes it. (SGLang copies the forward
        #: batch on its way here, so it cannot carry this.)
        self.next_fork_layout: ForkLayout | None = None
        #: Called before each layer: a forward takes long on a CPU, and its process has messages to look at.
        self.before_layer: Callable[[], None] | None = None
        self._groups: list[Group] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._groups = self._plan(forward_batch)

    def _plan(self, batch: ForwardBatch) -> list[Group]:
        if batch.forward_mode.is_idle():
            return []
        tables = self.req_to_token_pool.req_to_token
        pool_rows = batch.req_pool_indices.tolist()
        if batch.forward_mode.is_decode():
            lens = batch.seq_lens.tolist()
            layout, self.next_fork_layout = self.next_fork_layout, None
            if layout is not None:
                return plan_forks(tables, pool_rows, lens, layout)
            return [
                Group(slice(i, i + 1), tables[r, :n].long(), None)
                for i, (r, n) in enumerate(zip(pool_rows, lens))
            ]
        if batch.forward_mode.is_target_verify():
            width = batch.spec_info.draft_token_num
            prefixes, extends = batch.seq_lens.tolist(), [width] * len(pool_rows)
        else:
            prefixes, extends = batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist()
        return plan_extends(tables, pool_rows, prefixes, extends)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if not self._is_plain(layer, forward_batch):
            return super().forward_extend(q, k, v, layer, _as_extend(forward_batch), save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if not self._is_plain(layer, forward_batch):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _is_plain(self, layer, forward_batch: ForwardBatch) -> bool:
        window = layer.sliding_window_size
        return (
            not layer.is_cross_attention
            and layer.attn_type != AttentionType.ENCODER_ONLY
            and (window is None or window < 0)
            and forward_batch.encoder_lens is None
            and not self.use_sliding_window_kv_pool
        )

    def _attend(self, q, k, v, layer, forward_batch: ForwardBatch, save_kv_cache: bool) -> torch.Tensor:
        if self.before_layer is not None:
            self.before_layer()
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, _write_location(forward_batch), k, v)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        out = queries.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for group in self._groups:
            out[group.rows] = attend_group(queries[group.rows], keys, values, group, layer.scaling)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def plan_extends(
    tables: torch.Tensor, pool_rows: list[int], prefixes: list[int], extends: list[int]
) -> list[Group]:
    """Groups for rows that extend their requests: each row sees the prefix and the new rows up to itself.

    tables: int [pool rows, width], slot of each token. The three lists are [requests].
    """
    groups, start = [], 0
    for row, prefix, extend in zip(pool_rows, prefixes, extends, strict=True):
        slots = tables[row, : prefix + extend].long()
        mask = None
        if prefix and extend > 1:
            mask = torch.ones(extend, prefix + extend, dtype=torch.bool).tril_(prefix)
        groups.append(Group(slice(start, start + extend), slots, mask, is_causal=not prefix and extend > 1))
        start += extend
    return groups


def plan_forks(
    tables: torch.Tensor, pool_rows: list[int], lens: list[int], layout: ForkLayout
) -> list[Group]:
    """Groups for decode rows that fork: the shared prefix once, then the tail of each row for that row alone.

    tables: int [pool rows, width]. pool_rows, lens: [rows], lens include the token of this forward.
    """
    groups, start = [], 0
    for size, base_row in zip(layout.group_sizes, layout.base_rows, strict=True):
        rows = range(start, start + size)
        shared = max(layout.shared_lens[i] for i in rows)
        tails = [lens[i] - layout.shared_lens[i] for i in rows]
        mask = torch.zeros(size, shared + sum(tails), dtype=torch.bool)
        slots, tail_start = [tables[base_row, :shared]], shared
        for i, row in enumerate(rows):
            mask[i, : layout.shared_lens[row]] = True
            mask[i, tail_start : tail_start + tails[i]] = True
            slots.append(tables[pool_rows[row], layout.shared_lens[row] : lens[row]])
            tail_start += tails[i]
        groups.append(Group(slice(start, start + size), torch.cat(slots).long(), mask if size > 1 else None))
        start += size
    return groups


def attend_group(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scaling: float
) -> torch.Tensor:
    """Attention of one group. queries [rows, Hq, D], keys and values [slots, Hkv, D*], result [rows, Hq, Dv]."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    k = keys[group.slots].to(queries.dtype).transpose(0, 1)
    v = values[group.slots].to(queries.dtype).transpose(0, 1)
    # All query heads of a key head become rows of one tile, so that the keys are read once.
    q = queries.view(num_rows, num_kv_heads, heads_per_kv, head_dim).permute(1, 2, 0, 3)
    if group.is_causal:
        # [kv heads, group, rows, D] against broadcast keys: the triangle needs rows as its own dimension.
        out = scaled_dot_product_attention(
            q, k.unsqueeze(1).expand(-1, heads_per_kv, -1, -1), v.unsqueeze(1).expand(-1, heads_per_kv, -1, -1),
            is_causal=True, scale=scaling,
        )  # fmt: skip
    else:
        mask = None if group.mask is None else group.mask.repeat(heads_per_kv, 1)
        tile = q.reshape(1, num_kv_heads, heads_per_kv * num_rows, head_dim)
        out = scaled_dot_product_attention(
            tile, k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scaling
        )
        out = out.view(num_kv_heads, heads_per_kv, num_rows, v.shape[-1])
    return out.permute(2, 0, 1, 3).reshape(num_rows, num_heads, v.shape[-1])


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
