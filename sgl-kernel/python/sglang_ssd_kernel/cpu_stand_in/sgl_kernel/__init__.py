"""The package that a CPU-only host imports as ``sgl_kernel``: every function that SGLang 0.5.23 takes from it there.

A name that is not here raises ImportError or AttributeError as anywhere in python, and so does an operator
``torch.ops.sgl_kernel.*`` other than the one below. Both matter: SGLang asks whether some of them exist (for
instance ``convert_weight_packed``, its test for AMX) and takes its plain torch path where they do not.
"""

from __future__ import annotations

import torch

from sglang_ssd_kernel.cpu_stand_in.functions import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    murmur_hash32_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# SGLang reaches the hash as an operator, and compiles the sampler around it, which needs the result's shape.
# The operator lives as long as the library object.
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


@torch.library.register_fake("sgl_kernel::murmur_hash32_cpu", lib=_LIBRARY)
def _murmur_hash32_shape(seed, positions, col_indices):
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)
