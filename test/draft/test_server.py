"""The draft's loop against a toy model: every proposal is the draft's own greedy continuation, whatever happened."""

from __future__ import annotations

import random

import msgspec
import pytest
from draft.toy import VOCAB_SIZE, ToyChannel, ToyRunner, continuation, patient_policy, ranks_after
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.algorithm.acceptance import Snapshot
from sglang_ssd.algorithm.lookahead import Size
from sglang_ssd.algorithm.ngram import LazyNGramIndex
from sglang_ssd.bridge.idle_check import STRICT_SWITCH, StillHeld
from sglang_ssd.draft import server as draft_server
from sglang_ssd.draft.policy import DraftPolicy
from sglang_ssd.draft.server import PREFILL_CHUNK_TOKENS, DraftIdentity, DraftServer
from sglang_ssd.wire.channel import MalformedFromPeer, Received
from sglang_ssd.wire.messages import (
    PROTOCOL_VERSION,
    Close,
    FallbackName,
    Hello,
    Open,
    Ping,
    Pong,
    Proposal,
    Refuse,
    Round,
    Welcome,
)

K = 3
PEER = b"verifier"


def hello(budget: int = 8, **changes) -> Hello:
    facts = dict(
        protocol_version=PROTOCOL_VERSION,
        vocab_size=VOCAB_SIZE,
        tokenizer_fingerprint="toy",
        lookahead=K,
        fan_out_budget=budget,
        context_length=512,
        target_model="toy-target",
    )
    return Hello(**(facts | changes))


class ImpatientPolicy(DraftPolicy):
    """Answers with whatever is there."""

    def answers_now(self, num_ready) -> bool:
        return True


