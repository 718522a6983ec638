"""The sampling benchmarks' own arithmetic, requests and reports: no server, no model."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmark"))

import options
import report
import saguaro_sweep
import sampled_law
import seeded
import serving
import structured
from measurement import Share
from saguaro_sweep import Configuration, Point
from serving import Answer, Generation, Request

# -- options -----------------------------------------------------------------------------------------------------


def test_limits_are_named(capsys: pytest.CaptureFixture) -> None:
    for script, option, value in (
        (sampled_law, "--num-requests", "0"),
        (sampled_law, "--only", "["),
        (sampled_law, "--only", "nothing"),
        (seeded, "--num-requests", "0"),
        (structured, "--budget", "-1"),
        (saguaro_sweep, "--lookahead", "0"),
    ):
        with pytest.raises(SystemExit):
            script.parse(
                [option, value, *(["--model", "t", "--draft", "d"] if script is saguaro_sweep else [])]
            )
        assert f"{option} {value}" in capsys.readouterr().err


def test_default_file_names_the_pair(tmp_path: Path) -> None:
    assert structured.parse([]).out.name == "structured-test.json"
    asked = ["--pair", "demo", "--model", "t", "--draft", "d"]
    assert structured.parse(asked).out.name == "structured-demo.json"
    assert structured.parse(["--out", str(tmp_path / "PAIR.json")]).out.name == "PAIR.json"


def test_server_arguments_leave_the_servers_own_choices_alone() -> None:
    pair = options.PairPaths(Path("t"), Path("d"))
    off = options.server_arguments(pair, "off", lookahead=3, budget=0)
    assert off == ["--device", "cpu", "--model-path", "t", "--ssd-mode", "off"]
    speculative = options.server_arguments(pair, "sync", dtype="float32", budget=0)
    assert speculative[-2:] == ["--ssd-fan-out-budget", "0"] and "--speculative-num-steps" not in speculative


def test_arguments_in_results_name_no_folder() -> None:
    args = saguaro_sweep.parse(["--model", "a/t", "--draft", "b/d", "--out", "c/o.json"])
    found = options.arguments_as_json(args)
    assert (found["model"], found["draft"], found["out"]) == ("t", "d", "o.json")
    assert json.dumps(found)


# -- results and shares ------------------------------------------------------------------------------------------


def test_results_come_in_parts_and_setups_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    results = report.read_results(path, {"k": 3})
    assert results == {}
    report.write_results(path, {"k": 3}, {"a": 1})
    results = report.read_results(path, {"k": 3})
    assert results == {"a": 1}
    with pytest.raises(SystemExit, match="another --out"):
        report.read_results(path, {"k": 4})


def test_wilson_interval_by_hand() -> None:
    low, high = Share(8, 10).interval()
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert Share(0, 0).interval() == (0.0, 1.0) and Share(0, 0).rate is None


@given(st.integers(0, 50), st.integers(0, 50))
def test_wilson_interval_holds_its_rate(part: int, others: int) -> None:
    share = Share(part, part + others)
    low, high = share.interval()
    assert 0.0 <= low <= high <= 1.0
    if share.whole:
        assert low - 1e-9 <= share.rate <= high + 1e-9
        mirrored = Share(others, part + others).interval()
        assert mirrored == pytest.approx((1.0 - high, 1.0 - low))


# -- serving -----------------------------------------------------------------------------------------------------


class Echo(serving.Server):
    """Answers each prompt with itself."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", Path("none"))

    def ask(self, batch) -> list[Answer]:
        return [Answer("", request.input_ids, {}) for request in batch]


def test_answers_come_in_order_and_progress_is_told() -> None:
    batches = [[Request([i, j], {}) for j in range(2)] for i in range(5)]
    told: list[int] = []
    answers = Echo().ask_all(batches, 3, "test", told.append)
    assert [answer.output_ids for answer in answers] == [[i, j] for i in range(5) for j in range(2)]
    assert told == [1, 2, 3, 4, 5]


