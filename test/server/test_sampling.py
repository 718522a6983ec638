"""Sampled and constrained requests: the target's exact distribution after everything that a request asked for. A seed
fixes the output, so that exactness shows as token equality with plain decoding at any temperature."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate, product

import jsonschema
import pytest
import torch
from scipy.stats import chisquare
from server import processors
from server.running import Answer, Server, prompt, request
from transformers import AutoModelForCausalLM

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
OPTIONS = [
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.1},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -1.5},
    {"presence_penalty": 1.2},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.1, "top_p": 0.9},
    # A likely stop token, which min_new_tokens holds off for a while.
    {"min_new_tokens": 12, "stop_token_ids": [257], "logit_bias": {"257": 6.0}},
    {"logit_bias": {"13": -100.0, "90": 3.0}},
    {"top_k": 20, "logit_bias": {"10": 4.0}},
    {"top_p": 0.9, "min_new_tokens": 10, "stop_token_ids": [10, 13]},
    {"min_p": 0.1, "repetition_penalty": 1.2},
]
SEEDED = [
    request(
        prompt(1000 + i, 4 + 7 * i % 60),
        max_new_tokens=24,
        temperature=temperature,
        sampling_seed=2**40 * i - 7,
        **options,
    )
    for i, (options, temperature) in enumerate(product(OPTIONS, TEMPERATURES))
]


def output(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def as_batch(bodies: list[dict]) -> dict:
    """One HTTP request of several prompts, each with its own parameters."""
    return {
        "input_ids": [body["input_ids"] for body in bodies],
        "sampling_params": [body["sampling_params"] for body in bodies],
    }


@pytest.fixture(scope="module")
def plain_seeded(fleet) -> list[list[int]]:
    return output(fleet.get("off").ask_all(SEEDED, num_at_once=1))


# -- seeds -----------------------------------------------------------------------------------------------------------


def test_seeded_alone_equals_plain(plain_seeded, async_server):
    assert output(async_server.ask_all(SEEDED, num_at_once=1)) == plain_seeded


def test_seeded_together_equals_plain(plain_seeded, async_server, off_server):
    answers = async_server.ask_all(SEEDED, num_at_once=16)
    assert output(answers) == plain_seeded
    assert output(off_server.ask_all(SEEDED, num_at_once=16)) == plain_seeded
    assert num_accepted(answers)["hit"] > 0


def test_seeded_with_forced_misses_equals_plain(plain_seeded, sync_server):
    answers = sync_server.ask_all(SEEDED, num_at_once=16)
    assert output(answers) == plain_seeded
    accepted = num_accepted(answers)
    assert list(accepted) == ["neural"] and accepted["neural"] > 300


def num_accepted(answers: list[Answer]) -> Counter[str]:
    """Draft tokens that became output, by the source of their proposal: equality says something of these."""
    accepted: Counter[str] = Counter()
    for answer in answers:
        for source, length in zip(answer.sources, answer.accept_lengths, strict=True):
            accepted[source] += length - 1
    return accepted


def test_options_are_heard(plain_seeded, off_server):
    """Each option changes what the same seed gives, so that equality with plain says something about it."""
    names = ("temperature", "sampling_seed", "max_new_tokens")
    bare = [
        {**body, "sampling_params": {name: body["sampling_params"][name] for name in names}}
        for body in SEEDED
    ]
    without = output(off_server.ask_all(bare, num_at_once=16))
    size = len(TEMPERATURES)
    for i, options in enumerate(OPTIONS):
        part = slice(i * size, (i + 1) * size)
        assert (without[part] == plain_seeded[part]) == (not options), options


def test_n_samples_are_different_and_repeatable(async_server, off_server):
    body = request(prompt(1100, 10), max_new_tokens=16, temperature=1.0, sampling_seed=5, n=3)
    samples = output(async_server.ask_batch(body))
    assert len({tuple(sample) for sample in samples}) == 3
    assert output(async_server.ask_batch(body)) == samples
    assert output(off_server.ask_batch(body)) == samples
    single = request(prompt(1100, 10), max_new_tokens=16, temperature=1.0, sampling_seed=5)
    assert async_server.ask(single).output_ids == samples[0]


def test_prompts_of_a_batch_have_their_own_noise(async_server):
    body = request(prompt(1110, 10), max_new_tokens=16, temperature=1.0)
    seeds = [{**body["sampling_params"], "sampling_seed": seed} for seed in (1, 2, 1)]
    one, two, again = output(
        async_server.ask_batch({"input_ids": [body["input_ids"]] * 3, "sampling_params": seeds})
    )
    assert one == again != two


def test_requests_without_a_seed_differ(async_server):
    body = request(prompt(1120, 10), max_new_tokens=16, temperature=1.0)
    alone = [async_server.ask(body).output_ids for _ in range(2)]
    together = output(async_server.ask_batch({**body, "input_ids": [body["input_ids"]] * 2}))
    samples = output(async_server.ask_batch(request(prompt(1120, 10), 16, temperature=1.0, n=2)))
    assert len({tuple(tokens) for tokens in (*alone, *together, *samples)}) == 6


def test_a_seed_gives_the_same_alone_and_in_a_batch_of_eight(async_server):
    bodies = [
        request(prompt(1130 + i, 6 + i), max_new_tokens=24, temperature=1.0, sampling_seed=99)
        for i in range(8)
    ]
    together = output(async_server.ask_batch(as_batch(bodies)))
    assert together == [async_server.ask(body).output_ids for body in bodies]


# -- the law ---------------------------------------------------------------------------------------------------------

TOP_K, DEPTH, TEMPERATURE = 2, 5, 1.5
LAW_PROMPT = prompt(1200, 12)


@pytest.fixture(scope="module")
def target(pair):
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()


@torch.no_grad()
def exact_logits(target, sequences: list[list[int]]) -> torch.Tensor:
    """float64 [N, L, V] for N sequences of L tokens."""
    return target(torch.tensor(sequences)).logits.double()


def exact_joint(target) -> dict[tuple[int, ...], float]:
    """The joint law of the first ``DEPTH`` tokens after the prompt."""
    joint = {(): 1.0}
    for _ in range(DEPTH):
        logits = exact_logits(target, [[*LAW_PROMPT, *prefix] for prefix in joint])[:, -1]
        top = logits.topk(TOP_K)
        laws = (top.values / TEMPERATURE).softmax(-1)
        joint = {
            (*prefix, int(token)): probability * float(p)
            for (prefix, probability), tokens, law in zip(joint.items(), top.indices, laws, strict=True)
            for token, p in zip(tokens, law, strict=True)
        }
    return joint


def draws(server: Server, num_draws: int) -> list[tuple[int, ...]]:
    """The first tokens of requests with the seeds 0, 1, ..., many at a time."""
    drawn = []
    for start in range(0, num_draws, 200):
        bodies = [
            request(LAW_PROMPT, DEPTH, temperature=TEMPERATURE, top_k=TOP_K, sampling_seed=seed)
            for seed in range(start, min(start + 200, num_draws))
        ]
        drawn += [tuple(answer.output_ids) for answer in server.ask_batch(as_batch(bodies))]
    return drawn


def p_value(samples: list[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """Chi-square of samples against their law. Every outcome is common enough for a cell of its own."""
    counts = Counter(samples)
    assert set(counts) <= set(joint)
    expected = [probability * len(samples) for probability in joint.values()]
    assert min(expected) >= 5
    return chisquare([counts[outcome] for outcome in joint], expected).pvalue


def test_joint_law_of_the_first_tokens(target, off_server, async_server, sync_server):
    """Many seeds against the exact law. With and without misses: a seed gives the same tokens as plain decoding, so
    that the law of all draws is the law of each server's."""
    joint = exact_joint(target)
    plain = draws(off_server, 3000)
    assert p_value(plain, joint) > 0.001
    for server, num_draws in ((async_server, 1000), (sync_server, 1000)):
        drawn = draws(server, num_draws)
        assert drawn == plain[:num_draws]
        assert p_value(drawn, joint) > 0.001


