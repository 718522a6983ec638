"""The arithmetic of the storm and load benchmarks, and the proxy that garbles frames: no server, no model."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmark"))

import draft_down
import load
import report
import storm
from load import Stream

from sglang_ssd.wire.channel import DraftChannel, MalformedFromPeer, RunDirectory, VerifierChannel
from sglang_ssd.wire.messages import Ping

PATIENCE_MS = 20_000


# -- storm -------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory():
    run_directory = RunDirectory()
    yield run_directory
    run_directory.close()


def pings_through(directory: RunDirectory, weather: storm.Weather, num: int) -> tuple[list[int], int, dict]:
    """The nonces that arrived, how many frames were malformed, and what the proxy says that it did."""
    with closing(DraftChannel(directory.endpoint("draft"))) as draft:
        line = storm.Line(directory.endpoint("line"), directory.endpoint("draft"), seed=1)
        line.weather = weather
        verifier = VerifierChannel(directory.endpoint("line"))
        nonces, num_malformed = [], 0
        try:
            for nonce in range(num):
                verifier.send(Ping(nonce))
            # The proxy has them all; then nothing else comes for a while.
            while (received := receive(draft)) is not None or line.num_frames < num:
                if received is MALFORMED:
                    num_malformed += 1
                elif received is not None:
                    nonces.append(received.message.nonce)
            return nonces, num_malformed, dict(line.garbled)
        finally:
            verifier.close()
            line.close()


MALFORMED = object()


def receive(draft: DraftChannel):
    try:
        return draft.receive(1000)
    except MalformedFromPeer:
        return MALFORMED


def test_a_calm_line_passes_everything_on(directory):
    assert pings_through(directory, storm.CALM, 50) == (list(range(50)), 0, {})


@pytest.mark.parametrize("fate", storm.Weather._fields)
def test_a_garbling_line_does_what_it_says(directory, fate):
    nonces, num_malformed, garbled = pings_through(directory, storm.Weather(**{fate: 40}), 100)
    number = garbled.pop(fate)
    assert not garbled and 10 < number < 70
    expected = {"flipped": 100, "lost": 100 - number, "doubled": 100 + number, "late": 100}[fate]
    assert len(nonces) + num_malformed == expected
    if fate == "late":
        assert sorted(nonces) == list(range(100)) != nonces


def test_a_line_answers_to_who_asked(directory):
    with closing(DraftChannel(directory.endpoint("draft"))) as draft:
        line = storm.Line(directory.endpoint("line"), directory.endpoint("draft"), seed=1)
        verifiers = [VerifierChannel(directory.endpoint("line")) for _ in range(2)]
        try:
            for nonce, verifier in enumerate(verifiers):
                verifier.send(Ping(nonce))
            for _ in verifiers:
                peer, message = draft.receive(PATIENCE_MS)
                assert draft.send(peer, message)
            for nonce, verifier in enumerate(verifiers):
                assert verifier.receive(PATIENCE_MS) == Ping(nonce)
        finally:
            for verifier in verifiers:
                verifier.close()
            line.close()


def answer(output_ids: list[int], *sources: str) -> SimpleNamespace:
    return SimpleNamespace(output_ids=output_ids, meta_info={"ssd_sources": list(sources)})


def test_lost_and_wrong_answers_are_told_apart():
    outcome = storm.compare(
        [[1, 2], [1, 2], [1, 2], [1, 2]],
        [answer([1, 2], "hit", "none"), None, answer([1, 3], "hit"), answer([1])],
    )
    assert outcome == storm.Outcome(4, num_lost=1, num_wrong=2, sources={"hit": 2, "none": 1})


CLEAN = {
    "open_sessions": 0,
    "idle_leaks": 0,
    "draft": {
        "idle_leaks": 0, "num_sessions": 0, "num_branch_rows": 0, "total_kv_slots": 9, "free_kv_slots": 9,
        "total_rows": 3, "free_rows": 3,
    },
}  # fmt: skip


def test_what_is_held_is_named():
    assert storm.held(CLEAN) == {}
    leaking = {**CLEAN, "idle_leaks": 1, "draft": {**CLEAN["draft"], "free_kv_slots": 7, "num_sessions": 1}}
    assert storm.held(leaking) == {"idle_leaks": 1, "draft's sessions": 1, "draft's KV slots": 2}


@pytest.mark.parametrize(
    ("changes", "exit_code"),
    [
        ({}, 0),
        ({"num_lost": 1}, 1),
        ({"num_wrong": 1}, 1),
        ({"held_after": {"open_sessions": 1}}, 1),
        ({"drafts_died": 1}, 1),
    ],
)
def test_exit_code_of_a_storm(tmp_path, changes, exit_code):
    args = storm.parse(["--out", str(tmp_path / "storm.json")])
    outcome = storm.Outcome(3, 0, 0, {"hit": 5})
    rest = {"held_after": {}, "drafts_died": 0}
    outcome = outcome._replace(**{k: v for k, v in changes.items() if k in outcome._fields})
    rest |= {k: v for k, v in changes.items() if k in rest}
    assert storm.report(args, report.machine_facts(), outcome, rest) == exit_code
    assert json.loads(args.out.read_text(encoding="utf-8"))["num_wrong"] == outcome.num_wrong


# -- a draft that is down ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "num_wrong", "exit_code"),
    [([9.1, 9.5, 2.0], 0, 0), ([8.9, 8.8, 12.0], 0, 1), ([10.0, 10.0, 10.0], 1, 1)],
)
def test_exit_code_without_a_draft_is_that_of_the_median_turn(tmp_path, speeds, num_wrong, exit_code):
    args = draft_down.parse(["--pair", "test", "--out", str(tmp_path / "down.json")])
    turns = [
        draft_down.Turn(start, {"draft down": speed, "off": 10.0}, num_wrong, {"none": 3, "ngram": 1})
        for start, speed in enumerate(speeds)
    ]
    assert draft_down.report(args, report.machine_facts(), turns) == exit_code
    written = json.loads(args.out.read_text(encoding="utf-8"))
    assert written["share_of_plain"] == sorted(speeds)[1] / 10
    assert written["num_wrong"] == 3 * num_wrong


def test_half_of_the_requests_without_a_draft_are_sampled():
    requests = draft_down.make_requests([[1, 2], [3]], 4, max_tokens=5, seed=1)
    assert [request.input_ids for request in requests] == [[1, 2], [3], [1, 2], [3]]
    assert [request.sampling["temperature"] for request in requests] == [0, 0.8, 0, 0.8]
    assert len({request.sampling["sampling_seed"] for request in requests}) == 4
    assert all(3 <= request.sampling["max_new_tokens"] <= 5 for request in requests)


# -- load --------------------------------------------------------------------------------------------------------


STREAMS = [
    Stream(True, False, [(1.0, 1), (1.5, 3), (1.5, 3), (1.7, 4)], [1, 2, 3, 4]),
    Stream(False, True, [(2.0, 1)], [1]),
    Stream(False, True, [], []),
    Stream(False, False, [(3.0, 2)], [1, 9]),
]


def test_gaps_lie_between_events_that_bring_tokens():
    whole, shares = load.gaps(STREAMS)
    assert whole == pytest.approx([500.0, 200.0]) and shares == pytest.approx([250.0, 200.0])


@pytest.mark.parametrize("slope", [0.0, 0.5, -1.0])
def test_growth_is_that_of_the_second_half(slope):
    seconds = np.arange(0.0, 101.0)
    mib = np.where(seconds < 50, 10 * seconds, 500 + slope * (seconds - 50))
    assert load.growth_mib(list(seconds), list(mib)) == pytest.approx(50 * slope)


def test_a_summary_accounts_for_all_streams():
    requests = load.load_requests(4, seed=0)
    plain = [Stream(True, False, [], [1, 2, 3, 4])] * 4
    samples = [load.MemorySample(float(i), 100.0 + i, 50.0) for i in range(11)]
    figures = load.summarize("async", requests, STREAMS, 2.0, samples, plain)
    assert (figures.num_complete, figures.num_left, figures.num_lost, figures.num_wrong) == (1, 2, 1, 1)
    assert figures.tokens_per_s == 7 / 2
    assert figures.scheduler_growth_mib == pytest.approx(5.0) and figures.draft_growth_mib == pytest.approx(0)


def test_a_fifth_of_the_clients_leaves():
    leaving = [leave_after for _, leave_after in load.load_requests(2000, seed=1) if leave_after is not None]
    assert 340 < len(leaving) < 460 and min(leaving) == 0


@pytest.mark.parametrize(
    ("changes", "exit_code"),
    [
        ({}, 0),
        ({"num_lost": 1, "num_complete": 7}, 1),
        ({"num_wrong": 1}, 1),
        ({"num_left": 1}, 1),
        ({"draft_growth_mib": 33.0}, 1),
        ({"held": {"open_sessions": 1}}, 1),
    ],
)
def test_exit_code_and_plot_of_load(tmp_path, changes, exit_code):
    args = load.parse(["--out", str(tmp_path / "load.json")])
    still_held = changes.pop("held", {})
    row = load.Figures("async", 10, 8, 2, 0, 0, 100.0, 5.0, 9.0, 2.0, 3.0, 1.0, 1.0)._replace(**changes)
    memory = {"async": [load.MemorySample(1.0, 900.0, 500.0), load.MemorySample(2.0, 900.0, 500.0)]}
    gaps_ms = {"async": np.array([5.0, 9.0])}
    found = load.report(args, report.machine_facts(), [row], memory, gaps_ms, still_held)
    assert found == exit_code
    assert json.loads(args.out.read_text(encoding="utf-8"))["modes"][0]["num_requests"] == 10
    assert args.out.with_suffix(".png").stat().st_size > 0
