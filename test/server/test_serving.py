"""Running servers on the float32 test pair: SSD's tokens are those of plain decoding, whatever requests come and go."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import openai
import pytest
import requests
from server.conftest import LOOKAHEAD
from server.running import Answer, Server, prompt, request, wait_for


def output(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


# -- greedy output ---------------------------------------------------------------------------------------------------

GREEDY = [
    request(prompt(seed, num_tokens), max_new_tokens=40)
    for seed, num_tokens in enumerate([1, 2, 3, 5, 17, 40, 63, 64, 65, 128, 257, 400])
]


def test_greedy_alone_equals_plain(async_server, off_server, sync_server):
    plain = output(off_server.ask_all(GREEDY, num_at_once=1))
    assert output(async_server.ask_all(GREEDY, num_at_once=1)) == plain
    assert output(sync_server.ask_all(GREEDY, num_at_once=1)) == plain


def test_requests_that_join_and_leave_equal_plain(async_server, off_server):
    bodies = [request(prompt(100 + i, 3 + 11 * i), max_new_tokens=8 + 29 * i % 64) for i in range(24)]
    plain = output(off_server.ask_all(bodies, num_at_once=1))
    for _ in range(2):
        assert output(async_server.ask_all(bodies, num_at_once=16, stagger_s=0.07)) == plain


def test_long_prompts_that_join_and_leave_equal_plain(async_server, off_server):
    bodies = [request(prompt(200 + i, 150 + 67 * i % 500), max_new_tokens=4 + i % 9) for i in range(24)]
    plain = output(off_server.ask_all(bodies, num_at_once=1))
    for num_at_once in (2, 8):
        assert output(async_server.ask_all(bodies, num_at_once)) == plain


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16])
def test_hits_at_every_batch_size(async_server, batch_size):
    bodies = [request(prompt(300 + i, 20), max_new_tokens=24, ignore_eos=True) for i in range(batch_size)]
    # One HTTP request, so that they start together; the same length, so that they end together.
    answers = async_server.ask_batch(
        {
            "input_ids": [body["input_ids"] for body in bodies],
            "sampling_params": [body["sampling_params"] for body in bodies],
        }
    )
    sources = [source for answer in answers for source in answer.sources]
    assert len(answers) == batch_size and set(sources) <= {"hit", "neural", "none"}
    assert sources.count("hit") > 0


def test_both_loops_of_the_scheduler_are_tested(async_server, sync_server):
    assert (
        async_server.info()["disable_overlap_schedule"] and not sync_server.info()["disable_overlap_schedule"]
    )


def test_sync_serves_without_preparing(sync_server):
    (answer,) = sync_server.ask_all([request(prompt(310, 20))], num_at_once=1)
    assert set(answer.sources) == {"neural"}


def test_a_repeated_prompt_is_served_alike(async_server, sync_server):
    """With the radix cache the target skips the prompt from the second time on; the draft must still know all of it."""
    body = request(prompt(320, 180), max_new_tokens=64, ignore_eos=True)
    answers = [sync_server.ask(body) for _ in range(3)]
    assert answers[1].meta_info["cached_tokens"] > 0
    # Without preparation nothing depends on timing: the same proposals are accepted each time.
    assert len({(tuple(answer.output_ids), tuple(answer.accept_lengths)) for answer in answers}) == 1
    assert max(answers[0].accept_lengths) == LOOKAHEAD + 1

    prepared = [async_server.ask(body) for _ in range(3)]
    assert output(prepared) == output(answers)
    assert all("hit" in answer.sources for answer in prepared)


# -- what an answer says of itself -----------------------------------------------------------------------------------


def runs(answer: Answer) -> list[tuple[int, int]]:
    """First and last output position of each verified run; position 0 comes from the prompt. The last one may be cut."""
    ends = list(accumulate(answer.accept_lengths, initial=1))
    return [(start, end - 1) for start, end in zip(ends, ends[1:], strict=False)]


def test_runs_cover_the_output(async_server):
    bodies = [request(prompt(330 + i, 10 + i), max_new_tokens=1 + 5 * i) for i in range(12)]
    for answer in async_server.ask_all(bodies, num_at_once=4):
        assert len(answer.sources) == len(answer.accept_lengths)
        assert all(1 <= length <= LOOKAHEAD + 1 for length in answer.accept_lengths)
        assert all(
            length == 1
            for length, source in zip(answer.accept_lengths, answer.sources, strict=True)
            if source == "none"
        )
        num_tokens = len(answer.output_ids)
        assert num_tokens == answer.meta_info["completion_tokens"]
        if answer.accept_lengths:
            assert runs(answer)[-1][0] < num_tokens <= runs(answer)[-1][1] + 1
        else:
            assert num_tokens == 1


def test_stop_strings_inside_runs_equal_plain(sync_server, async_server, off_server):
    """A stop string may end on any token of a run that was accepted as a whole. Without preparation the runs do not
    depend on timing."""
    prompts = [prompt(350 + i, 24) for i in range(10)]
    answers = sync_server.ask_all(
        [request(ids, max_new_tokens=64, ignore_eos=True) for ids in prompts], num_at_once=5
    )
    wanted: dict[str, list[dict]] = {"first": [], "middle": [], "last": []}
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = answer.output_ids
        for first, last in runs(answer)[:-1]:
            if last - first < 2:
                continue
            for where, position in (("first", first), ("middle", first + 1), ("last", last)):
                for length in (1, 2):
                    stop = tokens[position - length + 1 : position + 1]
                    is_text = all(32 <= token < 127 for token in stop)
                    if is_text and is_first_at(tokens, stop, position) and len(wanted[where]) < 6:
                        wanted[where].append(request(ids, 64, ignore_eos=True, stop=bytes(stop).decode()))
    assert all(len(bodies) >= 3 for bodies in wanted.values()), "choose other prompts"

    ended_inside = 0
    for bodies in wanted.values():
        plain = off_server.ask_all(bodies, num_at_once=4)
        for server in (sync_server, async_server):
            for ours, theirs in zip(server.ask_all(bodies, num_at_once=4), plain, strict=True):
                assert (ours.text, ours.output_ids) == (theirs.text, theirs.output_ids)
                assert ours.meta_info["finish_reason"] == theirs.meta_info["finish_reason"]
                assert ours.meta_info["finish_reason"]["type"] == "stop"
                check_usage(ours, 24)
                if server is sync_server:
                    ended_inside += len(ours.output_ids) - 1 < runs(ours)[-1][1]
    assert ended_inside >= 6


def is_first_at(tokens: list[int], part: list[int], position: int) -> bool:
    """Whether ``part`` occurs in ``tokens`` for the first time with its end at ``position``."""
    ends = (end for end in range(len(part), len(tokens) + 1) if tokens[end - len(part) : end] == part)
    return next(ends) == position + 1


def test_usage_of_every_finish_reason(async_server, off_server):
    ids = prompt(370, 30)
    full = off_server.ask(request(ids, 48))
    stop_token = full.output_ids[20]
    length = full.output_ids.index(stop_token) + 1
    for server in (async_server, off_server):
        answer = server.ask(request(ids, 21))
        assert answer.meta_info["finish_reason"] == {"type": "length", "length": 21}
        assert answer.output_ids == full.output_ids[:21]
        check_usage(answer, 30)

        answer = server.ask(request(ids, 48, stop_token_ids=[stop_token]))
        assert answer.meta_info["finish_reason"] == {"type": "stop", "matched": stop_token}
        assert answer.output_ids == full.output_ids[:length]
        check_usage(answer, 30)

        *_, answer = aborted(server, ids)
        assert answer.meta_info["finish_reason"]["type"] == "abort"
        assert 0 < len(answer.output_ids) < 1500
        assert full.output_ids[: len(answer.output_ids)] == answer.output_ids[:48]
        check_usage(answer, 30)


def check_usage(answer: Answer, num_prompt_tokens: int) -> None:
    assert answer.meta_info["completion_tokens"] == len(answer.output_ids)
    assert answer.meta_info["prompt_tokens"] == num_prompt_tokens


def aborted(server: Server, ids: list[int]) -> list[Answer]:
    """The events of a stream that ``/abort_request`` ends in the middle."""
    answers = []
    body = request(ids, 1500, fields={"rid": "to-be-aborted"}, ignore_eos=True)
    with server.streaming("/generate", body) as events:
        for event in events:
            answers.append(Answer(event["text"], event["output_ids"], event["meta_info"]))
            if len(answers) == 3:
                server.post("/abort_request", {"rid": "to-be-aborted"})
    return answers


def test_a_prompt_beyond_the_context_is_refused(async_server, off_server):
    for ids, num_new in (([65] * 2049, 4), ([65] * 2000, 60)):
        answers = [server.post("/generate", request(ids, num_new)) for server in (async_server, off_server)]
        assert [answer.status_code for answer in answers] == [400, 400]
        assert answers[0].json() == answers[1].json()
        assert "context length" in answers[0].text


def test_generation_up_to_the_end_of_the_context_equals_plain(async_server, off_server):
    """Near its end the draft has no room for branches; the request goes on without them."""
    body = request(prompt(380, 2000), max_new_tokens=47, ignore_eos=True)
    answer, plain = async_server.ask(body), off_server.ask(body)
    assert answer.output_ids == plain.output_ids
    assert answer.meta_info["finish_reason"] == plain.meta_info["finish_reason"]
    assert len(answer.output_ids) > 40


# -- OpenAI endpoints ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(async_server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{async_server.url}/v1", api_key="none", timeout=120)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11}])
def test_completions_equal_generate(async_server, client, sampling):
    text = "Once upon a time"
    params = {"temperature": sampling["temperature"], "sampling_seed": sampling.get("seed")}
    expected = async_server.ask(request(list(text.encode()), 40, **params))

    whole = client.completions.create(model="m", prompt=text, max_tokens=40, **sampling)
    assert whole.choices[0].text == expected.text
    assert whole.usage.completion_tokens == len(expected.output_ids)
    assert whole.usage.prompt_tokens == len(text)

    events = list(
        client.completions.create(
            model="m", prompt=text, max_tokens=40, stream=True, stream_options={"include_usage": True}, **sampling
        )
    )  # fmt: skip
    assert "".join(event.choices[0].text for event in events if event.choices) == expected.text
    assert events[-1].usage == whole.usage
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == whole.choices[0].finish_reason


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11}])
def test_chat_equals_generate(async_server, client, sampling):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    rendered = "<|bos|><|system|>Be brief.<|user|>Who are you?<|assistant|>"
    params = {
        "temperature": sampling["temperature"],
        "sampling_seed": sampling.get("seed"),
        "max_new_tokens": 40,
    }
    expected = async_server.ask({"text": rendered, "sampling_params": params})

    whole = client.chat.completions.create(model="m", messages=messages, max_tokens=40, **sampling)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage.prompt_tokens == expected.meta_info["prompt_tokens"]
    assert whole.usage.completion_tokens == len(expected.output_ids)

    events = client.chat.completions.create(
        model="m", messages=messages, max_tokens=40, stream=True, **sampling
    )
    parts = [event.choices[0].delta.content for event in events if event.choices]
    assert "".join(filter(None, parts)) == expected.text


# -- aborts ----------------------------------------------------------------------------------------------------------


def test_a_closed_stream_frees_its_slots(async_server):
    async_server.wait_until_free()
    with async_server.streaming("/generate", request(prompt(400, 300), 1500, ignore_eos=True)) as events:
        for _ in range(4):
            next(events)
        state = async_server.ssd_state()
        assert state["open_sessions"] == 1
        assert async_server.num_used_tokens() >= 300
    async_server.wait_until_free()
    assert async_server.ask(request(prompt(401, 8), 8)).meta_info["completion_tokens"] <= 8


def test_aborts_leave_the_others_alone(async_server):
    """Eight requests share 128 tokens of prompt; two of them leave at once, fifteen times over."""
    shared = prompt(410, 128)
    bodies = [request([*shared, *prompt(411 + i, 4)], max_new_tokens=10, ignore_eos=True) for i in range(8)]
    alone = output([async_server.ask(body) for body in bodies])

    def leave_at_once(body: dict) -> None:
        body = {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 1500}}
        with async_server.streaming("/generate", body):
            time.sleep(0.015)

    for repeat in range(15):
        leaving = {repeat % 8, (3 * repeat + 1) % 8}
        with ThreadPoolExecutor(8) as threads:
            futures = [
                threads.submit(leave_at_once if i in leaving else async_server.ask, body)
                for i, body in enumerate(bodies)
            ]
            answers = [future.result() for future in futures]
        for i, answer in enumerate(answers):
            if i not in leaving:
                assert answer.output_ids == alone[i], f"request {i} of repeat {repeat}"
    async_server.wait_until_free()


# -- figures ---------------------------------------------------------------------------------------------------------


def test_figures_of_a_request_add_up(async_server):
    async_server.wait_until_free()
    before = async_server.ssd_state()
    answer = async_server.ask(request(prompt(420, 50), max_new_tokens=40, ignore_eos=True))
    after = async_server.ssd_state()
    grown = {
        name: after[name] - before[name] for name in ("rounds", "hits", "misses", "proposed", "accepted")
    }
    num_rounds = len(answer.sources)
    proposed = grown.pop("proposed")
    assert grown == {
        "rounds": num_rounds,
        "hits": answer.sources.count("hit"),
        "misses": num_rounds - answer.sources.count("hit"),
        "accepted": sum(answer.accept_lengths) - num_rounds,
    }
    assert grown["accepted"] <= proposed <= LOOKAHEAD * sum(source != "none" for source in answer.sources)
    assert after["hit_rate"] == after["hits"] / (after["hits"] + after["misses"])
    assert after["accept_length"] == pytest.approx(1 + after["accepted"] / (after["hits"] + after["misses"]))
    assert all(after[name] > 0 for name in ("draft_wait_ms", "verify_ms", "draft_round_ms"))
    assert after["draft_alive"] is True
    assert after["mode"] == "async"


def test_metrics_are_the_figures(async_server):
    async_server.ask(request(prompt(421, 20), max_new_tokens=20))
    async_server.wait_until_free()
    state = async_server.ssd_state()
    text = requests.get(f"{async_server.url}/metrics", timeout=60).text
    series = dict(re.findall(r"^(sglang_ssd_\w+)\{[^}]*\} (\S+)$", text, flags=re.MULTILINE))
    for name, figure in {
        "hits_total": state["hits"],
        "misses_total": state["misses"],
        "proposed_tokens_total": state["proposed"],
        "accepted_tokens_total": state["accepted"],
        "verify_ms_count": state["rounds"],
        "draft_wait_ms_count": state["rounds"],
        "verify_ms_sum": state["verify_ms"] * state["rounds"],
        "draft_wait_ms_sum": state["draft_wait_ms"] * state["rounds"],
    }.items():
        assert float(series[f"sglang_ssd_{name}"]) == pytest.approx(figure), name


def test_off_has_no_draft(off_server):
    state = off_server.ssd_state()
    assert (set(state), state["mode"]) == ({"mode", "bit_equality"}, "off")
    assert state["bit_equality"]["holds"], state["bit_equality"]["reason"]
    with pytest.raises(ValueError):
        off_server.draft_process()


def test_everything_comes_back(async_server, sync_server):
    """After all that the tests above did to them."""
    for server in (async_server, sync_server):
        server.wait_until_free()
        assert server.ssd_state()["client"]["malformed"] == 0


def test_a_killed_draft_changes_no_output(fleet, off_server, sync_server):
    bodies = [
        request(prompt(430 + i, 20), max_new_tokens=120, ignore_eos=True, temperature=0.8 * (i % 2), sampling_seed=i)
        for i in range(6)
    ]  # fmt: skip
    plain = output(off_server.ask_all(bodies, num_at_once=6))
    before = sync_server.ssd_state()["rounds"]
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(sync_server.ask_all, bodies, 6)
        assert wait_for(lambda: sync_server.ssd_state()["rounds"] >= before + 5, timeout_s=60) is True
        sync_server.draft_process().kill()
        assert output(answers.result()) == plain
    sources = [source for answer in answers.result() for source in answer.sources]
    assert sources.count("neural") > 0 and sources.count("none") > 0

    state = sync_server.ssd_state()
    assert state["draft_alive"] is False and state["open_sessions"] == 0
    assert output(sync_server.ask_all(bodies[:2], num_at_once=2)) == plain[:2]

    # Draws of a flat law over a few tokens: pairs come again all the time, and tell nothing of what follows.
    flat = {"temperature": 5.0, "logit_bias": {str(token): 100 for token in range(40, 80)}}
    bodies = [
        request(prompt(440 + i, 20), max_new_tokens=300, ignore_eos=True, sampling_seed=i, **flat)
        for i in range(4)
    ]  # fmt: skip
    assert output(sync_server.ask_all(bodies, num_at_once=4)) == output(
        off_server.ask_all(bodies, num_at_once=4)
    )
    assert sync_server.ssd_state()["ngrams_held_back"] > 20, "guesses that are no use are not verified"
    fleet.stop("sync")
