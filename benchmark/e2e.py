"""Measure plain decoding, synchronous speculative decoding and SSD end to end on a CPU: table, JSON and a plot.

Each mode runs on a fresh server and answers the same chat prompts at temperature 0; no server sees a prompt twice.
Two accountings stand side by side:

  same target cores   the target has the same cores in all modes; sync and async have the draft on cores of its own
                      (as the paper counts: SSD adds a device)
  same total cores    plain has all cores; in sync target and draft both have all cores, which they use in turns; async
                      splits them

The server's HTTP processes are bound to no core in any mode; tokens stream, as a user sees them.

Theorem 7's prediction stands next to what was measured. Its times are measured too: a verify and a draft round of the
async server, and the backup from the sync server, whose draft works on the same cores and drafts all K tokens while
the target waits.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import options
from measurement import MODES, Measurement, comparison, median, summarize, theorem_7
from report import (
    chat_token_ids,
    format_table,
    machine_facts,
    new_figure,
    read_prompts,
    save_figure,
    write_json,
)
from serving import Server, serving
from tqdm import tqdm

from sglang_ssd.bridge.environment import parse_cores, split_cores
from sglang_ssd.test_pair import PairPaths

NUM_WARM_UPS = 2
ACCOUNTINGS = ("same_target_cores", "same_total_cores")


class Setup(NamedTuple):
    """One server to measure. plain has no draft cores."""

    mode: str
    target_cores: tuple[int, ...]
    draft_cores: tuple[int, ...]


def setups_of(
    all_cores: Sequence[int], target: Sequence[int], draft: Sequence[int]
) -> dict[str, dict[str, Setup]]:
    """Accounting -> mode -> what to run. async is the same in both, so it is measured once."""
    everything, target, draft = tuple(all_cores), tuple(target), tuple(draft)
    ssd = Setup("async", target, draft)
    return {
        "same_target_cores": {
            "plain": Setup("plain", target, ()),
            "sync": Setup("sync", target, draft),
            "async": ssd,
        },
        "same_total_cores": {
            "plain": Setup("plain", everything, ()),
            "sync": Setup("sync", everything, everything),
            "async": ssd,
        },
    }


def server_arguments(setup: Setup, args: argparse.Namespace) -> list[str]:
    def listed(cores: Sequence[int]) -> str:
        return ",".join(map(str, cores))

    mode = "off" if setup.mode == "plain" else setup.mode
    arguments = options.server_arguments(
        PairPaths(Path(args.model), Path(args.draft)), mode, lookahead=args.lookahead, budget=args.budget
    )
    arguments += ["--ssd-target-cores", listed(setup.target_cores)]
    if mode != "off":
        arguments += ["--ssd-draft-cores", listed(setup.draft_cores)]
    return arguments + shlex.split(args.server_args)


def measure(
    server: Server, prompts: list[list[int]], warm_ups: list[list[int]], args, label: str
) -> Measurement:
    for prompt in warm_ups:
        server.generate(prompt, args.max_tokens)
    before = server.ssd_state()
    started = time.perf_counter()
    with ThreadPoolExecutor(args.concurrency) as pool:
        answers = pool.map(lambda prompt: server.generate(prompt, args.max_tokens), prompts)
        generations = list(tqdm(answers, desc=label, total=len(prompts), unit="prompt"))
    seconds = time.perf_counter() - started
    return summarize(generations, seconds, before, server.ssd_state())


def plot(path: Path, results: dict[str, dict[str, Measurement]]) -> None:
    figure, axes = new_figure()
    for i, mode in enumerate(MODES):
        speeds = [results[accounting][mode].tokens_per_s for accounting in ACCOUNTINGS]
        bars = axes.bar(
            [group + 0.27 * (i - 1) for group in range(len(ACCOUNTINGS))], speeds, 0.25, label=mode
        )
        axes.bar_label(bars, fmt="%.2f")
    axes.set_xticks(range(len(ACCOUNTINGS)), [accounting.replace("_", " ") for accounting in ACCOUNTINGS])
    axes.set_ylabel("tokens a second")
    axes.legend()
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    all_cores = sorted(os.sched_getaffinity(0))
    split = split_cores(args.target_cores, [args.draft_cores] if args.draft_cores else None)
    accountings = setups_of(all_cores, split.target, split.drafts[0])
    setups = list(dict.fromkeys(setup for modes in accountings.values() for setup in modes.values()))
    facts, prompts = machine_facts(), chat_token_ids(args.model, read_prompts())
    measured: dict[Setup, list[Measurement]] = {setup: [] for setup in setups}
    served: dict[str, Any] = {}
    for repeat in range(args.repeat):
        for setup in setups:
            label = (
                f"{setup.mode} on {'+'.join(map(str, setup.target_cores))}, repeat {repeat + 1}/{args.repeat}"
            )
            log = options.log_path(args.out, f"{setup.mode}-{len(setup.target_cores)}-{repeat + 1}")
            with serving(server_arguments(setup, args), log, label) as server:
                warm_ups = prompts[-NUM_WARM_UPS:]
                measured[setup].append(measure(server, prompts[: args.num_prompts], warm_ups, args, label))
                if setup.mode == "async":
                    served = served_options(server)
    report(args, facts, served, accountings, measured)
    return 0


def served_options(server: Server) -> dict[str, Any]:
    """What the server ran with, its defaults included."""
    info = server.info()
    return {
        "lookahead": info["speculative_num_steps"],
        "budget": info.get("ssd_fan_out_budget"),
        "dtype": info["dtype"],
    }


def report(args, facts, served, accountings, measured: dict[Setup, list[Measurement]]) -> None:
    medians = {setup: median(of_repeats) for setup, of_repeats in measured.items()}
    results = {
        name: {mode: medians[setup] for mode, setup in modes.items()} for name, modes in accountings.items()
    }
    same_target = results["same_target_cores"]
    prediction = theorem_7(same_target["async"], same_target["sync"]) if args.concurrency == 1 else None
    comparisons = {name: comparison(modes, prediction) for name, modes in results.items()}
    columns = (
        "tokens_per_s",
        "decode_tokens_per_s",
        "accept_length",
        "hit_rate",
        "verify_ms",
        "draft_wait_ms",
    )
    rows = [
        [name.replace("_", " "), mode, len(setup.target_cores), len(setup.draft_cores) or None]
        + [getattr(medians[setup], column) for column in (*columns, "draft_round_ms")]
        for name, modes in accountings.items()
        for mode, setup in modes.items()
    ]
    header = ["accounting", "mode", "target cores", "draft cores", *columns, "draft_round_ms"]
    print(f"\n{format_table([name.replace('_', ' ') for name in header], rows)}\n")
    ratios = [[name.replace("_", " "), *ratios.values()] for name, ratios in comparisons.items()]
    print(f"{format_table(['speed-up', *comparisons[ACCOUNTINGS[0]]], ratios)}\n")
    if prediction is not None:
        reached = same_target["async"].decode_tokens_per_s / prediction.ssd_tokens_per_s
        print(
            f"Theorem 7, draft round {prediction.primary_ms:.0f} ms, backup {prediction.backup_ms:.0f} ms: async decodes "
            f"{prediction.ssd_tokens_per_s:.3g} tokens/s; measured {100 * reached:.1f}% of that\n"
        )
    value: dict[str, Any] = {
        name: {
            mode: {
                **medians[setup]._asdict(),
                "cores": {"target": list(setup.target_cores), "draft": list(setup.draft_cores)},
                "repeats": [measurement._asdict() for measurement in measured[setup]],
            }
            for mode, setup in modes.items()
        }
        for name, modes in accountings.items()
    }
    value |= {
        "speed_ups": comparisons,
        "theorem_7": prediction._asdict() if prediction else None,
        "machine": facts,
        "served": served,
        "arguments": options.arguments_as_json(args),
    }
    write_json(args.out, value)
    plot(args.out.with_suffix(".png"), results)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("e2e", __doc__)
    parser.add_models()
    num_prompts = len(read_prompts()) - NUM_WARM_UPS
    parser.add_count("--num-prompts", 10, f"prompts of prompts.json, 1 to {num_prompts}", highest=num_prompts)
    parser.add_count("--max-tokens", 64, "tokens a prompt at most")
    parser.add_speculation()
    parser.add_count("--concurrency", 1, "requests at a time; Theorem 7 is told for 1")
    parser.add_count("--repeat", 1, "times each mode is measured, in turns; medians are told")
    add = parser.add_argument
    add("--target-cores", help="of the split, such as 0-3 (default: all that the draft leaves)")
    add("--draft-cores", help="of the split (default: the last core)")
    add("--server-args", default="", help="further flags of every server, in one string")
    parser.add_out("e2e.json", "; the plot lies beside it")
    args = parser.parse_args(argv)
    try:
        for option, cores in (("--target-cores", args.target_cores), ("--draft-cores", args.draft_cores)):
            if cores:
                parse_cores(cores, option)
    except ValueError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    options.run_script(main, "e2e")
