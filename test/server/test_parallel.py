"""Several ranks. Tensor-parallel ones are one verifier: rank 0 speaks to the draft, and all run the same rounds. Each
data-parallel one is a verifier of its own, and all have the same drafts."""

from __future__ import annotations

from server.running import prompt, request

BODIES = [
    request(prompt(1700 + i, 4 + 11 * i), max_new_tokens=32, temperature=0.9 * (i % 2), sampling_seed=i)
    for i in range(8)
]


def test_two_ranks_equal_one(parallel_server, off_server):
    plain = [answer.output_ids for answer in off_server.ask_all(BODIES, num_at_once=1)]
    assert [answer.output_ids for answer in parallel_server.ask_all(BODIES, num_at_once=1)] == plain
    together = parallel_server.ask_all(BODIES, num_at_once=8, stagger_s=0.05)
    assert [answer.output_ids for answer in together] == plain
    assert sum(source == "hit" for answer in together for source in answer.sources) > 0
    parallel_server.wait_until_free()


def test_data_parallel_ranks_are_verifiers_of_one_draft(replicated_server, off_server):
    bodies = BODIES[:6]
    plain = [answer.output_ids for answer in off_server.ask_all(bodies, num_at_once=1)]
    answers = replicated_server.ask_all(bodies, num_at_once=6, stagger_s=0.05)
    assert [answer.output_ids for answer in answers] == plain
    assert sum(source == "hit" for answer in answers for source in answer.sources) > 0
    replicated_server.wait_until_free()
    replicated_server.wait_until_alive()
    states = replicated_server.ssd_states()
    assert len(states) == 2 and len({state["drafts"][0]["endpoint"] for state in states}) == 1
    for state in states:
        assert state["rounds"] > 0
        assert state["estimates"]["num_rounds"] > 0, "the draft learnt of the rounds of each"
    assert states[0]["draft"]["rounds"] >= sum(state["rounds"] for state in states)
