"""``python -m sglang_ssd.plan``: what lookahead, budget and backup fit a pair of models, and what they bring.

Prints, for each batch size, the expected speed of plain decoding (AR), ordinary speculative decoding (SD) at
its own best lookahead, and SSD at the best lookahead and fan-out budget, with the fan-out list and the batch
size from which on the n-gram backup wins. Inputs are flags, or what a running server has measured
(``--server-url``); a flag wins.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_ssd.algorithm.fan_out import Allocator, FanOutQuery, GeometricFanOut
from sglang_ssd.algorithm.lookahead import (
    DraftQuality,
    Prediction,
    RoundCosts,
    affine_cost,
    choose,
    measured_cost,
    modelled_hit_rate,
    predict_ar,
    predict_sd,
    predict_ssd,
    predict_threshold,
)
from sglang_ssd.algorithm.theory import Acceptance

_SERVER_TIMEOUT_S = 10.0


class PlanRow(NamedTuple):
    """The plan for one batch size; speeds are tokens a second of one request.

    ``fallback_threshold`` is the batch size b* of Theorem 17, ``fan_out`` the list F_0..F_K.
    """

    batch_size: int
    ar_tokens_per_s: float
    sd_lookahead: int
    sd_tokens_per_s: float
    ssd_tokens_per_s: float
    ssd: Prediction
    fallback_threshold: float
    fan_out: list[int]


class PlanInputs(NamedTuple):
    """What a plan is made from."""

    costs: RoundCosts
    quality: DraftQuality
    allocator: Allocator


def plan_inputs(
    *,
    acceptance: Acceptance,
    power_law_r: float,
    costs: RoundCosts,
    ngram_acceptance: float = 0.0,
) -> PlanInputs:
    """Inputs with the geometric allocator and the power law's hit rates.

    ``acceptance`` may be one number or one a position; the allocator, which is Theorem 12's, takes the first
    of these.
    """
    first = acceptance if isinstance(acceptance, int | float) else acceptance[0]
    allocator = GeometricFanOut(first, power_law_r)
    hit_rate = modelled_hit_rate(allocator, acceptance, power_law_r)
    return PlanInputs(costs, DraftQuality(acceptance, ngram_acceptance, hit_rate), allocator)


def plan(
    inputs: PlanInputs, batch_sizes: Sequence[int], *, lookaheads: Sequence[int], budgets: Sequence[int]
) -> list[PlanRow]:
    """The best allowed (K, B) for each batch size: the least work within 1% of the best speed.

    Raises ValueError for empty lists and as ``predict_ssd`` does.
    """
    costs, quality, allocator = inputs
    rows = []
    for batch_size in batch_sizes:
        best = choose([predict_ssd(k, b, batch_size, costs, quality) for k in lookaheads for b in budgets])
        sd_speed, sd_lookahead = max((predict_sd(k, batch_size, costs, quality), -k) for k in lookaheads)
        rows.append(
            PlanRow(
                batch_size=batch_size,
                ar_tokens_per_s=1000.0 * predict_ar(batch_size, costs),
                sd_lookahead=-sd_lookahead,
                sd_tokens_per_s=1000.0 * sd_speed,
                ssd_tokens_per_s=1000.0 * best.tokens_per_ms,
                ssd=best,
                fallback_threshold=predict_threshold(best.lookahead, best.budget, batch_size, costs, quality),
                fan_out=allocator(FanOutQuery(best.lookahead, best.budget, after_hit=True)),
            )
        )
    return rows


def format_table(rows: Sequence[PlanRow]) -> str:
    """The plan as text, one line a batch size."""
    lines = [
        (
            f"{'batch':>5}  {'AR tok/s':>8}  {'SD tok/s (K)':>13}  {'SSD tok/s':>9}  {'/AR':>5}  {'/SD':>5}  "
            f"{'K':>2}  {'B':>3}  {'hits':>5}  {'backup':>10}  {'n-gram from':>11}  fan-out"
        )
    ]
    for row in rows:
        ssd = row.ssd
        backup = f"{ssd.fallback.value} ({ssd.backup_lookahead})"
        sd = f"{row.sd_tokens_per_s:.1f} ({row.sd_lookahead})"
        lines.append(
            f"{row.batch_size:>5}  {row.ar_tokens_per_s:>8.1f}  {sd:>13}  {row.ssd_tokens_per_s:>9.1f}  "
            f"{row.ssd_tokens_per_s / row.ar_tokens_per_s:>5.2f}  "
            f"{row.ssd_tokens_per_s / row.sd_tokens_per_s:>5.2f}  "
            f"{ssd.lookahead:>2}  {ssd.budget:>3}  {ssd.hit_rate:>5.2f}  {backup:>10}  "
            f"{row.fallback_threshold:>11.1f}  {' '.join(map(str, row.fan_out))}"
        )
    lines.append("Speeds are of one request. In brackets: tokens proposed. 'n-gram from': b* of Theorem 17.")
    return "\n".join(lines)


def write_plot(
    path: str,
    inputs: PlanInputs,
    rows: Sequence[PlanRow],
    *,
    lookaheads: Sequence[int],
    budgets: Sequence[int],
) -> None:
    """Speed by lookahead at the first batch size, and by batch size at the planned lookahead, as an image
    file."""
    try:
        from matplotlib.figure import Figure  # only a plot needs it
    except ImportError as error:
        raise ValueError(f"--plot {path} needs matplotlib, which cannot be imported: {error}") from None

    first = rows[0]
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    by_lookahead, by_batch = figure.subplots(1, 2)
    for budget in budgets:
        speeds = [
            1000.0 * predict_ssd(k, budget, first.batch_size, *inputs[:2]).tokens_per_ms for k in lookaheads
        ]
        by_lookahead.plot(lookaheads, speeds, marker="o", label=f"SSD, B={budget}")
    sd_speeds = [1000.0 * predict_sd(k, first.batch_size, *inputs[:2]) for k in lookaheads]
    by_lookahead.plot(lookaheads, sd_speeds, marker="s", linestyle="--", color="gray", label="SD")
    by_lookahead.axhline(first.ar_tokens_per_s, linestyle=":", color="black", label="AR")
    by_lookahead.set(
        xlabel="lookahead K", ylabel="tokens/s of one request", title=f"batch size {first.batch_size}"
    )
    batch_sizes = [row.batch_size for row in rows]
    by_batch.plot(batch_sizes, [row.ssd_tokens_per_s for row in rows], marker="o", label="SSD")
    by_batch.plot(
        batch_sizes,
        [row.sd_tokens_per_s for row in rows],
        marker="s",
        linestyle="--",
        color="gray",
        label="SD",
    )
    by_batch.plot(
        batch_sizes, [row.ar_tokens_per_s for row in rows], linestyle=":", color="black", label="AR"
    )
    by_batch.set(xlabel="batch size", ylabel="tokens/s of one request", title="planned K and B")
    for axes in (by_lookahead, by_batch):
        axes.set_ylim(bottom=0.0)
        axes.legend()
    figure.savefig(path)


def fetch_estimates(server_url: str) -> dict[str, Any]:
    """What a running server's draft has measured: ``/server_info``, ``internal_states[0]["ssd"]["estimates"]``.

    Their keys are those of ``acceptance.Snapshot``. Raises ValueError when the server runs without SSD,
    OSError when it cannot be reached.
    """
    url = server_url.rstrip("/") + "/server_info"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--server-url must begin with http:// or https://, got {server_url}")
    with urllib.request.urlopen(url, timeout=_SERVER_TIMEOUT_S) as response:
        info = json.load(response)
    try:
        return info["internal_states"][0]["ssd"]["estimates"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f'--server-url {server_url}: its /server_info has no internal_states[0]["ssd"]["estimates"]'
        ) from None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_ssd.plan", description=__doc__.split("\n\n")[1])
    models = parser.add_argument_group("the pair of models (measured by a running server, or given)")
    models.add_argument("--server-url", help="read what is not given below from this server's /server_info")
    models.add_argument("--acceptance", type=float, help="chance that a drafted token is accepted")
    models.add_argument(
        "--power-law-r", type=float, help="exponent r of the miss rate (1 + F)^-r (default 1)"
    )
    models.add_argument(
        "--ngram-acceptance", type=float, default=0.0, help="the same chance for the n-gram backup"
    )
    times = parser.add_argument_group("times in milliseconds")
    times.add_argument("--verify-ms", type=float, help="one target forward, for one token")
    times.add_argument("--verify-row-ms", type=float, default=0.0, help="more for each further token in it")
    times.add_argument("--draft-depth-ms", type=float, help="one draft forward, for one branch")
    times.add_argument("--draft-row-ms", type=float, default=0.0, help="more for each further branch in it")
    times.add_argument(
        "--fork-ms", type=float, help="a draft round beside its K depths (default: one more depth)"
    )
    times.add_argument(
        "--service-ms", type=float, default=0.0, help="from an outcome to the draft's work on it"
    )
    times.add_argument(
        "--ngram-ms", type=float, default=0.02, help="from a miss to the n-gram proposals (default 0.02)"
    )
    search = parser.add_argument_group("what to choose from")
    search.add_argument("--batch-sizes", type=_int_list(1), default=[1], help="comma-separated (default 1)")
    search.add_argument(
        "--lookaheads", type=_int_list(1), default=list(range(1, 9)), help="allowed K (default 1..8)"
    )
    search.add_argument(
        "--budgets",
        type=_int_list(0),
        default=[0, 4, 8, 16, 24, 32],
        help="allowed B (default 0,4,8,16,24,32)",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="also write a plot (needs matplotlib)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        inputs = _inputs(args, fetch_estimates(args.server_url) if args.server_url else {})
        allowed = {"lookaheads": args.lookaheads, "budgets": args.budgets}
        rows = plan(inputs, args.batch_sizes, **allowed)
        print(format_table(rows))
        if args.plot:
            write_plot(args.plot, inputs, rows, **allowed)
            print(f"wrote {args.plot}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _inputs(args: argparse.Namespace, measured: Mapping[str, Any]) -> PlanInputs:
    for name in ("verify_row_ms", "draft_row_ms", "service_ms", "ngram_ms"):
        _check_at_least_zero(name, getattr(args, name))
    verify_ms, depth_ms = (
        affine_cost(_given(args, name, {}), getattr(args, row))
        if getattr(args, name) is not None or not measured.get(table)
        else measured_cost({int(size): ms for size, ms in measured[table].items()})
        for name, row, table in (
            ("verify_ms", "verify_row_ms", "verify_ms_by_tokens"),
            ("draft_depth_ms", "draft_row_ms", "draft_depth_ms_by_rows"),
        )
    )
    if args.fork_ms is not None:
        _check_at_least_zero("fork_ms", args.fork_ms)
    return plan_inputs(
        acceptance=_given(args, "acceptance", measured),
        power_law_r=_given(args, "power_law_r", {"power_law_r": 1.0, **measured}),
        ngram_acceptance=args.ngram_acceptance,
        costs=RoundCosts(
            verify_ms=verify_ms,
            depth_ms=depth_ms,
            fork_ms=depth_ms(1) if args.fork_ms is None else args.fork_ms,
            service_ms=args.service_ms,
            ngram_ms=args.ngram_ms,
        ),
    )


def _given(args: argparse.Namespace, name: str, measured: Mapping[str, Any]) -> float:
    """A flag's value, else the server's. Raises ValueError, naming the flag, where neither is there or it is
    not > 0."""
    flag, value = "--" + name.replace("_", "-"), getattr(args, name)
    if value is None:
        value = measured.get(name)
    if value is None:
        raise ValueError(f"{flag} is needed: it was not given, and no server has measured it")
    if name != "acceptance" and not value > 0.0:
        raise ValueError(f"{flag} must be above 0, got {value}")
    return value


def _check_at_least_zero(name: str, value: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {value}")


def _int_list(minimum: int) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected whole numbers separated by commas, got {text!r}"
            ) from None
        if min(values) < minimum:
            raise argparse.ArgumentTypeError(f"each must be {minimum} or more, got {min(values)}")
        return values

    return parse


if __name__ == "__main__":
    sys.exit(main())
