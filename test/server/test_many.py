"""Two verifiers that share two drafts: SSD's tokens are those of plain decoding, also when a draft is killed."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from server.conftest import SHARED_FLAGS, launch_command
from server.running import Answer, Server, prompt, request, wait_for

PREPARED = {"hit", "neural"}


@pytest.fixture(scope="module")
def verifiers(pair, tmp_path_factory):
    """The first starts both drafts, the second names their endpoints."""
    folder = tmp_path_factory.mktemp("many")
    core = str(max(os.sched_getaffinity(0)))
    cores = ["--ssd-draft-cores", core, "--ssd-draft-cores", core]
    owner = Server(
        launch_command(pair, *SHARED_FLAGS, "--ssd-num-drafts", "2", *cores, "--enable-metrics"),
        folder / "owner",
    )
    servers = [owner]
    try:
        owner.wait_until_ready()
        ends = [flag for end in endpoints(owner) for flag in ("--ssd-draft-endpoint", end)]
        target = ["--model-path", str(pair.target)]
        command = ["sglang_ssd.launch_server", "--device", "cpu", *target, *SHARED_FLAGS, *ends]
        servers.append(Server(command, folder / "guest"))
        servers[1].wait_until_ready()
        yield servers
    finally:
        failures = []
        for server in reversed(servers):
            try:
                server.stop()
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)


def endpoints(server: Server) -> list[str]:
    return list(states(server))


def states(server: Server) -> dict[str, str]:
    """The state of each draft by its endpoint."""
    return {draft["endpoint"]: draft["state"] for draft in server.ssd_state()["drafts"]}


def ask_both(verifiers: list[Server], bodies: list[dict], num_at_once: int) -> list[Answer]:
    """The answers in order, of which each verifier gave every other one."""
    with ThreadPoolExecutor(2) as threads:
        halves = [
            threads.submit(server.ask_all, bodies[place::2], num_at_once, 0.05)
            for place, server in enumerate(verifiers)
        ]
    answers: list[Answer | None] = [None] * len(bodies)
    for place, half in enumerate(halves):
        answers[place::2] = half.result()
    return answers


def test_a_hundred_requests_on_two_by_two_equal_plain(verifiers, off_server):
    bodies = [
        request(prompt(2100 + i, 3 + 7 * i % 120), 8 + 5 * i % 40, temperature=0.8 * (i % 2), sampling_seed=i)
        for i in range(100)
    ]
    plain = off_server.ask_all(bodies, num_at_once=4)
    answers = ask_both(verifiers, bodies, num_at_once=6)
    assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in plain]
    for server in verifiers:
        server.wait_until_alive()
        state = server.ssd_state()
        assert len(state["drafts"]) == 2 and state["draft_alive"] and state["draft_state"] == "alive"
        assert state["client"]["moved"] == 0
        for draft in state["drafts"]:
            assert draft["draft"]["rounds"] > 0 and draft["draft"]["hits"] > 0
        assert state["draft"]["rounds"] == sum(draft["draft"]["rounds"] for draft in state["drafts"])
        server.wait_until_free()


def test_a_killed_draft_costs_no_token_and_its_requests_move(verifiers, off_server):
    owner = verifiers[0]
    bodies = [request(prompt(2300 + i, 20 + i), 200, ignore_eos=True) for i in range(8)]
    plain = off_server.ask_all(bodies, num_at_once=4)
    rounds = [server.ssd_state()["rounds"] for server in verifiers]

    def all_run() -> bool:
        states = [server.ssd_state() for server in verifiers]
        return all(
            state["rounds"] >= before + 8 and all(draft["open_sessions"] for draft in state["drafts"])
            for state, before in zip(states, rounds, strict=True)
        )

    lost, kept = endpoints(owner)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(ask_both, verifiers, bodies, 4)
        assert wait_for(all_run, timeout_s=120) is True
        owner.draft_process(lost).kill()
        answers = running.result()
    assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in plain]
    for answer in answers:
        assert set(answer.sources[-5:]) & PREPARED, "the other draft serves it by the end"
        unserved = [source for source in answer.sources if source not in PREPARED]
        assert len(unserved) < 20
    for server in verifiers:
        assert wait_for(lambda server=server: states(server)[kept] == "alive", timeout_s=15) is True
        state = server.ssd_state()
        by_end = {draft["endpoint"]: draft for draft in state["drafts"]}
        assert by_end[lost]["state"] != "alive"
        assert by_end[lost]["client"]["moved"] > 0 and state["client"]["reopened"] > 0
        assert (state["draft_alive"], state["draft_state"], state["open_sessions"]) == (True, "degraded", 0)
        assert server.log().count(f"draft at {lost} is degraded") == 1
    text = requests.get(f"{owner.url}/metrics", timeout=60).text
    alive = dict(
        re.findall(r'^sglang_ssd_draft_state\{draft="(\d)",.*state="alive"\} (\S+)$', text, re.MULTILINE)
    )
    assert alive == {"0": "0.0", "1": "1.0"}
    (moved,) = re.findall(
        r'^sglang_ssd_draft_events_total\{draft="0",event="moved",.*\} (\S+)$', text, re.MULTILINE
    )
    assert float(moved) == owner.ssd_state()["drafts"][0]["client"]["moved"]
    assert "requests go on without it" in owner.log()
