"""How the CPU kernels compare with what SGLang and torch do for the same answer, on one thread.

- Fork attention of one layer, with the demo draft's heads: all branches of one request behind its prefix, against SGLang's
  torch_native backend with one decode row a branch, and against scaled_dot_product_attention of one batch, whose keys and
  values were gathered before or are gathered each time. The rows' layout, made once a forward, is timed beside it.
- The draft's samplers under both laws, against torch's topk, softmax and multinomial.
- The target's draws under shared noise from log p, against torch's exp and multinomial.

The answers are looked at first. Then all take turns; a ratio is the median over the turns, each within one turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import options
import torch
from report import format_table, machine_facts, write_json
from torch.nn.functional import scaled_dot_product_attention
from tqdm import trange

from sglang_ssd_kernel import (
    ForkLayout,
    ForkPlan,
    draw_and_agree,
    fork_attention,
    is_compiled,
    make_plan,
    sample_saguaro,
    sample_shared_noise,
)
from sglang_ssd_kernel.cpu.draft_sampler import Drafted
from sglang_ssd_kernel.cpu.draft_sampler import reference as reference_sample
from sglang_ssd_kernel.cpu.fork_attention import reference as reference_attention
from sglang_ssd_kernel.cpu.target_draw import reference as reference_draw

#: Of Qwen2.5-0.5B, the demo pair's draft.
NUM_HEADS, NUM_KV_HEADS, HEAD_WIDTH = 14, 2, 64
NUM_RANKED, TOP_M = 6, 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: Of the largest magnitude, against the same in float64.
TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-5}


class Contest(NamedTuple):
    """One kernel and what else could be called in its place."""

    operation: str
    ours: Callable[[], object]
    others: dict[str, Callable[[], object]]


class Ratio(NamedTuple):
    """Medians over the turns."""

    operation: str
    instead: str
    ours_ms: float
    instead_ms: float | None
    times_as_fast: float | None


# -- attention ---------------------------------------------------------------------------------------------------------


class Branches(NamedTuple):
    """Decode rows of one request: its prefix is shared, each has a tail. table: int32 [branches, tokens], their slots."""

    table: torch.Tensor
    layout: ForkLayout
    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor

    @property
    def scaling(self) -> float:
        return self.q.shape[-1] ** -0.5


def make_branches(
    num_branches: int, prefix_len: int, depth: int, dtype: torch.dtype, random: torch.Generator
) -> Branches:
    """Random queries, keys and values; the slots lie anywhere in pools twice as large."""
    num_slots = prefix_len + num_branches * depth
    slots = torch.randperm(2 * num_slots, generator=random)[:num_slots].int()
    prefix, tails = slots[:prefix_len], slots[prefix_len:].view(num_branches, depth)
    table = torch.cat([prefix.expand(num_branches, -1), tails], dim=1).contiguous()
    rows, num_tokens = list(range(num_branches)), prefix_len + depth
    layout = ForkLayout([num_branches], [0], rows, [prefix_len] * num_branches, [num_tokens] * num_branches)
    shapes = (
        (num_branches, NUM_HEADS, HEAD_WIDTH),
        *[(2 * num_slots, NUM_KV_HEADS, HEAD_WIDTH)] * 2,
    )
    return Branches(table, layout, *(torch.randn(shape, generator=random).to(dtype) for shape in shapes))


def lay_out(branches: Branches) -> ForkPlan:
    """What the attention backend makes of the layout, once a forward."""
    from sglang_ssd.bridge.cpu_attention import keys_of_forks

    return make_plan(*keys_of_forks(branches.table, branches.layout), num_slots=branches.k_pool.shape[0])


def sglang_loop(branches: Branches) -> Callable[[], torch.Tensor]:
    """SGLang's own backend for these rows, which takes one after the other."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    pool = SimpleNamespace(
        get_key_buffer=lambda layer_id: branches.k_pool, get_value_buffer=lambda layer_id: branches.v_pool
    )
    tables = SimpleNamespace(req_to_token=branches.table)
    backend = TorchNativeAttnBackend(
        SimpleNamespace(device="cpu", req_to_token_pool=tables, token_to_kv_pool=pool)
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=NUM_HEADS,
        tp_k_head_num=NUM_KV_HEADS,
        qk_head_dim=HEAD_WIDTH,
        v_head_dim=HEAD_WIDTH,
        is_cross_attention=False,
        sliding_window_size=None,
        scaling=branches.scaling,
    )
    batch = SimpleNamespace(
        out_cache_loc=None,
        encoder_lens=None,
        req_pool_indices=torch.tensor(branches.layout.rows),
        seq_lens=torch.tensor(branches.layout.lens),
    )
    q = branches.q.flatten(1)
    return lambda: backend.forward_decode(q, None, None, layer, batch, False).view(branches.q.shape)


