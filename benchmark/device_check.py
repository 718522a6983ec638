"""Check the Triton kernels on a GPU: right on fresh random inputs, in a CUDA graph, without waiting; and how fast.

    python benchmark/device_check.py --json device.json

Needs torch, triton and this repository, nothing else, and under 8 minutes of one GPU. Every check runs even if one
before it fails; the exit status is 1 if any did. ``--dry-run`` runs the same code on a CPU, in Triton's interpreter and
with tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sgl-kernel" / "python"))

import torch
import triton

from sglang_ssd.algorithm.target_law import SamplingLaw, add_bias, log_probs, penalise_run
from sglang_ssd_kernel.cpu import draft_sampler as cpu_sampler
from sglang_ssd_kernel.cpu import fork_attention as cpu_attention
from sglang_ssd_kernel.cpu import target_draw as cpu_draw
from sglang_ssd_kernel.triton import draft_sampler, fork_attention, target_draw

FLUSHED_BYTES = 256 << 20  # more than any cache holds


class Size(NamedTuple):
    """How much is checked. ``forks``: requests, branches of each, keys of each prefix, that are timed, in the dtype and
    width ``timed``; ``vocab_sizes`` and ``num_rows`` of the sampler and the target's draws."""

    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, ...]
    heads: tuple[int, int]
    longest_prefix: int
    forks: tuple[tuple[int, int, int], ...]
    timed: tuple[torch.dtype, int]
    vocab_sizes: tuple[int, ...]
    num_rows: tuple[int, ...]
    repeats: int


FULL = Size(
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    widths=(64, 80, 96, 128, 256),
    heads=(32, 8),
    longest_prefix=3000,
    forks=((1, 24, 512), (1, 24, 4096), (1, 24, 16384), (8, 24, 2048), (32, 24, 8192), (1, 8, 256)),
    timed=(torch.bfloat16, 128),
    vocab_sizes=(151_936, 262_144, 1000),
    num_rows=(1, 24, 192),
    repeats=20,
)
TINY = Size((torch.float32,), (16,), (2, 1), 70, ((1, 3, 40),), (torch.float32, 16), (300,), (2,), 1)
ATTENTION_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Checker:
    """One run: where, how much, and the random numbers."""

    def __init__(self, size: Size, device: str, seed: int) -> None:
        self.size, self.device = size, device
        self.random = torch.Generator().manual_seed(seed)
        self._flushed = torch.empty(
            FLUSHED_BYTES if device == "cuda" else 1, dtype=torch.uint8, device=device
        )

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.random) * scale).to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    # -- time ----------------------------------------------------------------------------------------------------

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Median time of ``function`` on the device, captured in a graph and with cold caches."""
        function()
        if self.device == "cpu":
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        graph = self.capture(function)
        return statistics.median(self._replay_ms(graph) for _ in range(self.size.repeats))

    def _replay_ms(self, graph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def capture(self, function: Callable[[], object]):
        """A CUDA graph of ``function``, which has run before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph


# --- fork attention ---------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    plan: cpu_attention.ForkPlan

    def run(self, device_plan=None, out=None) -> torch.Tensor:
        plan = device_plan or fork_attention.to_device(self.plan, self.q.device)
        scaling = self.q.shape[2] ** -0.5
        return fork_attention.fork_attention(self.q, self.k_pool, self.v_pool, plan, scaling, out)

    def error(self, result: torch.Tensor) -> float:
        """Of the largest element, against float64."""
        q, k_pool, v_pool = (tensor.double() for tensor in self[:3])
        exact = cpu_attention.reference(q, k_pool, v_pool, self.plan, self.q.shape[2] ** -0.5)
        return float((result.double() - exact).abs().max() / exact.abs().max())


