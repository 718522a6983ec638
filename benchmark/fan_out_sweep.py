"""Which outcomes are worth preparing: hit rate over the fan-out budget B for each allocator, and the power law of ranks.

Proposals depend neither on what was prepared nor on who answers a miss, as long as the draft answers it and in full. So a
pair is served once at each temperature, and the draft tells of every round how many tokens were accepted and which rank
the bonus token had among the candidates of its position. On these same rounds every allocator is then replayed at every
B, the one that learns from its first round on: differences between them are not chance. ``--live`` serves each allocator
at one B as well, to see that the replay tells what happens.

Intervals are Wilson's 95%. The plots: hit rates over B, and the share of bonus tokens beyond the first F candidates over
1 + F on logarithmic axes, where the power law is a line with slope -r.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import options
import stretched
from emulated import LAUNCHER
from measurement import Share
from report import (
    chat_token_ids,
    format_table,
    machine_facts,
    new_figure,
    read_prompts,
    save_figure,
    write_json,
)
from serving import Request, Server, serving
from tqdm import tqdm

from sglang_ssd.algorithm.acceptance import SpeculationEstimator
from sglang_ssd.algorithm.fan_out import FanOutQuery
from sglang_ssd.algorithm.lookahead import Size
from sglang_ssd.draft.policy import DraftPolicy
from sglang_ssd.test_pair import PairPaths
from sglang_ssd.wire.messages import FanOutName

TEMPERATURES = (0.0, 1.0)
ALLOCATORS: tuple[FanOutName, ...] = get_args(FanOutName)


class Outcome(NamedTuple):
    """One round of one request. ``bonus_rank``: from 0, among the candidates of the position after ``num_accepted``; the
    number of candidates where it was none of them. A request's first token is the outcome of a proposal of 0 tokens."""

    num_proposed: int
    num_accepted: int
    bonus_rank: int


class Replay(NamedTuple):
    """``hits``: of rounds that verified a proposal. ``first_hits``: of first tokens."""

    hits: Share
    first_hits: Share


class Live(NamedTuple):
    """What one allocator hit while it was in force, and what a replay of the same rounds hits."""

    fan_out: str
    budget: int
    temperature: float
    hits: Share
    replayed: Share


# -- measuring ---------------------------------------------------------------------------------------------------


def serve(
    args: argparse.Namespace, fan_out: FanOutName, budget: int, prompts, label: str
) -> dict[float, list[dict[str, Any]]]:
    """What the draft says of its outcomes, ``--rounds`` at each temperature. One request at a time, so that a request's
    outcomes stand together and in order. Outcomes that came before the candidates of their position were known are left out,
    and told."""
    pair = PairPaths(Path(args.model), Path(args.draft))
    arguments = options.server_arguments(pair, "async", lookahead=args.lookahead, budget=budget)
    arguments += ["--ssd-fan-out", fan_out]
    with tempfile.TemporaryDirectory() as trace:
        os.environ[stretched.TRACE_DIR] = trace
        with serving(arguments, options.log_path(args.out, label), label, LAUNCHER) as server:
            return {
                t: ask(server, prompts, t, Path(trace), f"{label}, temperature {t}", args)
                for t in TEMPERATURES
            }


def ask(server: Server, prompts, temperature: float, trace: Path, label: str, args) -> list[dict[str, Any]]:
    num_before = len(read_outcomes(trace))
    seeds = itertools.count(1)
    with tqdm(desc=label, total=args.rounds, unit="round") as progress:
        for prompt in itertools.cycle(prompts):
            server.ask([request_of(prompt, temperature, next(seeds), args.max_tokens)])
            outcomes = read_outcomes(trace)[num_before:]
            ranked = [outcome for outcome in outcomes if outcome["bonus_rank"] is not None]
            progress.update(sum(outcome["num_proposed"] > 0 for outcome in ranked) - progress.n)
            if progress.n >= args.rounds:
                print(
                    f"{label}: {len(outcomes) - len(ranked)} outcomes came before their candidates were known"
                )
                return ranked


def request_of(prompt: list[int], temperature: float, seed: int, max_tokens: int) -> Request:
    """The same tokens in every run: a request's seed is its number."""
    return Request(prompt, {"temperature": temperature, "sampling_seed": seed, "max_new_tokens": max_tokens})