class Fake(Echo):
    """Stands for a server, and for ``serving``: ``draw`` makes the output of a request; every round is a hit."""

    def __init__(self, draw: Callable[[Request], list[int]]) -> None:
        super().__init__()
        self._draw = draw
        self.served: list[list[str]] = []

    @contextmanager
    def serving(self, arguments: list[str], log_path: Path, label: str) -> Iterator[Fake]:
        self.served.append(arguments)
        yield self

    def ask(self, batch) -> list[Answer]:
        meta = {"ssd_sources": ["hit"], "finish_reason": {"type": "stop"}}
        outputs = [self._draw(request) for request in batch]
        return [Answer(bytes(output).decode(), output, meta) for output in outputs]

    def ssd_state(self) -> dict:
        return {"accepted": 1, "proposed": 2, "malformed_laws": 0}

    def kill_draft(self) -> None:
        pass


# -- sampled_law -------------------------------------------------------------------------------------------------


def toy_law(token_ids: list[int]) -> dict[int, float]:
    """Depends on the last token alone."""
    return {0: 0.75, 1: 0.25} if token_ids[-1] == 0 else {0: 0.5, 2: 0.5}


def test_joint_law_is_the_product_along_each_path() -> None:
    law = sampled_law.joint_law(toy_law, [0], 2)
    assert law == {(0, 0): 0.5625, (0, 1): 0.1875, (1, 0): 0.125, (1, 2): 0.125}
    assert sum(sampled_law.joint_law(toy_law, [0], 3).values()) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.01, 20.0)), min_size=1, max_size=30))
def test_pooling_keeps_all_counts(cells: list[tuple[int, float]]) -> None:
    found = sampled_law.pooled(cells)
    assert sum(observed for observed, _ in found) == sum(observed for observed, _ in cells)
    assert sum(mean for _, mean in found) == pytest.approx(sum(mean for _, mean in cells))
    assert len(found) == 1 or min(mean for _, mean in found) >= sampled_law.LOWEST_EXPECTED


def sample(num: int, twist: float = 0.0) -> Counter[tuple[int, ...]]:
    """Of the toy law's three tokens; ``twist`` moves probability from the likeliest path to the others."""
    law = sampled_law.joint_law(toy_law, [0], 3)
    weights = [p * (1.0 - twist * (path == (0, 0, 0))) for path, p in law.items()]
    return Counter(Random(1).choices(list(law), weights, k=num))


def test_fit_knows_the_law_from_another() -> None:
    law = sampled_law.joint_law(toy_law, [0], 3)
    good, bad = sampled_law.fit(sample(4000), law), sampled_law.fit(sample(4000, twist=0.15), law)
    assert good.p > 0.01 and bad.p < sampled_law.LOWEST_P
    assert good.num_cells == len(law) == 8 and good.num_outside == 0


def test_what_is_outside_the_support_is_counted_by_itself() -> None:
    law = sampled_law.joint_law(toy_law, [0], 3)
    inside = sample(4000)
    found = sampled_law.fit(inside + Counter({(9, 9, 9): 3}), law)
    assert found == sampled_law.fit(inside, law)._replace(num_outside=3)


def test_variants_are_named_apart_and_known_by_regex() -> None:
    names = [variant.name for variant in sampled_law.VARIANTS]
    assert len(set(names)) == 12
    assert [variant.name for variant in sampled_law.selected("noise.*one-hot")] == [
        "shared-noise, one-hot misses"
    ]
    assert len(sampled_law.selected("")) == 12
    one_hot = sampled_law.selected(r"C=0\.5.*one-hot")[0]
    assert one_hot.source.budget == 0
    assert one_hot.flags == (
        *("--ssd-sampling", "residual", "--ssd-saguaro-c", "0.5"),
        *("--ssd-fallback", "ngram"),
    )


def test_batches_hold_every_request() -> None:
    assert [len(batch) for batch in sampled_law.batches_of(150)] == [64, 64, 22]
    assert "sampling_seed" not in sampled_law.batches_of(1)[0][0].sampling


