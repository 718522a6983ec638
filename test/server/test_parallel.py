"""A tensor-parallel verifier: rank 0 speaks to the draft, and all ranks run the same rounds."""

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
