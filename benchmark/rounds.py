"""Where the time of a round goes: the real scheduler, wire and draft loop at stated device times (``stretched.py``).

Each process tells when it did what, all on one clock. A round runs from one collected batch of proposals to the next; for
an ideal system it takes a verify, and here it takes

    prepare   proposals collected -> the target's forward begins
    verify    the forward, beyond the stated time
    decide    the target's draws, compared with the proposals
    send      outcomes written and queued
    then, side by side,
      host    the scheduler's bookkeeping until it asks for proposals
      wire    outcomes sent -> proposals received: queue (sent -> read by the draft), look-up (read -> answered),
              receive (answered -> read by the verifier)
    wait      what the verifier waited at the end of both

Milliseconds, medians over the rounds in which every row was answered at once, in one message.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import options
import stretched
from emulated import LAUNCHER, measure
from report import format_table, machine_facts, write_json
from serving import serving


class Step(NamedTuple):
    """One call: seconds of the machine's clock."""

    name: str
    ticket: int | None
    start_s: float
    end_s: float


class Breakdown(NamedTuple):
    """One round, in milliseconds."""

    round_ms: float
    prepare_ms: float
    verify_ms: float
    decide_ms: float
    send_ms: float
    host_ms: float
    queue_ms: float
    lookup_ms: float
    receive_ms: float
    wait_ms: float


def breakdowns(steps: Iterable[Step]) -> list[Breakdown]:
    """The rounds that these steps of one verifier and one draft tell of, where one message answered all rows."""
    by_ticket: dict[str, dict[int, list[Step]]] = {}
    verifier: list[Step] = []
    for step in sorted(steps, key=lambda step: step.end_s):
        if step.ticket is None:
            verifier.append(step)
        else:
            by_ticket.setdefault(step.name, {}).setdefault(step.ticket, []).append(step)
    sent, answered = by_ticket.get("VerifierChannel.send", {}), by_ticket.get("DraftChannel.send", {})
    read = by_ticket.get("DraftChannel.receive", {})
    received = by_ticket.get("VerifierChannel.receive", {})
    collects = [step for step in verifier if step.name == "SSDWorker._collect"]
    parts = {
        name: [step for step in verifier if step.name == f"SSDWorker.{name}"]
        for name in ("run_verify", "_decide", "_send_outcomes")
    }
    result = []
    for before, after, verify, decide, send in zip(collects, collects[1:], *parts.values(), strict=False):
        tickets = [t for t, steps in sent.items() if send.start_s <= steps[0].end_s <= send.end_s]
        answers = [answered.get(t, []) for t in tickets]
        if len(tickets) != 1 or len(answers[0]) != 1 or not {*tickets} <= read.keys() & received.keys():
            continue
        [ticket] = tickets
        sent_s, answered_s = sent[ticket][0].end_s, answers[0][0].end_s
        result.append(
            Breakdown(
                *(
                    1e3 * seconds
                    for seconds in (
                        after.end_s - before.end_s,
                        verify.start_s - before.end_s,
                        verify.end_s - verify.start_s,
                        decide.end_s - verify.end_s,
                        send.end_s - decide.end_s,
                        after.start_s - send.end_s,
                        read[ticket][0].end_s - sent_s,
                        answered_s - read[ticket][0].end_s,
                        received[ticket][0].end_s - answered_s,
                        after.end_s - after.start_s,
                    )
                )
            )
        )
    return result


def read_trace(folder: Path) -> list[Step]:
    """What all processes told. The last line of a process that was killed may be cut off."""
    steps = []
    for path in sorted([*folder.glob("verifier-*.jsonl"), *folder.glob("draft-*.jsonl")]):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                steps.append(Step(*json.loads(line)))
    return steps


def added(rounds: Sequence[Breakdown], verify_ms: float) -> dict[str, float]:
    """Medians, and what is added to a stated verify."""
    medians = {
        name: statistics.median(column)
        for name, column in zip(Breakdown._fields, zip(*rounds, strict=True), strict=True)
    }
    return {**medians, "added_ms": medians["round_ms"] - verify_ms}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    verify_ms, depth_ms = args.scale * args.verify_ms, args.scale * args.depth_ms
    os.environ[stretched.VERIFY_MS], os.environ[stretched.DEPTH_MS] = str(verify_ms), str(depth_ms)
    rows = []
    with tempfile.TemporaryDirectory() as trace, options.temporary_test_pair() as pair:
        os.environ[stretched.TRACE_DIR] = trace
        arguments = options.server_arguments(
            pair, "async", dtype="float32", lookahead=args.lookahead, budget=args.budget
        )
        arguments += ["--stream-interval", "64"]
        with serving(arguments, options.log_path(args.out, "rounds"), "async", LAUNCHER) as server:
            for num_at_once in args.concurrency:
                started_s = time.perf_counter()
                measured = measure(server, num_at_once, args, f"{num_at_once} at once")
                rounds = breakdowns(step for step in read_trace(Path(trace)) if step.start_s >= started_s)
                rows.append(
                    {
                        "num_at_once": num_at_once,
                        "hit_rate": measured.hit_rate,
                        "rounds": len(rounds),
                        **added(rounds, verify_ms),
                    }
                )
    print(
        f"\n{format_table([name.replace('_', ' ') for name in rows[0]], [list(row.values()) for row in rows])}\n"
    )
    write_json(
        args.out, {"rows": rows, "machine": machine_facts(), "arguments": options.arguments_as_json(args)}
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("rounds", __doc__)
    parser.add_argument(
        "--verify-ms", type=float, default=11.5, help="a target forward (default: %(default)s)"
    )
    parser.add_argument("--depth-ms", type=float, default=2.54, help="a draft forward (default: %(default)s)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="stretches both times (default: %(default)s)"
    )
    parser.add_speculation(3, 8)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 16], help="requests at a time (default: 1 16)"
    )
    parser.add_count("--num-prompts", 4, "prompts for each request at a time")
    parser.add_count("--max-tokens", 128, "tokens a prompt")
    parser.add_out("rounds.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options.run_script(main, "rounds")