class Harness:
    """A verifier that follows the protocol, with full control over when the draft gets to run."""

    def __init__(self, budget: int = 8, fallback: FallbackName = "neural", **runner) -> None:
        self.channel, self.runner = ToyChannel(), ToyRunner(**runner)
        self.server = DraftServer(
            self.channel, self.runner, DraftIdentity("toy", "toy", max_sessions=8), self.make_policy
        )
        #: What proposals may have.
        self.lengths = {K}
        self.ended: list[list[int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.proposals: dict[int, list[int]] = {}
        self.ticket = 0
        self.say(hello(budget, fallback=fallback))
        self.run()
        assert isinstance(self.sent()[0], Welcome)
        self.total = self.runner.pool.capacity()

    make_policy = staticmethod(patient_policy)

    def say(self, message, peer: bytes = PEER) -> None:
        self.channel.inbox.append(Received(peer, message))

    def run(self, turns: int = 64) -> None:
        for _ in range(turns):
            self.server.turn()

    def sent(self, peer: bytes = PEER) -> list:
        return self.channel.sent.pop(peer, [])

    def open(self, request: int, tokens: list[int]) -> None:
        self.tokens[request], self.proposals[request] = list(tokens), []
        self.say(Open(request, 0, tokens))

    def outcome(self, choices: dict[int, tuple[int, int]]) -> int:
        """Send outcomes (k, bonus) of several requests in one round; returns the ticket."""
        self.ticket += 1
        rows = list(choices)
        for request in rows:
            accepted, bonus = choices[request]
            self.tokens[request] += [*self.proposals[request][:accepted], bonus]
        self.say(
            Round(
                self.ticket,
                rows,
                [0] * len(rows),
                [len(self.tokens[r]) for r in rows],
                [choices[r][0] for r in rows],
                [choices[r][1] for r in rows],
            )
        )
        return self.ticket

    def in_the_middle_of_a_forward(self, happening) -> None:
        """Let ``happening`` take place during the next forward, or now when none is due."""
        self.runner.in_the_middle = happening
        self.run(1)
        if self.runner.in_the_middle is not None:
            self.runner.in_the_middle = None
            happening()

    def resize(self, size: Size) -> None:
        """Let the policy have chosen this."""
        (peer,) = self.server._peers.values()
        peer.policy.size = size

    def take(self, rows: list[int]) -> dict[int, str]:
        """Check all proposals sent and return their sources by request."""
        sources = {}
        for message in self.sent():
            if not isinstance(message, Proposal):
                continue
            assert message.ticket == self.ticket
            for row, source, tokens in zip(message.rows, message.sources, message.token_ids, strict=True):
                request = rows[row]
                sources[request] = source
                self.proposals[request] = tokens
                if source in ("hit", "neural"):
                    assert len(tokens) in self.lengths and tokens == continuation(
                        self.tokens[request], len(tokens)
                    )
                elif source == "ngram":
                    assert len(tokens) in self.lengths
                    assert tokens == LazyNGramIndex().propose(self.tokens[request], len(tokens))
                else:
                    assert tokens == []
        return sources

    def assert_all_free(self) -> None:
        """But for what ended requests left, which nobody reads."""
        self.runner.pool.evict()
        assert not self.runner.pool.left_behind
        assert self.runner.pool.capacity() == self.total
        assert self.server.stats().num_sessions == 0


def test_first_token_is_prepared_and_hits():
    run = Harness()
    run.open(1, [3, 1, 4, 1, 5])
    run.run()
    run.outcome({1: (0, ranks_after([3, 1, 4, 1, 5], 1)[0])})
    run.run(1)
    assert run.take([1]) == {1: "hit"}


@pytest.mark.parametrize("accepted", range(K + 1))
def test_likely_outcome_hits_at_every_position(accepted):
    run = Harness()
    run.open(1, [3, 1, 4])
    run.outcome({1: (0, 7)})
    run.run()
    run.take([1])
    path = run.tokens[1] + run.proposals[1][:accepted]
    # At k < K the drafted token cannot be the bonus: the next rank is prepared.
    bonus = ranks_after(path, 2)[1 if accepted < K else 0]
    run.outcome({1: (accepted, bonus)})
    forwards = run.server.stats().forwards
    run.run(1)
    assert run.take([1]) == {1: "hit"}
    assert run.server.stats().forwards - forwards <= 0 + 1, "a hit is answered without a forward of its own"


def test_one_forward_a_depth_and_no_kv_computed_twice():
    run = Harness()
    run.open(1, [3, 1, 4])
    run.outcome({1: (0, 7)})
    run.run()
    run.take([1])
    for _ in range(5):
        before = run.server.stats()
        path = run.tokens[1] + run.proposals[1]
        run.outcome({1: (K, ranks_after(path, 1)[0])})
        run.run()
        assert run.take([1]) == {1: "hit"}
        after = run.server.stats()
        assert after.forwards - before.forwards == K + 1
        assert after.backup_forwards == before.backup_forwards
    run.say(Close([1], [0], "finished"))
    run.run()
    run.assert_all_free()


def test_budget_zero_is_synchronous_speculation():
    run = Harness(budget=0)
    run.open(1, [3, 1, 4])
    for _ in range(4):
        run.outcome({1: (len(run.proposals[1]), 9)})
        before = run.server.stats()
        run.run()
        assert run.take([1]) == {1: "neural"}
        after = run.server.stats()
        assert after.backup_forwards - before.backup_forwards <= K
        assert after.fork_forwards == after.branches_drafted == 0


#: A prompt that repeats, and whose likeliest next tokens are not those that the repetition says.
PATTERN = next(p for i in range(VOCAB_SIZE) if (p := [i, 1, 4, 1, 5, 9])[0] not in ranks_after(p * 2, 8))


def test_an_ngram_backup_answers_at_once_and_is_forked_from_like_any_proposal():
    run = Harness(fallback="ngram")
    run.open(1, PATTERN * 2)
    run.run()
    run.outcome({1: (0, PATTERN[0])})
    run.run(1)
    assert run.take([1]) == {1: "ngram"} and run.proposals[1] == PATTERN[1 : 1 + K]
    before = run.server.stats()
    assert before.backup_forwards == 0
    run.run()
    # All of the proposal went through one forward, in the turn that answered; then the branches grow, one a depth.
    assert run.server.stats().fork_forwards - before.fork_forwards == K
    for accepted in range(K + 1):
        again = Harness(fallback="ngram")
        again.open(1, PATTERN * 2)
        again.run()
        again.outcome({1: (0, PATTERN[0])})
        again.run()
        again.take([1])
        candidates = ranks_after(again.tokens[1] + again.proposals[1][:accepted], 3)
        bonus = next(t for t in candidates if accepted == K or t != again.proposals[1][accepted])
        again.outcome({1: (accepted, bonus)})
        again.run(1)
        assert again.take([1]) == {1: "hit"}


def test_an_ngram_backup_without_a_match_proposes_nothing():
    run = Harness(budget=0, fallback="ngram")
    run.open(1, [3, 1, 4])
    run.run()
    run.outcome({1: (0, 7)})
    run.run()
    assert run.take([1]) == {1: "none"}
    assert run.server.stats().backup_forwards == 0


def test_a_prompt_that_goes_on_from_another_request_reads_only_what_is_new():
    run = Harness()
    run.open(1, [3, 1, 4, 1, 5])
    run.outcome({1: (0, 7)})
    run.run()
    run.take([1])
    run.outcome({1: (2, 9)})
    run.run()
    run.take([1])
    conversation = list(run.tokens[1])
    run.say(Close([1], [0], "finished"))
    run.run()
    before = run.runner.num_tokens_forwarded
    run.open(2, [*conversation, 8, 6])
    run.run(1)
    # The last bonus token has its KV by then: the branches that followed it had it forwarded.
    assert run.runner.num_tokens_forwarded - before <= 3
    assert run.server.stats().prompt_tokens_cached >= len(conversation) - 1
    run.outcome({2: (0, 7)})
    run.run()
    assert run.take([2]).keys() == {2}
    run.say(Close([2], [0], "finished"))
    run.run()
    run.assert_all_free()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    budget=st.sampled_from([0, 1, 4, 12]),
    tight=st.booleans(),
    fallback=st.sampled_from(["neural", "ngram", "auto"]),
    resizes=st.booleans(),
)
def test_any_interleaving_proposes_the_drafts_own_continuation(seed, budget, tight, fallback, resizes):
    """Random outcomes, some likely, some not, arriving after any number of forwards; requests join and leave; rows
    and slots may run out. Every proposal is right, and at the end everything is free."""
    rng = random.Random(seed)
    run = Harness(budget, fallback, num_rows=12 if tight else 128, num_slots=160 if tight else 4096)
    next_request = 1
    if resizes:
        run.lengths = set(range(1, K + 1))
    for _ in range(30):
        if resizes:
            run.resize(Size(rng.randint(1, K), rng.randint(0, budget)))
        if len(run.tokens) < 4 and rng.random() < 0.4:
            # Some go on from what another was.
            begun = rng.choice([[], *run.ended])
            begun = begun[: rng.randint(0, len(begun))] if len(begun) < 100 else []
            run.open(next_request, begun + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))])
            next_request += 1
            run.run(rng.randint(0, 4))
        if run.tokens and rng.random() < 0.1:
            leaver = rng.choice(list(run.tokens))
            run.say(Close([leaver], [0], "aborted"))
            run.ended.append(run.tokens.pop(leaver))
            del run.proposals[leaver]
        if not run.tokens:
            continue
        rows = rng.sample(list(run.tokens), rng.randint(1, len(run.tokens)))
        choices = {}
        for request in rows:
            accepted = rng.randint(0, len(run.proposals[request]))
            path = run.tokens[request] + run.proposals[request][:accepted]
            candidates = [
                t for t in ranks_after(path, 5) if t not in run.proposals[request][accepted : accepted + 1]
            ]
            choices[request] = (
                accepted,
                rng.choice([candidates[0], candidates[1], rng.randrange(VOCAB_SIZE)]),
            )
        if rng.random() < 0.5:
            run.in_the_middle_of_a_forward(lambda choices=choices: run.outcome(choices))
        else:
            run.outcome(choices)
        run.run(40)
        sources = run.take(rows)
        assert sources.keys() == set(rows)
        for request, source in sources.items():
            if source == "unknown" or source == "none":
                assert tight or fallback != "neural", f"{source} with room to spare"
                if source == "unknown":  # As a verifier does: open again with what is certain.
                    run.open(request, run.tokens[request])
        run.run(rng.randint(0, 6))
    assert run.server.stats().kv_tokens_recomputed == 0
    run.say(Close(list(run.tokens), [0] * len(run.tokens), "finished"))
    run.run()
    run.assert_all_free()


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_outcomes_of_a_round_that_was_never_answered(turns):
    """The verifier gave up waiting and went on without the proposal: nothing of it may be taken as accepted, and
    bonus tokens that no forward took in yet stay part of the request."""
    run = Harness()
    run.open(1, [3, 1, 4])
    run.run()
    for bonus in (7, 9, 11):
        run.sent()
        run.outcome({1: (0, bonus)})
        run.run(turns)
    run.run()
    assert run.take([1]).keys() == {1}


