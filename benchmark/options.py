"""What the benchmarks' command lines share: the pair, K and B, where results go, and how a script ends."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from report import RESULTS
from serving import ServerFailed

from sglang_ssd.demo_models import DRAFT, TARGET, models_dir
from sglang_ssd.test_pair import DraftKind, PairPaths, write_pair


class Limits(NamedTuple):
    """The values that an integer option may have."""

    option: str
    lowest: int
    highest: int | None


class Parser(argparse.ArgumentParser):
    """The command line of one script. What it refuses it names as ``--option value: why``."""

    def __init__(self, script: str, doc: str) -> None:
        super().__init__(
            prog=f"benchmark/{script}.py",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._limits: list[Limits] = []

    def add_count(
        self, option: str, default: int | None, help: str, lowest: int = 1, highest: int | None = None
    ) -> None:
        """An integer with limits. A default of None is the server's own."""
        told = "the server's own" if default is None else default
        self.add_argument(option, type=int, default=default, help=f"{help} (default: {told})")
        self._limits.append(Limits(option, lowest, highest))

    def add_models(self) -> None:
        for option, role, model in (("--model", "target", TARGET), ("--draft", "draft", DRAFT)):
            self.add_argument(
                option, default=str(models_dir() / model.name), help=f"{role} (default: the demo pair's)"
            )

    def add_pair(self, default: str) -> None:
        """--pair, and --model and --draft for the demo pair."""
        self.add_argument(
            "--pair",
            choices=("demo", "test"),
            default=default,
            help="test: a tiny float32 pair, written for this run; demo: --model and --draft (default: %(default)s)",
        )
        self.add_models()

    def add_speculation(self, lookahead: int | None = None, budget: int | None = None) -> None:
        self.add_count("--lookahead", lookahead, "K")
        self.add_count("--budget", budget, "fan-out budget B", lowest=0)

    def add_only(self, what: str) -> None:
        self.add_argument("--only", default="", metavar="REGEX", help=f"{what} to run (default: all)")

    def add_out(self, name: str, note: str = "") -> None:
        """``name`` is the default file in benchmark/results; PAIR in it stands for --pair."""
        self.add_argument(
            "--out", type=Path, default=RESULTS / name, help=f"JSON{note} (default: benchmark/results/{name})"
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        parsed = super().parse_args(args, namespace)
        for limits in self._limits:
            self._check_limits(limits, getattr(parsed, limits.option.strip("-").replace("-", "_")))
        if hasattr(parsed, "pair") and parsed.out == self.get_default("out"):
            parsed.out = parsed.out.with_name(parsed.out.name.replace("PAIR", parsed.pair))
        if getattr(parsed, "pair", "demo") == "demo" and hasattr(parsed, "model"):
            self._check_models(parsed)
        try:
            re.compile(getattr(parsed, "only", ""))
        except re.error as error:
            self.error(f"--only {parsed.only}: {error}")
        return parsed

    def _check_limits(self, limits: Limits, value: int | None) -> None:
        option, lowest, highest = limits
        if value is not None and (value < lowest or (highest is not None and value > highest)):
            at_most = f" and at most {highest}" if highest is not None else ""
            self.error(f"{option} {value}: must be {lowest} or more{at_most}")

    def _check_models(self, parsed: argparse.Namespace) -> None:
        for option, path in (("--model", parsed.model), ("--draft", parsed.draft)):
            if Path(path).is_absolute() and not Path(path).is_dir():
                self.error(f"{option} {path}: no such folder (the demo pair comes with `make models`)")


def pair_folders(args: argparse.Namespace) -> AbstractContextManager[PairPaths]:
    """The pair that --pair names."""
    if args.pair == "test":
        return temporary_test_pair()
    return nullcontext(PairPaths(Path(args.model), Path(args.draft)))


@contextmanager
def temporary_test_pair(draft: DraftKind = "normal") -> Iterator[PairPaths]:
    """The test pair, as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_pair(Path(folder), draft=draft)


def server_arguments(
    pair: PairPaths,
    mode: str,
    *,
    dtype: str | None = None,
    lookahead: int | None = None,
    budget: int | None = None,
) -> list[str]:
    """Flags of a server in one mode; what is None is the server's own choice. --ssd-mode off takes no K, no B."""
    arguments = ["--device", "cpu", "--model-path", str(pair.target), "--ssd-mode", mode]
    if dtype is not None:
        arguments += ["--dtype", dtype]
    if mode == "off":
        return arguments
    arguments += ["--speculative-draft-model-path", str(pair.draft)]
    if lookahead is not None:
        arguments += ["--speculative-num-steps", str(lookahead)]
    if budget is not None:
        arguments += ["--ssd-fan-out-budget", str(budget)]
    return arguments


def log_path(out: Path, label: str) -> Path:
    """Where the log of one server goes: beside the results, never committed."""
    return out.parent / "local" / f"{out.stem}-{re.sub(r'[^A-Za-z0-9.]+', '-', label)}.log"


def arguments_as_json(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments, paths by name: where models and results lie on this machine says nothing."""
    paths = {
        name: Path(value).name for name, value in vars(args).items() if name in ("model", "draft", "out")
    }
    return vars(args) | paths


def run_script(main: Callable[[], int], script: str, failure: type[Exception] = ServerFailed) -> NoReturn:
    """Exit with what ``main`` returns, or with one message for a ``failure``."""
    try:
        sys.exit(main())
    except failure as error:
        sys.exit(f"{script}: error: {error}")
