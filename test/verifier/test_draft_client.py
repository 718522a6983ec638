"""The verifier's line to a draft that answers, is late, lies, leaves, comes back or never was there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
from draft.toy import VOCAB_SIZE, ToyRunner, continuation, patient_policy, ranks_after
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from verifier.in_memory import Clock, DraftEnd, Line, drafts_on

from sglang_ssd.algorithm.round_limit import RoundLimit
from sglang_ssd.algorithm.target_law import SamplingLaw
from sglang_ssd.draft import server as draft_server
from sglang_ssd.draft.server import SILENT_PEER_S, DraftIdentity, DraftServer
from sglang_ssd.verifier import draft_client
from sglang_ssd.verifier.draft_client import (
    DOWN_AFTER_S,
    PING_INTERVAL_S,
    DraftClient,
    DraftRefused,
    DraftUnreachable,
    RowOutcome,
)
from sglang_ssd.verifier.drafts import Drafts
from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow, VerifierSession
from sglang_ssd.wire.channel import DraftChannel, LinkBroken, RunDirectory
from sglang_ssd.wire.messages import (
    PROTOCOL_VERSION,
    Close,
    DraftStats,
    Hello,
    Open,
    Ping,
    Pong,
    Proposal,
    Refuse,
    Round,
    RowKey,
    Welcome,
)

K = 3
TIMEOUT_MS = 100.0
HELLO = Hello(PROTOCOL_VERSION, VOCAB_SIZE, "toy", K, 8, 512, "the-target")
#: What is said when something went wrong for the first time.
AGAIN = msgspec.structs.replace(HELLO, greeting=1)


def welcome(boot_id: str = "boot-1") -> Welcome:
    return Welcome(PROTOCOL_VERSION, "the-draft", VOCAB_SIZE, 512, 8, 4096, boot_id)


class Harness:
    """A client that is connected to a scripted draft, and its sessions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.line = Line()
        self.drafts = drafts_on([self.line], HELLO, RoundLimit(TIMEOUT_MS), patch)
        (self.client,) = self.drafts.clients
        self.line.say(welcome())
        self.drafts.connect(timeout_s=1)
        assert self.line.heard() == [HELLO]

    def open(self, request: int, prompt: list[int] | None = None) -> VerifierSession:
        session = VerifierSession(RowKey(request, 0), object(), list(prompt or [request, 2, 3]))
        self.drafts.open(session)
        return session

    def outcomes(self, *rows: tuple[VerifierSession, int, int]) -> None:
        """Each row: a session, the number of its proposed tokens that were accepted (they are 10, 11, ...), its bonus
        token."""
        for session, num_accepted, bonus_token in rows:
            session.tokens += [*range(10, 10 + num_accepted), bonus_token]
        self.drafts.send_outcomes([RowOutcome(*row) for row in rows])

    def first_tokens(self, *sessions: VerifierSession) -> int:
        """Bonus token 7 for each; returns the ticket."""
        self.line.heard()
        self.outcomes(*((session, 0, 7) for session in sessions))
        (message,) = (m for m in self.line.heard() if isinstance(m, Round))
        return message.ticket

    def opened(self, *requests: int) -> tuple[list[VerifierSession], int]:
        """Sessions whose first proposal is awaited, and its ticket."""
        sessions = [self.open(request) for request in requests]
        return sessions, self.first_tokens(*sessions)

    def waited_ms(self, sessions: list[VerifierSession]) -> tuple[list[ProposedRow], float]:
        started_s = self.line.now_s
        proposals = self.drafts.collect(sessions)
        return proposals, (self.line.now_s - started_s) * 1e3


@pytest.fixture
def run(monkeypatch):
    return Harness(monkeypatch)


def hit(*token_ids: int) -> ProposedRow:
    return ProposedRow("hit", list(token_ids))


# -- the handshake ---------------------------------------------------------------------------------------------------


@pytest.fixture
def directory():
    run_directory = RunDirectory()
    yield run_directory
    run_directory.close()


@contextlib.contextmanager
def real_drafts(directory: RunDirectory):
    limit = RoundLimit(TIMEOUT_MS)
    drafts = Drafts([DraftClient(directory.endpoint("draft"), HELLO, limit)], limit)
    try:
        yield drafts
    finally:
        drafts.disconnect()