def test_a_variant_without_its_source_fails() -> None:
    variant = sampled_law.selected("shared-noise, hits")[0]
    law = sampled_law.joint_law(toy_law, [0], 3)

    def check(source: str, outputs: Counter[tuple[int, ...]]) -> list[str]:
        meta = {"ssd_sources": ["neural", source]}
        answers = [Answer("", [*path, 7, 7], meta) for path in outputs.elements()]
        state = {"accepted": 6, "proposed": 12, "malformed_laws": 0}
        found = sampled_law.law_check(variant, law, answers, 2.0, state)
        assert found.acceptance == 0.5 and found.requests_per_s == len(answers) / 2.0
        assert found.hit_rate == (0.5 if source == "hit" else 0.0)
        return found.failures(variant.source)

    assert check("hit", sample(1000)) == []
    assert check("neural", sample(1000)) == ["no round was answered by hit"]
    outside = Counter({(9, 9, 9): 1})
    assert check("hit", sample(1000) + outside) == ["1 outputs are outside the support"]
    assert len(check("hit", sample(4000, twist=0.2))) == 1


def test_a_run_in_parts_keeps_earlier_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_law, "target_law", lambda model: toy_law)
    rng, law = Random(2), sampled_law.joint_law(toy_law, sampled_law.PROMPT, 3)
    fake = Fake(lambda request: [*rng.choices(list(law), law.values())[0], 7, 7])
    monkeypatch.setattr(sampled_law, "serving", fake.serving)
    asked = ["--num-requests", "1000", "--out", str(tmp_path / "out.json")]
    assert sampled_law.main(["--only", "noise, hits", *asked]) == 0
    assert sampled_law.main(["--only", "C=0.05, (hits|neural)", *asked]) == 1  # No round was neural.
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    assert list(results) == ["shared-noise, hits", "residual C=0.05, hits", "residual C=0.05, neural misses"]
    assert all(result["num_requests"] == 1000 and result["num_outside"] == 0 for result in results.values())
    assert (
        "0.05" in fake.served[2] and fake.served[2][fake.served[2].index("--ssd-fan-out-budget") + 1] == "0"
    )


# -- seeded ------------------------------------------------------------------------------------------------------


def test_seeded_requests_mix_everything_and_repeat() -> None:
    requests = seeded.seeded_requests(200)
    assert requests == seeded.seeded_requests(200)
    lengths = {len(request.input_ids) for request in requests}
    assert min(lengths) >= 3 and max(lengths) <= 90 and len(lengths) > 40
    assert len({request.sampling["sampling_seed"] for request in requests}) == 200
    mixed = {
        (request.sampling["temperature"], i)
        for request in requests
        for i, option in enumerate(seeded.OPTIONS)
        if option and option.items() <= request.sampling.items()
    }
    # The requests without an option are the rest.
    assert mixed >= set(product(seeded.TEMPERATURES, range(1, len(seeded.OPTIONS))))


def test_off_is_always_the_first_run() -> None:
    assert [run.name for run in seeded.selected("killed")] == ["off", "async draft killed"]
    assert seeded.selected("") == list(seeded.RUNS)


def answers_of(*outputs: list[int]) -> list[Answer]:
    return [Answer("", output, {"ssd_sources": ["hit"]}) for output in outputs]


def test_seeded_comparison_finds_the_first_divergence(tmp_path: Path) -> None:
    requests = [Request([1], {"temperature": t}) for t in (0.3, 0.7, 1.0)]
    plain, ours = answers_of([1, 2], [3, 4], [5, 6]), answers_of([1, 2], [3, 9], [5])
    found = seeded.compare(seeded.RUNS[1], 16, requests, plain, ours)
    assert (found.num_equal, found.num_requests, found.sources) == (1, 3, {"hit": 3})
    assert found.divergences == [
        seeded.Divergence(1, 1, 4, 9, {"temperature": 0.7}),
        seeded.Divergence(2, 1, 6, None, {"temperature": 1.0}),
    ]
    args = seeded.parse(["--out", str(tmp_path / "out.json")])
    assert seeded.report(args, report.machine_facts(), [found]) == 1
    assert seeded.report(args, report.machine_facts(), [found._replace(divergences=[])]) == 0
    result = json.loads(args.out.read_text(encoding="utf-8"))
    assert result["comparisons"][0]["run"] == "sync"


