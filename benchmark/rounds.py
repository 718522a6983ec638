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

``--inject-misses`` also serves eight requests of which one always misses (a logit bias that the draft knows nothing of),
and tells how long after an outcome the hits of the other seven were answered, and the miss.
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
from emulated import LAUNCHER, STREAM_INTERVAL, measure, prompts_of
from report import format_table, machine_facts, write_json
from serving import Request, Server, serving

#: Requests at a time where misses are injected, and tokens that the target alone is told to prefer.
NUM_BESIDE_A_MISS, BIASED = 8, {str(token): 40.0 for token in range(33, 97)}


class Step(NamedTuple):
    """One call: seconds of the machine's clock."""

    name: str
    ticket: int | None
    num_rows: int | None
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
    sends = iter(parts.pop("_send_outcomes"))
    result = []
    for before, after, verify, decide in zip(collects, collects[1:], *parts.values(), strict=False):
        # The outcomes of prompts are sent as well.
        send = next((send for send in sends if send.end_s >= decide.end_s), None)
        if send is None:
            break
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


class Answers(NamedTuple):
    """Milliseconds from an outcome's departure to its rows' answers, medians: those that left first, and the last."""

    num_rounds: int
    first_ms: float
    last_ms: float


def answers(steps: Sequence[Step], num_rows: int, num_first: int) -> Answers:
    """Of rounds of ``num_rows`` whose first answer holds ``num_first`` of them."""
    sent = {s.ticket: s for s in steps if s.name == "VerifierChannel.send" and s.num_rows == num_rows}
    of_round: dict[int, list[Step]] = {}
    for step in sorted((s for s in steps if s.name == "DraftChannel.send"), key=lambda s: s.end_s):
        if step.ticket in sent:
            of_round.setdefault(step.ticket, []).append(step)
    times = [
        (1e3 * (of_ticket[0].end_s - sent[ticket].end_s), 1e3 * (of_ticket[-1].end_s - sent[ticket].end_s))
        for ticket, of_ticket in of_round.items()
        if of_ticket[0].num_rows == num_first and sum(step.num_rows for step in of_ticket) == num_rows
    ]
    return Answers(len(times), *(statistics.median(column) for column in zip(*times, strict=True)))


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


def injected(server: Server, trace: Path, args: argparse.Namespace) -> dict[str, Answers]:
    """Eight requests that hit, and then eight of which the first always misses."""
    prompts = prompts_of(NUM_BESIDE_A_MISS)
    result = {}
    for name, num_first in (("all hit", NUM_BESIDE_A_MISS), ("one misses", NUM_BESIDE_A_MISS - 1)):
        plain = {"temperature": 0.0, "max_new_tokens": args.max_tokens}
        biased = {**plain, "logit_bias": BIASED} if name == "one misses" else plain
        batches = [
            [Request(prompts[i % len(prompts)], plain if i % NUM_BESIDE_A_MISS else biased)]
            for i in range(NUM_BESIDE_A_MISS * args.num_prompts)
        ]
        started_s = time.perf_counter()
        server.ask_all(batches, NUM_BESIDE_A_MISS, name)
        steps = [step for step in read_trace(trace) if step.start_s >= started_s]
        result[name] = answers(steps, NUM_BESIDE_A_MISS, num_first)
        print(f"{name}: {result[name]}")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    verify_ms, _ = stretched.state_times(args)
    rows, beside_misses = [], {}
    with tempfile.TemporaryDirectory() as trace, options.temporary_test_pair() as pair:
        os.environ[stretched.TRACE_DIR] = trace
        arguments = options.server_arguments(
            pair, "async", dtype="float32", lookahead=args.lookahead, budget=args.budget
        )
        arguments += ["--stream-interval", str(STREAM_INTERVAL)]
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
            if args.inject_misses:
                beside_misses = injected(server, Path(trace), args)
    print(
        f"\n{format_table([name.replace('_', ' ') for name in rows[0]], [list(row.values()) for row in rows])}\n"
    )
    write_json(
        args.out,
        {
            "rows": rows,
            "beside_misses": {name: a._asdict() for name, a in beside_misses.items()},
            "machine": machine_facts(),
            "arguments": options.arguments_as_json(args),
        },
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("rounds", __doc__)
    stretched.add_times(parser)
    parser.add_speculation(3, 8)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 16], help="requests at a time (default: 1 16)"
    )
    parser.add_argument(
        "--inject-misses", action="store_true", help="also the answers beside a request that misses"
    )
    parser.add_count("--warm-ups", 1, "prompts before that, for each request at a time", lowest=0)
    parser.add_count("--num-prompts", 4, "prompts for each request at a time")
    parser.add_count("--max-tokens", 128, "tokens a prompt")
    parser.add_out("rounds.json")
    args = parser.parse_args(argv)
    stretched.check_times(parser, args)
    return args


if __name__ == "__main__":
    options.run_script(main, "rounds")