def test_law_inside_runs(target, async_server):
    """Each token of long outputs against the exact law given all before it, separately for tokens of prepared and of
    missed proposals: its randomised distribution function must be uniform, and independent of the one before."""
    bodies = [
        request(prompt(1210 + i, 16), max_new_tokens=48, temperature=1.0, sampling_seed=i, ignore_eos=True)
        for i in range(64)
    ]
    answers = async_server.ask_all(bodies, num_at_once=8)
    jitter = torch.Generator().manual_seed(0)
    levels: dict[str, list[float]] = {"hit": []}
    pairs: list[tuple[float, float]] = []
    for body, answer in zip(bodies, answers, strict=True):
        tokens = answer.output_ids
        logits = exact_logits(target, [[*body["input_ids"], *tokens]])[0, 15:-1]
        law = logits.softmax(-1)
        drawn = torch.tensor(tokens)[:, None]
        below = (law.cumsum(-1) - law).gather(1, drawn)
        level = (
            (below + law.gather(1, drawn) * torch.rand(48, 1, generator=jitter).double()).view(-1).tolist()
        )
        pairs += zip(level, level[1:], strict=False)
        position = 1
        for source, length in zip(answer.sources, answer.accept_lengths, strict=True):
            levels.setdefault(source, []).extend(level[position : position + length])
            position += length
    assert len(levels["hit"]) > 200
    for source in (source for source in levels if len(levels[source]) > 200):
        counts = Counter(int(20 * level) for level in levels[source])
        assert chisquare([counts[i] for i in range(20)]).pvalue > 0.001, source
    counts = Counter((int(5 * one), int(5 * two)) for one, two in pairs)
    assert chisquare([counts[cell] for cell in product(range(5), repeat=2)]).pvalue > 0.001