class Mortal(Echo):
    """Counts how often its draft is killed, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked, self.killed_at = 0, []

    def ask(self, batch) -> list[Answer]:
        self.num_asked += 1
        return super().ask(batch)

    def kill_draft(self) -> None:
        self.killed_at.append(self.num_asked)


@pytest.mark.parametrize("num_at_once", seeded.NUM_AT_ONCE)
def test_the_draft_dies_once_and_not_before_the_half(num_at_once: int) -> None:
    requests, server = seeded.seeded_requests(20), Mortal()
    answers = seeded.ask(server, seeded.RUNS[-1], num_at_once, requests)
    assert [answer.output_ids for answer in answers] == [request.input_ids for request in requests]
    assert len(server.killed_at) == 1 and server.killed_at[0] >= 10


def test_seeded_serves_each_run_at_each_concurrency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--num-requests", "8", "--out", str(tmp_path / "out.json")]
    fake = Fake(lambda request: request.input_ids)
    monkeypatch.setattr(seeded, "serving", fake.serving)
    assert seeded.main(out) == 0
    assert len(fake.served) == len(seeded.RUNS) * len(seeded.NUM_AT_ONCE)
    random = Fake(lambda request: [len(fake.served), *Random().choices(range(99), k=9)])
    monkeypatch.setattr(seeded, "serving", random.serving)
    assert seeded.main([*out, "--only", "sync$"]) == 1
    assert len(random.served) == 2 * len(seeded.NUM_AT_ONCE)


# -- structured --------------------------------------------------------------------------------------------------


def test_grammars_are_sound_bounded_and_repeat() -> None:
    grammars = structured.constraints(100, 50)
    assert grammars == structured.constraints(100, 50)
    assert [list(grammar) for grammar in grammars] == [["json_schema"]] * 100 + [["regex"]] * 50
    kinds = Counter()
    for grammar in grammars[:100]:
        schema = json.loads(grammar["json_schema"])
        jsonschema.Draft202012Validator.check_schema(schema)
        kinds.update(next(iter(value)) + str(value.get("type")) for value in schema["properties"].values())
    assert len(kinds) == 5 and min(kinds.values()) >= 20
    for grammar in grammars[100:]:
        re.compile(grammar["regex"])
        assert not re.search(r"(?<!\\)[*+]", grammar["regex"])


def test_half_of_the_constrained_requests_are_greedy() -> None:
    grammars = structured.constraints(4, 2)
    requests = structured.constrained_requests([[i] for i in range(6)], grammars)
    assert [request.sampling["temperature"] for request in requests] == [0.0, 1.0] * 3
    assert "json_schema" in requests[3].sampling and "regex" in requests[4].sampling


@pytest.mark.parametrize(
    ("text", "reason", "what"),
    [
        ('{"n": 3}', "stop", None),
        ('{"n": 3}', "length", "ended by length"),
        ('{"n": ', "stop", "is no JSON"),
        ('{"n": 30}', "stop", "is not of its schema"),
        ('{"n": 3, "m": 1}', "stop", "is not of its schema"),
    ],
)
def test_violations_of_a_schema(text: str, reason: str, what: str | None) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = Answer(text, [], {"finish_reason": {"type": reason}})
    found = structured.violation(answer, {"json_schema": json.dumps(schema)})
    assert found is None if what is None else found.startswith(what)


def test_a_pattern_must_match_from_end_to_end() -> None:
    def violation(text: str) -> str | None:
        return structured.violation(Answer(text, [], {"finish_reason": {"type": "stop"}}), {"regex": "a|ab"})

    assert violation("ab") is None and violation("abc") == "does not match"


def test_structured_outputs_must_hold_and_equal_plain(tmp_path: Path) -> None:
    requests = [Request([1], {"regex": "[ab]"}) for _ in range(3)]

    def answers(*texts: str) -> list[Answer]:
        meta = {"finish_reason": {"type": "stop"}, "ssd_sources": ["hit"]}
        return [Answer(text, list(text.encode()), meta) for text in texts]

    plain = answers("a", "b", "a")
    result, problems = structured.examine("async", requests, plain, answers("a", "a", "c"))
    assert result == structured.ModeResult("async", 3, 2, 1, {"hit": 3})
    assert [(problem.request, problem.what) for problem in problems] == [
        (1, "leaves plain decoding at token 0"),
        (2, "does not match"),
        (2, "leaves plain decoding at token 0"),
    ]
    args = structured.parse(["--out", str(tmp_path / "out.json")])
    assert structured.report(args, report.machine_facts(), [result], problems) == 1
    assert structured.report(args, report.machine_facts(), [result], []) == 0


def test_structured_asks_off_and_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(lambda request: list(b"{}"))
    monkeypatch.setattr(structured, "serving", fake.serving)
    out = ["--num-schemas", "2", "--num-patterns", "1", "--out", str(tmp_path / "out.json")]
    assert structured.main([*out, "--modes", "async", "sync"]) == 1
    modes = [arguments[arguments.index("--ssd-mode") + 1] for arguments in fake.served]
    assert modes == ["off", "async", "sync"]
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    assert [(result["num_valid"], result["num_equal"]) for result in found] == [(0, 3)] * 3


# -- saguaro_sweep -----------------------------------------------------------------------------------------------


def test_point_counts_rounds_first_rounds_and_proposed_tokens() -> None:
    def generation(sources: list[str], lengths: list[int], num_tokens: int) -> Generation:
        proposed = [0 if source == "none" else 3 for source in sources]
        meta = {"ssd_sources": sources, "ssd_proposed_lengths": proposed, "ssd_accept_lengths": lengths}
        return Generation([0] * num_tokens, meta, seconds=4.0, first_token_seconds=1.0)

    point = saguaro_sweep.point_of(
        [
            generation(["neural", "hit", "hit"], [1, 4, 2], 8),
            generation(["hit", "none"], [3, 1], 5),
            generation([], [], 1),
        ]
    )
    assert point.acceptance == Share(0 + 3 + 1 + 2 + 0, 4 * 3)
    assert point.hits == Share(3, 5) and point.first_hits == Share(1, 2)
    assert point.tokens_per_round == 11 / 5
    assert point.decode_tokens_per_s == (7 + 4 + 0) / 9.0
    assert Point.from_json(json.loads(json.dumps(point.as_json()))) == point


class ThreeRounds:
    """Stands for a server: every request takes three rounds."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], float]] = []

    def generate(self, input_ids: list[int], max_new_tokens: int, temperature: float) -> Generation:
        self.asked.append((input_ids, temperature))
        meta = {
            "ssd_sources": ["neural", "hit", "hit"],
            "ssd_proposed_lengths": [3, 3, 3],
            "ssd_accept_lengths": [2, 2, 2],
        }
        return Generation([0] * 7, meta, 2.0, 1.0)


