"""What operators do to a running server: pauses, flushes, new weights, aborts at any moment. The tokens stay those of plain
decoding, and nothing is left on either side (an idle server that holds something ends, and fails what follows)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import pytest
import requests
import torch
from server.running import Answer, Server, prompt, request, wait_for
from transformers import AutoModelForCausalLM

from sglang_ssd.test_pair import write_pair


def output(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def long_requests(seed: int, num: int, max_new_tokens: int = 200) -> list[dict]:
    """Greedy and seeded, each under a name."""
    return [
        request(
            prompt(seed + i, 20 + 9 * i),
            max_new_tokens,
            {"rid": f"long-{seed + i}"},
            temperature=0.8 * (i % 2),
            sampling_seed=i,
            ignore_eos=True,
        )
        for i in range(num)
    ]


def wait_for_rounds(server: Server, num_rounds: int) -> None:
    before = server.ssd_state()["rounds"]
    assert wait_for(lambda: server.ssd_state()["rounds"] >= before + num_rounds, timeout_s=120) is True


# -- pauses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("name", ["async", "paged"])
def test_paused_requests_go_on_where_they_were(fleet, off_server, name, mode):
    """Page size 1 and 16. With ``retract`` all of them are taken in again, under another generation."""
    server = fleet.get(name)
    bodies = long_requests(2000, num=3)
    plain = output(off_server.ask_all(bodies, num_at_once=3))
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(server.ask_all, bodies, 3)
        wait_for_rounds(server, 3)
        assert server.post("/pause_generation", {"mode": mode}).ok
        at_pause = server.ssd_state()["rounds"]
        time.sleep(0.5)
        assert server.ssd_state()["rounds"] == at_pause
        assert server.post("/continue_generation", {}).ok
        assert output(answers.result()) == plain
    server.wait_until_free()
    assert server.ssd_state()["idle_leaks"] == 0


def test_requests_that_a_pause_aborts_leave_nothing(async_server, off_server):
    bodies = long_requests(2020, num=3, max_new_tokens=400)
    plain = output(off_server.ask_all(bodies, num_at_once=3))
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(async_server.ask_all, bodies, 3)
        wait_for_rounds(async_server, 3)
        assert async_server.post("/pause_generation", {"mode": "abort"}).ok
        assert async_server.post("/continue_generation", {}).ok
        for ours, theirs in zip(answers.result(), plain, strict=True):
            assert ours.meta_info["finish_reason"]["type"] == "abort"
            assert ours.output_ids == theirs[: len(ours.output_ids)]
    async_server.wait_until_free()


def test_requests_aborted_while_they_wait_to_return_leave_nothing(async_server, off_server):
    """Retracted ones are in no batch: the scheduler drops them from its queue. One that stays goes on."""
    bodies = long_requests(2040, num=3)
    plain = output(off_server.ask_all(bodies, num_at_once=3))
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(async_server.post, "/generate", body) for body in bodies]
        wait_for_rounds(async_server, 3)
        assert async_server.post("/pause_generation", {"mode": "retract"}).ok
        for body in bodies[1:]:
            async_server.post("/abort_request", {"rid": body["rid"]})
        wait(answers[1:], timeout=60)
        # Before it is idle: no check may have to clean up.
        assert async_server.ssd_state()["open_sessions"] <= 1
        assert async_server.post("/continue_generation", {}).ok
        assert answers[0].result().json()["output_ids"] == plain[0]
    async_server.wait_until_free()
    assert async_server.ssd_state()["idle_leaks"] == 0


# -- aborts of prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["async", "paged"])
def test_clients_that_leave_while_their_prompt_is_read_leave_nothing(fleet, off_server, name):
    """Prompts of several chunks; a bystander goes on."""
    server = fleet.get(name)
    num_tokens = {"async": 1500, "paged": 400}[name]
    (bystander,) = long_requests(2060, num=1, max_new_tokens=150)
    plain = off_server.ask(bystander).output_ids

    def leave(i: int) -> None:
        body = request(prompt(2070 + i, num_tokens), 20)
        with suppress(requests.Timeout):
            requests.post(f"{server.url}/generate", json=body, timeout=(30, 0.02 + 0.03 * i))

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.ask, bystander)
        for i in range(8):
            leave(i)
        assert answer.result().output_ids == plain
    server.wait_until_free(timeout_s=60)
    assert server.ssd_state()["idle_leaks"] == 0


# -- flushes and limits ----------------------------------------------------------------------------------------------


def test_flush_cache_empties_an_idle_server_and_leaves_a_busy_one_alone(async_server, off_server):
    bodies = long_requests(2080, num=2)
    plain = output(off_server.ask_all(bodies, num_at_once=2))
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(async_server.ask_all, bodies, 2)
        wait_for_rounds(async_server, 3)
        assert async_server.post("/flush_cache", {}).status_code == 400
        assert output(answers.result()) == plain
    async_server.wait_until_free()
    assert async_server.ask(bodies[1]).meta_info["cached_tokens"] > 0
    async_server.wait_until_free()
    assert async_server.post("/flush_cache", {}).ok
    again = [async_server.ask(body) for body in bodies]
    assert [answer.meta_info["cached_tokens"] for answer in again] == [0, 0]
    assert output(again) == plain
    assert all("hit" in answer.sources for answer in again)


def test_a_row_at_the_end_of_its_context_does_not_stop_the_others(async_server, off_server):
    """Its last rounds have no room for a proposal, nor for a branch on the draft's side."""
    bodies = [
        request(prompt(2100, 1960), max_new_tokens=87, ignore_eos=True),
        *long_requests(2101, num=3, max_new_tokens=120),
    ]
    plain = off_server.ask_all(bodies, num_at_once=1)
    answers = async_server.ask_all(bodies, num_at_once=4)
    assert output(answers) == output(plain)
    assert answers[0].meta_info["finish_reason"] == plain[0].meta_info["finish_reason"]
    assert all("hit" in answer.sources for answer in answers)
    async_server.wait_until_free()


