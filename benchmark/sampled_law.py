"""Check that sampled output has the target's own distribution, whoever proposes and however a proposal is verified.

The first three output tokens of many requests stand against the exact joint distribution, which transformers gives for
the target: temperature 1, top_k 4, so 64 cells. Five tokens are asked for, so that a verified run decides the third
and does not end with it. Each variant has a fresh server:

  shared-noise, residual with C = 1, .5, .05
  x hits (B=6), neural misses (B=0: every proposal is drafted just in time), one-hot misses (B=0, n-gram fallback)

The exit code is 1 when a variant has p < 0.001, a token outside the support, or no round of the source it is about.
Results are merged into --out by variant, so that a run can be done in parts.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import options
from report import format_table, machine_facts, read_results, write_results
from serving import Answer, Request, Server, serving

LOOKAHEAD, BUDGET = 3, 6
TOP_K, DEPTH, NEW_TOKENS = 4, 3, 5
#: A period of eight, three times. Found by search on the test pair: the target goes on with the period with
#: probability .59, .76 and .57, so that n-gram proposals exist and are accepted as well as rejected.
PROMPT = list(b"tX1%woj?" * 3)
BATCH_SIZE, NUM_BATCHES_AT_ONCE = 64, 2
#: Below this p a fit is a failure; below this expected count cells are pooled.
LOWEST_P, LOWEST_EXPECTED = 1e-3, 5.0

Law = dict[tuple[int, ...], float]


class Source(NamedTuple):
    """Where the proposals of a variant come from. ``name`` is as in ``meta_info``'s ssd_sources."""

    label: str
    name: str
    budget: int
    flags: tuple[str, ...] = ()


SOURCES = (
    Source("hits", "hit", BUDGET),
    Source("neural misses", "neural", 0),
    Source("one-hot misses", "ngram", 0, ("--ssd-fallback", "ngram")),
)
SAMPLINGS = {
    "shared-noise": ("--ssd-sampling", "shared-noise"),
    **{
        f"residual C={c}": ("--ssd-sampling", "residual", "--ssd-saguaro-c", str(c)) for c in (1.0, 0.5, 0.05)
    },
}


class Variant(NamedTuple):
    sampling: str
    source: Source

    @property
    def name(self) -> str:
        return f"{self.sampling}, {self.source.label}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (*SAMPLINGS[self.sampling], *self.source.flags)


VARIANTS = tuple(Variant(sampling, source) for sampling in SAMPLINGS for source in SOURCES)


class Fit(NamedTuple):
    """Of counts to a law. ``num_outside``: samples that the law gives probability 0; they are not in ``p``."""

    p: float
    num_cells: int
    num_outside: int


class LawCheck(NamedTuple):
    """One variant. ``sources`` counts rounds; ``acceptance`` is accepted of proposed tokens."""

    variant: str
    num_requests: int
    p: float
    num_cells: int
    num_outside: int
    hit_rate: float
    acceptance: float | None
    requests_per_s: float
    malformed_laws: int
    sources: dict[str, int]

    def failures(self, wanted: Source) -> list[str]:
        found = {
            f"p = {self.p:.2g} is below {LOWEST_P}": self.p < LOWEST_P,
            f"{self.num_outside} outputs are outside the support": self.num_outside > 0,
            f"no round was answered by {wanted.name}": not self.sources.get(wanted.name),
        }
        return [text for text, is_so in found.items() if is_so]


# -- the law -----------------------------------------------------------------------------------------------------


def joint_law(next_law: Callable[[list[int]], dict[int, float]], prompt: list[int], depth: int) -> Law:
    """The probability of every path of ``depth`` tokens after ``prompt``. ``next_law``: prefix -> token -> p."""
    law: Law = {(): 1.0}
    for _ in range(depth):
        law = {
            (*path, token): p_path * p
            for path, p_path in law.items()
            for token, p in next_law([*prompt, *path]).items()
        }
    return law


def target_law(model: Path) -> Callable[[list[int]], dict[int, float]]:
    """The target's top-k law of the next token at temperature 1, from float32 logits in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def next_law(token_ids: list[int]) -> dict[int, float]:
        logits, tokens = target(torch.tensor([token_ids])).logits[0, -1].double().topk(TOP_K)
        return dict(zip(tokens.tolist(), logits.softmax(-1).tolist(), strict=True))

    return next_law


def fit(counts: Counter[tuple[int, ...]], law: Law) -> Fit:
    """Pearson's chi-square test of samples against a law."""
    from scipy.stats import chisquare

    num_inside = sum(count for path, count in counts.items() if path in law)
    cells = pooled([(counts[path], p * num_inside) for path, p in law.items()])
    p = float(chisquare(*zip(*cells, strict=True)).pvalue) if len(cells) > 1 else 1.0
    return Fit(p, len(cells), counts.total() - num_inside)


