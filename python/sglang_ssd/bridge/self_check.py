"""Checks at start that every seam of SGLang is what this project was written against, and lists what drifted."""

from __future__ import annotations

import importlib
import inspect
from typing import NamedTuple

SGLANG_VERSION = "0.5.23"


class Seam(NamedTuple):
    """``module:qualified.name`` and the parameters that we pass or override (a subset, in order)."""

    target: str
    parameters: tuple[str, ...] = ()


SEAMS = (
    Seam("sglang.srt.managers.scheduler:Scheduler.init_tp_model_worker", ("self",)),
    Seam("sglang.srt.managers.scheduler:Scheduler.handle_generate_request", ("self", "recv_req")),
    Seam("sglang.srt.managers.scheduler:Scheduler.send_abort_output", ("self", "abort_req", "req")),
    Seam("sglang.srt.managers.scheduler:Scheduler.process_batch_result", ("self", "batch", "result")),
    Seam("sglang.srt.managers.scheduler:Scheduler.pause_generation", ("self", "recv_req")),
    Seam("sglang.srt.managers.scheduler:Scheduler.on_idle", ("self",)),
    Seam("sglang.srt.managers.scheduler:Scheduler.is_fully_idle", ("self",)),
    Seam("sglang.srt.managers.scheduler:Scheduler.record_weight_version_change", ("self", "new_version")),
    Seam("sglang.srt.managers.scheduler:Scheduler.get_internal_state", ("self", "recv_req")),
    Seam("sglang.srt.managers.scheduler:Scheduler.get_output_streamer_class", ("self",)),
    Seam(
        "sglang.srt.managers.scheduler:run_scheduler_process",
        ("server_args", "port_args", "gpu_id", "tp_rank", "pp_rank", "dp_rank", "pipe_writer"),
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer:"
        "SchedulerOutputStreamer.build_additional_customized_info",
        ("self", "reqs"),
    ),
    Seam("sglang.srt.speculative.spec_registry:CustomSpecAlgo.handle_server_args", ("self", "server_args")),
    Seam(
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "spec_class"),
    ),
    Seam("sglang.srt.speculative.base_spec_worker:BaseSpecWorker.note_request_finished", ("self", "rid")),
    Seam(
        "sglang.srt.speculative.dflash_info:DFlashVerifyInput.prepare_for_verify",
        ("self", "batch", "target_worker", "defer_metadata_init"),
    ),
    Seam("sglang.srt.layers.logprob_processor:compute_spec_logprobs", ("batch", "logits_output", "predict")),
    Seam(
        "sglang.srt.managers.overlap_utils:FutureMap.__init__",
        ("self", "device", "spec_algo", "req_to_token_pool"),
    ),
    Seam(
        "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan",
        ("self", "req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual"),
    ),
    Seam(
        "sglang.srt.distributed.parallel_state:GroupCoordinator.__init__",
        ("self", "group_ranks", "local_rank", "torch_distributed_backend", "use_pynccl"),
    ),
    Seam("sglang.srt.mem_cache.radix_cache:RadixCache.match_prefix", ("self", "params")),
    Seam("sglang.srt.mem_cache.radix_cache:RadixCache.path_device_indices", ("self", "node")),
    Seam("sglang.srt.mem_cache.radix_cache:RadixCache.insert", ("self", "params")),
    Seam("sglang.srt.mem_cache.radix_cache:RadixCache.evict", ("self", "params")),
    Seam("sglang.srt.mem_cache.radix_cache:RadixCache.inc_lock_ref", ("self", "node")),
    Seam("sglang.srt.mem_cache.radix_cache:RadixCache.dec_lock_ref", ("self", "node")),
    Seam("sglang.srt.model_executor.model_runner:ModelRunner.forward", ("self", "forward_batch")),
    Seam(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.__init__",
        ("self", "model_runner"),
    ),
    Seam(
        "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")
    ),
    Seam(
        "sglang.srt.layers.quantization.unquant:UnquantizedEmbeddingMethod.apply",
        ("self", "layer", "x", "bias"),
    ),
    Seam(
        "sglang.srt.layers.layernorm:RMSNorm.forward_native",
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.weight_updater:_unsupported_derived_weight_cache_error",
        ("model",),
    ),
    Seam("sglang.srt.layers.activation:SiluAndMul.forward_native", ("self", "x")),
    Seam(
        "sglang.srt.layers.rotary_embedding:RotaryEmbedding.forward_native",
        ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
    ),
    Seam("sglang.kernels.fused_op:BaseFusedOp._resolve_forward_method", ("self",)),
    Seam("sglang.srt.entrypoints.http_server:launch_server", ("server_args", "run_scheduler_process_func")),
    Seam("sglang.srt.server_args:ServerArgs.from_cli_args", ("args",)),
    Seam("sglang.srt.model_executor.model_runner:ModelRunner._decode_cuda_graph_runner_cls", ("self",)),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.get_spec_info",
        ("self", "num_tokens"),
    ),
    Seam(
        "sglang.srt.model_executor.runner.base_runner:create_dummy_verify_input",
        ("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker"),
    ),
)

#: Those of the draft's attention on a GPU (bridge.fork_attention_backend), checked where it is used.
FORK_ATTENTION_SEAMS = (
    Seam("sglang.srt.layers.attention.triton_backend:TritonAttnBackend.__init__", ("self", "model_runner")),
    Seam(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.init_forward_metadata",
        ("self", "forward_batch"),
    ),
    Seam(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.init_forward_metadata_out_graph",
        ("self", "forward_batch", "in_capture"),
    ),
    Seam(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.forward_decode",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    Seam(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend._set_kv_buffer",
        ("self", "forward_batch", "layer", "loc_info", "k", "v"),
    ),
    Seam("sglang.srt.mem_cache.memory_pool:KVWriteLoc.for_batch", ("forward_batch",)),
    Seam("sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer", ("self", "layer_id")),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:build_replay_fb_view",
        ("forward_batch", "bs", "capture_forward_mode"),
    ),
    Seam("sglang.srt.layers.attention.attention_registry:register_attention_backend", ("name",)),
    Seam("sglang.srt.arg_groups.choices:add_attention_backend_choices"),
)


def drifted_seams(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """One line for each seam that is not what this project expects; empty when all hold."""
    return [line for seam in seams if (line := _why_drifted(seam))]


def _why_drifted(seam: Seam) -> str | None:
    module_name, _, path = seam.target.partition(":")
    try:
        found = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        return f"{seam.target}: {error}"
    names = list(inspect.signature(found).parameters)
    missing = [name for name in seam.parameters if name not in names]
    if missing:
        return f"{seam.target}: no parameter {', '.join(missing)} (has {', '.join(names)})"
    positions = [names.index(name) for name in seam.parameters]
    if positions != sorted(positions):
        return f"{seam.target}: parameters {', '.join(seam.parameters)} stand in another order: {', '.join(names)}"
    return None