def test_long_prompt_does_not_hold_its_request_up():
    run = Harness(num_slots=4096)
    prompt = [i % VOCAB_SIZE for i in range(3 * PREFILL_CHUNK_TOKENS)]
    run.open(1, prompt)
    run.outcome({1: (0, 7)})
    run.run(1)
    assert run.take([1]) == {1: "none"}
    run.run()
    run.outcome({1: (0, 8)})
    run.run()
    assert run.take([1])[1] in ("hit", "neural")


def test_a_miss_of_one_row_does_not_delay_the_hits_of_others():
    run = Harness(num_rows=128)
    for request in range(1, 5):
        run.open(request, [request, 2, 3])
    run.run()
    run.outcome({r: (0, ranks_after(run.tokens[r], 1)[0]) for r in range(1, 5)})
    run.run()
    run.take([1, 2, 3, 4])
    likely = {r: (0, ranks_after(run.tokens[r], 2)[1]) for r in range(1, 5)}
    run.outcome({**likely, 4: (0, ranks_after(run.tokens[4], VOCAB_SIZE)[-1])})
    sent_before_the_forward = []
    run.runner.in_the_middle = lambda: sent_before_the_forward.extend(run.channel.sent.get(PEER, []))
    run.run(1)
    assert sent_before_the_forward, "answers leave before the next forward begins"
    assert run.take([1, 2, 3, 4]) == {1: "hit", 2: "hit", 3: "hit"}
    run.run()
    assert run.take([1, 2, 3, 4]) == {4: "neural"}


