"""What SGLang's own n-gram speculation imports by name on a CPU; it is not implemented."""

from __future__ import annotations

from sglang_ssd_kernel.cpu_stand_in.functions import not_implemented

reconstruct_indices_from_tree_mask = not_implemented(
    "sgl_kernel.speculative.reconstruct_indices_from_tree_mask"
)