# -- penalties, bias, processors -------------------------------------------------------------------------------------


def assert_equal_plain(bodies: list[dict], async_server: Server, off_server: Server) -> list[list[int]]:
    plain = output(off_server.ask_all(bodies, num_at_once=8))
    assert output(async_server.ask_all(bodies, num_at_once=8)) == plain
    return plain


def greedy_and_sampled(input_ids: list[int], max_new_tokens: int = 32, **more) -> list[dict]:
    return [
        request(input_ids, max_new_tokens, **more),
        request(input_ids, max_new_tokens, **more, temperature=0.8, sampling_seed=3),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.7},
    ],
    ids=str,
)
def test_penalties_equal_plain(async_server, off_server, options):
    prompts = [prompt(1300, 12), prompt(1301, 40), [90] * 60]
    bodies = [body for ids in prompts for body in greedy_and_sampled(ids, **options)]
    penalised = assert_equal_plain(bodies, async_server, off_server)
    free = output(off_server.ask_all([body for ids in prompts for body in greedy_and_sampled(ids)], 8))
    # What repeats itself anyway may stay as it is.
    assert sum(with_it != without for with_it, without in zip(penalised, free, strict=True)) >= 4


def test_a_penalty_ends_a_loop_as_plain_does(async_server, off_server):
    """A negative frequency penalty makes a loop out of any token; the penalties of the same request end one."""
    ids = prompt(1310, 20)
    (looping,) = assert_equal_plain(
        [request(ids, 60, frequency_penalty=-2.0, ignore_eos=True)], async_server, off_server
    )
    assert len(set(looping[-20:])) == 1
    (ended,) = assert_equal_plain(
        [request([*ids, *looping], 60, repetition_penalty=2.0, ignore_eos=True)], async_server, off_server
    )
    assert len(set(ended[-20:])) > 10


def test_bias_against_the_argmax_equals_plain(async_server, off_server):
    ids = prompt(1320, 15)
    free = output(off_server.ask_all(greedy_and_sampled(ids), 1))
    banned = sorted(set(free[0]))[:20]
    bias = {str(token): -100.0 for token in banned}
    for tokens in assert_equal_plain(greedy_and_sampled(ids, logit_bias=bias), async_server, off_server):
        assert not set(tokens) & set(banned)


def test_a_processor_that_bans_tokens_equals_plain(async_server, off_server):
    ids = prompt(1330, 15)
    free = output(off_server.ask_all(greedy_and_sampled(ids), 1))
    banned = sorted(set(free[0]) | set(free[1]))[:20]
    fields = {"custom_logit_processor": processors.serialized(processors.Ban)}
    bodies = greedy_and_sampled(ids, fields=fields, custom_params={"banned": banned})
    for tokens in assert_equal_plain(bodies, async_server, off_server):
        assert not set(tokens) & set(banned)


def test_nan_is_never_drawn_and_counted(async_server):
    ids = prompt(1335, 15)
    free = output(async_server.ask_all(greedy_and_sampled(ids), 1))
    params = {"banned": sorted(set(free[0]) | set(free[1]))[:20]}
    before = async_server.ssd_state()["non_finite_logits"]
    banned, spoilt = (
        output(
            async_server.ask_all(
                greedy_and_sampled(
                    ids, fields={"custom_logit_processor": processors.serialized(kind)}, custom_params=params
                ),
                1,
            )
        )
        for kind in (processors.Ban, processors.Spoil)
    )
    assert spoilt == banned and async_server.ssd_state()["non_finite_logits"] > before
    assert "the target's logits hold NaN" in async_server.log()


