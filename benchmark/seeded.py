"""Check that a seed fixes the sampled output: with SSD, without it, alone, together, and when the draft dies.

Requests with seeds and varied options go to fresh servers of the test pair, one at a time and 16 at once. Every run's
tokens are compared with those of plain decoding, one at a time. In the last run the draft is killed when half of the
requests are answered. The exit code is 1 on any difference.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import options
from measurement import first_difference
from report import format_table, machine_facts, write_json
from serving import Answer, Request, Server, serving

LOOKAHEAD, BUDGET = 3, 12
NEW_TOKENS, SHORTEST_PROMPT, LONGEST_PROMPT = 24, 3, 90
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2},
    # Stop tokens end a request only where EOS does, and a likely one has something to be held off.
    {"min_new_tokens": 8, "stop_token_ids": [10, 13], "logit_bias": {"10": 6.0}, "ignore_eos": False},
    {"logit_bias": {"13": -100.0, "90": 3.0}},
)
NUM_AT_ONCE = (1, 16)
#: The divergences that the table shows.
NUM_LISTED = 10


class Run(NamedTuple):
    """One way to serve all requests."""

    name: str
    mode: str
    budget: int | None = None
    flags: tuple[str, ...] = ()
    kills_draft: bool = False


PLAIN = Run("off", "off")
RUNS = (
    PLAIN,
    Run("sync", "sync"),
    Run("async hits", "async", BUDGET),
    Run("async neural misses", "async", 0),
    Run("async one-hot misses", "async", 0, ("--ssd-fallback", "ngram")),
    Run("async draft killed", "async", BUDGET, kills_draft=True),
)


class Divergence(NamedTuple):
    """Where a request leaves plain decoding. A run that ends early has the token None."""

    request: int
    index: int
    plain_token: int | None
    token: int | None
    sampling: dict[str, Any]


class Comparison(NamedTuple):
    """One run at one concurrency against plain decoding alone. ``sources`` counts rounds."""

    run: str
    num_at_once: int
    num_requests: int
    num_equal: int
    sources: dict[str, int]
    divergences: list[Divergence]


def seeded_requests(num: int) -> list[Request]:
    """Every pair of temperature and options in turn, each with a prompt and a seed of its own."""
    rng, requests = Random(0), []
    for i in range(num):
        length = rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT)
        sampling = {
            "temperature": TEMPERATURES[i % len(TEMPERATURES)],
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "sampling_seed": rng.getrandbits(63),
            **OPTIONS[i // len(TEMPERATURES) % len(OPTIONS)],
        }
        requests.append(Request(rng.choices(range(32, 127), k=length), sampling))
    return requests


def compare(
    run: Run,
    num_at_once: int,
    requests: Sequence[Request],
    plain: Sequence[Answer],
    answers: Sequence[Answer],
) -> Comparison:
    divergences = []
    for i, (request, ours, theirs) in enumerate(zip(requests, answers, plain, strict=True)):
        index = first_difference(theirs.output_ids, ours.output_ids)
        if index is not None:
            tokens = [
                path[index] if index < len(path) else None for path in (theirs.output_ids, ours.output_ids)
            ]
            divergences.append(Divergence(i, index, *tokens, request.sampling))
    sources = Counter(source for answer in answers for source in answer.meta_info.get("ssd_sources", ()))
    num_equal = len(requests) - len(divergences)
    return Comparison(run.name, num_at_once, len(requests), num_equal, dict(sources), divergences)


def ask(server: Server, run: Run, num_at_once: int, requests: Sequence[Request]) -> list[Answer]:
    """Answers in order; the draft dies half way through, where the run says so."""

    def after_batch(num_answered: int) -> None:
        if run.kills_draft and num_answered == max(1, len(requests) // 2):
            server.kill_draft()

    label = f"{run.name}, {num_at_once} at once"
    return server.ask_all([[request] for request in requests], num_at_once, label, after_batch)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts, requests = machine_facts(), seeded_requests(args.num_requests)
    plain: list[Answer] = []
    comparisons = []
    with options.temporary_test_pair() as pair:
        for run in selected(args.only):
            arguments = options.server_arguments(
                pair, run.mode, dtype="float32", lookahead=LOOKAHEAD, budget=run.budget
            )
            # A server for each concurrency: no prompt is cached, and every draft lives at first.
            for num_at_once in NUM_AT_ONCE:
                log = options.log_path(args.out, f"{run.name}-{num_at_once}")
                with serving([*arguments, *run.flags], log, run.name) as server:
                    answers = ask(server, run, num_at_once, requests)
                plain = plain or answers
                comparisons.append(compare(run, num_at_once, requests, plain, answers))
    return report(args, facts, comparisons)


def report(args, facts, comparisons: Sequence[Comparison]) -> int:
    rows = [comparison[:-1] for comparison in comparisons]
    print(f"\n{format_table([name.replace('_', ' ') for name in Comparison._fields[:-1]], rows)}\n")
    listed = [
        [comparison.run, comparison.num_at_once, *divergence]
        for comparison in comparisons
        for divergence in comparison.divergences
    ]
    if listed:
        header = ["run", "at once", *Divergence._fields]
        print(f"{format_table(header, listed[:NUM_LISTED])}\n{len(listed)} divergences\n")
    value = {
        "comparisons": [
            {**comparison._asdict(), "divergences": [found._asdict() for found in comparison.divergences]}
            for comparison in comparisons
        ],
        "machine": facts,
        "arguments": options.arguments_as_json(args),
    }
    write_json(args.out, value)
    return 1 if listed else 0


def selected(only: str) -> list[Run]:
    """The runs of this name, and plain decoding as the first."""
    return [run for run in RUNS if run == PLAIN or re.search(only, run.name)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("seeded", __doc__)
    parser.add_count("--num-requests", 200, "requests a run")
    parser.add_only("runs beside off")
    parser.add_out("seeded.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options.run_script(main, "seeded")