def test_prompts_come_again_until_enough_rounds_are_counted() -> None:
    args = saguaro_sweep.parse(["--model", "t", "--draft", "d", "--rounds", "10"])
    server, prompts = ThreeRounds(), [[i] for i in range(5)]
    points = saguaro_sweep.measure_configuration(server, prompts, "test", args)
    assert [point.hits.whole for point in points.values()] == [12, 12]
    counted = server.asked[2 * saguaro_sweep.NUM_WARM_UPS :]
    assert [token for (token,), _ in counted] == [0, 1, 2, 0] * 2
    assert Counter(temperature for _, temperature in counted) == {0.7: 4, 1.0: 4}


@pytest.mark.parametrize("configurations", [saguaro_sweep.CONFIGURATIONS, [Configuration(0.5)]])
def test_table_and_plot_are_redrawn_from_results(
    tmp_path: Path, capsys: pytest.CaptureFixture, configurations
) -> None:
    point = Point(Share(50, 100), Share(0, 80), Share(0, 0), 2.5, 4.0, 9)
    points = {str(temperature): point.as_json() for temperature in saguaro_sweep.TEMPERATURES}
    out = tmp_path / "sweep.json"
    setup = {"model": "t", "draft": "d", "lookahead": 3, "budget": 12}
    report.write_results(out, setup, {c.name: {"points": points} for c in configurations})
    assert saguaro_sweep.main(["--model", "t", "--draft", "d", "--plot-only", "--out", str(out)]) == 0
    assert out.with_suffix(".png").stat().st_size > 0
    shown = capsys.readouterr().out
    assert "0.500 [0.404, 0.596]" in shown
    assert all(shown.count(configuration.name + "  ") == 2 for configuration in configurations)
