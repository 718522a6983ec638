"""What a server whose draft is dead still serves, next to plain decoding.

An async server loses its draft for good. Then it and a plain one (--ssd-mode off) answer the same requests on the same
cores, in many short turns, each first in every other one. The share is the median over the turns, each within one turn;
every answer must be that of plain decoding. The exit code is 1 when one is not, or the share is below --slowest.

Servers of one kind differ by a few percent from start to start, so both are started several times. Answers differ in length
as those of people do: requests that march in step would all wait for the slowest of them.

On the test pair, whose forward is a few milliseconds of Python, what a round adds shows most; on a pair that people use it
is small.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random
from typing import Any, NamedTuple

import options
from report import chat_token_ids, format_table, machine_facts, read_prompts, write_json
from serving import Request, Server, ServerFailed, serving
from storm import any_sampling, compare, cores_of_both
from tqdm import trange

NAMES = ("draft down", "off")
#: How long a dead draft may go unnoticed: pings go out once a second.
NOTICE_TIMEOUT_S = 60.0


class Turn(NamedTuple):
    """What both servers did with the same requests, after a start of both."""

    start: int
    tokens_per_s: dict[str, float]
    num_wrong: int
    num_rounds_by_source: dict[str, int]

    @property
    def share(self) -> float:
        return self.tokens_per_s["draft down"] / self.tokens_per_s["off"]


def make_requests(prompts: Sequence[list[int]], num: int, max_tokens: int, seed: int) -> list[Request]:
    """Chat prompts, every other one greedy, the others with a temperature and a seed; ended by length alone, half of
    ``max_tokens`` at least."""
    rng = Random(seed)
    return [
        Request(
            prompts[i % len(prompts)],
            any_sampling(i, rng.getrandbits(62), rng.randint((max_tokens + 1) // 2, max_tokens)),
        )
        for i in range(num)
    ]


def without_draft(server: Server) -> None:
    """Kill the draft and wait until the server has noticed. Raises ``ServerFailed`` when it does not."""
    server.kill_draft()
    deadline = time.monotonic() + NOTICE_TIMEOUT_S
    while (state := server.ssd_state()["draft_state"]) != "down":
        if time.monotonic() > deadline:
            raise ServerFailed(f"the draft is {state} {NOTICE_TIMEOUT_S:.0f} s after it was killed")


def take_turn(
    start: int,
    servers: dict[str, Server],
    requests: Sequence[Request],
    num_at_once: int,
    names: Sequence[str],
) -> Turn:
    """Both servers answer the requests, in this order of names."""
    speeds, answers = {}, {}
    for name in names:
        started_s = time.perf_counter()
        answers[name] = servers[name].ask_all([[request] for request in requests], num_at_once, name)
        num_tokens = sum(len(answer.output_ids) for answer in answers[name])
        speeds[name] = num_tokens / (time.perf_counter() - started_s)
    outcome = compare([answer.output_ids for answer in answers["off"]], answers["draft down"])
    return Turn(start, speeds, outcome.num_wrong, outcome.sources)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts = machine_facts()
    with options.pair_folders(args) as pair:
        requests = make_requests(
            chat_token_ids(str(pair.target), read_prompts()), args.num_requests, args.max_tokens, args.seed
        )
        turns = [turn for start in range(args.starts) for turn in take_turns(args, pair, requests, start)]
    return report(args, facts, turns)


def take_turns(
    args: argparse.Namespace, pair: options.PairPaths, requests: Sequence[Request], start: int
) -> list[Turn]:
    """Start both servers, lose the draft of one, and have them take turns."""
    # Plain decoding has the target's cores; that of the draft stays idle.
    target_cores, _ = cores_of_both()
    servers = {}
    with ExitStack() as stack:
        for name, mode in zip(NAMES, ("async", "off"), strict=True):
            arguments = options.server_arguments(pair, mode, lookahead=args.lookahead, budget=args.budget)
            arguments += ["--ssd-target-cores", target_cores, "--max-total-tokens", str(args.pool)]
            log = options.log_path(args.out, f"{mode}-{start}")
            servers[name] = stack.enter_context(serving(arguments, log, name))
            if mode == "async":
                without_draft(servers[name])
        take_turn(start, servers, requests, args.at_once, NAMES)  # warm-up
        return [
            take_turn(start, servers, requests, args.at_once, NAMES[:: 1 if i % 2 else -1])
            for i in trange(args.turns, desc=f"turns after start {start + 1} of {args.starts}")
        ]


def report(args: argparse.Namespace, facts: dict[str, Any], turns: Sequence[Turn]) -> int:
    shares = [turn.share for turn in turns]
    share, num_wrong = statistics.median(shares), sum(turn.num_wrong for turn in turns)
    rows = [(turn.start + 1, *(turn.tokens_per_s[name] for name in NAMES), turn.share) for turn in turns]
    print(f"\n{format_table(['start', *(f'{name} tok/s' for name in NAMES), 'share'], rows)}\n")
    print(f"without a draft: {share:.1%} of plain decoding ({min(shares):.1%} to {max(shares):.1%})")
    print(f"answers that differ: {num_wrong} of {args.num_requests * len(turns)}")
    write_json(
        args.out,
        {
            "share_of_plain": share,
            "shares": shares,
            "num_wrong": num_wrong,
            "turns": [turn._asdict() for turn in turns],
            "machine": facts,
            "arguments": options.arguments_as_json(args),
        },
    )
    return 1 if num_wrong or share < args.slowest else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("draft_down", __doc__)
    parser.add_pair("demo")
    parser.add_speculation()
    parser.add_count("--num-requests", 4, "requests a turn")
    parser.add_count("--at-once", 4, "requests in flight")
    parser.add_count("--max-tokens", 32, "tokens a request")
    parser.add_count("--starts", 3, "starts of both servers")
    parser.add_count("--turns", 5, "turns after each start")
    parser.add_count("--seed", 1, "of the requests' noise", lowest=0)
    parser.add_count("--pool", 8192, "KV slots of each target", lowest=1024)
    parser.add_argument(
        "--slowest",
        type=float,
        default=0.9,
        help="least throughput, of plain decoding (default: %(default)s)",
    )
    parser.add_out("draft-down-PAIR.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options.run_script(main, "draft_down")