def make_plan(
    check: Checker, rows: list[tuple[int, int, int]], prefix_lens: list[int]
) -> cpu_attention.ForkPlan:
    """rows: (group, keys of its prefix, keys of its tail). Every key has a slot of its own."""
    depth = max(tail for _, _, tail in rows)
    num_slots = sum(prefix_lens) + len(rows) * depth
    slots = torch.randperm(num_slots, generator=check.random)
    starts = torch.tensor([0, *prefix_lens]).cumsum(0)
    groups, lens, tails = map(torch.tensor, zip(*rows))
    tail_slots = slots[sum(prefix_lens) :].view(len(rows), depth)
    return cpu_attention.make_plan(
        slots[: sum(prefix_lens)], starts, groups, lens, tail_slots, tails, num_slots
    )


def ragged_plan(check: Checker) -> cpu_attention.ForkPlan:
    """Forks, a verified run, plain decode, a row without prefix and one with a long tail."""
    longest = check.size.longest_prefix
    lens = [*check.integers(longest // 2, longest, 3).tolist(), 0]
    forks = [(0, lens[0], depth % 9) for depth in range(24 if longest > 100 else 3)]
    verified = [(1, lens[1] - back, 0) for back in reversed(range(4))]
    return make_plan(check, [*forks, *verified, (2, lens[2], 0), (3, 0, 5), (3, 0, longest // 8)], lens)


def fork_plan(check: Checker, requests: int, branches: int, prefix_len: int) -> cpu_attention.ForkPlan:
    rows = [
        (request, prefix_len, 1 + branch % 8) for request in range(requests) for branch in range(branches)
    ]
    return make_plan(check, rows, [prefix_len] * requests)


def make_attention(check: Checker, plan, dtype, heads: tuple[int, int], width: int) -> Attention:
    q = check.randn(plan.row_groups.numel(), heads[0], width, dtype=dtype)
    pools = (check.randn(plan.num_slots, heads[1], width, dtype=dtype) for _ in range(2))
    return Attention(q, *pools, plan)


def check_attention(check: Checker) -> dict:
    """Errors over dtypes, widths and grouped heads 1 to 16; and rows alone have the bits that they have together."""
    results = {}
    for dtype in check.size.dtypes:
        cases = [(check.size.heads, width) for width in check.size.widths]
        cases += [((heads, 1), check.size.widths[0]) for heads in (1, 7, 16)]
        for heads, width in cases:
            attention = make_attention(check, ragged_plan(check), dtype, heads, width)
            poisoned = torch.full_like(attention.q, torch.nan)
            error = attention.error(attention.run(out=poisoned))
            results[f"{dtype} {heads[0]}/{heads[1]} x {width}"] = error
            require(error < ATTENTION_ERROR[dtype], f"{dtype} {heads} {width}: error {error}")
    return results


def check_attention_bits(check: Checker) -> dict:
    """Every row of a ragged batch has the same bits without the others, and with all its keys in its tail."""
    differing = {}
    for dtype in check.size.dtypes:
        attention = make_attention(check, ragged_plan(check), dtype, check.size.heads, check.size.timed[1])
        plan, limits = attention.plan, fork_attention.to_device(attention.plan, check.device).limits
        together = attention.run()
        count = 0
        for row, slots in enumerate(cpu_attention.row_slots(plan)):
            for prefix_len in (0, len(slots)):
                alone = cpu_attention.make_plan(
                    slots[:prefix_len], torch.tensor([0, prefix_len]), torch.tensor([0]), torch.tensor([prefix_len]),
                    slots[None, prefix_len:], torch.tensor([len(slots) - prefix_len]), plan.num_slots,
                )  # fmt: skip
                # The same tiles, which the limits decide.
                wide = limits._replace(
                    depth=len(slots), prefix_slots=len(slots), prefix_len=len(slots), rows=1
                )
                device_plan = fork_attention.DevicePlan(wide, check.device)
                device_plan.update(alone)
                result = attention._replace(q=attention.q[row : row + 1]).run(device_plan)
                count += not torch.equal(result[0], together[row])
        differing[str(dtype)] = count
    require(not any(differing.values()), f"rows whose bits depend on the batch: {differing}")
    return differing


def check_attention_graph(check: Checker) -> dict:
    """One captured graph runs plan after plan, with padded rows and groups, and waits for nothing."""
    plans = [ragged_plan(check) for _ in range(3)]
    sizes = [fork_attention.to_device(plan, "cpu").limits for plan in plans]
    limits = fork_attention.PlanLimits(*map(max, zip(*sizes)))
    limits = limits._replace(rows=limits.rows + 3, groups=limits.groups + 2)
    device_plan = fork_attention.DevicePlan(limits, check.device)
    attention = make_attention(check, plans[0], check.size.dtypes[-1], check.size.heads, check.size.widths[0])
    num_slots = max(plan.num_slots for plan in plans)
    shape = (num_slots, *attention.k_pool.shape[1:])
    attention = attention._replace(
        q=check.randn(limits.rows, *attention.q.shape[1:], dtype=attention.q.dtype),
        k_pool=check.randn(*shape, dtype=attention.q.dtype),
        v_pool=check.randn(*shape, dtype=attention.q.dtype),
    )
    out = torch.empty_like(attention.q)
    run = without_waiting(check, lambda: attention.run(device_plan, out))
    run()
    if check.device == "cuda":
        run = check.capture(run).replay
    errors = []
    for plan in plans:
        without_waiting(check, lambda plan=plan: device_plan.update(plan))()
        out.fill_(torch.nan)
        run()
        num_rows = plan.row_groups.numel()
        errors.append(attention._replace(q=attention.q[:num_rows], plan=plan).error(out[:num_rows]))
        require(errors[-1] < ATTENTION_ERROR[out.dtype], f"replayed: {errors}")
        require(not out[num_rows:].any(), "rows of padding must be 0")
    return {"errors": errors}


def check_attention_table(check: Checker) -> dict:
    """As the draft's graphs run it: slots read where a table has them, limits that no step fills. Times against buffers
    of just the plan's size."""
    requests, branches, longest = (4, 24, check.size.longest_prefix) if check.device == "cuda" else (2, 3, 70)
    width, num_own = longest + 9, requests * branches
    table = torch.randperm((requests + num_own) * width, generator=check.random).to(torch.int32)
    table = table.view(-1, width).to(check.device)
    (heads, kv_heads), (dtype, head_width) = check.size.heads, check.size.timed
    limits = fork_attention.PlanLimits(num_own + 5, num_own + 5, 0, 0, 4 * longest, num_own)
    group_rows = fork_attention.rows_of_a_tile(limits, dtype, heads // kv_heads, head_width)
    plan = fork_attention.TablePlan(limits._replace(group_rows=group_rows), table)
    q = check.randn(limits.rows, heads, head_width, dtype=dtype)
    pools = [check.randn(table.numel(), kv_heads, head_width, dtype=dtype) for _ in range(2)]
    out = torch.empty_like(q)
    run = without_waiting(check, Attention(q, *pools, plan).run)
    run(plan, out)
    replay = (
        check.capture(lambda: run(plan, out)).replay if check.device == "cuda" else lambda: run(plan, out)
    )
    errors = []
    for _ in range(3):
        prefixes = check.integers(1, longest, requests).tolist()
        layout = cpu_attention.ForkLayout(
            [branches] * requests,
            list(range(requests)),
            list(range(requests, requests + num_own)),
            [n for n in prefixes for _ in range(branches)],
            [n + 1 + i % 8 for n in prefixes for i in range(branches)],
        )
        without_waiting(check, lambda layout=layout: plan.update_layout(layout))()
        out.fill_(torch.nan)
        replay()
        attention = Attention(q[:num_own], *pools, plan_of_table(layout, table.cpu()))
        errors.append(attention.error(out[:num_own]))
        require(errors[-1] < ATTENTION_ERROR[dtype], f"replayed: {errors}")
        require(not out[num_own:].any(), "rows of padding must be 0")
    exact = fork_attention.to_device(attention.plan, check.device)
    return {
        "errors": errors,
        "ms": check.milliseconds(lambda: run(plan, out)),
        "exact_limits_ms": check.milliseconds(lambda: attention.run(exact)),
    }


def plan_of_table(layout, table: torch.Tensor) -> cpu_attention.ForkPlan:
    """The same rows with slots of their own. All rows of a group share as much."""
    firsts = [sum(layout.group_sizes[:group]) for group in range(len(layout.group_sizes))]
    shared = [layout.shared_lens[first] for first in firsts]
    tail_lens = torch.tensor(layout.lens) - torch.tensor(layout.shared_lens)
    tails = [table[row, n:] for row, n in zip(layout.rows, layout.shared_lens)]
    depth = int(tail_lens.max())
    return cpu_attention.make_plan(
        torch.cat([table[row, :n] for row, n in zip(layout.base_rows, shared)]),
        torch.tensor([0, *shared]).cumsum(0),
        torch.arange(len(shared)).repeat_interleave(torch.tensor(layout.group_sizes)),
        torch.tensor(layout.shared_lens),
        torch.stack([tail[:depth] for tail in tails]),
        tail_lens,
        table.numel(),
    )


def without_waiting(check: Checker, function: Callable) -> Callable:
    """``function``, failing where the host would wait for the device."""

    def checked(*arguments):
        if check.device == "cpu":
            return function(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked


def time_attention(check: Checker) -> list[dict]:
    """Against a row a branch with its own copy of the prefix's slots, and SDPA on keys gathered before."""
    results = []
    dtype, width = check.size.timed
    for requests, branches, prefix_len in check.size.forks:
        attention = make_attention(
            check, fork_plan(check, requests, branches, prefix_len), dtype, check.size.heads, width
        )
        device_plan = fork_attention.to_device(attention.plan, check.device)
        slots = cpu_attention.row_slots(attention.plan)
        alone = rows_alone(slots, attention.plan.num_slots)
        alone_plan = fork_attention.to_device(alone, check.device)
        bytes_read = attention.plan.num_slots * attention.k_pool[0].nbytes * 2
        fork_ms = check.milliseconds(lambda a=attention, plan=device_plan: a.run(plan))
        result = {
            "requests": requests, "branches": branches, "prefix": prefix_len, "fork_ms": fork_ms,
            "row_per_branch_ms": check.milliseconds(lambda a=attention, plan=alone_plan: a.run(plan)),
            "gb_per_s": bytes_read / fork_ms / 1e6,
        }  # fmt: skip
        if requests == 1:
            result["sdpa_ms"] = time_sdpa(check, attention, slots)
        results.append(result)
    return results


def rows_alone(slots: list[torch.Tensor], num_slots: int) -> cpu_attention.ForkPlan:
    """Every row a group of its own."""
    lens = torch.tensor([len(keys) for keys in slots])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
    no_tails = torch.zeros(len(slots), 0, dtype=torch.int64), torch.zeros(len(slots), dtype=torch.int64)
    return cpu_attention.make_plan(
        torch.cat(slots), starts, torch.arange(len(slots)), lens, *no_tails, num_slots
    )


def time_sdpa(check: Checker, attention: Attention, slots: list[torch.Tensor]) -> float:
    """Gathering is part of it: no row's keys lie side by side."""
    longest = max(map(len, slots))
    index = torch.stack([torch.nn.functional.pad(keys, (0, longest - len(keys))) for keys in slots])
    mask = torch.arange(longest) < torch.tensor([len(keys) for keys in slots])[:, None]
    index, mask = index.to(check.device), mask[:, None, None].to(check.device)

    def run():
        keys, values = (pool[index].transpose(1, 2) for pool in (attention.k_pool, attention.v_pool))
        return torch.nn.functional.scaled_dot_product_attention(
            attention.q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True
        )

    return check.milliseconds(run)


# --- samplers ---------------------------------------------------------------------------------------------------------


def sampler_arguments(check: Checker, num_rows: int, vocab_size: int, dtype=torch.float32) -> dict:
    return {
        "logits": check.randn(num_rows, vocab_size, dtype=dtype, scale=3.0),
        "temperatures": (torch.rand(num_rows, generator=check.random, dtype=torch.float64) + 0.3).to(
            check.device
        ),
        "seeds": check.integers(-(2**63), 2**63 - 1, num_rows).to(check.device),
        "positions": check.integers(0, 1 << 20, num_rows).to(check.device),
        "is_greedy": (torch.arange(num_rows) % 4 == 3).to(check.device),
    }


def saguaro_arguments(check: Checker, num_rows: int) -> dict:
    c = torch.rand(num_rows, generator=check.random, dtype=torch.float64)
    return {"fan_out": check.integers(0, 6, num_rows).to(check.device), "c": c.to(check.device)}


def on_cpu(arguments: dict) -> dict:
    return {name: value.cpu() if torch.is_tensor(value) else value for name, value in arguments.items()}


def check_sampler(check: Checker) -> dict:
    """Tokens and candidates equal to the reference, q within one float32 step, drawn from what is shipped."""
    results = {}
    for vocab_size in check.size.vocab_sizes:
        for dtype in check.size.dtypes:
            arguments = sampler_arguments(check, check.size.num_rows[-1], vocab_size, dtype)
            sizes = {"num_ranked": 8, "top_m": min(64, vocab_size)}
            shared = draft_sampler.sample(**arguments, **sizes)
            compare(shared, cpu_sampler.reference(**on_cpu(arguments), **sizes), "shared noise")
            arguments |= saguaro_arguments(check, check.size.num_rows[-1])
            saguaro = draft_sampler.sample(**arguments, **sizes)
            expected = cpu_sampler.reference(**on_cpu(arguments), **sizes)
            compare(saguaro, expected, "Saguaro")
            drawn = cpu_sampler.reference_draw(
                saguaro.q.cpu(), arguments["seeds"].cpu(), arguments["positions"].cpu()
            )
            tokens = saguaro.top_ids.gather(1, drawn.to(check.device))[:, 0]
            require(torch.equal(tokens, saguaro.token_ids), "tokens are not those of the q that is emitted")
            error = float((saguaro.q.cpu() - expected.q).abs().max())
            results[f"{dtype} {vocab_size}"] = {"q_error": error}
            require(error < 1e-6, f"q differs by {error}")
    return results


def compare(actual, expected, name: str) -> None:
    for field, values in expected._asdict().items():
        if values is not None and not values.is_floating_point():
            different = int((getattr(actual, field).cpu() != values).sum())
            require(not different, f"{name}: {different} of {values.numel()} {field} differ")


def time_sampler(check: Checker) -> list[dict]:
    """Against topk, softmax and a draw; and what share of a copy's bandwidth the one pass reaches."""
    results = []
    vocab_size, copied = check.size.vocab_sizes[0], copy_gb_per_s(check)
    for num_rows in check.size.num_rows:
        for dtype in check.size.dtypes[:2]:
            arguments = sampler_arguments(check, num_rows, vocab_size, dtype)
            logits, temperatures = arguments["logits"], arguments["temperatures"].float()[:, None]
            top_m = min(64, vocab_size)

            def ours(a=arguments, top_m=top_m):
                return draft_sampler.sample(**a, num_ranked=8, top_m=top_m)

            def plain(logits=logits, temperatures=temperatures, top_m=top_m):
                top = logits.float().topk(top_m)
                return draw_plainly((top.values / temperatures).softmax(-1))

            ours_ms = check.milliseconds(ours)
            gb_per_s = logits.nbytes / ours_ms / 1e6
            results.append(
                {
                    "rows": num_rows, "dtype": str(dtype), "ms": ours_ms, "gb_per_s": gb_per_s,
                    "share_of_copy": gb_per_s / copied, "topk_softmax_draw_ms": check.milliseconds(plain),
                }
            )  # fmt: skip
    return results


def draw_plainly(weights: torch.Tensor) -> torch.Tensor:
    """A token of each row, as ``torch.multinomial`` draws it but without its waiting, which no graph can hold."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def copy_gb_per_s(check: Checker) -> float:
    """Bytes read and written a second by a copy of a gigabyte."""
    source = torch.zeros(
        (1 << 30) if check.device == "cuda" else 1024, dtype=torch.uint8, device=check.device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / check.milliseconds(lambda: target.copy_(source)) / 1e6


def target_arguments(check: Checker, batch_size: int, width: int, vocab_size: int) -> dict:
    logits = check.randn(batch_size, width, vocab_size, scale=3.0)
    arguments = sampler_arguments(check, batch_size, 1)
    del arguments["logits"]
    arguments |= {"scores": logits, "lengths": check.integers(0, width, batch_size).to(check.device)}
    return arguments | {"proposed": check.integers(0, vocab_size, batch_size, width - 1).to(check.device)}


def residual_arguments(check: Checker, batch_size: int, lookahead: int, vocab_size: int) -> dict:
    p = check.randn(batch_size, lookahead + 1, vocab_size, scale=3.0).softmax(-1)
    top = p[:, :-1].topk(min(64, vocab_size // 2))
    q_probs = (top.values * torch.rand_like(top.values)).float()
    uniforms = torch.rand(batch_size, lookahead + 1, generator=check.random, dtype=torch.float64).to(
        check.device
    )
    return {
        "p": p,
        "proposed": top.indices[..., 0].contiguous(),
        "lengths": check.integers(0, lookahead + 1, batch_size).to(check.device),
        "is_one_hot": (torch.arange(batch_size) % 5 == 4).to(check.device),
        "q_ids": top.indices,
        "q_probs": q_probs / q_probs.sum(-1, keepdim=True),
        "accept_uniforms": uniforms[:, 1:].contiguous(),
        "bonus_uniforms": uniforms[:, 0].contiguous(),
    }


def check_target_draw(check: Checker) -> dict:
    """Draws, agreement, acceptance and bonus tokens equal to the references."""
    for vocab_size in check.size.vocab_sizes:
        arguments = target_arguments(check, 4, 4, vocab_size)
        actual = target_draw.draw_and_agree(**arguments)
        compare(actual, cpu_draw.reference(**on_cpu(arguments)), "draws")
        # And where it agrees for a while.
        arguments["proposed"] = actual.token_ids[:, :-1].contiguous()
        actual = target_draw.draw_and_agree(**arguments)
        compare(actual, cpu_draw.reference(**on_cpu(arguments)), "agreement")
        arguments = residual_arguments(check, 8, 3, vocab_size)
        actual = target_draw.verify_residual(**arguments)
        compare(actual, target_draw.reference_residual(**on_cpu(arguments)), "residual")
    return {}


def check_law(check: Checker) -> dict:
    """What a verifier makes of its logits before it draws is what the host makes of them, and waits for nothing: the
    overlapped loop hides its bookkeeping behind this."""
    penalised = SamplingLaw(1.2, 2, frequency_penalty=0.5, min_new_tokens=9, stop_token_ids=(7, 8))
    laws = [SamplingLaw(0.8, 1), SamplingLaw(), penalised, SamplingLaw(0.5, logit_bias=((3, 2.0), (5, -1.0)))]

    def scores(logits: torch.Tensor) -> torch.Tensor:
        for row, law in enumerate(laws):
            penalise_run(logits[row, None], law, [1, 2, 2, 3], [])
            add_bias(logits[row, None], law)
        return log_probs(logits, laws)

    logits = check.randn(len(laws), check.size.vocab_sizes[0], scale=3.0)
    expected = scores(logits.cpu().clone())
    torch.testing.assert_close(without_waiting(check, scores)(logits).cpu(), expected, rtol=1e-4, atol=1e-3)
    return {}


def time_target_draw(check: Checker) -> list[dict]:
    """Against Gumbel noise of the vocabulary's size, and a dense residual."""
    results, vocab_size, width = [], check.size.vocab_sizes[0], 8
    for batch_size in (1, 8, 64) if check.device == "cuda" else (1,):
        arguments = target_arguments(check, batch_size, width, vocab_size)
        residual = residual_arguments(check, batch_size, width - 1, vocab_size)

        def dense_draw(scores=arguments["scores"]):
            return (scores - torch.empty_like(scores).exponential_().log_()).argmax(-1)

        def dense_residual(p=residual["p"], q_ids=residual["q_ids"], q_probs=residual["q_probs"]):
            weights = (p[:, :-1] - torch.zeros_like(p[:, :-1]).scatter_(-1, q_ids, q_probs)).clamp_(min=0.0)
            return draw_plainly(weights[:, 0])

        results.append({
            "requests": batch_size,
            "draw_ms": check.milliseconds(lambda a=arguments: target_draw.draw_and_agree(**a)),
            "dense_draw_ms": check.milliseconds(dense_draw),
            "residual_ms": check.milliseconds(lambda a=residual: target_draw.verify_residual(**a)),
            "dense_residual_ms": check.milliseconds(dense_residual),
        })  # fmt: skip
    return results


def check_sampler_graph(check: Checker) -> dict:
    """Sampler and target draw in one captured graph follow their inputs, and wait for nothing."""
    vocab_size = check.size.vocab_sizes[-1]
    drafts = sampler_arguments(check, 4, vocab_size)
    targets = target_arguments(check, 4, 3, vocab_size)
    sizes = {"num_ranked": 3, "top_m": 16}
    kept: list = []

    def run():
        kept[:] = [
            draft_sampler.sample(**drafts, **sizes),
            target_draw.draw_and_agree(**targets),
        ]

    run = without_waiting(check, run)
    run()
    replay = check.capture(run).replay if check.device == "cuda" else run
    for arguments in (drafts, targets):
        scores = arguments["logits" if "logits" in arguments else "scores"]
        scores.copy_(check.randn(*scores.shape, scale=3.0))
        arguments["seeds"].add_(1)
    replay()
    compare(kept[0], cpu_sampler.reference(**on_cpu(drafts), **sizes), "replayed sampler")
    compare(kept[1], cpu_draw.reference(**on_cpu(targets)), "replayed draws")
    return {}


# --- the run ----------------------------------------------------------------------------------------------------------


class CheckFailed(Exception):
    """A kernel's answer was wrong."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


CHECKS = (
    check_attention,
    check_attention_bits,
    check_attention_graph,
    check_attention_table,
    check_sampler,
    check_target_draw,
    check_law,
    check_sampler_graph,
    time_attention,
    time_sampler,
    time_target_draw,
)


def describe(device: str) -> dict:
    facts = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    if device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    return facts


def run_check(function: Callable[[Checker], object], check: Checker) -> dict:
    start = time.perf_counter()
    try:
        outcome = {"ok": True, "results": function(check)}
    except Exception as error:  # the other checks still have something to say
        traceback.print_exc()
        outcome = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    outcome["seconds"] = round(time.perf_counter() - start, 1)
    print(f"{function.__name__}: {json.dumps(outcome)}", flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--seed", type=int, help="of the inputs; fresh if not given")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, on a CPU"
    )
    options = parser.parse_args()
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    device = "cpu" if options.dry_run else "cuda"
    check = Checker(TINY if options.dry_run else FULL, device, seed)
    report = {"machine": describe(device), "seed": seed, "dry_run": options.dry_run}
    print(json.dumps(report))
    report["checks"] = {function.__name__: run_check(function, check) for function in CHECKS}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(outcome["ok"] for outcome in report["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
