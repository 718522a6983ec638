"""A small KV pool with pages: prompts in chunks, requests retracted and taken in again, nothing lost."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

from server.running import prompt, request, wait_for


def test_requests_that_are_retracted_equal_plain(paged_server, off_server):
    """40 requests, of which the pool holds three: all finish, greedy and sampled. (With ignore_eos the scheduler would
    keep room for whole outputs, and never run out of it.)"""
    bodies = [
        request(
            prompt(500 + i, 70 + 13 * i % 60),
            max_new_tokens=60 + i % 40,
            temperature=0.7 * (i % 2),
            sampling_seed=i,
        )
        for i in range(40)
    ]
    plain = off_server.ask_all(bodies, num_at_once=8)
    answers = paged_server.ask_all(bodies, num_at_once=40)
    assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in plain]
    assert sum(answer.meta_info["num_retractions"] for answer in answers) > 0
    assert any("hit" in answer.sources for answer in answers)
    paged_server.wait_until_free()


def test_requests_of_every_fate_lose_no_slot(paged_server):
    """Finished by length and by stop, closed in the middle and at once, retracted."""

    def meet_its_fate(i: int) -> None:
        body = request(prompt(600 + i, 20 + 29 * i % 150), 30 + i % 50)
        if i % 4 == 3:
            with paged_server.streaming("/generate", body) as events:
                if i % 8 == 3:
                    next(events)
                    time.sleep(0.05)
        else:
            paged_server.ask(body)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(meet_its_fate, range(200)))
    paged_server.wait_until_free()


def test_a_draft_that_hangs_changes_no_output(paged_server, off_server):
    """SIGSTOP: requests go on without it, with the same output; when it is back it proposes again."""
    draft = paged_server.draft_process()
    bodies = [request(prompt(700 + i, 30), max_new_tokens=40, ignore_eos=True) for i in range(3)]
    plain = [answer.output_ids for answer in off_server.ask_all(bodies, num_at_once=3)]
    draft.send_signal(signal.SIGSTOP)
    try:
        answers = paged_server.ask_all(bodies, num_at_once=3)
        state = paged_server.ssd_state()
    finally:
        draft.send_signal(signal.SIGCONT)
    assert [answer.output_ids for answer in answers] == plain
    assert {source for answer in answers for source in answer.sources} == {"none"}
    assert state["draft_alive"] is False and state["client"]["timeouts"] > 0

    assert wait_for(lambda: paged_server.ssd_state()["draft_alive"], timeout_s=15) is True
    answers = paged_server.ask_all(bodies, num_at_once=3)
    assert [answer.output_ids for answer in answers] == plain
    assert {"hit", "neural"} & {source for answer in answers for source in answer.sources}
    paged_server.wait_until_free()


def test_ctrl_c_in_the_middle_of_requests_leaves_nothing(fleet, paged_server):
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(paged_server.post, "/generate", request(prompt(710, 20), 500, ignore_eos=True))
        assert wait_for(lambda: paged_server.ssd_state()["open_sessions"] == 1, timeout_s=30) is True
        fleet.stop("paged")
        answer.exception()