# -- new weights -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy(model_path, input_ids: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    path = list(input_ids)
    for _ in range(num_tokens):
        path.append(int(model(torch.tensor([path])).logits[0, -1].argmax()))
    return path[len(input_ids) :]


def update_weights(server: Server, model_path) -> requests.Response:
    return server.post("/update_weights_from_disk", {"model_path": str(model_path)})


def num_estimated_rounds(server: Server) -> float:
    """Rounds that the draft's estimates rest on."""
    return server.ssd_state()["estimates"].get("num_rounds", 0)


def test_new_weights_are_served_exactly_whatever_the_draft_knows(pair, sync_server, off_server, tmp_path):
    """The draft still proposes for the old weights, and learns anew how well."""
    body = request(prompt(2120, 30), 24, ignore_eos=True)
    plain = off_server.ask(body).output_ids
    assert sync_server.ask(body).output_ids == plain
    other = write_pair(tmp_path, seed=7).target
    sync_server.wait_until_free()
    assert num_estimated_rounds(sync_server) > 0
    assert update_weights(sync_server, other).ok
    try:
        assert wait_for(lambda: num_estimated_rounds(sync_server) == 0, timeout_s=30) is True
        answer = sync_server.ask(body)
        assert answer.output_ids == greedy(other, body["input_ids"], 24) != plain
        assert "neural" in answer.sources
        sync_server.wait_until_free()
    finally:
        assert update_weights(sync_server, pair.target).ok
    assert sync_server.ask(body).output_ids == plain


def test_packed_weights_are_not_updated_by_halves(pair, async_server):
    body = request(prompt(2130, 30), 24)
    before = async_server.ask(body).output_ids
    refused = update_weights(async_server, pair.target)
    assert refused.status_code == 400 and "--no-ssd-pack-weights" in refused.json()["message"]
    assert async_server.ask(body).output_ids == before