@pytest.mark.parametrize("fallback", ["neural", "ngram", "auto"])
def test_context_limit_ends_proposals_not_the_request(fallback):
    run = Harness(fallback=fallback, context_length=24)
    run.open(1, list(range(12)))
    run.run()
    sources = []
    for bonus in range(30, 35):
        run.outcome({1: (len(run.proposals[1]), bonus)})
        run.run()
        answered = [row for message in run.channel.sent[PEER] for row in message.rows]
        assert answered == [0], "each row is answered once"
        sources.append(run.take([1])[1])
    assert fallback != "neural" or sources[0] in ("hit", "neural")
    assert sources[-2:] == ["none", "none"]
    run.say(Close([1], [0], "finished"))
    run.run()
    run.assert_all_free()


def prepared_round(budget: int = 8) -> tuple[Harness, list[int]]:
    """A request whose proposal is out; returns the candidates after none of it is accepted."""
    run = Harness(budget)
    run.open(1, [3, 1, 4])
    run.outcome({1: (0, 7)})
    run.run(K + 1)
    run.take([1])
    return run, ranks_after(run.tokens[1], VOCAB_SIZE)


def test_a_complete_hit_is_answered_in_the_middle_of_a_forward_and_ends_it():
    run, ranks = prepared_round()
    run.run(K - 1)  # Branches at k < K have K tokens after K forwards; those at K need one more.
    while not any(len(branch.drafted) == K for s in run.server._sessions() for branch in s.cache.branches()):
        run.run(1)
    before = run.server.stats()
    run.runner.in_the_middle = lambda: run.outcome({1: (0, ranks[1])})
    run.run(1)
    assert run.take([1]) == {1: "hit"}
    after = run.server.stats()
    assert after.forwards_ended_early == before.forwards_ended_early + 1
    assert after.forwards == before.forwards
    run.run()
    path = run.tokens[1] + run.proposals[1]
    run.outcome({1: (K, ranks_after(path, 1)[0])})
    run.run()
    assert run.take([1]) == {1: "hit"}
    run.say(Close([1], [0], "finished"))
    run.run()
    run.assert_all_free()


