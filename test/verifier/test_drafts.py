"""Several drafts of one verifier: who serves what, one limit for all, and requests that outlive their draft."""

from __future__ import annotations

import pytest
from draft.toy import VOCAB_SIZE, ToyRunner, continuation, patient_policy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from verifier.in_memory import Clock, DraftEnd, Line, drafts_on

from sglang_ssd.algorithm.round_limit import CEILING_MS, MIN_WAITS, RoundLimit
from sglang_ssd.draft.server import DraftIdentity, DraftServer
from sglang_ssd.verifier.draft_client import (
    DOWN_AFTER_S,
    PING_INTERVAL_S,
    DraftRefused,
    DraftUnreachable,
    RowOutcome,
)
from sglang_ssd.verifier.drafts import sum_of
from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow, VerifierSession
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

TIMEOUT_MS = 100.0
HELLO = Hello(PROTOCOL_VERSION, VOCAB_SIZE, "toy", 3, 8, 512, "the-target")


def welcome(boot_id: str = "boot", max_sessions: int = 8, context_length: int = 512) -> Welcome:
    return Welcome(PROTOCOL_VERSION, "the-draft", VOCAB_SIZE, context_length, max_sessions, 4096, boot_id)


class Harness:
    """A verifier with scripted drafts on lines that share a clock."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *welcomes: Welcome, limit: RoundLimit | None = None
    ) -> None:
        clock = Clock()
        self.lines = [Line(clock) for _ in welcomes]
        self.drafts = drafts_on(self.lines, HELLO, limit or RoundLimit(TIMEOUT_MS), patch)
        for line, message in zip(self.lines, welcomes, strict=True):
            line.say(message)
        self.drafts.connect(timeout_s=1)
        self.heard()
        self.num_requests = 0

    def heard(self) -> list[list]:
        """What each draft was told since the last call."""
        return [line.heard() for line in self.lines]

    def open(self, num_requests: int) -> list[VerifierSession]:
        sessions = []
        for _ in range(num_requests):
            self.num_requests += 1
            sessions.append(VerifierSession(RowKey(self.num_requests, 0), None, [1, 2, 3]))
            self.drafts.open(sessions[-1])
        return sessions

    def outcome(self, *sessions: VerifierSession) -> list[Round | None]:
        """Bonus token 7 for each; what each draft was asked."""
        for session in sessions:
            session.tokens.append(7)
        self.drafts.send_outcomes([RowOutcome(session, 0, 7) for session in sessions])
        self.told = self.heard()
        return [next((m for m in told if isinstance(m, Round)), None) for told in self.told]

    def collect(self, sessions: list[VerifierSession]) -> tuple[list[ProposedRow], float]:
        """Proposals, and the milliseconds that were waited."""
        started_s = self.lines[0].now_s
        proposals = self.drafts.collect(sessions)
        return proposals, (self.lines[0].now_s - started_s) * 1e3

    def num_at(self) -> list[int]:
        return [client.num_sessions() for client in self.drafts.clients]

    def states(self) -> list[str]:
        return [client.state for client in self.drafts.clients]

    def pass_time(self, seconds: float, *answering: int) -> None:
        """Time passes, in which the drafts at these places answer pings."""
        for _ in range(round(seconds / PING_INTERVAL_S)):
            self.lines[0].now_s += PING_INTERVAL_S
            self.drafts.tend()
            for place in answering:
                for message in self.lines[place].heard():
                    if isinstance(message, Ping):
                        self.lines[place].say(Pong(message.nonce, DraftStats()))
        self.drafts.tend()


@pytest.fixture
def run(monkeypatch):
    return Harness(monkeypatch, welcome(), welcome())


def answer(line: Line, question: Round, token: int) -> None:
    rows = list(range(len(question.requests)))
    line.say(Proposal(question.ticket, rows, ["hit"] * len(rows), [[token] for _ in rows]))


def hit(token: int) -> ProposedRow:
    return ProposedRow("hit", [token])


# -- who serves what -------------------------------------------------------------------------------------------------


def test_requests_are_spread_and_stay(run):
    sessions = run.open(4)
    assert run.num_at() == [2, 2] and run.drafts.num_sessions() == 4
    told = run.heard()
    assert [[m.request for m in messages] for messages in told] == [[1, 3], [2, 4]]
    for _ in range(3):
        first, second = run.outcome(*sessions)
        assert (first.requests, second.requests) == ([1, 3], [2, 4])
        answer(run.lines[0], first, 10)
        answer(run.lines[1], second, 20)
        assert run.collect(sessions) == ([hit(10), hit(20), hit(10), hit(20)], 0)
    run.drafts.close([sessions[0], sessions[2]], "finished")
    assert run.heard() == [[Close([1, 3], [0, 0], "finished")], []]
    run.open(2)
    assert run.num_at() == [2, 2], "what is free is filled"


def test_a_draft_gets_what_its_size_allows(monkeypatch):
    run = Harness(monkeypatch, welcome(max_sessions=30), welcome(max_sessions=10))
    run.open(20)
    assert run.num_at() == [15, 5]


def test_what_other_verifiers_have_there_counts(run):
    run.lines[0].say(Pong(1, DraftStats(num_sessions=4)))
    run.drafts.tend()
    run.open(4)
    assert run.num_at() == [0, 4]
    run.lines[1].say(Pong(1, DraftStats(num_sessions=4)))
    run.drafts.tend()
    run.open(2)
    assert run.num_at() == [1, 5], "its own are not counted twice"


# -- one limit for all -----------------------------------------------------------------------------------------------


def test_drafts_are_waited_for_together(run):
    sessions = run.open(2)
    questions = run.outcome(*sessions)

    def speak_in_turns() -> None:
        run.lines[0].now_s += 0.03
        place = 1 if not run.lines[1].to_verifier and sessions[1].proposed is None else 0
        answer(run.lines[place], questions[place], 10 * (place + 1))

    run.lines[0].when_waiting = speak_in_turns
    proposals, waited_ms = run.collect(sessions)
    assert proposals == [hit(10), hit(20)] and waited_ms == pytest.approx(60)
    assert run.states() == ["alive", "alive"]


def test_two_silent_drafts_cost_one_limit(run):
    sessions = run.open(2)
    run.outcome(*sessions)
    proposals, waited_ms = run.collect(sessions)
    assert proposals == [NOTHING_PROPOSED] * 2 and waited_ms == pytest.approx(TIMEOUT_MS)
    assert run.states() == ["degraded", "degraded"] and run.drafts.counts.timeouts == 2
    run.outcome(*sessions)
    assert run.collect(sessions)[1] == 0


def test_a_dead_draft_costs_the_others_one_limit_and_then_nothing(run):
    sessions = run.open(4)
    first, second = run.outcome(*sessions)
    answer(run.lines[0], first, 10)
    proposals, waited_ms = run.collect(sessions)
    assert proposals == [hit(10), NOTHING_PROPOSED] * 2 and waited_ms == pytest.approx(TIMEOUT_MS)
    for _ in range(5):
        first, second = run.outcome(*sessions)
        assert second is None and sorted(first.requests) == [1, 2, 3, 4]
        answer(run.lines[0], first, 10)
        assert run.collect(sessions) == ([hit(10)] * 4, 0)


def test_a_draft_that_is_not_asked_is_not_waited_for(run):
    one, two = run.open(2)
    run.outcome(two)
    first, _ = run.outcome(one)
    answer(run.lines[0], first, 10)
    assert run.collect([one]) == ([hit(10)], 0)


# -- drafts that are lost --------------------------------------------------------------------------------------------


def test_requests_move_within_two_rounds_and_are_opened_from_committed_tokens(run):
    sessions = run.open(4)
    questions = run.outcome(*sessions)
    answer(run.lines[1], questions[1], 20)
    run.collect(sessions)  # The first limit.
    assert run.states() == ["degraded", "alive"]
    first, second = run.outcome(*sessions)
    closed, *others = run.told[0]
    assert closed == Close([1, 3], [0, 0], "moved") and first is None
    assert not any(isinstance(message, (Open, Round)) for message in others)
    opened = [message for message in run.told[1] if isinstance(message, Open)]
    assert [(m.request, m.token_ids) for m in opened] == [(1, [1, 2, 3, 7]), (3, [1, 2, 3, 7])]
    assert sorted(second.requests) == [1, 2, 3, 4] and second.committed_lens == [5] * 4
    answer(run.lines[1], second, 21)
    assert run.collect(sessions) == ([hit(21)] * 4, 0)
    assert run.num_at() == [0, 4] and all(session.is_held for session in sessions)
    assert run.drafts.clients[0].counts.moved == 2 and run.drafts.counts.reopened == 2


@pytest.mark.parametrize("loss", ["refuses", "breaks", "is silent"])
def test_however_a_draft_is_lost_its_requests_move(run, loss):
    sessions = run.open(4)
    run.outcome(*sessions)
    if loss == "refuses":
        run.lines[0].say(Refuse("say Hello first"))
    elif loss == "breaks":
        run.lines[0].breaks()
    else:
        run.pass_time(2 * DOWN_AFTER_S, 1)
    run.drafts.tend()
    assert run.states()[0] == ("down" if loss == "is silent" else "degraded")
    run.heard()
    _, second = run.outcome(*sessions)
    assert sorted(second.requests) == [1, 2, 3, 4]
    answer(run.lines[1], second, 20)
    assert run.collect(sessions) == ([hit(20)] * 4, 0)
    assert run.drafts.counts.timeouts == 0, "nobody waited"


def test_a_draft_that_returns_gets_new_requests_only(run):
    sessions = run.open(4)
    run.lines[0].breaks()
    run.drafts.tend()
    run.outcome(*sessions)
    run.lines[0].is_connected = True
    run.lines[0].say(welcome("boot-2"))
    run.drafts.tend()
    assert run.states() == ["alive", "alive"] and run.drafts.state == "alive"
    first, second = run.outcome(*sessions)
    assert first is None and len(second.requests) == 4, "sticky"
    run.open(3)
    assert run.num_at() == [3, 4]


def test_without_a_living_draft_requests_stay_and_move_to_the_first_that_returns(run):
    sessions = run.open(2)
    for line in run.lines:
        line.breaks()
    run.drafts.tend()
    late = run.open(1)
    assert run.drafts.state == "degraded" and not run.drafts.is_any_alive
    assert run.outcome(*sessions, *late) == [None, None]
    assert run.collect([*sessions, *late]) == ([NOTHING_PROPOSED] * 3, 0)
    run.lines[1].is_connected = True
    run.lines[1].say(welcome("boot-2"))
    run.drafts.tend()
    _, second = run.outcome(*sessions, *late)
    assert sorted(second.requests) == [1, 2, 3] and run.num_at() == [0, 3]


def test_a_late_answer_of_the_draft_that_was_left_is_dropped(run):
    (session, _) = run.open(2)
    first, _ = run.outcome(session)
    run.collect([session])
    _, second = run.outcome(session)
    answer(run.lines[0], first, 10)
    answer(run.lines[1], second, 20)
    assert run.collect([session]) == ([hit(20)], 0)
    run.drafts.tend()
    assert run.drafts.clients[0].counts.late_rows == 1 and run.states() == ["alive", "alive"]


def test_everything_is_closed_where_it_is(run):
    sessions = run.open(6)
    run.lines[1].breaks()
    run.drafts.tend()
    run.outcome(*sessions)
    run.drafts.close(sessions, "aborted")
    told = run.heard()
    (closed,) = [message for message in told[0] if isinstance(message, Close)]
    assert sorted(closed.requests) == [1, 2, 3, 4, 5, 6] and run.num_at() == [0, 0]
    assert run.drafts.num_sessions() == 0


def test_a_request_longer_than_the_drafts_context_is_not_told(monkeypatch):
    """It would be denied, and may be larger than the draft takes in one message."""
    run = Harness(monkeypatch, welcome(context_length=4))
    (session,) = run.open(1)
    assert session.is_held
    run.outcome(session)
    run.lines[0].say(Refuse("say Hello first"), welcome("boot-2", context_length=4))
    run.drafts.tend()
    run.heard()
    session.tokens += [7, 7]
    assert run.outcome(session) == [None] and run.told == [[]]
    assert run.collect([session]) == ([NOTHING_PROPOSED], 0) and not session.is_held


# -- the limit that is measured --------------------------------------------------------------------------------------


def test_the_limit_follows_the_waits_and_a_slow_draft_is_not_taken_for_dead_for_long(monkeypatch):
    limit = RoundLimit()
    run = Harness(monkeypatch, welcome(), limit=limit)
    (session,) = run.open(1)
    delay_ms = 5.0
    questions = []

    def speak() -> None:
        if questions:
            run.lines[0].now_s += min(delay_ms, limit.ms) / 1e3
            if delay_ms <= limit.ms:
                answer(run.lines[0], questions.pop(), 10)

    run.lines[0].when_waiting = speak
    assert limit.ms == CEILING_MS
    for _ in range(MIN_WAITS):
        questions[:] = [q for q in run.outcome(session) if q]
        assert run.collect([session])[0] == [hit(10)]
    assert limit.ms < CEILING_MS
    delay_ms = 3000.0
    num_late = 0
    for _ in range(20):
        questions[:] = [q for q in run.outcome(session) if q]
        if run.collect([session])[0] == [NOTHING_PROPOSED]:
            num_late += 1
            run.lines[0].say(Pong(1, DraftStats()))  # It lives.
            run.drafts.tend()
    assert num_late == 2 and limit.ms >= 3000.0 and run.states() == ["alive"]


def test_a_draft_that_was_away_does_not_make_the_limit_longer(monkeypatch):
    limit = RoundLimit()
    run = Harness(monkeypatch, welcome(), limit=limit)
    for _ in range(MIN_WAITS):
        limit.observe_wait(1.0)
    before_ms = limit.ms
    (session,) = run.open(1)
    run.outcome(session)
    run.collect([session])
    run.pass_time(2 * CEILING_MS / 1e3)
    run.lines[0].say(welcome())
    run.drafts.tend()
    assert run.states() == ["alive"] and limit.ms == before_ms


# -- start and figures -----------------------------------------------------------------------------------------------


def test_every_draft_that_is_named_must_answer(monkeypatch):
    with pytest.raises(DraftUnreachable, match="in-memory-1 within 3 s"):
        clock = Clock()
        lines = [Line(clock), Line(clock)]
        drafts = drafts_on(lines, HELLO, RoundLimit(TIMEOUT_MS), monkeypatch)
        lines[0].say(welcome())
        drafts.connect(timeout_s=3)
    assert clock.now_s == pytest.approx(1003, abs=0.1), "one limit for all"
    assert all(isinstance(line.heard()[0], Hello) for line in lines)


def test_a_draft_that_refuses_is_named(monkeypatch):
    lines = [Line(clock := Clock()), Line(clock)]
    drafts = drafts_on(lines, HELLO, RoundLimit(TIMEOUT_MS), monkeypatch)
    lines[0].say(welcome())
    lines[1].say(Refuse("the tokenizers differ"))
    with pytest.raises(DraftRefused, match="in-memory-1 refuses: the tokenizers differ"):
        drafts.connect(timeout_s=3)


def test_figures_of_several_drafts(run):
    run.lines[0].say(Pong(1, DraftStats(hits=3, acceptance=0.5, lookahead=2), {"num_rounds": 3.0}))
    run.lines[1].say(
        Pong(1, DraftStats(hits=4, acceptance=0.7, lookahead=5, fallback_threshold=6.0), {"num_rounds": 9.0})
    )
    stats = run.drafts.refresh_stats()
    assert (stats.hits, stats.lookahead, stats.fallback_threshold) == (7, 5, 6.0)
    assert stats.acceptance == pytest.approx(0.6)
    assert run.drafts.estimates == {"num_rounds": 9.0}
    run.lines[0].breaks()
    run.drafts.tend()
    assert (run.drafts.state, run.drafts.is_any_alive) == ("degraded", True)
    shown = run.drafts.describe()
    assert [(draft["endpoint"], draft["state"], draft["draft"]["hits"]) for draft in shown] == [
        ("ipc://in-memory-0", "degraded", 3),
        ("ipc://in-memory-1", "alive", 4),
    ]


def test_the_sum_of_one_is_itself():
    stats = DraftStats(**{name: index + 1 for index, name in enumerate(DraftStats.__struct_fields__)})
    assert sum_of([stats]) == stats
    assert sum_of([DraftStats()]) == DraftStats()
    assert sum_of([stats, stats]).total_kv_slots == 2 * stats.total_kv_slots


# -- against two real drafts -----------------------------------------------------------------------------------------


class TwoDrafts(RuleBasedStateMachine):
    """Two drafts with toy models, either of which may be silent, cut off or restarted at any time. What is proposed is
    always the draft's continuation, every request has one home, and in the end nothing is held."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        clock = Clock()
        self.lines = [Line(clock), Line(clock)]
        self.drafts = drafts_on(self.lines, HELLO, RoundLimit(TIMEOUT_MS), self.patch)
        self.servers: list[DraftServer] = [self.started(line) for line in self.lines]
        for line in self.lines:
            line.when_waiting = lambda: self.drafts_work(4)
        self.drafts.connect(timeout_s=1)
        self.sessions: list[VerifierSession] = []
        self.num_requests = 0

    @staticmethod
    def started(line: Line) -> DraftServer:
        identity = DraftIdentity("toy", "toy", max_sessions=8)
        return DraftServer(DraftEnd(line), ToyRunner(64, 4096), identity, patient_policy)

    @rule(turns=st.integers(0, 6))
    def drafts_work(self, turns):
        for line, server in zip(self.lines, self.servers, strict=True):
            for _ in range(turns if line.is_connected else 0):
                server.turn()

    @precondition(lambda self: len(self.sessions) < 6)
    @rule(prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6))
    def a_request_enters(self, prompt):
        self.num_requests += 1
        session = VerifierSession(RowKey(self.num_requests, 0), None, list(prompt))
        self.sessions.append(session)
        self.drafts.open(session)
        session.tokens.append(3)
        self.drafts.send_outcomes([RowOutcome(session, 0, 3)])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def a_round(self, data):
        self.verify(data.draw(st.lists(st.sampled_from(self.sessions), min_size=1, unique_by=id)))

    def verify(self, sessions: list[VerifierSession]) -> list[ProposedRow]:
        """All of every proposal is accepted."""
        proposals = self.drafts.collect(sessions)
        outcomes = []
        for session, proposal in zip(sessions, proposals, strict=True):
            assert proposal.token_ids == continuation(session.tokens, len(proposal.token_ids))
            session.tokens += [*proposal.token_ids, 5]
            outcomes.append(RowOutcome(session, len(proposal.token_ids), 5))
        self.drafts.send_outcomes(outcomes)
        return proposals

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def requests_leave(self, data):
        leaving = data.draw(st.lists(st.sampled_from(self.sessions), min_size=1, unique_by=id))
        self.sessions = [session for session in self.sessions if session not in leaving]
        self.drafts.close(leaving, "finished")

    @rule(place=st.integers(0, 1), is_stalled=st.booleans())
    def a_draft_is_silent(self, place, is_stalled):
        self.lines[place].is_stalled = is_stalled

    @rule(place=st.integers(0, 1))
    def a_link_breaks(self, place):
        if self.lines[place].is_connected:
            self.lines[place].breaks()

    @rule(place=st.integers(0, 1), is_new_process=st.booleans())
    def a_draft_returns(self, place, is_new_process):
        line = self.lines[place]
        if not line.is_connected:
            line.is_connected = True
            if is_new_process:
                self.servers[place] = self.started(line)

    @rule(seconds=st.sampled_from([0.0, PING_INTERVAL_S, 2 * DOWN_AFTER_S]))
    def time_passes(self, seconds):
        self.lines[0].now_s += seconds
        self.drafts.tend()

    @invariant()
    def every_request_has_one_home(self):
        assert self.drafts.num_sessions() == len(self.sessions)
        assert sum(client.num_sessions() for client in self.drafts.clients) == len(self.sessions)
        assert self.drafts.counts.malformed == 0

    def settle(self) -> None:
        for _ in range(4):
            self.lines[0].now_s += PING_INTERVAL_S
            self.drafts.tend()
            self.drafts_work(40)
        self.drafts.tend()

    def teardown(self) -> None:
        try:
            for place, line in enumerate(self.lines):
                line.is_stalled = False
                self.a_draft_returns(place, is_new_process=False)
            self.settle()
            assert self.drafts.state == "alive"
            for _ in range(3):
                proposals = self.verify(self.sessions)
                self.drafts_work(40)
            assert all(proposal.token_ids for proposal in proposals), "all are served again"
            self.drafts.close(self.sessions, "finished")
            self.settle()
            assert self.drafts.num_sessions() == 0
            for server in self.servers:
                assert server.stats().num_sessions == server.stats().num_branch_rows == 0
        finally:
            self.patch.undo()


TestTwoDrafts = TwoDrafts.TestCase
TestTwoDrafts.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
