"""Check at temperature 0 that SSD, synchronous speculation and plain decoding give the same tokens.

Fresh servers in async, async again, sync and off answer the same varied prompts. Each first divergence from plain is
listed with the target's own margin there: the log-probability of its first choice less that of its second, from the
plain server. Batches of other shapes round differently, so that two tokens within that noise may change places; the
exit code is 1 when a margin is above --noise, or the other token is not the target's first or second choice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from report import RESULTS, chat_token_ids, format_table, machine_facts, read_prompts, write_json
from serving import Server, ServerFailed, serving
from tqdm import tqdm

from sglang_ssd.demo_models import DRAFT, TARGET, models_dir
from sglang_ssd.test_pair import write_pair

#: Mode of each run. Plain is the last: its server tells the margins.
RUNS = {"async": "async", "async again": "async", "sync": "sync", "plain": "off"}
#: A bf16 logit between 16 and 32 has steps of .125: two tokens that far apart are neighbours.
NOISE = {"bfloat16": 0.125, "float32": 1e-3}


class Divergence(NamedTuple):
    """Where a run leaves plain decoding first. ``margin`` is in nats; ``is_near_tie``: the tokens of both runs are the
    target's first two choices. A run that ends early has the token None."""

    run: str
    prompt: int
    position: int
    plain_token: int | None
    token: int | None
    margin: float
    is_near_tie: bool

    def is_noise(self, noise: float) -> bool:
        return self.is_near_tie and self.margin <= noise


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position at which two token lists differ, the end of the shorter one included; None if equal."""
    if a == b:
        return None
    return next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))


def diverge(server: Server, run: str, number: int, prompt: list[int], plain: list[int], other: list[int]):
    """The first divergence of ``other``, with the margin that the plain server gives; None when there is none."""
    position = first_difference(plain, other)
    if position is None:
        return None
    answer = server.generate([*prompt, *plain[:position]], 1, return_logprob=True, top_logprobs_num=2)
    (first, first_id, _), (second, second_id, _) = answer.meta_info["output_top_logprobs"][0]
    tokens = [path[position] if position < len(path) else None for path in (plain, other)]
    return Divergence(run, number, position, *tokens, first - second, set(tokens) == {first_id, second_id})


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        model, draft = args.model, args.draft
        if args.pair == "test":
            model, draft = map(str, write_pair(Path(folder)))
        facts, prompts = machine_facts(), chat_token_ids(model, read_prompts()[: args.num_prompts])
        outputs: dict[str, list[list[int]]] = {}
        for run, mode in RUNS.items():
            log = args.out.parent / "local" / f"exactness-{args.pair}-{run.replace(' ', '-')}.log"
            with serving(server_arguments(mode, model, draft, args), log, run) as server:
                outputs[run] = [
                    server.generate(prompt, args.max_tokens).output_ids
                    for prompt in tqdm(prompts, desc=run, unit="prompt")
                ]
                if run == "plain":
                    found = [
                        diverge(server, other, i, prompt, outputs["plain"][i], outputs[other][i])
                        for other in outputs
                        for i, prompt in enumerate(prompts)
                    ]
    return report(args, facts, outputs, [divergence for divergence in found if divergence is not None])


def server_arguments(mode: str, model: str, draft: str, args: argparse.Namespace) -> list[str]:
    arguments = ["--device", "cpu", "--model-path", model, "--dtype", args.dtype, "--ssd-mode", mode]
    if mode != "off":
        arguments += ["--speculative-draft-model-path", draft]
        if args.lookahead is not None:
            arguments += ["--speculative-num-steps", str(args.lookahead)]
        if args.budget is not None:
            arguments += ["--ssd-fan-out-budget", str(args.budget)]
    return arguments


def report(args, facts, outputs: dict[str, list[list[int]]], divergences: list[Divergence]) -> int:
    others = [run for run in RUNS if run != "plain"]
    left_at = {(divergence.run, divergence.prompt): divergence.position for divergence in divergences}
    rows = [
        [
            i,
            len(tokens),
            *(f"differs at {left_at[run, i]}" if (run, i) in left_at else "equal" for run in others),
        ]
        for i, tokens in enumerate(outputs["plain"])
    ]
    print(f"\n{format_table(['prompt', 'tokens', *others], rows)}\n")
    if divergences:
        print(f"{format_table(Divergence._fields, divergences)}\n")
    num_exact = sum(not any((run, i) in left_at for run in others) for i in range(len(rows)))
    num_same = sum(a == b for a, b in zip(outputs["async"], outputs["async again"], strict=True))
    bad = [divergence for divergence in divergences if not divergence.is_noise(args.noise)]
    print(
        f"{num_exact} of {len(rows)} prompts equal in all modes; async twice: {num_same} of {len(rows)} equal; "
        f"{len(divergences)} divergences, {len(bad)} of them beyond numeric noise ({args.noise} nats)"
    )
    write_json(
        args.out,
        {
            "num_prompts": len(rows),
            "num_equal_in_all_modes": num_exact,
            "num_async_twice_equal": num_same,
            "num_beyond_noise": len(bad),
            "divergences": [divergence._asdict() for divergence in divergences],
            "output_ids": outputs,
            "machine": facts,
            "arguments": vars(args)
            | {"model": Path(args.model).name, "draft": Path(args.draft).name, "out": args.out.name},
        },
    )
    return 1 if bad else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark/exactness.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--pair",
        choices=("demo", "test"),
        default="demo",
        help="test: a tiny float32 pair, written for this run",
    )
    add("--model", default=str(models_dir() / TARGET.name), help="target of --pair demo")
    add("--draft", default=str(models_dir() / DRAFT.name), help="draft of --pair demo")
    add("--dtype", choices=tuple(NOISE), help="of the target (default: bfloat16 for demo, float32 for test)")
    add(
        "--noise",
        type=float,
        help=f"largest margin in nats that rounding explains (default: by dtype, {NOISE})",
    )
    add("--num-prompts", type=int, default=10, help="prompts of prompts.json (default: 10)")
    add("--max-tokens", type=int, default=128, help="tokens a prompt at most (default: 128)")
    add("--lookahead", type=int, help="K (default: the server's own)")
    add("--budget", type=int, help="fan-out budget B (default: the server's own)")
    add("--out", type=Path, help="JSON (default: exactness-PAIR.json in benchmark/results)")
    args = parser.parse_args(argv)
    num_prompts = len(read_prompts())
    if not 1 <= args.num_prompts <= num_prompts:
        parser.error(f"--num-prompts {args.num_prompts}: must be from 1 to {num_prompts}")
    if args.max_tokens < 1:
        parser.error(f"--max-tokens {args.max_tokens}: must be 1 or more")
    if args.pair == "demo" and Path(args.model).is_absolute() and not Path(args.model).is_dir():
        parser.error(f"--model {args.model}: no such folder (the demo pair comes with `make models`)")
    args.dtype = args.dtype or ("float32" if args.pair == "test" else "bfloat16")
    args.noise = NOISE[args.dtype] if args.noise is None else args.noise
    args.out = args.out or RESULTS / f"exactness-{args.pair}.json"
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerFailed as error:
        sys.exit(f"exactness: error: {error}")
