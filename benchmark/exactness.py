"""Check at temperature 0 that SSD, synchronous speculation and plain decoding give the same tokens.

Servers in async, sync and off answer the same varied prompts, once for every --concurrency, with caches emptied in
between. What all are compared with is plain decoding at the first concurrency. Each first divergence is listed with the
target's own margin there: the log-probability of its first choice less that of its second, from the plain server. Where
batches of other shapes round differently, two tokens within that noise may change places; the exit code is 1 when a
margin is above --noise, or the other token is not the target's first or second choice.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import options
from measurement import first_difference
from report import chat_token_ids, format_table, machine_facts, read_prompts, write_json
from serving import Server, serving
from tqdm import tqdm

#: Plain is the last: its server tells the margins.
MODES = ("async", "sync", "off")
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


def diverge(server: Server, run: str, number: int, prompt: list[int], plain: list[int], other: list[int]):
    """The first divergence of ``other``, with the margin that the plain server gives; None when there is none."""
    position = first_difference(plain, other)
    if position is None:
        return None
    answer = server.generate([*prompt, *plain[:position]], 1, return_logprob=True, top_logprobs_num=2)
    (first, first_id, _), (second, second_id, _) = answer.meta_info["output_top_logprobs"][0]
    tokens = [path[position] if position < len(path) else None for path in (plain, other)]
    return Divergence(run, number, position, *tokens, first - second, set(tokens) == {first_id, second_id})


def run_name(mode: str, concurrency: int) -> str:
    return f"{mode} {concurrency} at once"


def answers(
    server: Server, run: str, prompts: list[list[int]], max_tokens: int, concurrency: int
) -> list[list[int]]:
    with ThreadPoolExecutor(concurrency) as pool:
        generations = pool.map(lambda prompt: server.generate(prompt, max_tokens), prompts)
        return [
            answer.output_ids for answer in tqdm(generations, desc=run, total=len(prompts), unit="prompt")
        ]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with options.pair_folders(args) as pair:
        facts, prompts = machine_facts(), chat_token_ids(str(pair.target), read_prompts()[: args.num_prompts])
        outputs: dict[str, list[list[int]]] = {}
        for mode in MODES:
            arguments = options.server_arguments(
                pair, mode, dtype=args.dtype, lookahead=args.lookahead, budget=args.budget
            )
            with serving(arguments, options.log_path(args.out, mode), mode) as server:
                for concurrency in args.concurrency:
                    run = run_name(mode, concurrency)
                    outputs[run] = answers(server, run, prompts, args.max_tokens, concurrency)
                    server.flush_cache()
                if mode == MODES[-1]:
                    plain = outputs.pop(run_name(mode, args.concurrency[0]))
                    found = [
                        diverge(server, run, i, prompt, plain[i], outputs[run][i])
                        for run in outputs
                        for i, prompt in enumerate(prompts)
                    ]
    return report(args, facts, plain, outputs, [divergence for divergence in found if divergence is not None])


def report(
    args,
    facts,
    plain: list[list[int]],
    outputs: dict[str, list[list[int]]],
    divergences: list[Divergence],
) -> int:
    left_at = {(divergence.run, divergence.prompt): divergence.position for divergence in divergences}
    rows = [
        [
            i,
            len(tokens),
            *(f"differs at {left_at[run, i]}" if (run, i) in left_at else "equal" for run in outputs),
        ]
        for i, tokens in enumerate(plain)
    ]
    print(f"\n{format_table(['prompt', 'tokens', *outputs], rows)}\n")
    if divergences:
        print(f"{format_table(Divergence._fields, divergences)}\n")
    num_exact = sum(not any((run, i) in left_at for run in outputs) for i in range(len(rows)))
    bad = [divergence for divergence in divergences if not divergence.is_noise(args.noise)]
    print(
        f"{num_exact} of {len(rows)} prompts equal in all runs; "
        f"{len(divergences)} divergences, {len(bad)} of them beyond numeric noise ({args.noise} nats)"
    )
    write_json(
        args.out,
        {
            "num_prompts": len(rows),
            "num_equal_in_all_runs": num_exact,
            "num_beyond_noise": len(bad),
            "divergences": [divergence._asdict() for divergence in divergences],
            "plain_output_ids": plain,
            "runs": list(outputs),
            "machine": facts,
            "arguments": options.arguments_as_json(args),
        },
    )
    return 1 if bad else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("exactness", __doc__)
    parser.add_pair("demo")
    add = parser.add_argument
    add("--dtype", choices=tuple(NOISE), help="of the target (default: bfloat16 for demo, float32 for test)")
    add(
        "--noise",
        type=float,
        help=f"largest margin in nats that rounding explains (default: by dtype, {NOISE})",
    )
    parser.add_count("--num-prompts", 10, "prompts of prompts.json", highest=len(read_prompts()))
    parser.add_count("--max-tokens", 128, "tokens a prompt at most")
    add(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1],
        help="requests at a time; every mode runs once for each (default: 1)",
    )
    parser.add_speculation()
    parser.add_out("exactness-PAIR.json")
    args = parser.parse_args(argv)
    if min(args.concurrency) < 1 or len(set(args.concurrency)) != len(args.concurrency):
        told = " ".join(map(str, args.concurrency))
        parser.error(f"--concurrency {told}: must be different numbers, 1 or more")
    args.dtype = args.dtype or ("float32" if args.pair == "test" else "bfloat16")
    args.noise = NOISE[args.dtype] if args.noise is None else args.noise
    return args


if __name__ == "__main__":
    options.run_script(main, "exactness")
