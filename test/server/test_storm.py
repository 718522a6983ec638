"""Half a minute of ``benchmark/storm.py``: the draft is killed, replaced, stopped, slowed and garbled under load."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmark"))

import storm

NUM_REQUESTS, SECONDS, SEED = 40, 30.0, 3


def test_a_storm_of_faults_changes_no_answer_and_leaves_nothing(fleet, pair, off_server, tmp_path):
    fleet.stop_all_but("off")
    requests = storm.storm_requests(NUM_REQUESTS, SEED)
    bodies = [{"input_ids": request.input_ids, "sampling_params": request.sampling} for request in requests]
    plain = [answer.output_ids for answer in off_server.ask_all(bodies, num_at_once=8)]
    with storm.stage(pair, tmp_path / "others", SEED, tmp_path / "async.log", storm.cores_of_both()) as on:
        outcome, rest = storm.weather_the_storm(on, requests, plain, SECONDS, SEED, pause_s=2.0)
    assert (outcome.num_requests, outcome.num_lost, outcome.num_wrong) == (NUM_REQUESTS, 0, 0)
    assert rest["held_after"] == {} and rest["drafts_died"] == 0
    # The storm was one, and the draft was of use between its faults. (On a slow machine no frame may cross a garbling line,
    # and not all kinds of faults fit: test_benchmark_faults.py looks at each.)
    assert len(rest["faults"]) >= 3
    assert outcome.sources["hit"] > 0 and outcome.sources["none"] + outcome.sources.get("ngram", 0) > 0
