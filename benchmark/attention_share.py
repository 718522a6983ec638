"""The attention's share of a verify on a CPU, by the length of what was said before.

An async server tells when each verify and each of its attention layers began and ended: writing keys and values, laying
out the rows (once a forward) and the kernel. The share is that of the verify forward with what prepares it; medians over
the rounds of one request at a time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from itertools import chain, cycle, islice
from pathlib import Path
from typing import NamedTuple

import options
import stretched
from emulated import LAUNCHER
from report import chat_token_ids, format_table, machine_facts, read_prompts, write_json
from rounds import Step, read_trace
from serving import serving


class Share(NamedTuple):
    """Medians of one context length, milliseconds a verify."""

    num_context_tokens: int
    num_rounds: int
    verify_ms: float
    attention_ms: float
    attention_share: float


def verifies(steps: Iterable[Step]) -> list[tuple[float, float]]:
    """Milliseconds of each verify, and of the attention layers within it."""
    found: list[tuple[float, float]] = []
    attention_s = 0.0
    # A verify ends after its layers. Those of a prompt lie before its beginning.
    for step in sorted(steps, key=lambda step: step.end_s):
        if step.name == "CpuAttentionBackend.forward_extend":
            attention_s += step.end_s - step.start_s
        elif step.name == "SSDWorker._collect":
            attention_s = 0.0
        elif step.name == "SSDWorker.run_verify":
            found.append(((step.end_s - step.start_s) * 1e3, attention_s * 1e3))
    return found


def share_of(num_context_tokens: int, found: list[tuple[float, float]]) -> Share:
    verify_ms, attention_ms = (statistics.median(column) for column in zip(*found, strict=True))
    share = statistics.median(attention / verify for verify, attention in found)
    return Share(num_context_tokens, len(found), verify_ms, attention_ms, share)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    shares = []
    with tempfile.TemporaryDirectory() as trace, options.pair_folders(args) as pair:
        os.environ[stretched.TRACE_DIR], os.environ[stretched.TRACE_ATTENTION] = trace, "1"
        words = list(chain(*chat_token_ids(str(pair.target), read_prompts())))
        arguments = options.server_arguments(pair, "async", lookahead=args.lookahead, budget=args.budget)
        with serving(arguments, options.log_path(args.out, "async"), "async", LAUNCHER) as server:
            for num_tokens in args.contexts:
                started_s = time.perf_counter()
                server.generate(
                    list(islice(cycle(words), num_tokens)),
                    args.max_tokens,
                    sampling_params={
                        "temperature": 0.0,
                        "max_new_tokens": args.max_tokens,
                        "ignore_eos": True,
                    },
                )
                steps = [step for step in read_trace(Path(trace)) if step.start_s >= started_s]
                shares.append(share_of(num_tokens, verifies(steps)))
    print(f"\n{format_table([name.replace('_', ' ') for name in Share._fields], shares)}\n")
    write_json(
        args.out,
        {
            "shares": [share._asdict() for share in shares],
            "machine": machine_facts(),
            "arguments": options.arguments_as_json(args),
        },
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("attention_share", __doc__)
    parser.add_pair("demo")
    parser.add_speculation()
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[256, 1024], help="prompt tokens (default: 256 1024)"
    )
    parser.add_count("--max-tokens", 64, "tokens after each prompt")
    parser.add_out("attention-share.json")
    args = parser.parse_args(argv)
    if min(args.contexts) < 1:
        parser.error(f"--contexts {' '.join(map(str, args.contexts))}: must be 1 or more")
    return args


if __name__ == "__main__":
    options.run_script(main, "attention_share")