def pooled(cells: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Cells of observed and expected counts; the smallest are joined until each is expected often enough."""
    observed, expected, result = 0, 0.0, []
    for count, mean in sorted(cells, key=lambda cell: cell[1]):
        observed, expected = observed + count, expected + mean
        if expected >= LOWEST_EXPECTED:
            result.append((observed, expected))
            observed, expected = 0, 0.0
    if expected:
        last = result.pop() if result else (0, 0.0)
        result.append((last[0] + observed, last[1] + expected))
    return result


# -- the server --------------------------------------------------------------------------------------------------


def batches_of(num_requests: int) -> list[list[Request]]:
    """Requests without a seed: the server draws one for each."""
    sampling = {"temperature": 1.0, "top_k": TOP_K, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    requests = [Request(PROMPT, sampling)] * num_requests
    return [requests[start : start + BATCH_SIZE] for start in range(0, num_requests, BATCH_SIZE)]


def measure(server: Server, variant: Variant, law: Law, num_requests: int) -> LawCheck:
    started = time.perf_counter()
    answers = server.ask_all(batches_of(num_requests), NUM_BATCHES_AT_ONCE, variant.name)
    return law_check(variant, law, answers, time.perf_counter() - started, server.ssd_state())


def law_check(
    variant: Variant, law: Law, answers: Sequence[Answer], seconds: float, state: dict[str, Any]
) -> LawCheck:
    """``state``: the server's own counts; the server is fresh, so they are of these answers."""
    sources = Counter(source for answer in answers for source in answer.meta_info["ssd_sources"])
    found = fit(Counter(tuple(answer.output_ids[:DEPTH]) for answer in answers), law)
    return LawCheck(
        variant=variant.name,
        num_requests=len(answers),
        p=found.p,
        num_cells=found.num_cells,
        num_outside=found.num_outside,
        hit_rate=sources["hit"] / max(1, sources.total()),
        acceptance=state["accepted"] / state["proposed"] if state["proposed"] else None,
        requests_per_s=len(answers) / seconds,
        malformed_laws=state["malformed_laws"],
        sources=dict(sources),
    )


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    setup = {"pair": "test", "prompt": PROMPT, "top_k": TOP_K, "depth": DEPTH, "lookahead": LOOKAHEAD}
    results, checks, failures = read_results(args.out, setup), [], []
    with options.temporary_test_pair() as pair:
        law = joint_law(target_law(pair.target), PROMPT, DEPTH)
        for variant in selected(args.only):
            arguments = options.server_arguments(
                pair, "async", dtype="float32", lookahead=LOOKAHEAD, budget=variant.source.budget
            )
            # As many as the draft serves at a time; the second body waits, so that no row is ever missing.
            arguments += ["--max-running-requests", str(BATCH_SIZE), *variant.flags]
            facts = machine_facts()
            with serving(arguments, options.log_path(args.out, variant.name), variant.name) as server:
                check = measure(server, variant, law, args.num_requests)
            checks.append(check)
            failures += [f"{variant.name}: {text}" for text in check.failures(variant.source)]
            results[variant.name] = {**check._asdict(), "machine": facts}
            write_results(args.out, setup, results)
    print(f"\n{format_table([name.replace('_', ' ') for name in LawCheck._fields], checks)}\n")
    print("\n".join(failures) or "every variant has the target's law")
    return 1 if failures else 0


def selected(only: str) -> list[Variant]:
    return [variant for variant in VARIANTS if re.search(only, variant.name)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("sampled_law", __doc__)
    parser.add_count("--num-requests", 20_000, "requests a variant")
    parser.add_only(f"variants, such as '{VARIANTS[1].name}',")
    parser.add_out("sampled-law.json")
    args = parser.parse_args(argv)
    if not selected(args.only):
        parser.error(f"--only {args.only}: no variant has such a name: {', '.join(v.name for v in VARIANTS)}")
    return args


if __name__ == "__main__":
    options.run_script(main, "sampled_law")