def gathered(branches: Branches) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each row, [branches, kv heads, tokens, width]."""
    index = branches.table.long()
    keys, values = (pool[index].transpose(1, 2) for pool in (branches.k_pool, branches.v_pool))
    return keys, values


def attention_contests(branches: Branches, tolerance: float) -> list[Contest]:
    """Raises SystemExit when an answer is not that of the reference in float64."""
    plan = lay_out(branches)
    keys, values = (tensor.contiguous() for tensor in gathered(branches))

    def sdpa(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # Query heads that share a key head as its rows: several times as fast as enable_gqa.
        q = branches.q.view(-1, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, HEAD_WIDTH)
        return scaled_dot_product_attention(q, keys, values, scale=branches.scaling).flatten(1, 2)

    def ours() -> torch.Tensor:
        return fork_attention(branches.q, branches.k_pool, branches.v_pool, plan, branches.scaling)

    others = {
        "SGLang's loop": sglang_loop(branches),
        "SDPA, gathered before": lambda: sdpa(keys, values),
        "gather and SDPA": lambda: sdpa(*gathered(branches)),
    }
    wide = (tensor.double() for tensor in (branches.q, branches.k_pool, branches.v_pool))
    expected = reference_attention(*wide, plan, branches.scaling)
    for name, answer in {"fork attention": ours, **others}.items():
        error = float((answer() - expected).abs().max() / expected.abs().max())
        if error > tolerance:
            raise SystemExit(f"{name}: off by {error:.2g} of the largest magnitude, more than {tolerance:g}")
    return [Contest("fork attention", ours, others), Contest("its layout", lambda: lay_out(branches), {})]


# -- sampling ----------------------------------------------------------------------------------------------------------


def sampling_contests(num_rows: int, vocab_size: int, random: torch.Generator) -> list[Contest]:
    """Raises SystemExit when a sampler's answer is not that of the reference."""
    logits = torch.randn(num_rows, vocab_size, generator=random) * 3
    temperatures = torch.full((num_rows,), 0.8, dtype=torch.float64)
    seeds, positions = torch.arange(num_rows) + 1, torch.arange(num_rows) + 5
    columns = (temperatures, seeds, positions, torch.zeros(num_rows, dtype=torch.bool))
    saguaro = (torch.full((num_rows,), 2), torch.full((num_rows,), 0.3, dtype=torch.float64))
    sizes = {"num_ranked": NUM_RANKED, "top_m": TOP_M}

    def draw(probs: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probs, 1, generator=random)

    def in_torch() -> tuple[torch.Tensor, torch.Tensor]:
        top = logits.topk(TOP_M)
        return top.indices, draw(torch.softmax(logits / 0.8, dim=-1))

    samplers = {
        "sampler, shared noise": (lambda: sample_shared_noise(logits, *columns, **sizes), ()),
        "sampler, Saguaro": (lambda: sample_saguaro(logits, *columns, *saguaro, **sizes), saguaro),
    }
    for name, (sample, law) in samplers.items():
        if not _is_same_draw(sample(), reference_sample(logits, *columns, *law, **sizes)):
            raise SystemExit(f"{name}: not the tokens of the reference")
    log_probs = torch.log_softmax(logits / 0.8, dim=-1).unsqueeze(1)
    proposal = torch.zeros(num_rows, 0, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64)
    draws = (log_probs, *columns[1:], *proposal)
    if not torch.equal(draw_and_agree(*draws).token_ids, reference_draw(*draws).token_ids):
        raise SystemExit("target's draw from log p: not the tokens of the reference")
    return [
        *(
            Contest(name, sample, {"topk, softmax, multinomial": in_torch})
            for name, (sample, _) in samplers.items()
        ),
        Contest(
            "target's draw from log p",
            lambda: draw_and_agree(*draws),
            {"exp, multinomial": lambda: draw(log_probs[:, 0].exp())},
        ),
    ]


def _is_same_draw(a: Drafted, b: Drafted) -> bool:
    return torch.equal(a.token_ids, b.token_ids) and torch.equal(a.ranked_ids, b.ranked_ids)


# -- measurement -------------------------------------------------------------------------------------------------------


def milliseconds(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return (time.perf_counter() - started_s) * 1e3


def compare(contest: Contest, num_turns: int) -> list[Ratio]:
    """A line for each alternative; one for the kernel alone where there is none."""
    functions = {"ours": contest.ours, **contest.others}
    for function in functions.values():
        function()  # caches, and what torch makes at the first call
    turns = [
        {name: milliseconds(function) for name, function in functions.items()}
        for _ in trange(num_turns, desc=contest.operation, leave=False)
    ]
    ours_ms = statistics.median(turn["ours"] for turn in turns)
    if not contest.others:
        return [Ratio(contest.operation, "-", ours_ms, None, None)]
    return [
        Ratio(
            contest.operation,
            name,
            ours_ms,
            statistics.median(turn[name] for turn in turns),
            statistics.median(turn[name] / turn["ours"] for turn in turns),
        )
        for name in contest.others
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(args.seed)
    branches = make_branches(args.branches, args.prefix, args.depth, DTYPES[args.dtype], random)
    contests = [
        *attention_contests(branches, TOLERANCES[args.dtype]),
        *sampling_contests(args.rows, args.vocab_size, random),
    ]
    ratios = [ratio for contest in contests for ratio in compare(contest, args.turns)]
    print(f"\ncompiled kernels: {is_compiled()}")
    print(f"{format_table([name.replace('_', ' ') for name in Ratio._fields], ratios)}\n")
    write_json(
        args.out,
        {
            "ratios": [ratio._asdict() for ratio in ratios],
            "kernels": is_compiled(),
            "machine": machine_facts(),
            "arguments": options.arguments_as_json(args),
        },
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("cpu_kernels", __doc__)
    parser.add_count("--branches", 24, "rows of the attention")
    parser.add_count("--prefix", 512, "tokens that they share")
    parser.add_count("--depth", 4, "tokens of each one's own")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: %(default)s)")
    parser.add_count("--rows", 4, "rows of the samplers")
    parser.add_count("--vocab-size", 151_936, "V", lowest=TOP_M)
    parser.add_count("--turns", 101, "how often each is called")
    parser.add_count("--seed", 1, "of the random inputs", lowest=0)
    parser.add_out("cpu-kernels.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options.run_script(main, "cpu_kernels")