def test_a_miss_ends_a_forward_that_only_forks():
    run, ranks = prepared_round()
    run.runner.in_the_middle = lambda: run.outcome({1: (0, ranks[-1])})
    run.run(1)
    assert run.server.stats().forwards_ended_early == 1
    run.run()
    assert run.take([1]) == {1: "neural"}


def test_a_forward_that_another_request_needs_is_not_ended():
    run, ranks = prepared_round()
    run.open(2, [9, 9])
    run.run(2)
    run.runner.in_the_middle = lambda: run.outcome({1: (0, ranks[-1])})
    run.run(1)
    assert run.server.stats().forwards_ended_early == 0
    run.run()
    assert run.take([1]) == {1: "neural"}


@pytest.mark.parametrize(
    "row",
    [
        dict(committed_lens=[99]),
        dict(num_accepted=[4]),
        dict(num_accepted=[-1]),
        dict(bonus_tokens=[VOCAB_SIZE]),
        dict(bonus_tokens=[-1]),
        dict(generations=[1]),
        dict(requests=[2]),
    ],
)
def test_a_row_that_does_not_fit_is_unknown(row):
    run = Harness()
    run.open(1, [3, 1, 4])
    run.run()
    fields = dict(requests=[1], generations=[0], committed_lens=[4], num_accepted=[0], bonus_tokens=[7]) | row
    run.say(Round(1, **fields))
    run.run()
    (message,) = run.sent()
    assert message.sources == ["unknown"] and message.token_ids == [[]]


def test_a_generation_replaces_the_one_before():
    run = Harness()
    run.open(1, [3, 1, 4])
    run.run()
    run.say(Open(1, 1, [3, 1, 4, 9]))
    run.run()
    run.say(Close([1], [0], "retracted"))
    run.run()
    assert run.server.stats().num_sessions == 1, "the close names the old generation"
    run.say(Close([1], [1], "finished"))
    run.run()
    run.assert_all_free()


@pytest.mark.parametrize(
    "changes",
    [
        dict(protocol_version=PROTOCOL_VERSION + 1),
        dict(vocab_size=49, tokenizer_fingerprint=""),
        dict(tokenizer_fingerprint="another"),
        dict(lookahead=0),
        dict(fan_out_budget=-1),
    ],
)
def test_a_verifier_that_does_not_fit_is_refused_with_a_reason(changes):
    run = Harness()
    run.say(hello(**changes), b"other")
    run.say(Open(1, 0, [1, 2]), b"other")
    run.run()
    first, second = run.sent(b"other")
    assert isinstance(first, Refuse) and first.reason
    assert isinstance(second, Refuse) and second.reason == "say Hello first"
    assert run.server.stats().num_sessions == 0


def test_each_verifier_gets_tokens_of_its_own_vocabulary():
    run = Harness()
    sizes = {PEER: VOCAB_SIZE, b"small": 20, b"large": VOCAB_SIZE + 14}
    for peer, vocab_size in sizes.items():
        if peer != PEER:
            run.say(hello(vocab_size=vocab_size), peer)
        run.say(Open(1, 0, [3, 1, 4]), peer)
        run.say(Round(1, [1], [0], [4], [0], [7]), peer)
    run.run()
    for peer, vocab_size in sizes.items():
        (proposal,) = (message for message in run.sent(peer) if isinstance(message, Proposal))
        assert proposal.token_ids == [continuation([3, 1, 4, 7], K, vocab_size)]
    assert continuation([3, 1, 4, 7], K, 20) != continuation([3, 1, 4, 7], K)


def test_malformed_message_ends_that_peers_sessions_only():
    run = Harness()
    run.open(1, [3, 1, 4])
    run.say(hello(), b"other")
    run.say(Open(1, 0, [1, 2]), b"other")
    run.run()
    assert run.server.stats().num_sessions == 2
    run.channel.inbox.append(MalformedFromPeer(b"other", "3 bytes are no message"))
    run.run()
    assert run.server.stats().num_sessions == 1
    assert run.server.stats().messages_malformed == 1
    assert isinstance(run.sent(b"other")[-1], Refuse)