@pytest.mark.parametrize("serialized", ["no json", '{"callable": "00ff"}', '{"other": 1}'])
def test_a_processor_that_cannot_be_loaded_is_refused(async_server, serialized):
    fields = {"custom_logit_processor": serialized}
    response = async_server.post("/generate", request(prompt(1336, 5), 4, fields=fields))
    assert response.status_code == 400
    assert "custom_logit_processor: cannot be loaded" in response.json()["error"]["message"]
    assert async_server.ask(request(prompt(1336, 5), 4)).output_ids


def test_a_processor_that_reads_the_output_equals_plain(async_server, off_server):
    fields = {"custom_logit_processor": processors.serialized(processors.Favour)}
    prompts = [prompt(1340 + i, 15 + i) for i in range(4)]
    bodies = [
        body for ids in prompts for body in greedy_and_sampled(ids, 48, fields=fields, custom_params={})
    ]
    favoured = assert_equal_plain(bodies, async_server, off_server)
    free = output(off_server.ask_all([b for ids in prompts for b in greedy_and_sampled(ids, 48)], 8))
    assert all(with_it != without for with_it, without in zip(favoured, free, strict=True))


# -- grammars --------------------------------------------------------------------------------------------------------

SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z ]{1,6}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    {"enum": ["north", "south", "east", "west", 7, None]},
    {
        "type": "object",
        "properties": {"point": {"type": "object", "properties": {"x": {"enum": [1, 2, 3]}, "y": {"type": "boolean"}},
                                 "required": ["x", "y"], "additionalProperties": False}},
        "required": ["point"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -50, "maximum": 50}, "minItems": 1, "maxItems": 4},
]  # fmt: skip
PATTERNS = ["[a-f]{3,9}-(x|yy|zzz)[0-9]{2}", "(yes|no|maybe)!{1,3}", "[A-Z][a-z]{2,5}( [A-Z][a-z]{2,5}){1,2}",
            r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}", "(ab|a|b){4,8}c"]  # fmt: skip


def constrained(num: int, **options_of_kind) -> list[dict]:
    """``num`` requests for each value of a constraint, every second one greedy."""
    ((kind, values),) = options_of_kind.items()
    return [
        request(
            prompt(1400 + i, 5 + i),
            max_new_tokens=160,
            temperature=[0.0, 1.0][i % 2],
            sampling_seed=i,
            **{kind: value},
        )
        for value in values
        for i in range(num)
    ]


def answers_equal_plain(bodies: list[dict], server: Server, off_server: Server) -> list[Answer]:
    answers = server.ask_all(bodies, num_at_once=16)
    assert output(answers) == output(off_server.ask_all(bodies, num_at_once=16))
    assert {answer.meta_info["finish_reason"]["type"] for answer in answers} == {"stop"}
    return answers


def test_json_schemas_hold_and_equal_plain(async_server, off_server):
    bodies = constrained(6, json_schema=[json.dumps(schema) for schema in SCHEMAS])
    answers = answers_equal_plain(bodies, async_server, off_server)
    for body, answer in zip(bodies, answers, strict=True):
        jsonschema.validate(json.loads(answer.text), json.loads(body["sampling_params"]["json_schema"]))
    assert len({answer.text for answer in answers}) > 15


def test_patterns_hold_and_equal_plain(async_server, off_server):
    bodies = constrained(6, regex=PATTERNS)
    answers = answers_equal_plain(bodies, async_server, off_server)
    for body, answer in zip(bodies, answers, strict=True):
        assert re.fullmatch(body["sampling_params"]["regex"], answer.text)
    assert len({answer.text for answer in answers}) > 15


def test_constrained_and_free_requests_in_one_batch_equal_plain(async_server, off_server):
    free = [request(prompt(1450 + i, 9), 24, temperature=0.9 * (i % 2), sampling_seed=i) for i in range(8)]
    bodies = [body for two in zip(constrained(4, regex=PATTERNS[:2]), free, strict=True) for body in two]
    assert_equal_plain(bodies, async_server, off_server)


