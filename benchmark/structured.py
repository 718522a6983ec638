"""Check that constrained output keeps to its grammar with SSD, and equals that of plain decoding.

Small bounded JSON schemas and patterns, made from a fixed seed; half of the requests are greedy, half sampled with a
seed. Every output must end by itself and parse or match, in every mode, and have the tokens of --ssd-mode off. The
exit code is 1 when one does not. On the demo pair, in bfloat16, near ties round differently from mode to mode: a
difference there is no proof of an error (see exactness.py).
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import jsonschema
import options
from measurement import first_difference
from report import chat_token_ids, format_table, machine_facts, write_json
from serving import Answer, Request, serving

#: More than the longest output of any grammar below, a token a character.
NEW_TOKENS = 256
PLAIN_MODE = "off"
MODES = ("async", "sync", PLAIN_MODE)
WORDS = ("red", "green", "blue", "north", "south", "small", "large", "open", "closed")
PROPERTIES = ("name", "size", "count", "active", "tags", "colour")
NUM_AT_ONCE = 16


class Problem(NamedTuple):
    mode: str
    request: int
    what: str
    grammar: str
    text: str


class ModeResult(NamedTuple):
    """``num_equal``: outputs whose tokens are those of plain decoding. ``sources`` counts rounds."""

    mode: str
    num_requests: int
    num_valid: int
    num_equal: int
    sources: dict[str, int]


# -- requests ----------------------------------------------------------------------------------------------------


def small_schema(rng: Random) -> dict[str, Any]:
    """An object of one to four required properties, every one bounded."""
    properties = {name: _value_schema(rng) for name in rng.sample(PROPERTIES, rng.randint(1, 4))}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _value_schema(rng: Random) -> dict[str, Any]:
    kind = rng.choice(("enum", "integer", "boolean", "array", "string"))
    if kind == "enum":
        return {"enum": rng.sample(WORDS, rng.randint(2, 4))}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 500)}
    if kind == "array":
        items = {"enum": rng.sample(WORDS, 3)}
        return {"type": "array", "items": items, "minItems": rng.randint(0, 1), "maxItems": rng.randint(2, 4)}
    if kind == "boolean":
        return {"type": "boolean"}
    # Not maxLength: xgrammar then lets a string have raw control characters, which are not JSON, and takes no pattern beside it.
    longest = rng.randint(3, 8)
    return {"type": "string", "pattern": f"^[a-z ]{{0,{longest}}}$"}


def small_pattern(rng: Random) -> str:
    """Two to four bounded parts in a row."""
    low = rng.randint(1, 3)
    parts = (
        f"[a-f]{{{low},{low + 4}}}",
        f"[0-9]{{{low}}}",
        f"({'|'.join(rng.sample(WORDS, 3))})",
        f"[A-Z][a-z]{{{low},{low + 2}}}",
        r"\([0-9]{3}\) ",
        "(ab|a|b){2,5}c",
        "!{1,3}",
    )
    return "-".join(rng.sample(parts, rng.randint(2, 4)))


def constraints(num_schemas: int, num_patterns: int) -> list[dict[str, str]]:
    """What stands in ``sampling_params``: the same for the same numbers."""
    rng = Random(0)
    return [
        *({"json_schema": json.dumps(small_schema(rng))} for _ in range(num_schemas)),
        *({"regex": small_pattern(rng)} for _ in range(num_patterns)),
    ]


def constrained_requests(prompts: Sequence[list[int]], grammars: Sequence[dict[str, str]]) -> list[Request]:
    """Every second request is greedy; all have a seed."""
    return [
        Request(
            prompt,
            {
                "temperature": float(i % 2),
                "max_new_tokens": NEW_TOKENS,
                "sampling_seed": i,
                **grammar,
            },
        )
        for i, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
    ]


def prompt_text(number: int, grammar: dict[str, str]) -> str:
    ((kind, text),) = grammar.items()
    wanted = "a JSON value of the schema" if kind == "json_schema" else "a text that matches the pattern"
    return f"{number}. Invent {wanted} {text}"


# -- checks ------------------------------------------------------------------------------------------------------


def violation(answer: Answer, sampling: dict[str, Any]) -> str | None:
    """What is wrong with one output by itself; None when it keeps to its grammar."""
    reason = answer.meta_info["finish_reason"]["type"]
    if reason != "stop":
        return f"ended by {reason}"
    if "regex" in sampling:
        return None if re.fullmatch(sampling["regex"], answer.text) else "does not match"
    try:
        jsonschema.validate(json.loads(answer.text), json.loads(sampling["json_schema"]))
    except json.JSONDecodeError as error:
        return f"is no JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"is not of its schema: {error.message}"
    return None


def examine(
    mode: str, requests: Sequence[Request], plain: Sequence[Answer], answers: Sequence[Answer]
) -> tuple[ModeResult, list[Problem]]:
    problems, num_valid, num_equal = [], 0, 0
    for i, (request, theirs, ours) in enumerate(zip(requests, plain, answers, strict=True)):
        wrong = violation(ours, request.sampling)
        index = first_difference(theirs.output_ids, ours.output_ids)
        differs = None if index is None else f"leaves plain decoding at token {index}"
        num_valid, num_equal = num_valid + (wrong is None), num_equal + (differs is None)
        grammar = request.sampling.get("regex") or request.sampling["json_schema"]
        problems += [Problem(mode, i, what, grammar, ours.text) for what in (wrong, differs) if what]
    sources = Counter(source for answer in answers for source in answer.meta_info.get("ssd_sources", ()))
    return ModeResult(mode, len(requests), num_valid, num_equal, dict(sources)), problems


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts, grammars = machine_facts(), constraints(args.num_schemas, args.num_patterns)
    answers: dict[str, list[Answer]] = {}
    with options.pair_folders(args) as pair:
        texts = [prompt_text(i, grammar) for i, grammar in enumerate(grammars)]
        requests = constrained_requests(chat_token_ids(str(pair.target), texts), grammars)
        for mode in (PLAIN_MODE, *args.modes):
            arguments = options.server_arguments(
                pair, mode, dtype=args.dtype, lookahead=args.lookahead, budget=args.budget
            )
            # Else a model may write white space until its tokens run out.
            arguments.append("--constrained-json-disable-any-whitespace")
            with serving(arguments, options.log_path(args.out, mode), mode) as server:
                answers[mode] = server.ask_all([[request] for request in requests], NUM_AT_ONCE, mode)
    examined = [examine(mode, requests, answers[PLAIN_MODE], of_mode) for mode, of_mode in answers.items()]
    return report(
        args, facts, [result for result, _ in examined], [p for _, found in examined for p in found]
    )


def report(args, facts, results: Sequence[ModeResult], problems: Sequence[Problem]) -> int:
    print(f"\n{format_table([name.replace('_', ' ') for name in ModeResult._fields], results)}\n")
    if problems:
        print(f"{format_table(Problem._fields, problems)}\n")
    value = {
        "results": [result._asdict() for result in results],
        "problems": [problem._asdict() for problem in problems],
        "machine": facts,
        "arguments": options.arguments_as_json(args),
    }
    write_json(args.out, value)
    return 1 if problems else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("structured", __doc__)
    parser.add_pair("test")
    parser.add_argument("--dtype", help="of the target (default: float32 for test, the model's own for demo)")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=[mode for mode in MODES if mode != PLAIN_MODE],
        default=["async"],
        help="beside off (default: async)",
    )
    parser.add_count("--num-schemas", 100, "requests with a JSON schema", lowest=0)
    parser.add_count("--num-patterns", 50, "requests with a regex", lowest=0)
    parser.add_speculation(3, 12)
    parser.add_out("structured-PAIR.json")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("float32" if args.pair == "test" else None)
    return args


if __name__ == "__main__":
    options.run_script(main, "structured")
