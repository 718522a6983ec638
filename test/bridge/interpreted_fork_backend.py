"""The draft's GPU attention backend in SGLang's own model runner, in Triton's interpreter on a CPU.

``test_fork_backend.py`` runs this file with TRITON_INTERPRET=1. Prints JSON: how far logits of forks are from those of the
CPU's backend, in a forward and as a graph of padded rows would run it, and what is refused.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

from sglang_ssd.bridge.environment import use_cpu_engine

use_cpu_engine()

from sglang_ssd.bridge.cpu_attention import CpuAttentionBackend  # noqa: E402
from sglang_ssd.bridge.draft_runner import DraftModelRunner, DraftRunnerConfig  # noqa: E402
from sglang_ssd.bridge.fork_attention_backend import ForkAttentionBackend, why_not_served  # noqa: E402
from sglang_ssd_kernel import ForkLayout  # noqa: E402

PROMPT_LENS = (70, 33)
NUM_BRANCHES, DEPTH = 3, 2


def start_forks(model: DraftModelRunner) -> ForkLayout:
    """Two prompts, each with its main row and branches that leave it at different places."""
    sizes, bases, rows, shared_lens, lens = [], [], [], [], []
    for prompt_len in PROMPT_LENS:
        main = model.take_row()
        model.write_slots(main, 0, model.take_slots(prompt_len))
        model.extend([main], [0], [[(7 * i + prompt_len) % model.vocab_size for i in range(prompt_len)]])
        sizes.append(1 + NUM_BRANCHES)
        bases.append(main)
        rows.append(main)
        shared_lens.append(prompt_len)
        lens.append(prompt_len)
        for branch in range(NUM_BRANCHES):
            row, shared = model.take_row(), prompt_len - branch
            model.copy_slots(main, row, 0, shared)
            model.write_slots(row, shared, model.take_slots(DEPTH))
            rows.append(row)
            shared_lens.append(shared)
            lens.append(shared + DEPTH)
    return ForkLayout(sizes, bases, rows, shared_lens, lens)


def step_by_step(model: DraftModelRunner, layout: ForkLayout) -> torch.Tensor:
    """The KV of each depth, then the logits of the last: [rows, V]."""
    for depth in range(DEPTH):
        lens = [min(n, shared + depth + 1) for n, shared in zip(layout.lens, layout.shared_lens)]
        logits = model.decode(layout._replace(lens=lens), [(n * 3 + depth) % model.vocab_size for n in lens])
    return logits.clone()


def as_a_graph(model: DraftModelRunner, layout: ForkLayout) -> dict:
    """A layer's output over a captured plan of more rows, against that of a forward of the same rows."""
    backend, num_rows = model.runner.attn_backend, len(layout.rows)
    layer = next(m for m in model.runner.model.modules() if type(m).__name__ == "RadixAttention")
    random = torch.Generator().manual_seed(0)
    q = torch.randn(num_rows + 3, layer.tp_q_head_num * layer.qk_head_dim, generator=random)
    mode = SimpleNamespace(is_decode=lambda: True)
    eager = SimpleNamespace(batch_size=num_rows, forward_mode=mode)
    padded = SimpleNamespace(batch_size=num_rows + 3, forward_mode=mode)
    backend.next_fork_layout = layout
    backend.init_forward_metadata(eager)
    expected = backend.forward_decode(q[:num_rows], None, None, layer, eager, save_kv_cache=False)
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    captured = backend.forward_decode(q, None, None, layer, padded, save_kv_cache=False)
    plan = backend._plan
    backend.next_fork_layout = layout
    backend.init_forward_metadata_out_graph(padded)
    replayed = backend.forward_decode(q, None, None, layer, padded, save_kv_cache=False)
    return {
        "same_bits": torch.equal(replayed[:num_rows], expected),
        "padding_is_0": not replayed[num_rows:].any() and not captured.any(),
        "same_plan": backend._plan is plan,
        "layout_taken": backend.next_fork_layout is None,
    }


def refusals(model: DraftModelRunner) -> dict[str, str | None]:
    """What is said of a model that changes in one thing."""
    layers = [m for m in model.runner.model.modules() if type(m).__name__ == "RadixAttention"]
    runner, found = model.runner, {}
    for name, value in {"sliding_window_size": 8, "logit_cap": 30.0, "k_scale": 1.0, "is_cross_attention": True,
                        "tp_q_head_num": 1000}.items():  # fmt: skip
        before = getattr(layers[-1], name)
        setattr(layers[-1], name, value)
        found[name] = why_not_served(runner)
        setattr(layers[-1], name, before)
    runner.use_mla_backend = True
    found["use_mla_backend"] = why_not_served(runner)
    runner.use_mla_backend = False
    found["nothing"] = why_not_served(runner)
    batch = SimpleNamespace(batch_size=1)
    try:
        runner.attn_backend.forward_decode(None, None, None, layers[0], batch, sinks=torch.ones(1))
    except ValueError as error:
        found["sinks"] = str(error)
    return found


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def main(model_path: str) -> None:
    model = DraftModelRunner(
        DraftRunnerConfig(
            model_path, "cpu", "float32", "triton-fork", max_rows=16, kv_tokens=1024, context_length=256
        )
    )
    ours, cpu = model.runner.attn_backend, CpuAttentionBackend(model.runner)
    assert type(ours) is ForkAttentionBackend
    model.runner.attn_backend = cpu
    layout = start_forks(model)
    expected = step_by_step(model, layout)
    model.runner.attn_backend = ours
    logits = step_by_step(model, layout)
    # A prompt in two chunks: SGLang's own kernels, after which decode goes on.
    chunks = [[5, 6, 7], [8, 9]]
    prompts = []
    for backend in (cpu, ours):
        model.runner.attn_backend = backend
        row = model.take_row()
        model.write_slots(row, 0, model.take_slots(6))
        model.extend([row], [0], chunks[:1])
        prompts += [model.extend([row], [3], chunks[1:]).clone()]
        prompts += [model.decode(ForkLayout.without_forks([row], [6]), [4]).clone()]
    print(
        json.dumps(
            {
                "forks": difference(logits, expected),
                "prompt": difference(prompts[2], prompts[0]),
                "decode": difference(prompts[3], prompts[1]),
                "graph": as_a_graph(model, layout),
                "refused": refusals(model),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