def test_a_grammar_holds_from_the_end_of_the_reasoning_on(pair, sync_server, off_server):
    """The reasoning ends inside a run: what is proposed after its end must obey already. The prompts are those after
    which the draft itself proposes the last token of the end that the processor spells."""
    end = list(b"</think>")
    draft = AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32).eval()
    prompts = [prompt(1600 + i, 6) for i in range(4000)]
    proposed = exact_logits(draft, [[*ids, *end[:-1]] for ids in prompts])[:, -1].argmax(-1).tolist()
    chosen = [ids for ids, token in zip(prompts, proposed, strict=True) if token == end[-1]][:8]
    fields = {"require_reasoning": True, "custom_logit_processor": processors.serialized(processors.Spell)}
    bodies = [
        request(ids, 40, fields=fields, custom_params={"spelling": end}, regex=PATTERNS[0], **sampling)
        for ids in chosen
        for sampling in ({}, {"temperature": 1.0, "sampling_seed": 4})
    ]
    answers = answers_equal_plain(bodies, sync_server, off_server)
    ends_inside = 0
    for answer in answers:
        spelled, answered = answer.output_ids[: len(end)], answer.text.removeprefix("</think>")
        assert spelled == end and re.fullmatch(PATTERNS[0], answered)
        run_ends = accumulate(answer.accept_lengths, initial=1)
        ends_inside += len(end) not in run_ends
    assert ends_inside > 0


# -- logprobs --------------------------------------------------------------------------------------------------------

LOGPROBS = {
    "return_logprob": True,
    "top_logprobs_num": 4,
    "logprob_start_len": 0,
    "token_ids_logprob": [65, 90],
}
LOGPROB_BODIES = [
    request(prompt(1500 + i, 10 + 3 * i), 20, fields=LOGPROBS, **sampling)
    for i, sampling in enumerate(
        [
            {},
            {"temperature": 0.7, "sampling_seed": 1},
            {"temperature": 1.3, "sampling_seed": 2, "top_p": 0.9, "top_k": 3},
            {"temperature": 1.0, "sampling_seed": 3, "frequency_penalty": 1.0, "logit_bias": {"65": 2.0}},
            {"frequency_penalty": 2.0},
            {"regex": PATTERNS[0]},
        ]
    )
]


def test_logprobs_equal_plain(async_server, off_server):
    answers = async_server.ask_all(LOGPROB_BODIES, num_at_once=6)
    for ours, theirs in zip(answers, off_server.ask_all(LOGPROB_BODIES, num_at_once=1), strict=True):
        assert ours.output_ids == theirs.output_ids
        assert_same_logprobs(ours, theirs)


def test_streamed_logprobs_equal_whole(async_server):
    for body in LOGPROB_BODIES[:3]:
        whole = async_server.ask(body)
        with async_server.streaming("/generate", body) as events:
            for event in events:
                answer = Answer(event["text"], event["output_ids"], event["meta_info"])
                assert len(answer.meta_info["output_token_logprobs"]) == len(answer.output_ids)
        assert answer.output_ids == whole.output_ids
        assert_same_logprobs(answer, whole)


def assert_same_logprobs(ours: Answer, theirs: Answer) -> None:
    num_tokens = len(ours.output_ids)
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        assert len(ours.meta_info[name]) == num_tokens, name
        assert len(theirs.meta_info[name]) == num_tokens, name
    assert [token for _, token, _ in ours.meta_info["output_token_logprobs"]] == ours.output_ids
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert_close(ours.meta_info[name], theirs.meta_info[name], name)
    for name in ("output_top_logprobs", "output_token_ids_logprobs", "input_top_logprobs"):
        for one, two in zip(ours.meta_info[name], theirs.meta_info[name], strict=True):
            assert_close(one or [], two or [], name)


def assert_close(ours: list, theirs: list, name: str) -> None:
    """Entries are (logprob or None, token id, text)."""
    assert [entry[1] for entry in ours] == [entry[1] for entry in theirs], name
    for (one, *_), (two, *_) in zip(ours, theirs, strict=True):
        assert one == two or one == pytest.approx(two, abs=1e-3), name


# -- what is not served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option, body",
    [
        ("beam_width", request(LAW_PROMPT, 4, beam_width=2)),
        ("return_sampling_mask", request(LAW_PROMPT, 4, fields={"return_sampling_mask": True})),
        ("return.hidden.states", request(LAW_PROMPT, 4, fields={"return_hidden_states": True})),
        ("watermark", request(LAW_PROMPT, 4, fields={"watermark": {"key": "k"}})),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(async_server, option, body):
    """By us, or by SGLang before us."""
    response = async_server.post("/generate", body)
    assert response.status_code == 400
    assert re.search(option, response.json()["error"]["message"])
    assert async_server.ssd_state()["open_sessions"] == 0