@contextlib.contextmanager
def answering(directory: RunDirectory, answer):
    """A draft in a thread that says ``answer`` to the first message; yields what it received."""
    received = []
    with contextlib.closing(DraftChannel(directory.endpoint("draft"))) as draft:

        def answer_once() -> None:
            peer, message = draft.receive(5000)
            received.append(message)
            draft.send(peer, answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        try:
            yield received
        finally:
            thread.join()


def test_handshake_over_a_socket(directory):
    with answering(directory, welcome()) as received, real_drafts(directory) as drafts:
        drafts.connect(timeout_s=5)
        assert drafts.clients[0].welcome == welcome() and received == [HELLO]
        assert drafts.state == "alive" and drafts.num_sessions() == 0


def test_a_draft_that_refuses_says_why(directory):
    with (
        answering(directory, Refuse("the tokenizers differ")),
        real_drafts(directory) as drafts,
        pytest.raises(DraftRefused, match="refuses: the tokenizers differ$"),
    ):
        drafts.connect(timeout_s=5)


def test_a_draft_that_is_not_there_is_named(directory):
    with real_drafts(directory) as drafts, pytest.raises(DraftUnreachable) as caught:
        drafts.connect(timeout_s=0.05)
    assert directory.endpoint("draft") in str(caught.value) and "\n" not in str(caught.value)


def test_a_draft_that_keeps_talking_of_something_else_is_unreachable(monkeypatch):
    line = Line()
    drafts = drafts_on([line], HELLO, RoundLimit(TIMEOUT_MS), monkeypatch)

    def talk() -> None:
        line.now_s += 0.1
        line.say(Ping(1))

    line.when_waiting = talk
    with pytest.raises(DraftUnreachable):
        drafts.connect(timeout_s=2)
    assert line.now_s == pytest.approx(1002, abs=0.2)


def test_a_peer_of_another_protocol_is_refused(monkeypatch):
    line = Line()
    drafts = drafts_on([line], HELLO, RoundLimit(TIMEOUT_MS), monkeypatch)
    line.to_verifier.append(b"SSH-2.0")
    with pytest.raises(DraftRefused, match="ipc://in-memory-0 speaks another protocol"):
        drafts.connect(timeout_s=1)


def test_an_endpoint_that_is_none_is_an_oserror():
    with pytest.raises(OSError, match="cannot connect to nowhere"):
        DraftClient("nowhere", HELLO, RoundLimit(TIMEOUT_MS))


def test_a_leaving_verifier_says_so(run):
    run.drafts.disconnect()
    (message,) = run.line.heard()
    assert isinstance(message, Refuse) and run.line.is_closed


def test_a_full_queue_of_a_real_socket_is_counted_and_nothing_raised(directory, monkeypatch):
    monkeypatch.setattr("sglang_ssd.wire.channel.QUEUE_LIMIT_MESSAGES", 4)
    with (
        real_drafts(directory) as drafts,
        contextlib.closing(DraftChannel(directory.endpoint("draft"))) as draft,
    ):
        thread = threading.Thread(target=lambda: draft.send(draft.receive(5000).peer, welcome()))
        thread.start()
        drafts.connect(timeout_s=5)
        thread.join()
        session = VerifierSession(RowKey(1, 0), None, [1, 2])
        drafts.open(session)
        for _ in range(100_000):  # What the kernel holds comes on top of the queues.
            session.tokens.append(7)
            drafts.send_outcomes([RowOutcome(session, 0, 7)])
            if drafts.counts.sends_refused:
                break
        drafts.tend()
        assert drafts.counts.sends_refused > 0
        assert drafts.collect([session]) == [NOTHING_PROPOSED]
        drafts.close([session], "finished")
        assert drafts.num_sessions() == 0


def test_a_connection_that_breaks_is_known_at_once_and_made_again(directory):
    """Nothing is waited for from a draft that was killed, and its successor is greeted."""
    session = VerifierSession(RowKey(1, 0), None, [1, 2])
    with real_drafts(directory) as drafts:
        with answering(directory, welcome()):
            drafts.connect(timeout_s=5)
            drafts.open(session)
            session.tokens.append(7)
            drafts.send_outcomes([RowOutcome(session, 0, 7)])
        drafts.limit = RoundLimit(60_000.0)
        assert drafts.collect([session]) == [NOTHING_PROPOSED]
        assert drafts.state == "degraded" and drafts.counts.timeouts == 0
        with answering(directory, welcome("boot-2")) as received:
            deadline_s = time.monotonic() + 30
            while drafts.state != "alive" and time.monotonic() < deadline_s:
                drafts.tend()
                time.sleep(0.01)
        assert received[0] in (AGAIN, Open(1, 0, [1, 2])), "or what was on its way to its predecessor"
        assert drafts.state == "alive" and drafts.clients[0].welcome.boot_id == "boot-2"


def test_a_draft_that_was_stopped_for_a_minute_takes_the_verifier_in_once(directory, monkeypatch):
    """The line holds, so that it then finds a minute of greetings."""
    greetings = []

    def policy(hello: Hello):
        greetings.append(hello.greeting)
        return patient_policy(hello)

    session = VerifierSession(RowKey(1, 0), None, [1, 2])
    with (
        real_drafts(directory) as drafts,
        contextlib.closing(DraftChannel(directory.endpoint("draft"))) as channel,
    ):
        (client,) = drafts.clients
        draft = DraftServer(channel, ToyRunner(), DraftIdentity("toy", "toy", 8), policy)

        def serve_until(condition) -> None:
            deadline_s = time.monotonic() + 30
            while not condition() and time.monotonic() < deadline_s:
                draft.turn()
                client.receive()

        thread = threading.Thread(target=drafts.connect, args=[30])
        thread.start()
        while not greetings:
            draft.turn()
        thread.join()
        clock = Clock()
        with monkeypatch.context() as patch:
            patch.setattr(draft_client, "time", clock)
            for _ in range(60):
                clock.now_s += PING_INTERVAL_S
                client.tend()
        assert client.state == "down"
        serve_until(lambda: client._refusal is None)
        drafts.open(session)
        session.tokens.append(7)
        drafts.send_outcomes([RowOutcome(session, 0, 7)])
        serve_until(lambda: session.ticket is None)
        assert session.proposed.token_ids == continuation([1, 2, 7], K)
        assert greetings == [0, 1]


# -- a draft that works ----------------------------------------------------------------------------------------------


def test_a_round(run):
    session = run.open(4, [1, 2, 3])
    assert run.line.heard() == [Open(4, 0, [1, 2, 3])] and session.is_held
    run.outcomes((session, 0, 7))
    (question,) = run.line.heard()
    assert question == Round(question.ticket, [4], [0], [4], [0], [7])
    run.line.say(Proposal(question.ticket, [0], ["hit"], [[10, 11, 12]]))
    assert run.waited_ms([session]) == ([hit(10, 11, 12)], 0)
    run.outcomes((session, 2, 9))
    (question,) = run.line.heard()
    assert question == Round(question.ticket, [4], [0], [7], [2], [9])
    assert session.tokens == [1, 2, 3, 7, 10, 11, 9]
    run.drafts.close([session], "finished")
    assert run.line.heard() == [Close([4], [0], "finished")]
    assert run.client.num_sessions() == 0 and run.client.counts == type(run.client.counts)()


@pytest.mark.parametrize(
    "messages",
    [
        [[0, 1, 2]],
        [[2, 0, 1]],
        [[1], [0, 2]],
        [[2], [1], [0]],
    ],
    ids=["one-message", "any-order", "two-messages", "row-by-row"],
)
def test_rows_come_in_any_order_and_number_of_messages(run, messages):
    sessions, ticket = run.opened(1, 2, 3)
    for rows in messages:
        run.line.say(Proposal(ticket, rows, ["hit"] * len(rows), [[10 + row] for row in rows]))
    assert run.waited_ms(sessions) == ([hit(10), hit(11), hit(12)], 0)
    assert run.client.counts.late_rows == 0


def test_proposals_that_come_while_the_verifier_waits(run):
    sessions, ticket = run.opened(1, 2)
    answers = [Proposal(ticket, [1], ["hit"], [[11]]), Ping(3), Proposal(ticket, [0], ["neural"], [[10]])]

    def answer() -> None:
        run.line.now_s += 0.03
        run.line.say(answers.pop(0))

    run.line.when_waiting = answer
    proposals, waited_ms = run.waited_ms(sessions)
    assert proposals == [ProposedRow("neural", [10]), hit(11)]
    assert waited_ms == pytest.approx(90) and run.client.state == "alive"
    assert Pong(3, DraftStats()) in run.line.heard()


def test_rows_of_several_tickets_are_collected_together(run):
    (one, two), first = run.opened(1, 2)
    (three,), second = run.opened(3)
    assert first != second
    run.line.say(Proposal(second, [0], ["hit"], [[30]]), Proposal(first, [1, 0], ["hit"] * 2, [[20], [10]]))
    assert run.waited_ms([three, one, two]) == ([hit(30), hit(10), hit(20)], 0)


def test_collect_waits_for_its_own_sessions_only(run):
    (one, two), ticket = run.opened(1, 2)
    run.line.say(Proposal(ticket, [0], ["hit"], [[10]]))
    assert run.waited_ms([one]) == ([hit(10)], 0)
    run.line.say(Proposal(ticket, [1], ["hit"], [[20]]))
    assert run.waited_ms([two]) == ([hit(20)], 0)


def test_a_proposal_is_collected_once(run):
    (session,), ticket = run.opened(1)
    run.line.say(Proposal(ticket, [0], ["hit"], [[10]]))
    assert run.drafts.collect([session]) == [hit(10)]
    assert run.waited_ms([session]) == ([NOTHING_PROPOSED], 0)


def test_empty_proposals_of_every_source(run):
    sessions, ticket = run.opened(1, 2, 3, 4, 5)
    sources = ["hit", "neural", "ngram", "none", "unknown"]
    run.line.say(Proposal(ticket, list(range(5)), sources, [[]] * 5))
    assert run.waited_ms(sessions) == ([ProposedRow(source, []) for source in sources], 0)
    assert [session.is_held for session in sessions] == [True, True, True, True, False]


def test_outcomes_of_strangers_and_of_nobody_are_not_sent(run):
    run.drafts.send_outcomes([])
    run.outcomes((VerifierSession(RowKey(1, 0), None, [1]), 0, 7))
    run.drafts.close([], "finished")
    assert run.line.heard() == []
    assert run.drafts.collect([]) == []


def test_draft_stats_are_kept(run):
    run.line.say(Pong(1, DraftStats(hits=5)))
    run.client.tend()
    assert run.client.draft_stats == DraftStats(hits=5)


def test_draft_stats_are_asked_for_within_a_limit(run):
    run.line.when_waiting = lambda: run.line.say(Pong(1, DraftStats(hits=5)))
    assert run.drafts.refresh_stats(timeout_s=0.1) == DraftStats(hits=5)
    assert [type(message) for message in run.line.heard()] == [Ping]
    run.line.when_waiting = lambda: None
    started_s = run.line.now_s
    assert run.drafts.refresh_stats(timeout_s=0.1) == DraftStats(hits=5), "what it last said"
    assert run.line.now_s - started_s == pytest.approx(0.1)
    run.opened(1)
    run.line.say(Refuse("say Hello first"))
    run.client.tend()
    started_s = run.line.now_s
    assert run.drafts.refresh_stats(timeout_s=0.1) == DraftStats(hits=5)
    assert run.line.now_s == started_s, "nobody is waited for who is not alive"


def test_how_a_request_is_sampled_is_said_each_time_it_is_opened(run):
    law = SamplingLaw(temperature=0.9, seed=-(2**63))
    session = VerifierSession(RowKey(1, 0), None, [1, 2], law, draft_temperature=0.7)
    run.drafts.open(session)
    assert run.line.heard() == [Open(1, 0, [1, 2], 0.7, -(2**63))]
    session.is_held = False
    session.tokens.append(7)
    run.drafts.send_outcomes([RowOutcome(session, 0, 7)], saguaro_c=0.25)
    opened, question = run.line.heard()
    assert opened == Open(1, 0, [1, 2], 0.7, -(2**63))
    assert question == Round(question.ticket, [1], [0], [3], [0], [7], 0.25)


# -- a draft that is late --------------------------------------------------------------------------------------------


def test_a_late_row_costs_one_wait_and_its_answer_is_never_taken_for_a_newer_ticket(run):
    (session, other), late_ticket = run.opened(1, 2)
    run.line.say(Proposal(late_ticket, [1], ["hit"], [[20]]))
    proposals, waited_ms = run.waited_ms([session, other])
    assert proposals == [NOTHING_PROPOSED, hit(20)], "who is in time does not suffer"
    assert waited_ms == pytest.approx(TIMEOUT_MS)
    assert run.client.state == "degraded" and run.client.counts.timeouts == 1

    ticket = run.first_tokens(session)
    assert run.waited_ms([session]) == ([NOTHING_PROPOSED], 0), "degraded: nothing is waited for"
    assert run.client.counts.timeouts == 1

    newest_ticket = run.first_tokens(session)
    run.line.say(Proposal(late_ticket, [0], ["hit"], [[10]]), Proposal(ticket, [0], ["hit"], [[11]]))
    run.client.tend()
    assert run.client.state == "alive" and run.client.counts.late_rows == 2
    assert session.proposed is None and session.ticket == newest_ticket
    run.line.say(Proposal(newest_ticket, [0], ["hit"], [[12]]))
    assert run.waited_ms([session]) == ([hit(12)], 0)
    assert session.is_held


def test_a_late_row_of_a_ticket_that_another_session_waits_for(run):
    (session, other), late_ticket = run.opened(1, 2)
    assert run.drafts.collect([session]) == [NOTHING_PROPOSED]
    ticket = run.first_tokens(session)
    run.line.say(
        Proposal(late_ticket, [0, 1], ["hit"] * 2, [[10], [20]]), Proposal(ticket, [0], ["hit"], [[11]])
    )
    assert run.drafts.collect([session, other]) == [hit(11), hit(20)]
    assert run.client.counts.late_rows == 1


def test_a_degraded_line_takes_what_is_already_there(run):
    (session,), _ = run.opened(1)
    run.drafts.collect([session])
    ticket = run.first_tokens(session)
    run.line.say(Proposal(ticket, [0], ["hit"], [[10]]))
    assert run.waited_ms([session]) == ([hit(10)], 0)
    assert run.client.state == "alive" and run.client.counts.timeouts == 1


@pytest.mark.parametrize(
    "word",
    [Ping(1), Pong(1, DraftStats()), welcome(), Proposal(99, [0], ["hit"], [[1]])],
    ids=lambda word: type(word).__name__,
)
def test_any_word_makes_the_draft_alive_again(run, word):
    (session,), _ = run.opened(1)
    run.drafts.collect([session])
    assert run.client.state == "degraded"
    run.line.say(word)
    run.client.tend()
    assert run.client.state == "alive"
    run.first_tokens(session)
    assert run.waited_ms([session])[1] == pytest.approx(TIMEOUT_MS), "and waited for again"


def test_duplicate_and_unknown_tickets_are_counted(run):
    (one, two), ticket = run.opened(1, 2)
    answer = Proposal(ticket, [0, 1], ["hit"] * 2, [[10], [20]])
    run.line.say(
        answer,
        answer,
        Proposal(ticket + 1, [0], ["hit"], [[1]]),
        Proposal(ticket, [1, 1], ["hit"] * 2, [[3]] * 2),
    )
    assert run.drafts.collect([one, two]) == [hit(10), hit(20)]
    assert run.client.counts.late_rows == 5 and run.client.counts.malformed == 0


def test_a_row_that_is_answered_twice_in_one_message(run):
    (session,), ticket = run.opened(1)
    run.line.say(Proposal(ticket, [0, 0], ["hit"] * 2, [[10], [11]]))
    assert run.drafts.collect([session]) == [hit(10)]
    assert run.client.counts.late_rows == 1


# -- pings -----------------------------------------------------------------------------------------------------------


def test_a_draft_that_answers_no_ping_is_down_and_comes_back(run):
    for _ in range(int(DOWN_AFTER_S / PING_INTERVAL_S) + 1):
        run.client.tend()
        assert run.client.state == "alive"
        run.line.now_s += PING_INTERVAL_S
    run.line.now_s += 0.001
    run.client.tend()
    assert run.client.state == "down"
    *pings, greeting = run.line.heard()
    assert len(pings) == DOWN_AFTER_S / PING_INTERVAL_S + 2 and all(isinstance(ping, Ping) for ping in pings)
    assert greeting == AGAIN

    session = run.open(1)
    run.outcomes((session, 0, 7))
    assert not session.is_held and run.line.heard() == [], (
        "nothing is queued for a draft that does not listen"
    )
    assert run.waited_ms([session]) == ([NOTHING_PROPOSED], 0)
    assert run.client.state == "down"

    run.line.say(welcome())
    run.client.tend()
    assert run.client.state == "alive"
    run.outcomes((session, 0, 8))
    opened, told = run.line.heard()
    assert isinstance(opened, Open) and opened.token_ids == session.tokens[:-1] and isinstance(told, Round)


def test_a_ping_names_what_is_open(run):
    """So that the draft can free what it was not told to close."""
    sessions, _ = run.opened(1, 2, 3)
    run.client.close(sessions[1:2], "finished")
    run.line.heard()
    run.line.now_s += PING_INTERVAL_S
    run.client.tend()
    (ping,) = run.line.heard()
    assert sorted(ping.open_requests) == [1, 3]


def test_pings_are_spaced(run):
    for _ in range(100):
        run.client.tend()
        run.line.now_s += PING_INTERVAL_S / 50
    assert len(run.line.heard()) == 2


def test_a_verifier_that_was_busy_does_not_take_the_draft_for_dead(run):
    """No ping was sent in a long forward of the target, so silence says nothing."""
    run.client.tend()
    run.line.say(Pong(1, DraftStats()))
    run.client.tend()
    run.line.now_s += 10 * DOWN_AFTER_S
    run.client.tend()
    assert run.client.state == "alive"
    run.line.now_s += 10 * DOWN_AFTER_S
    run.line.say(Pong(1, DraftStats()))
    run.client.tend()
    assert run.client.state == "alive"


# -- a draft that was restarted --------------------------------------------------------------------------------------


def test_sessions_are_opened_again_at_a_draft_that_was_restarted(run):
    """From the committed tokens; the pending bonus token arrives as the first outcome."""
    (one, two), ticket = run.opened(1, 2)
    run.line.say(Proposal(ticket, [0], ["hit"], [[10, 11]]), Refuse("say Hello first"))
    assert run.waited_ms([one, two]) == ([hit(10, 11), NOTHING_PROPOSED], 0), "no answer will come: no wait"
    assert run.line.heard() == [AGAIN]
    assert not one.is_held and not two.is_held

    run.outcomes((one, 2, 8), (two, 0, 9))
    assert run.line.heard() == [], "nothing is said to a draft that would not know of what"
    assert run.waited_ms([one, two]) == ([NOTHING_PROPOSED] * 2, 0)

    run.line.say(welcome("boot-2"))
    run.client.tend()
    assert run.client.state == "alive" and run.client.welcome.boot_id == "boot-2"
    run.line.heard()
    run.outcomes((one, 0, 5), (two, 0, 6))
    *opens, question = run.line.heard()
    assert opens == [Open(1, 0, [1, 2, 3, 7, 10, 11, 8]), Open(2, 0, [2, 2, 3, 7, 9])]
    assert question == Round(question.ticket, [1, 2], [0, 0], [8, 6], [0, 0], [5, 6])
    assert run.client.counts.reopened == 2
    run.line.say(Proposal(question.ticket, [0, 1], ["neural"] * 2, [[1], [2]]))
    assert run.drafts.collect([one, two]) == [ProposedRow("neural", [1]), ProposedRow("neural", [2])]
    run.outcomes((one, 0, 5))
    (question,) = run.line.heard()
    assert isinstance(question, Round), "opened again once"


def test_accepted_tokens_are_part_of_what_is_opened_again(run):
    (session,), ticket = run.opened(1)
    run.line.say(Proposal(ticket, [0], ["hit"], [[10, 11]]))
    run.drafts.collect([session])
    run.line.say(Refuse("say Hello first"), welcome("boot-2"))
    run.client.tend()
    run.line.heard()
    run.outcomes((session, 2, 8))
    opened, question = run.line.heard()
    assert opened == Open(1, 0, [1, 2, 3, 7, 10, 11])
    assert question == Round(question.ticket, [1], [0], [7], [0], [8]), (
        "num_accepted 0: the draft opens afresh"
    )


def test_a_welcome_of_another_boot_opens_again(run):
    (session,), ticket = run.opened(1)
    run.line.say(welcome("boot-2"))
    run.client.tend()
    run.outcomes((session, 0, 8))
    assert Open(1, 0, [1, 2, 3, 7]) in run.line.heard()


def test_a_session_that_enters_while_the_draft_is_away_is_opened_later(run):
    run.line.say(Refuse("say Hello first"))
    run.client.tend()
    session = run.open(1)
    assert not session.is_held and run.client.num_sessions() == 1
    run.line.say(welcome("boot-2"))
    run.client.tend()
    run.line.heard()
    run.outcomes((session, 0, 7))
    opened, question = run.line.heard()
    assert opened == Open(1, 0, [1, 2, 3]) and question.committed_lens == [4]


def test_new_weights_of_the_target_make_the_draft_learn_anew(run):
    (session,), ticket = run.opened(1)
    run.line.say(Proposal(ticket, [0], ["hit"], [[10, 11]]), Pong(1, DraftStats(), {"acceptance": 0.9}))
    run.client.tend()
    run.line.heard()
    run.drafts.learn_anew()
    assert run.line.heard() == [AGAIN] and run.client.estimates == {} and run.client.state == "alive"
    assert run.waited_ms([session]) == ([hit(10, 11)], 0), "any proposal is verified exactly"
    run.line.say(welcome())
    run.client.tend()
    run.outcomes((session, 0, 8))
    opened, question = run.line.heard()
    assert opened == Open(1, 0, [1, 2, 3, 7]) and question.requests == [1]


def test_many_refusals_bring_one_greeting(run, caplog):
    """Everything that was on its way to a draft that was restarted is refused; each greeting makes it forget us."""
    run.opened(1)
    run.line.say(*[Refuse("say Hello first")] * 200)
    run.client.tend()
    assert [m for m in run.line.heard() if isinstance(m, Hello)] == [AGAIN]
    assert len([record for record in caplog.records if "say Hello first" in record.message]) == 1


def test_a_draft_that_was_replaced_by_one_that_does_not_fit(run, caplog):
    """It is greeted once a ping interval, nothing is waited for, and it does not count as alive."""
    (session,), _ = run.opened(1)
    run.drafts.collect([session])
    heard = []

    def refuse() -> None:
        for message in run.line.heard():
            heard.append(message)
            run.line.say(Refuse("the tokenizers differ" if isinstance(message, Hello) else "say Hello first"))

    for _ in range(50):
        run.outcomes((session, 0, 7))
        refuse()
        assert run.waited_ms([session]) == ([NOTHING_PROPOSED], 0)
        run.line.now_s += PING_INTERVAL_S / 10
        run.client.tend()
        refuse()
    assert run.client.state == "degraded"
    first, *greetings = heard
    assert isinstance(first, Round) and set(greetings) == {AGAIN} and 5 <= len(greetings) <= 6
    assert sum("the tokenizers differ" in record.message for record in caplog.records) == 1


def test_greetings_are_repeated_until_welcome(run):
    run.line.say(Refuse("say Hello first"))
    run.client.tend()
    run.line.heard()
    for _ in range(3):
        run.line.now_s += PING_INTERVAL_S
        run.client.tend()
        assert run.line.heard() == [AGAIN]
    run.line.say(welcome("boot-2"))
    run.line.now_s += PING_INTERVAL_S
    run.client.tend()
    assert [type(message) for message in run.line.heard()] == [Ping]


# -- a draft that does not know, or lies -----------------------------------------------------------------------------


def test_an_unknown_row_is_opened_again(run):
    (one, two), ticket = run.opened(1, 2)
    run.line.say(Proposal(ticket, [0, 1], ["unknown", "hit"], [[], [20]]))
    assert run.drafts.collect([one, two]) == [ProposedRow("unknown", []), hit(20)]
    run.outcomes((one, 0, 8), (two, 0, 9))
    opened, question = run.line.heard()
    assert opened == Open(1, 0, [1, 2, 3, 7])
    assert question == Round(question.ticket, [1, 2], [0, 0], [5, 5], [0, 0], [8, 9])
    assert run.client.counts.reopened == 1 and run.client.counts.malformed == 0


@pytest.mark.parametrize("token_ids", [[1] * (K + 1), [VOCAB_SIZE], [1, -1], [2**63]])
def test_an_illegal_proposal_is_dropped_and_its_session_opened_again(run, token_ids):
    (one, two), ticket = run.opened(1, 2)
    run.line.say(Proposal(ticket, [0, 1], ["hit", "hit"], [token_ids, [VOCAB_SIZE - 1] * K]))
    assert run.waited_ms([one, two]) == ([NOTHING_PROPOSED, hit(*[VOCAB_SIZE - 1] * K)], 0)
    assert run.client.counts.malformed == 1
    run.outcomes((one, 0, 8), (two, 0, 8))
    opened, question = run.line.heard()
    assert opened == Open(1, 0, [1, 2, 3, 7]) and question.requests == [1, 2]


LAW = (b"\1\0\0\0" * 4, b"\0\0\x80\x3f" * 4)  # [2, 2]


@pytest.mark.parametrize(
    ("token_ids", "law"),
    [
        ([1, 2], (LAW[0], LAW[1][:-4])),
        ([1, 2], (LAW[0], b"")),
        ([1, 2], (LAW[0][:-4], LAW[1][:-4])),
        ([1, 2], (LAW[0][:-1], LAW[1][:-1])),
        ([1, 2, 3], LAW),
        ([], LAW),
        ([], (b"\0" * 4, b"")),
        ([1], (bytes(4 * (VOCAB_SIZE + 1)), bytes(4 * (VOCAB_SIZE + 1)))),
    ],
)
def test_a_law_of_the_wrong_size_is_dropped_and_its_tokens_kept(run, token_ids, law):
    """Tokens without a law are verified as one-hot, which is exact."""
    (one, two), ticket = run.opened(1, 2)
    q_ids, q_probs = zip(law, LAW, strict=True)
    run.line.say(Proposal(ticket, [0, 1], ["hit"] * 2, [token_ids, [3, 4]], list(q_ids), list(q_probs)))
    assert run.drafts.collect([one, two]) == [hit(*token_ids), ProposedRow("hit", [3, 4], *LAW)]
    assert run.client.counts.malformed == 1 and one.is_held


def test_laws_of_some_rows(run):
    (one, two, three), ticket = run.opened(1, 2, 3)
    widest = (bytes(4 * VOCAB_SIZE), bytes(4 * VOCAB_SIZE))
    q_ids, q_probs = zip((b"", b""), LAW, widest, strict=True)
    run.line.say(
        Proposal(ticket, [2, 0, 1], ["hit"] * 3, [[], [3, 4], [5]], list(q_ids), list(q_probs)),
    )
    proposals = run.drafts.collect([one, two, three])
    assert proposals == [ProposedRow("hit", [3, 4], *LAW), ProposedRow("hit", [5], *widest), hit()]
    assert run.client.counts.malformed == 0


@pytest.mark.parametrize("row", [1, -1, 2**63])
def test_a_row_out_of_range_is_counted(run, row):
    (session,), ticket = run.opened(1)
    run.line.say(Proposal(ticket, [row, 0], ["hit"] * 2, [[9], [10]]))
    assert run.waited_ms([session]) == ([hit(10)], 0)
    assert run.client.counts.malformed == 1


def test_nonsense_is_counted_and_is_no_sign_of_life(run):
    (session,), ticket = run.opened(1)
    run.drafts.collect([session])
    assert run.client.state == "degraded"
    run.line.to_verifier.extend([b"nonsense", b"", b"\x92\xa4Ping\x01"])
    run.client.tend()
    assert run.client.counts.malformed == 2 and run.client.state == "alive", "the last one is a ping"


@pytest.mark.parametrize("frame", [b"nonsense", b"\x92\xa4Ping\x01"])
def test_a_draft_that_never_stops_talking_holds_nobody(run, frame):
    (session,), _ = run.opened(1)
    receive = run.line.receive

    def endless(timeout_ms: float):
        run.line.now_s += 1e-5
        run.line.to_verifier.append(frame)
        return receive(timeout_ms)

    run.line.receive = endless
    run.client.tend()
    proposals, waited_ms = run.waited_ms([session])
    assert proposals == [NOTHING_PROPOSED]
    assert TIMEOUT_MS <= waited_ms <= TIMEOUT_MS + 10


# -- a full queue ----------------------------------------------------------------------------------------------------


def test_a_full_queue_costs_proposals_only(run):
    (session,), _ = run.opened(1)
    run.drafts.collect([session])
    run.line.is_full = True
    run.outcomes((session, 0, 8))
    assert run.client.counts.sends_refused == 1
    assert run.waited_ms([session]) == ([NOTHING_PROPOSED], 0), "nothing is on its way"
    run.outcomes((session, 0, 9))
    other = run.open(2)
    assert not other.is_held
    run.line.is_full = False
    run.outcomes((session, 0, 10), (other, 0, 7))
    *opens, question = run.line.heard()
    assert opens == [Open(1, 0, [1, 2, 3, 7, 8, 9]), Open(2, 0, [2, 2, 3])]
    assert question == Round(question.ticket, [1, 2], [0, 0], [7, 4], [0, 0], [10, 7])
    assert run.client.counts.reopened == 2


def test_a_close_that_was_lost_makes_the_draft_forget_everything(run):
    """It would hold the session for as long as this verifier lives."""
    (one, two), _ = run.opened(1, 2)
    run.drafts.collect([one, two])
    run.line.is_full = True
    run.drafts.close([one], "finished")
    assert run.client.num_sessions() == 1 and run.client.counts.sends_refused == 1
    run.line.is_full = False
    run.line.now_s += PING_INTERVAL_S
    run.client.tend()
    assert run.line.heard() == [AGAIN], "a greeting frees all that the draft holds of us"
    run.line.say(welcome())
    run.client.tend()
    run.line.heard()
    run.outcomes((two, 0, 8))
    opened, question = run.line.heard()
    assert opened == Open(2, 0, [2, 2, 3, 7]) and question.requests == [2]


# -- sessions that leave ---------------------------------------------------------------------------------------------


def test_close_names_its_sessions_and_forgets_them(run):
    (one, two, three), ticket = run.opened(1, 2, 3)
    run.drafts.close(iter([one, three]), "aborted")
    assert run.line.heard() == [Close([1, 3], [0, 0], "aborted")]
    assert run.client.num_sessions() == 1
    run.line.say(Proposal(ticket, [0, 1, 2], ["hit"] * 3, [[10], [20], [30]]))
    assert run.waited_ms([one, two, three]) == ([NOTHING_PROPOSED, hit(20), NOTHING_PROPOSED], 0)
    assert run.client.counts.late_rows == 2
    run.outcomes((one, 0, 8))
    assert run.line.heard() == [], "outcomes of closed sessions are not sent"


def test_a_generation_follows_another(run):
    (old,), ticket = run.opened(1)
    run.drafts.close([old], "retracted")
    new = VerifierSession(RowKey(1, 1), old.request, [1, 2, 3, 7])
    run.drafts.open(new)
    assert run.line.heard() == [Close([1], [0], "retracted"), Open(1, 1, [1, 2, 3, 7])]
    newer_ticket = run.first_tokens(new)
    run.line.say(Proposal(ticket, [0], ["hit"], [[10]]), Proposal(newer_ticket, [0], ["hit"], [[11]]))
    assert run.drafts.collect([new]) == [hit(11)]


def test_tickets_of_a_silent_draft_do_not_pile_up(run):
    sessions = [run.open(request) for request in range(1, 5)]
    for turn in range(300):
        for session in sessions[: 1 + turn % 4]:
            run.outcomes((session, 0, 7))
        if turn % 3 == 0:
            run.drafts.collect(sessions)
        assert run.client.num_tickets() <= len(sessions)
    run.drafts.close(sessions, "finished")
    assert run.client.num_tickets() == 0, "or closed requests stay in memory"
    assert run.client.num_sessions() == 0


# -- against the real draft ------------------------------------------------------------------------------------------


class Pair(RuleBasedStateMachine):
    """A client and the draft's real loop with a toy model. Anything may be late, lost, doubled, overtaken, garbled,
    refused or restarted; what is proposed is always the draft's own continuation of the committed tokens, and in the
    end nothing is held."""

    num_rows, num_slots, max_sessions = 64, 4096, 8

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.line = Line()
        clock = SimpleNamespace(monotonic=self.line.clock.monotonic, perf_counter=time.perf_counter)
        self.patch.setattr(draft_server, "time", clock)
        self.line.when_waiting = lambda: self.draft_works(self.turns_per_wait)
        self.turns_per_wait = 4
        self.num_verifiers = 0
        self.was_garbled = False
        self.start_draft()
        self.start_verifier()

    def start_verifier(self) -> None:
        self.num_verifiers += 1
        self.line.peer = b"verifier %d" % self.num_verifiers
        self.sessions: list[VerifierSession] = []
        self.num_requests = 0
        self.drafts = drafts_on([self.line], HELLO, RoundLimit(TIMEOUT_MS), self.patch)
        (self.client,) = self.drafts.clients
        self.line.is_full = self.line.is_stalled = False
        turns, self.turns_per_wait = self.turns_per_wait, 4
        self.drafts.connect(timeout_s=1)
        self.turns_per_wait = turns

    def start_draft(self) -> None:
        self.runner = ToyRunner(self.num_rows, self.num_slots)
        self.all_free = self.runner.pool.capacity()
        identity = DraftIdentity("toy", "toy", self.max_sessions)
        self.draft = DraftServer(DraftEnd(self.line), self.runner, identity, patient_policy)

    def enter(self, key: RowKey, tokens: list[int], num_turns: int, rank: int) -> None:
        """A request is prefilled; its first token is the draft's candidate of this rank."""
        session = VerifierSession(key, None, list(tokens))
        self.sessions.append(session)
        self.drafts.open(session)
        self.draft_works(num_turns)
        bonus_token = ranks_after(session.tokens, rank + 1)[rank]
        session.tokens.append(bonus_token)
        self.drafts.send_outcomes([RowOutcome(session, 0, bonus_token)])

    def leave(self, sessions: list[VerifierSession], reason: str) -> None:
        self.sessions = [session for session in self.sessions if session not in sessions]
        self.drafts.close(sessions, reason)

    def verify(
        self, sessions: list[VerifierSession], accepts: list[int], ranks: list[int]
    ) -> list[ProposedRow]:
        """One round: the row's first tokens are accepted, and the bonus token is the draft's candidate of this rank
        that differs from the rejected one."""
        proposals = self.drafts.collect(sessions)
        outcomes = []
        for session, proposal, num_accepted, rank in zip(sessions, proposals, accepts, ranks, strict=True):
            if proposal.token_ids:
                assert proposal.source in ("hit", "neural")
                # A draft may answer with fewer than K tokens where the rest is not worth the wait.
                assert proposal.token_ids == continuation(session.tokens, len(proposal.token_ids))
            else:
                assert proposal.source in ("none", "unknown")
            num_accepted = min(num_accepted, len(proposal.token_ids))
            session.tokens += proposal.token_ids[:num_accepted]
            rejected = proposal.token_ids[num_accepted : num_accepted + 1]
            candidates = [token for token in ranks_after(session.tokens, rank + 2) if token not in rejected]
            session.tokens.append(candidates[rank])
            outcomes.append(RowOutcome(session, num_accepted, candidates[rank]))
        self.drafts.send_outcomes(outcomes)
        return proposals

    # -- what requests do --------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < 5)
    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9),
        turns=st.integers(0, 3),
        rank=st.integers(0, 9),
    )
    def a_request_enters(self, prompt, turns, rank):
        self.num_requests += 1
        self.enter(RowKey(self.num_requests, 0), prompt, turns, rank)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), are_answers_late=st.booleans(), in_the_middle=st.booleans())
    def a_round(self, data, are_answers_late, in_the_middle):
        self.line.is_stalled = are_answers_late
        sessions = data.draw(st.lists(st.sampled_from(self.sessions), min_size=1, unique_by=id))
        size = dict(min_size=len(sessions), max_size=len(sessions))
        accepts, ranks = st.lists(st.integers(0, K), **size), st.lists(st.integers(0, 3), **size)
        self.verify(sessions, data.draw(accepts), data.draw(ranks))
        self.line.is_stalled = False
        if in_the_middle:
            arriving, self.line.to_draft = self.line.to_draft, deque()
            self.runner.in_the_middle = lambda: self.line.to_draft.extend(arriving)
            self.draft.turn()
            if self.runner.in_the_middle is not None:  # No forward was due.
                self.runner.in_the_middle = None
                self.line.to_draft.extend(arriving)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), reason=st.sampled_from(["finished", "aborted"]), is_queue_full=st.booleans())
    def requests_leave(self, data, reason, is_queue_full):
        was_full, self.line.is_full = self.line.is_full, is_queue_full
        self.leave(data.draw(st.lists(st.sampled_from(self.sessions), min_size=1, unique_by=id)), reason)
        self.line.is_full = was_full

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), turns=st.integers(0, 3), rank=st.integers(0, 9))
    def a_request_is_retracted_and_returns(self, data, turns, rank):
        session = data.draw(st.sampled_from(self.sessions))
        self.leave([session], "retracted")
        self.enter(RowKey(session.key.request, session.key.generation + 1), session.tokens, turns, rank)

    @rule()
    def the_target_gets_new_weights(self):
        self.drafts.learn_anew()

    # -- what the line and the draft do ------------------------------------------------------------------------------

    @rule(turns=st.integers(0, 8))
    def draft_works(self, turns):
        for _ in range(turns):
            self.draft.turn()

    @rule(turns=st.sampled_from([0, 1, 4, 20]))
    def the_draft_changes_its_pace(self, turns):
        self.turns_per_wait = turns

    @rule(seconds=st.sampled_from([0.0, PING_INTERVAL_S, 2 * DOWN_AFTER_S]))
    def the_line_is_tended(self, seconds):
        self.line.now_s += seconds
        self.client.tend()

    @rule(is_full=st.booleans())
    def the_queue_fills_or_empties(self, is_full):
        self.line.is_full = is_full

    @rule(
        tag=st.sampled_from(
            [b"Proposal", b"Welcome", b"Pong", b"Hello", b"Open", b"Round", b"Ping", b"Close"]
        )
    )
    def messages_are_lost(self, tag):
        self.line.to_draft = deque(frame for frame in self.line.to_draft if tag not in frame)
        self.line.to_verifier = deque(frame for frame in self.line.to_verifier if tag not in frame)

    @rule(data=st.data(), is_to_draft=st.booleans())
    def a_message_comes_again(self, data, is_to_draft):
        frames = self.on_the_way(is_to_draft)
        if frames:
            place = data.draw(st.integers(0, len(frames)))
            frames.insert(place, data.draw(st.sampled_from(list(frames))))

    @rule(data=st.data(), is_to_draft=st.booleans())
    def messages_overtake_each_other(self, data, is_to_draft):
        frames = self.on_the_way(is_to_draft)
        order = data.draw(st.permutations(list(frames)))
        frames.clear()
        frames.extend(order)

    @rule(data=st.data(), is_to_draft=st.booleans(), nonsense=st.sampled_from([b"", b"nonsense", None]))
    def a_message_is_garbled(self, data, is_to_draft, nonsense):
        frames = self.on_the_way(is_to_draft)
        places = [place for place, frame in enumerate(frames) if isinstance(frame, bytes)]
        if places:
            place = data.draw(st.sampled_from(places))
            frames[place] = frames[place][:-1] if nonsense is None else nonsense
            self.was_garbled = True

    def on_the_way(self, is_to_draft: bool) -> deque[bytes]:
        return self.line.to_draft if is_to_draft else self.line.to_verifier

    @rule(num_arrived=st.integers(0, 5))
    def the_connection_breaks(self, num_arrived):
        self.line.to_draft = deque(list(self.line.to_draft)[:num_arrived])
        self.line.to_verifier.clear()
        self.line.to_verifier.append(LinkBroken("the connection broke"))

    @rule(is_queue_kept=st.booleans(), is_noticed=st.booleans())
    def the_draft_is_started_again(self, is_queue_kept, is_noticed):
        if not is_queue_kept:
            self.line.to_draft.clear()
        self.start_draft()
        if is_noticed:
            self.line.to_verifier.append(LinkBroken("the connection broke"))

    @rule(says_so=st.booleans(), num_arrived=st.integers(0, 5))
    def the_verifier_is_started_again(self, says_so, num_arrived):
        if says_so:
            self.line.is_full = False
            self.client.disconnect()
        else:
            self.line.to_draft = deque(list(self.line.to_draft)[:num_arrived])
        # What was on its way to it is lost.
        self.draft_works(20)
        self.line.to_draft.clear()
        self.line.to_verifier.clear()
        self.start_verifier()

    @invariant()
    def the_client_holds_what_is_open(self):
        assert self.client.num_sessions() == len(self.sessions)
        assert self.client.num_tickets() <= len(self.sessions)
        assert self.was_garbled or self.client.counts.malformed == 0

    # -- the end -----------------------------------------------------------------------------------------------------

    def settle(self, seconds: int = 3) -> None:
        for _ in range(seconds):
            self.line.now_s += PING_INTERVAL_S
            self.client.tend()
            self.draft_works(40)
        self.client.tend()

    def teardown(self) -> None:
        try:
            self.line.is_full, self.line.is_stalled, self.turns_per_wait = False, False, 40
            self.settle()
            assert self.client.state == "alive"
            self.assert_all_are_served()
            self.leave(self.sessions, "finished")
            self.settle()
            if self.num_verifiers > 1:
                self.settle(int(SILENT_PEER_S) + 2)
            assert self.client.num_sessions() == self.client.num_tickets() == 0
            stats = self.draft.stats()
            assert stats.num_sessions == stats.num_branch_rows == 0
            assert self.draft.held_at_rest() == []
            assert not any(peer.denied for peer in self.draft._peers.values())
            self.runner.pool.evict()
            assert not self.runner.pool.left_behind and self.runner.pool.capacity() == self.all_free
        finally:
            self.patch.undo()

    def assert_all_are_served(self) -> None:
        """Whatever went wrong is over after a round of which the draft says that it does not know it."""
        num_rows = len(self.sessions)
        for _ in range(3):
            proposals = self.verify(self.sessions, [K] * num_rows, [0] * num_rows)
            self.draft_works(40)
        assert all(proposal.token_ids for proposal in proposals)


class TightPair(Pair):
    """With a draft that has no room for all: proposals may be missing, never wrong, and nothing leaks."""

    num_rows, num_slots, max_sessions = 10, 90, 3

    def assert_all_are_served(self) -> None:
        self.verify(self.sessions, [K] * len(self.sessions), [0] * len(self.sessions))


TestPair = Pair.TestCase
TestTightPair = TightPair.TestCase
TestPair.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTightPair.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
