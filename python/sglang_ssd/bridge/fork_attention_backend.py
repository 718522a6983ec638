"""The draft's attention on a GPU: SGLang's Triton backend, but decode rows go to fork attention.

Seam: ``TritonAttnBackend`` (srt/layers/attention/triton_backend.py). Prompts and all that is not DECODE stay with it. A
DECODE forward needs none of its metadata: the kernels read slots in ``req_to_token`` where they stand, by a ``TablePlan``
that is filled from host lists before each forward or replay. A CUDA graph is captured over a plan of its own (one a batch
size, which SGLang pads to), empty at that time, so that captured rows see no key and padded ones never do.

The kernels have run in Triton's interpreter only, and so has this; see docs/devices.md.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_ssd.bridge.server_args import TRITON_FORK
from sglang_ssd_kernel import ForkLayout
from sglang_ssd_kernel.triton.fork_attention import (
    BLOCK_KEYS,
    MAX_HEADS_PER_KV,
    PlanLimits,
    TablePlan,
    fork_attention,
    rows_of_a_tile,
)

#: Keys of one split, and splits of the longest sequence, each of which costs a float32 state a row and head.
_LEAST_SPLIT_KEYS, _MOST_SPLITS = 512, 64


class ForkAttentionBackend(TritonAttnBackend):
    """Fork attention for DECODE. Raises ValueError, with the reason, for models that need more than it computes."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner) -> None:
        if reason := why_not_served(model_runner):
            raise ValueError(f"attention backend {TRITON_FORK}: {reason}; choose another")
        super().__init__(model_runner)
        #: How the rows of the next decode forward share prefixes; each forward takes it.
        self.next_fork_layout: ForkLayout | None = None
        self._limits = _limits_of(model_runner, self.req_to_token)
        self._plan: TablePlan | None = None
        self._graph_plans: dict[int, TablePlan] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not forward_batch.forward_mode.is_decode():
            return super().init_forward_metadata(forward_batch)
        self._plan = self._new_plan(forward_batch.batch_size)
        self._plan.update_layout(self._take_layout(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode():
            return super().init_forward_metadata_out_graph(forward_batch, in_capture)
        num_rows = forward_batch.batch_size
        if not in_capture:
            self._graph_plans[num_rows].update_layout(self._take_layout(forward_batch))
            return
        if num_rows not in self._graph_plans:  # graphs of one size, as LoRA has them, share a plan
            self._graph_plans[num_rows] = self._new_plan(num_rows)
        self._plan = self._graph_plans[num_rows]

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if asked := [name for name, value in kwargs.items() if value is not None]:
            raise ValueError(
                f"attention backend {TRITON_FORK}: layer {layer.layer_id} passes {', '.join(asked)}; choose another"
            )
        if save_kv_cache:
            self._set_kv_buffer(forward_batch, layer, KVWriteLoc.for_batch(forward_batch), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return fork_attention(queries, keys, values, self._plan, layer.scaling).flatten(1)

    def _new_plan(self, num_rows: int) -> TablePlan:
        return TablePlan(self._limits._replace(rows=num_rows, groups=num_rows), self.req_to_token)

    def _take_layout(self, forward_batch: ForwardBatch) -> ForkLayout:
        layout, self.next_fork_layout = self.next_fork_layout, None
        if layout is not None:
            return layout
        # SGLang's own warm-up: may wait for the device.
        return ForkLayout.without_forks(
            forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        )


def why_not_served(model_runner) -> str | None:
    """What of the model or its KV pool fork attention does not compute or read; None when it does all."""
    pool = model_runner.token_to_kv_pool
    if model_runner.use_mla_backend:
        return "the model has latent attention (MLA)"
    if type(pool) is not MHATokenToKVPool or pool.dtype != model_runner.dtype:
        return f"the KV pool is {type(pool).__name__} of {pool.dtype}, the model {model_runner.dtype}"
    if model_runner.kv_index_translator.is_translating:
        return "the KV pool has virtual slots"
    layers = _attention_layers(model_runner)
    if len({_shape_of(layer) for layer in layers}) != 1:
        return "the model has no attention layers, or layers of different shapes"
    for layer in layers:
        if reason := _why_layer_not_served(layer):
            return f"layer {layer.layer_id} has {reason}"
    return None


def _why_layer_not_served(layer: RadixAttention) -> str | None:
    reasons = {
        "a sliding window": layer.sliding_window_size is not None and layer.sliding_window_size >= 0,
        "cross attention": layer.is_cross_attention,
        "attention in both directions": layer.attn_type != AttentionType.DECODER,
        "capped scores": layer.logit_cap > 0,
        "scores that fall with length": layer.xai_temperature_len > 0,
        "scaled keys or values": layer.k_scale is not None or layer.v_scale is not None,
        f"more than {MAX_HEADS_PER_KV} query heads a key head": (
            layer.tp_q_head_num > MAX_HEADS_PER_KV * layer.tp_k_head_num
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _limits_of(model_runner, req_to_token: torch.Tensor) -> PlanLimits:
    """Limits of all plans but for their rows. Tiles and splits are the same in each, and with them a row's bits."""
    num_heads, num_kv_heads, key_width, value_width = _shape_of(_attention_layers(model_runner)[0])
    num_pool_rows, longest = req_to_token.shape
    split_blocks = -(-longest // (_MOST_SPLITS * BLOCK_KEYS))
    limits = PlanLimits(
        rows=1,
        groups=1,
        depth=0,
        prefix_slots=0,
        prefix_len=longest,
        group_rows=num_pool_rows,
        split_keys=max(_LEAST_SPLIT_KEYS, split_blocks * BLOCK_KEYS),
    )
    shape = model_runner.dtype, num_heads // num_kv_heads, max(key_width, value_width)
    return limits._replace(group_rows=rows_of_a_tile(limits, *shape))


def _attention_layers(model_runner) -> list[RadixAttention]:
    return [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]


def _shape_of(layer: RadixAttention) -> tuple[int, int, int, int]:
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim


def install_fork_attention() -> None:
    """Serve SGLang's ``attention_backend`` of that name. Raises ValueError where a seam is not the one written against."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_ssd.bridge.self_check import FORK_ATTENTION_SEAMS, SGLANG_VERSION, drifted_seams

    if drifted := drifted_seams(FORK_ATTENTION_SEAMS):
        raise ValueError(
            f"attention backend {TRITON_FORK}: this SGLang is not the {SGLANG_VERSION} that it is built on: "
            + "; ".join(drifted)
        )
    register_attention_backend(TRITON_FORK)(ForkAttentionBackend)
    if TRITON_FORK not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([TRITON_FORK])