def outcome_of(told: dict[str, Any]) -> Outcome:
    return Outcome(told["num_proposed"], told["num_accepted"], told["bonus_rank"])


def read_outcomes(trace: Path) -> list[dict[str, Any]]:
    [path] = trace.glob("outcomes-*.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def measure_live(args: argparse.Namespace, prompts) -> list[Live]:
    """Every allocator at ``--live-budget``, and what a replay of the very same rounds says."""
    points = []
    for fan_out in ALLOCATORS if args.live_budget else ():
        label = f"{fan_out} B={args.live_budget}"
        for temperature, told in serve(args, fan_out, args.live_budget, prompts, label).items():
            rounds = [outcome for outcome in told if outcome["num_proposed"]]
            hits = Share(sum(outcome["hit"] for outcome in rounds), len(rounds))
            replayed = replay([outcome_of(o) for o in told], fan_out, args.live_budget).hits
            points.append(Live(fan_out, args.live_budget, temperature, hits, replayed))
    return points


# -- replaying ---------------------------------------------------------------------------------------------------


def replay(outcomes: Sequence[Outcome], fan_out: FanOutName, budget: int) -> Replay:
    """What this allocator would have hit in these rounds, in which it learns as the draft does."""
    limit = Size(max(outcome.num_proposed for outcome in outcomes), budget)
    policy = DraftPolicy(limit, fan_out)
    hits, first_hits, is_hit = [], [], False
    for outcome in outcomes:
        if outcome.num_proposed == 0:
            is_hit = False  # Another request begins.
        query = FanOutQuery(outcome.num_proposed, budget, after_hit=is_hit)
        was_hit, is_hit = is_hit, outcome.bonus_rank < policy.allocate(query)[outcome.num_accepted]
        policy.observe_outcome(**outcome._asdict(), source="hit" if was_hit else "neural", hit=is_hit)
        (hits if outcome.num_proposed else first_hits).append(is_hit)
    return Replay(Share(sum(hits), len(hits)), Share(sum(first_hits), len(first_hits)))


def miss_shares(outcomes: Sequence[Outcome], max_fan_out: int) -> list[Share]:
    """Rounds whose bonus token is not among the first F candidates of its position, for F = 1 and up."""
    ranks = [outcome.bonus_rank for outcome in outcomes if outcome.num_proposed]
    return [Share(sum(rank >= f for rank in ranks), len(ranks)) for f in range(1, max_fan_out + 1)]


def power_law_r(outcomes: Sequence[Outcome], max_fan_out: int) -> float:
    """The exponent that the draft's own estimator sees in these rounds."""
    estimator = SpeculationEstimator(
        max_lookahead=max(o.num_proposed for o in outcomes), max_rank=max_fan_out
    )
    for outcome in outcomes:
        if outcome.num_proposed:
            estimator.observe_round(source="neural", **outcome._asdict())
    return estimator.power_law_r(after_hit=False)


# -- showing -----------------------------------------------------------------------------------------------------


def shown(share: Share) -> str:
    low, high = share.interval()
    return f"{share.rate:.3f} [{low:.3f}, {high:.3f}]" if share.whole else "-"


def report(args, recorded: dict[float, list[Outcome]]) -> dict[str, Any]:
    replays = {
        temperature: {
            budget: {fan_out: replay(outcomes, fan_out, budget) for fan_out in ALLOCATORS}
            for budget in args.budgets
        }
        for temperature, outcomes in recorded.items()
    }
    rows = [
        [
            temperature,
            budget,
            *(shown(by_name[fan_out].hits) for fan_out in ALLOCATORS),
            shown(by_name["measured"].first_hits),
        ]
        for temperature, by_budget in replays.items()
        for budget, by_name in by_budget.items()
    ]
    print(f"\n{format_table(['temperature', 'B', *ALLOCATORS, 'first tokens, measured'], rows)}\n")
    exponents = {t: power_law_r(outcomes, max(args.budgets)) for t, outcomes in recorded.items()}
    print(f"power law: {', '.join(f'r = {r:.2f} at temperature {t}' for t, r in exponents.items())}")
    plot(args, recorded, replays, exponents)
    return {
        "hit_rates": {
            str(t): {
                str(b): {name: of_name.hits.as_json() for name, of_name in by_name.items()}
                for b, by_name in by_budget.items()
            }
            for t, by_budget in replays.items()
        },
        "power_law_r": {str(t): r for t, r in exponents.items()},
    }


def plot(args, recorded, replays, exponents: dict[float, float]) -> None:
    figure, axes = new_figure()
    for i, temperature in enumerate(replays):
        for fan_out, style in zip(ALLOCATORS, (":", "--", "-"), strict=True):
            shares = [by_name[fan_out].hits for by_name in replays[temperature].values()]
            axes.plot(args.budgets, [s.rate for s in shares], style, color=f"C{i}", marker="o", ms=3,
                      label=f"{fan_out}, temperature {temperature:g}")  # fmt: skip
        low, high = zip(
            *(by_name["measured"].hits.interval() for by_name in replays[temperature].values()), strict=True
        )
        axes.fill_between(args.budgets, low, high, color=f"C{i}", alpha=0.12)
    axes.set_xlabel("fan-out budget B")
    axes.set_ylabel("hit rate (of rounds)")
    axes.set_title(
        f"{Path(args.model).name}, draft {Path(args.draft).name}\nK={args.lookahead}; band: 95% of measured",
        fontsize=9,
    )
    axes.legend(fontsize=8)
    save_figure(figure, args.out.with_suffix(".png"))
    figure, axes = new_figure()
    for i, (temperature, outcomes) in enumerate(recorded.items()):
        max_fan_out = max(args.budgets)
        shares = miss_shares(outcomes, max_fan_out)
        xs = [1 + f for f in range(1, max_fan_out + 1)]
        axes.plot(
            xs,
            [share.rate or None for share in shares],
            "o",
            ms=3,
            color=f"C{i}",
            label=f"temperature {temperature:g}",
        )
        axes.plot(
            xs,
            [x ** -exponents[temperature] for x in xs],
            "-",
            color=f"C{i}",
            lw=0.8,
            label=f"$(1+F)^{{-{exponents[temperature]:.2f}}}$",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("1 + F")
    axes.set_ylabel("bonus token beyond the first F candidates")
    axes.legend(fontsize=8)
    save_figure(figure, args.out.with_name(f"{args.out.stem}-power-law.png"))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.plot_only:
        kept = json.loads(args.out.read_text())
    else:
        prompts = chat_token_ids(args.model, read_prompts())
        told = serve(args, "measured", max(args.budgets), prompts, f"B={max(args.budgets)}")
        kept = {
            "outcomes": {
                str(t): [outcome_of(o) for o in of_temperature] for t, of_temperature in told.items()
            },
            "live": [
                {**point._asdict(), "hits": point.hits.as_json(), "replayed": point.replayed.as_json()}
                for point in measure_live(args, prompts)
            ],
            "machine": machine_facts(),
            "arguments": options.arguments_as_json(args),
        }
    recorded = {float(t): [Outcome(*o) for o in outcomes] for t, outcomes in kept["outcomes"].items()}
    for point in kept["live"]:
        print("live: {fan_out} B={budget} temperature {temperature}: hit rate".format(**point), end=" ")
        print(
            f"{point['hits']['rate']:.3f}, replayed {point['replayed']['rate']:.3f} ({point['hits']['whole']} rounds)"
        )
    write_json(args.out, {**report(args, recorded), **kept})
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("fan_out_sweep", __doc__)
    parser.add_models()
    parser.add_count("--lookahead", 2, "K")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[0, 4, 8, 16, 32], help="B, rising (default: 0 4 8 16 32)"
    )
    parser.add_count("--rounds", 300, "rounds of each run and temperature, at least")
    parser.add_count("--live-budget", 8, "B at which each allocator is served as well, 0: at none", lowest=0)
    parser.add_count("--max-tokens", 96, "tokens a request at most", lowest=2)
    parser.add_argument(
        "--plot-only", action="store_true", help="replay and draw again from --out; starts no server"
    )
    parser.add_out("fan-out-sweep.json", "; the plots lie beside it")
    args = parser.parse_args(argv)
    if args.budgets != sorted(set(args.budgets)) or args.budgets[0] < 0 or args.budgets[-1] < 1:
        parser.error(f"--budgets {' '.join(map(str, args.budgets))}: must rise, from 0 or more to 1 or more")
    if args.plot_only and not args.out.is_file():
        parser.error(f"--plot-only: {args.out} does not exist")
    return args


if __name__ == "__main__":
    options.run_script(main, "fan_out_sweep")
