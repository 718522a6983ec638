"""Measure the whole system at the times of other devices: the real scheduler, wire and draft loop with the test pair, whose
forwards are stretched to stated times by sleeping (``stretched.py``).

Defaults are published times of Qwen3-32B with the 0.6B as draft on H100: 11.5 ms a verify, 2.54 ms a draft depth. Here the
test pair's own forwards must be shorter than that; where they are not, ``--scale`` stretches all times alike, which leaves
every ratio as it is. What is added to a round (send, queue, look-up, receive, bookkeeping) is told in true milliseconds.

One line a configuration: plain decoding, synchronous speculation at every K, and SSD with every backup. Theorem 7 says
what SSD would reach at the measured hit rate if nothing were added: in tokens a second at the stated times, and as a
speed-up over plain decoding, to which the scheduler adds its own work a round as well.

A plot of tokens a second over requests at a time goes beside the JSON.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_args

import options
import stretched
from measurement import Measurement, summarize
from report import format_table, machine_facts, new_figure, save_figure, write_json
from serving import Server, serving
from tqdm import tqdm

from sglang_ssd.algorithm.theory import ssd_tokens_per_ms
from sglang_ssd.bridge.environment import OVERLAP_SWITCH
from sglang_ssd.test_pair import DraftKind
from sglang_ssd.wire.messages import FallbackName

PROMPT_LENGTH = 24
#: Tokens between two parts of a stream: on a machine of few cores, HTTP would take time from the scheduler and the draft.
STREAM_INTERVAL = 64
LAUNCHER = (str(Path(stretched.__file__)), "server")


class Configuration(NamedTuple):
    """``lookahead`` and ``budget`` as the flags take them."""

    mode: str
    lookahead: str | None = None
    budget: str | None = None
    fallback: str | None = None

    @property
    def name(self) -> str:
        sizes = (f"{n}={v}" for n, v in zip("KB", self[1:3]) if v is not None)
        return " ".join([self.mode, *sizes, *([self.fallback] if self.fallback else [])])

    @property
    def flags(self) -> list[str]:
        flags = ["--ssd-mode", self.mode]
        if self.lookahead is not None:
            flags += ["--speculative-num-steps", self.lookahead]
        if self.budget is not None:
            flags += ["--ssd-fan-out-budget", self.budget]
        if self.fallback is not None:
            flags += ["--ssd-fallback", self.fallback]
        return flags


class Row(NamedTuple):
    """One configuration at one concurrency. Milliseconds are true ones, a round each."""

    configuration: str
    num_at_once: int
    tokens_per_s: float
    accept_length: float | None
    hit_rate: float | None
    round_ms: float | None
    verify_ms: float | None
    wait_ms: float | None
    added_ms: float | None
    of_theorem_7: float | None
    of_its_speed_up: float | None


def configurations(args: argparse.Namespace) -> list[Configuration]:
    sync = [Configuration("sync", str(k)) for k in args.sync_lookaheads]
    sizes = [(str(k), str(b)) for k in args.lookaheads for b in args.budgets]
    sizes += [("auto", "auto")] if args.auto else []
    ssd = [Configuration("async", *size, fallback) for size in sizes for fallback in args.fallbacks]
    return [Configuration("off"), *sync, *ssd]


def row_of(
    configuration: Configuration,
    num_at_once: int,
    measured: Measurement,
    depth_ms: float,
    verify_ms: float,
    plain_tokens_per_s: float | None = None,
) -> Row:
    """``depth_ms`` and ``verify_ms``: the stated times. ``plain_tokens_per_s``: what one request decodes without
    speculation."""
    if measured.rounds is None:
        return Row(configuration.name, num_at_once, measured.tokens_per_s, *[None] * 8)
    round_ms = 1e3 * measured.seconds / measured.rounds
    is_fixed = (configuration.lookahead or "").isdigit()
    added_ms = of_theorem = of_speed_up = None
    if configuration.mode == "async" and is_fixed and num_at_once == 1:
        lookahead = int(configuration.lookahead)
        # Without what is added: a round is the longer of both sides, and a miss waits for its backup.
        ideal = ssd_tokens_per_ms(
            hit_rate=measured.hit_rate,
            tokens_hit=measured.tokens_hit or 0.0,
            tokens_miss=measured.tokens_miss or 0.0,
            verify_ms=verify_ms,
            primary_ms=(lookahead + 1) * depth_ms,
            backup_ms=lookahead * depth_ms,
        )
        of_theorem = measured.decode_tokens_per_s / (1e3 * ideal)
        if plain_tokens_per_s:
            of_speed_up = measured.decode_tokens_per_s / plain_tokens_per_s / (ideal * verify_ms)
        ideal_ms = max(verify_ms, (lookahead + 1) * depth_ms) + (1 - measured.hit_rate) * lookahead * depth_ms
        round_ms = 1e3 * measured.accept_length / measured.decode_tokens_per_s
        added_ms = round_ms - ideal_ms
    return Row(
        configuration.name, num_at_once, measured.tokens_per_s, measured.accept_length, measured.hit_rate,
        round_ms, measured.verify_ms, measured.draft_wait_ms, added_ms, of_theorem, of_speed_up,
    )  # fmt: skip


def prompts_of(num: int) -> list[list[int]]:
    """Printable bytes, which are tokens of the test pair."""
    rng = Random(0)
    return [rng.choices(range(32, 127), k=PROMPT_LENGTH) for _ in range(num)]


def measure(server: Server, num_at_once: int, args: argparse.Namespace, label: str) -> Measurement:
    num_warm_ups = args.warm_ups * num_at_once
    prompts = prompts_of(num_warm_ups + args.num_prompts * num_at_once)

    def ask(prompt: list[int]):
        return server.generate(prompt, args.max_tokens)

    with ThreadPoolExecutor(num_at_once) as pool:
        list(pool.map(ask, prompts[:num_warm_ups]))
        before, started = server.ssd_state(), time.perf_counter()
        answers = list(
            tqdm(pool.map(ask, prompts[num_warm_ups:]), desc=label, total=len(prompts) - num_warm_ups)
        )
    return summarize(answers, time.perf_counter() - started, before, server.ssd_state())


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    verify_ms, depth_ms = stretched.state_times(args)
    if args.overlap:
        os.environ[OVERLAP_SWITCH] = "1"
    facts, rows, plain_tokens_per_s = machine_facts(), [], None
    with options.temporary_test_pair(args.draft) as pair:
        for configuration in configurations(args):
            arguments = options.server_arguments(pair, configuration.mode, dtype="float32")
            arguments += [*configuration.flags, "--stream-interval", str(STREAM_INTERVAL)]
            log = options.log_path(args.out, configuration.name)
            with serving(arguments, log, configuration.name, LAUNCHER) as server:
                for num_at_once in args.concurrency:
                    label = f"{configuration.name}, {num_at_once} at once"
                    measured = measure(server, num_at_once, args, label)
                    if configuration.mode == "off" and num_at_once == 1:
                        plain_tokens_per_s = measured.decode_tokens_per_s
                    rows.append(
                        row_of(configuration, num_at_once, measured, depth_ms, verify_ms, plain_tokens_per_s)
                    )
    report(args, facts, rows)
    return 0


def report(args: argparse.Namespace, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    print(f"\n{format_table([name.replace('_', ' ') for name in Row._fields], rows)}\n")
    speed_ups = {}
    for num_at_once in args.concurrency:
        best = {
            mode: max((r for r in rows if r.num_at_once == num_at_once and r.configuration.startswith(mode)),
                      key=lambda row: row.tokens_per_s, default=None)
            for mode in ("off", "sync", "async")
        }  # fmt: skip
        if all(best.values()):
            speed_ups[num_at_once] = {
                "best sync": best["sync"].configuration,
                "best async": best["async"].configuration,
                "async/sync": best["async"].tokens_per_s / best["sync"].tokens_per_s,
                "async/off": best["async"].tokens_per_s / best["off"].tokens_per_s,
            }
            print(f"{num_at_once} at once: {speed_ups[num_at_once]}")
    plot(args, rows)
    write_json(
        args.out,
        {
            "rows": [row._asdict() for row in rows],
            "speed_ups": speed_ups,
            "machine": facts,
            "arguments": options.arguments_as_json(args),
        },
    )


def plot(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    figure, axes = new_figure()
    for name in dict.fromkeys(row.configuration for row in rows):
        points = [row for row in rows if row.configuration == name]
        axes.plot([p.num_at_once for p in points], [p.tokens_per_s for p in points], "o-", ms=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("tokens a second, all requests")
    axes.set_title(
        f"test pair, {args.draft} draft, at {args.verify_ms:g} ms a verify and {args.depth_ms:g} ms a draft depth, "
        f"times {args.scale:g}",
        fontsize=9,
    )
    axes.legend(fontsize=8)
    save_figure(figure, args.out.with_suffix(".png"))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("emulated", __doc__)
    add = parser.add_argument
    stretched.add_times(parser)
    add("--lookaheads", type=int, nargs="+", default=[3], help="K of SSD (default: 3)")
    add("--budgets", type=int, nargs="+", default=[8, 12], help="B of SSD (default: 8 12)")
    add("--sync-lookaheads", type=int, nargs="*", default=[1, 2, 3, 4, 5], help="K of sync (default: 1 to 5)")
    add(
        "--fallbacks", choices=get_args(FallbackName), nargs="+", default=["neural"], help="(default: neural)"
    )
    add(
        "--overlap",
        action="store_true",
        help="SSD and sync in the loop that a GPU runs: bookkeeping beside the verify (plain decoding stays in the other)",
    )
    add("--auto", action="store_true", help="also SSD with K and B auto")
    add("--draft", choices=get_args(DraftKind), default="normal", help="(default: %(default)s)")
    add("--concurrency", type=int, nargs="+", default=[1], help="requests at a time (default: 1)")
    parser.add_count("--warm-ups", 1, "prompts before that, for each request at a time", lowest=0)
    parser.add_count("--num-prompts", 8, "prompts for each request at a time")
    parser.add_count("--max-tokens", 128, "tokens a prompt")
    parser.add_out("emulated.json")
    args = parser.parse_args(argv)
    stretched.check_times(parser, args)
    return args


if __name__ == "__main__":
    options.run_script(main, "emulated")
