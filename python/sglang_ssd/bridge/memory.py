"""How large the two KV pools are on a CPU, where SGLang would give most of the host to each of two processes."""

from __future__ import annotations

import os
from typing import NamedTuple

#: Share of what is free after both models are loaded that goes to the KV pools; the rest is page cache and headroom.
_POOL_SHARE = 0.4
#: More than this many tokens a pool brings nothing on a CPU, which serves few requests at a time.
_MAX_POOL_TOKENS = 32_768
#: Activations, Python and libraries of the server's processes together.
_PROCESS_BYTES = 4 << 30


class MemoryPlan(NamedTuple):
    """Tokens of each pool and what they stand on, in bytes; of one data-parallel rank and one draft."""

    target_tokens: int
    draft_tokens: int
    target_pool_bytes: int
    draft_pool_bytes: int
    weight_bytes: int
    available_bytes: int

    def describe(self) -> str:
        gib = 1 << 30
        return (
            f"memory: {self.available_bytes / gib:.1f} GiB available, weights {self.weight_bytes / gib:.1f} GiB, KV pools "
            f"{self.target_tokens} tokens ({self.target_pool_bytes / gib:.2f} GiB) for the target, "
            f"{self.draft_tokens} tokens ({self.draft_pool_bytes / gib:.2f} GiB) for the draft"
        )


def plan_pools(
    *,
    available_bytes: int,
    weight_bytes: int,
    target_token_bytes: int,
    draft_token_bytes: int,
    context_length: int,
    num_drafts: int = 1,
    num_replicas: int = 1,
) -> MemoryPlan:
    """Choose all pools so that weights, pools and page cache fit.

    The pools hold equally many tokens plus a quarter more on the draft's side, whose branches need slots too.
    Every draft has room for the requests of all ``num_replicas`` data-parallel ranks, since it may have to take over
    those of the other drafts. ``weight_bytes`` are those of all ranks and drafts.
    ``target_token_bytes`` and ``draft_token_bytes`` are KV bytes a token; ``draft_token_bytes`` 0 means no draft.
    Raises ValueError in one line when not even one request of a tenth of the context fits.
    """
    spare = available_bytes - weight_bytes - _PROCESS_BYTES
    token_bytes = target_token_bytes + num_drafts * draft_token_bytes * 5 // 4
    tokens = min(_MAX_POOL_TOKENS, int(spare * _POOL_SHARE) // token_bytes) // num_replicas
    if tokens < max(64, context_length // 10):
        raise ValueError(
            f"not enough memory: {available_bytes >> 20} MiB available, weights need {weight_bytes >> 20} MiB; "
            f"--max-total-tokens sets the pool by hand"
        )
    draft_tokens = num_replicas * tokens * 5 // 4 if draft_token_bytes else 0
    return MemoryPlan(
        tokens,
        draft_tokens,
        tokens * target_token_bytes,
        draft_tokens * draft_token_bytes,
        weight_bytes,
        available_bytes,
    )


def bytes_per_kv_token(text_config, itemsize: int) -> int:
    """KV bytes of one token in a model with plain multi-head attention. ``text_config`` is a Hugging Face config."""
    num_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_dim = (
        getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    )
    return 2 * text_config.num_hidden_layers * num_heads * head_dim * itemsize


def weight_file_bytes(model_path: str) -> int:
    """Size of the weight files of a local model folder, 0 where there is none."""
    if not os.path.isdir(model_path):
        return 0
    endings = (".safetensors", ".bin", ".gguf", ".pt")
    return sum(entry.stat().st_size for entry in os.scandir(model_path) if entry.name.endswith(endings))


def available_host_bytes() -> int:
    """Memory that this process could still get: the host's, or its control group's where that is less."""
    import psutil

    available = psutil.virtual_memory().available
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(current.read()))
    except OSError:
        pass  # No control groups here: the host's own figure holds.
    return available
