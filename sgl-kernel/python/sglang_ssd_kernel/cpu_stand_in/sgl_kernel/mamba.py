"""Linear-attention functions that SGLang's backends import by name on a CPU; none is implemented."""

from __future__ import annotations

from sglang_ssd_kernel.cpu_stand_in.functions import not_implemented

causal_conv1d_fn_cpu = not_implemented("sgl_kernel.mamba.causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = not_implemented("sgl_kernel.mamba.causal_conv1d_update_cpu")
chunk_gated_delta_rule_cpu = not_implemented("sgl_kernel.mamba.chunk_gated_delta_rule_cpu")