def test_unknown_peer_must_greet_and_pings_are_answered():
    run = Harness()
    run.say(Ping(5), b"stranger")
    run.say(Ping(6))
    run.run()
    assert isinstance(run.sent(b"stranger")[0], Refuse)
    (pong,) = run.sent()
    assert isinstance(pong, Pong) and pong.nonce == 6 and pong.stats.total_kv_slots == run.total.total_slots
    assert pong.estimates.keys() == set(Snapshot._fields) and pong.estimates["acceptance"] > 0


def test_a_greeting_that_is_said_again_changes_nothing_and_a_new_one_frees_all():
    run = Harness()
    run.open(1, [3, 1, 4])
    run.run()
    (peer,) = run.server._peers.values()
    run.say(hello())
    run.say(hello())
    run.run()
    assert [type(message) for message in run.sent()] == [Welcome, Welcome]
    assert run.server._peers == {PEER: peer} and run.server.stats().num_sessions == 1
    run.outcome({1: (0, continuation([3, 1, 4], 1)[0])})
    run.run()
    assert run.take([1]) == {1: "hit"}
    run.say(hello(greeting=1))
    run.run()
    assert [type(message) for message in run.sent()] == [Welcome]
    assert run.server._peers[PEER].policy is not peer.policy, "what it learnt is forgotten"
    run.assert_all_free()


def test_a_ping_frees_what_its_verifier_does_not_name():
    """Whose ``Close`` was lost, or whose ``Open`` came twice."""
    run = Harness(num_rows=3, budget=0)
    for request in (1, 2, 3, 4):
        run.open(request, [request])
    run.say(hello(), b"other")
    run.run()
    (denied,) = run.server._peers[PEER].denied
    assert denied.request == 4 and run.server.stats().num_sessions == 3
    run.say(Ping(1))
    run.say(Ping(2, []), b"other")
    run.say(Ping(3, [2, 4]))
    run.run()
    assert run.sent()[-1].stats.num_sessions == run.server.stats().num_sessions == 1
    run.outcome({2: (0, 7)})
    run.run()
    assert run.take([2]) == {2: "neural"}
    assert run.server._peers[PEER].denied == {denied}
    run.say(Ping(4, []))
    run.run()
    assert not run.server._peers[PEER].denied
    run.assert_all_free()


def leak_a_slot(run: Harness) -> None:
    run.runner.pool.take_slots(1)


def leak_a_row(run: Harness) -> None:
    run.runner.pool.take_row()


def leak_an_early_answer(run: Harness) -> None:
    run.server._answered_rows.add((PEER, 1, 0))


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (leak_a_slot, "1 KV slots"),
        (leak_a_row, "1 rows"),
        (leak_an_early_answer, "1 rows answered early"),
    ],
)
def test_what_an_idle_draft_still_holds_ends_a_test_and_is_said_once_in_production(
    leak, words, monkeypatch, caplog
):
    run = Harness()
    run.open(1, [3, 1, 4])
    run.run()
    leak(run)
    assert run.server.held_at_rest() == [], "a session is open: it may hold anything"
    run.say(Close([1], [0], "finished"))
    with pytest.raises(StillHeld, match=words):
        run.run()
    monkeypatch.setenv(STRICT_SWITCH, "0")
    run.run()
    assert run.server.held_at_rest() == [words] and run.server.stats().idle_leaks == 1
    assert [record.message for record in caplog.records].count(f"held though nothing is served: {words}") == 1


@pytest.mark.parametrize("first", [Ping(1, []), None])
def test_early_answers_of_a_round_that_does_not_stand_are_forgotten(first):
    """A hit leaves between the layers of a forward; what came just before ends its session, or is the same round."""
    run, ranks = prepared_round()
    while not any(len(branch.drafted) == K for s in run.server._sessions() for branch in s.cache.branches()):
        run.run(1)
    round_ = Round(9, [1], [0], [len(run.tokens[1]) + 1], [0], [ranks[1]])

    def arriving() -> None:
        run.say(first or msgspec.structs.replace(round_, ticket=8))
        run.say(round_)

    run.runner.in_the_middle = arriving
    run.run()
    answers = [message for message in run.sent() if isinstance(message, Proposal)]
    assert [a.sources for a in answers if a.ticket == 9] == [["hit"], ["unknown"]]
    assert run.server.held_at_rest() == []
    run.assert_all_free()


