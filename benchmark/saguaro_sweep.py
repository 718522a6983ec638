"""Measure the trade of Saguaro sampling on a real pair: acceptance against hit rate over C, and shared noise beside it.

The paper's figure 5 (left) with our point on it. One server for each of shared noise and residual sampling at every C;
it answers chat prompts one at a time at both temperatures, until enough rounds are counted. Counts are those that each
answer tells of itself; prompts come again when there are too few, each time with another seed.

Acceptance is accepted of proposed tokens, so what stands after a rejection counts as rejected. The intervals are
Wilson's, as if tokens were independent; those of one round are not, and their true interval is somewhat wider.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import options
from measurement import Share
from report import (
    chat_token_ids,
    format_table,
    machine_facts,
    new_figure,
    read_prompts,
    read_results,
    save_figure,
    write_results,
)
from serving import Generation, Server, serving
from tqdm import tqdm

from sglang_ssd.test_pair import PairPaths

TEMPERATURES = (0.7, 1.0)
SCALES = (1.0, 0.7, 0.5, 0.3, 0.1, 0.01)
#: Of each temperature, before anything is counted: the draft learns which outcomes are worth preparing.
NUM_WARM_UPS = 2


class Configuration(NamedTuple):
    """One server. ``saguaro_c`` is None for shared noise."""

    saguaro_c: float | None

    @property
    def name(self) -> str:
        return "shared-noise" if self.saguaro_c is None else f"residual C={self.saguaro_c}"

    @property
    def flags(self) -> list[str]:
        if self.saguaro_c is None:
            return ["--ssd-sampling", "shared-noise"]
        return ["--ssd-sampling", "residual", "--ssd-saguaro-c", str(self.saguaro_c)]


CONFIGURATIONS = (Configuration(None), *map(Configuration, SCALES))


class Point(NamedTuple):
    """What one configuration did at one temperature.

    first_hits:          hits of the requests' first rounds, which ``hits`` include.
    tokens_per_round:    emitted, the bonus token included.
    decode_tokens_per_s: tokens a second after a request's first one, as a streaming client sees them.
    """

    acceptance: Share
    hits: Share
    first_hits: Share
    tokens_per_round: float
    decode_tokens_per_s: float
    num_requests: int

    def as_json(self) -> dict[str, Any]:
        return {
            name: value.as_json() if isinstance(value, Share) else value
            for name, value in self._asdict().items()
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Point:
        shares = {
            name: Share(value[name]["part"], value[name]["whole"])
            for name in ("acceptance", "hits", "first_hits")
        }
        return cls(**{**value, **shares})


# -- measuring ---------------------------------------------------------------------------------------------------


def point_of(generations: Sequence[Generation]) -> Point:
    per_request = [answer.meta_info["ssd_sources"] for answer in generations]
    sources = [source for of_request in per_request for source in of_request]
    firsts = [of_request[0] for of_request in per_request if of_request]
    emitted = sum(sum(answer.meta_info["ssd_accept_lengths"]) for answer in generations)
    num_proposed = sum(sum(answer.meta_info["ssd_proposed_lengths"]) for answer in generations)
    num_decoded = sum(len(answer.output_ids) - 1 for answer in generations)
    seconds = sum(answer.seconds - answer.first_token_seconds for answer in generations)
    return Point(
        acceptance=Share(emitted - len(sources), num_proposed),
        hits=Share(sources.count("hit"), len(sources)),
        first_hits=Share(firsts.count("hit"), len(firsts)),
        tokens_per_round=emitted / len(sources),
        decode_tokens_per_s=num_decoded / seconds,
        num_requests=len(generations),
    )


def measure(server: Server, prompts: list[list[int]], temperature: float, label: str, args) -> Point:
    """Prompts one at a time, over and over, until ``--rounds`` rounds are counted."""
    generations: list[Generation] = []
    with tqdm(desc=f"{label}, temperature {temperature}", total=args.rounds, unit="round") as progress:
        for prompt in itertools.cycle(prompts):
            generations.append(server.generate(prompt, args.max_tokens, temperature))
            progress.update(len(generations[-1].meta_info["ssd_sources"]))
            if progress.n >= args.rounds:
                return point_of(generations)


def measure_configuration(server: Server, prompts: list[list[int]], label: str, args) -> dict[float, Point]:
    for temperature in TEMPERATURES:
        for prompt in prompts[-NUM_WARM_UPS:]:
            server.generate(prompt, args.max_tokens, temperature)
    return {
        temperature: measure(server, prompts[:-NUM_WARM_UPS], temperature, label, args)
        for temperature in TEMPERATURES
    }


# -- showing -----------------------------------------------------------------------------------------------------


def points_of(results: dict[str, Any]) -> dict[tuple[Configuration, float], Point]:
    """What a result file holds, in the order of the curve."""
    return {
        (configuration, temperature): Point.from_json(results[configuration.name]["points"][str(temperature)])
        for configuration in CONFIGURATIONS
        if configuration.name in results
        for temperature in TEMPERATURES
    }


def table(results: dict[str, Any]) -> str:
    def shown(share: Share) -> str:
        low, high = share.interval()
        return "-" if share.rate is None else f"{share.rate:.3f} [{low:.3f}, {high:.3f}]"

    header = ["configuration", "temperature", "rounds", *Point._fields]
    rows = [
        [configuration.name, temperature, point.hits.whole, *map(shown, point[:3]), *point[3:]]
        for (configuration, temperature), point in points_of(results).items()
    ]
    return format_table([name.replace("_", " ") for name in header], rows)


def plot(path: Path, setup: dict[str, Any], results: dict[str, Any]) -> None:
    """Acceptance against hit rate: a curve of residual sampling over C and a star of shared noise, by temperature."""
    figure, axes = new_figure()
    points = points_of(results)
    for i, temperature in enumerate(TEMPERATURES):
        at_temperature = {c: point for (c, of_point), point in points.items() if of_point == temperature}
        star = at_temperature.pop(Configuration(None), None)
        style = {"color": f"C{i}", "capsize": 2, "elinewidth": 0.8}
        if at_temperature:
            label = f"residual, temperature {temperature}"
            _draw(axes, list(at_temperature.values()), fmt="o-", label=label, **style)
        for configuration, point in at_temperature.items():
            place = (point.acceptance.rate, point.hits.rate)
            axes.annotate(
                f"C={configuration.saguaro_c:g}", place, (5, 5), textcoords="offset points", fontsize=8
            )
        if star is not None:
            _draw(axes, [star], fmt="*", ms=14, label=f"shared noise, temperature {temperature}", **style)
    axes.set_xlabel("acceptance (accepted of proposed tokens)")
    axes.set_ylabel("hit rate (of rounds)")
    axes.set_title(
        f"{setup['model']}, draft {setup['draft']}\nK={setup['lookahead']}, B={setup['budget']}; bars: 95%",
        fontsize=9,
    )
    axes.legend()
    save_figure(figure, path)


def _draw(axes, points: Sequence[Point], **style: Any) -> None:
    """Points with the 95% intervals of both coordinates."""

    def bars(shares: Sequence[Share]) -> list[list[float]]:
        intervals = [share.interval() for share in shares]
        # Rounding may put a rate of 0 or 1 outside its interval by an ulp.
        return [
            [max(0.0, share.rate - low) for share, (low, _) in zip(shares, intervals)],
            [max(0.0, high - share.rate) for share, (_, high) in zip(shares, intervals)],
        ]

    acceptance, hits = [point.acceptance for point in points], [point.hits for point in points]
    axes.errorbar(
        [share.rate for share in acceptance],
        [share.rate for share in hits],
        xerr=bars(acceptance),
        yerr=bars(hits),
        **style,
    )


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    setup = {
        "model": Path(args.model).name,
        "draft": Path(args.draft).name,
        "lookahead": args.lookahead,
        "budget": args.budget,
    }
    results = read_results(args.out, setup)
    if not args.plot_only:
        measure_all(args, setup, results)
    print(f"\n{table(results)}\n")
    plot(args.out.with_suffix(".png"), setup, results)
    return 0


def measure_all(args, setup: dict[str, Any], results: dict[str, Any]) -> None:
    """Fill ``results`` in, and write them after each configuration."""
    prompts = chat_token_ids(args.model, read_prompts())
    pair = PairPaths(Path(args.model), Path(args.draft))
    arguments = options.server_arguments(pair, "async", lookahead=args.lookahead, budget=args.budget)
    for configuration in selected(args.only):
        facts, name = machine_facts(), configuration.name
        with serving([*arguments, *configuration.flags], options.log_path(args.out, name), name) as server:
            points = measure_configuration(server, prompts, name, args)
        results[name] = {
            "points": {str(temperature): point.as_json() for temperature, point in points.items()},
            "machine": facts,
            "arguments": options.arguments_as_json(args),
        }
        write_results(args.out, setup, results)


def selected(only: str) -> list[Configuration]:
    return [configuration for configuration in CONFIGURATIONS if re.search(only, configuration.name)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("saguaro_sweep", __doc__)
    parser.add_models()
    parser.add_speculation(lookahead=3, budget=12)
    parser.add_count("--rounds", 300, "rounds of each configuration and temperature, at least")
    parser.add_count("--max-tokens", 64, "tokens a request at most", lowest=2)
    parser.add_only(f"configurations, such as '{CONFIGURATIONS[1].name}',")
    parser.add_argument(
        "--plot-only", action="store_true", help="redraw table and plot from --out; starts no server"
    )
    parser.add_out("saguaro-sweep.json", "; the plot lies beside it")
    args = parser.parse_args(argv)
    if not selected(args.only):
        parser.error(f"--only {args.only}: no configuration has such a name")
    if args.plot_only and not args.out.is_file():
        parser.error(f"--plot-only: {args.out} does not exist")
    return args


if __name__ == "__main__":
    options.run_script(main, "saguaro_sweep")