def test_answers_to_a_peer_that_left_are_counted():
    run = Harness()
    run.open(1, [3, 1, 4])
    run.run()
    run.channel.gone.add(PEER)
    run.outcome({1: (0, 7)})
    run.run()
    assert run.server.stats().replies_dropped == 1


def test_no_room_for_a_session_is_counted_and_answered():
    run = Harness(num_rows=2)
    for request in (1, 2, 3):
        run.open(request, [request])
    run.run()
    assert run.server.stats().opens_denied == 1
    run.outcome({3: (0, 7)})
    run.run()
    assert run.take([3]) == {3: "none"}


def test_a_verifier_that_waits_may_get_a_shorter_proposal_and_goes_on_from_it():
    class Impatient(Harness):
        make_policy = staticmethod(
            lambda hello: ImpatientPolicy(Size(hello.lookahead, hello.fan_out_budget), "uniform")
        )

    run = Impatient()
    run.open(1, [3, 1, 4])
    lengths, sources = set(), []
    for turns in (0, 1, 6, 2, 6, 3, 6, 6, 1, 0, 2, 6):
        run.run(turns)
        path = run.tokens[1] + run.proposals[1]
        run.outcome({1: (len(run.proposals[1]), ranks_after(path, 1)[0])})
        run.run(1)
        (message,) = run.sent()
        (tokens,) = message.token_ids
        assert tokens == continuation(run.tokens[1], len(tokens))
        assert (message.sources == ["none"]) == (not tokens)
        run.proposals[1] = tokens
        lengths.add(len(tokens))
        sources += message.sources
        if turns == 6:
            # Whatever was proposed before, there was time to prepare the likeliest outcome: all of it and one more.
            assert message.sources == ["hit"] and len(tokens) == K
    assert len(lengths) > 1 and min(lengths) < K
    assert run.server.stats().short_answers > 0
    run.say(Close([1], [0], "finished"))
    run.run()
    run.assert_all_free()


# -- limits on what a verifier can make grow -------------------------------------------------------------------------


def test_more_verifiers_than_a_draft_serves_are_refused(monkeypatch):
    monkeypatch.setattr(draft_server, "MAX_VERIFIERS", 2)
    run = Harness()
    for peer in (b"second", b"third", b"second"):
        run.say(hello(), peer)
    run.run()
    assert [type(message) for message in run.sent(b"second")] == [Welcome, Welcome], "again is no more"
    (refused,) = run.sent(b"third")
    assert isinstance(refused, Refuse) and "2 verifiers" in refused.reason
    run.say(Refuse("the verifier leaves"), b"second")
    run.say(hello(), b"third")
    run.run()
    assert isinstance(run.sent(b"third")[0], Welcome)


def test_a_verifier_that_never_closes_its_requests_is_refused(monkeypatch):
    """Denied requests are remembered too."""
    monkeypatch.setattr(draft_server, "MAX_OPEN_REQUESTS", 12)
    run = Harness()
    run.open(1, [3, 1, 4])
    run.say(hello(), b"other")
    for request in range(13):
        run.say(Open(request, 0, [1, 2]), b"other")
    run.run()
    welcome, refused = run.sent(b"other")
    assert isinstance(refused, Refuse) and "12 requests" in refused.reason
    assert run.server.stats().num_sessions == 1
    run.outcome({1: (0, 7)})
    run.run()
    assert run.take([1]) and run.proposals[1]


def test_a_flood_does_not_keep_the_draft_from_its_work(monkeypatch):
    monkeypatch.setattr(draft_server, "MAX_MESSAGES_AT_ONCE", 8)
    run = Harness()
    run.open(1, [3, 1, 4])
    run.run()
    run.outcome({1: (0, 7)})
    receive = run.channel.receive

    def flooded(timeout_ms):
        if len(run.channel.inbox) < 2:
            run.channel.inbox.append(Received(b"flood", Ping(1)))
        return receive(timeout_ms)

    run.channel.receive = flooded
    run.run()
    assert len(run.server._deferred) <= 8
    assert run.take([1]) and run.proposals[1]
