"""The verifier's line to one draft: sessions, outcomes out, proposals in. ``drafts`` waits, for all drafts at once.

States: ``alive`` while answers come in time; ``degraded`` after one did not, or after the draft refused us: nothing is
waited for until the draft says something again; ``down`` when it does not answer pings either. Requests go on in every
state. A draft that refuses us (it was restarted, or it freed us) is greeted until it says Welcome; until then it is
told nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from sglang_ssd.algorithm.round_limit import CEILING_MS, RoundLimit
from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow, VerifierSession
from sglang_ssd.wire.channel import LinkBroken, VerifierChannel
from sglang_ssd.wire.curve import VerifierKeys
from sglang_ssd.wire.messages import (
    MAX_TOP_M,
    Close,
    CloseReason,
    DraftStats,
    Estimate,
    Hello,
    MalformedMessage,
    Open,
    Ping,
    Pong,
    Proposal,
    Refuse,
    Round,
    Welcome,
)

logger = logging.getLogger(__name__)

DraftState = Literal["alive", "degraded", "down"]

PING_INTERVAL_S = 1.0
#: A ping that is unanswered for so long means that the draft is down.
DOWN_AFTER_S = 5.0
#: Messages taken in at once. A draft that never stops talking does not hold the verifier.
_MAX_MESSAGES_AT_ONCE = 256


class DraftRefused(RuntimeError):
    """The draft does not work with this verifier. Holds one line that says why."""


class DraftUnreachable(RuntimeError):
    """No draft answered in time."""


class ClientCounts(NamedTuple):
    """What went wrong on the line and was dropped on purpose."""

    timeouts: int = 0
    late_rows: int = 0
    malformed: int = 0
    sends_refused: int = 0
    reopened: int = 0
    moved: int = 0


class RowOutcome(NamedTuple):
    """What one verification decided for one session, its tokens already committed."""

    session: VerifierSession
    num_accepted: int
    bonus_token: int


class DraftClient:
    """Speaks for TP rank 0 of one verifier to one draft. ``limit`` is told when a round waited for a draft that turns
    out to be slow."""

    def __init__(
        self, endpoint: str, hello: Hello, limit: RoundLimit, keys: VerifierKeys | None = None
    ) -> None:
        self.endpoint = endpoint
        self.state: DraftState = "alive"
        self.welcome: Welcome | None = None
        self.draft_stats = DraftStats()
        #: What the draft learnt of our rounds.
        self.estimates: dict[str, Estimate] = {}
        self.counts = ClientCounts()
        self._hello = hello
        #: Why the draft does not know us; None while its Welcome stands.
        self._refusal: str | None = "not greeted yet"
        self._limit = limit
        self.channel = VerifierChannel(endpoint, keys)
        self._tickets: dict[int, list[VerifierSession]] = {}
        self._sessions: set[VerifierSession] = set()
        self._next_ticket = 1
        self._last_ping_s = 0.0
        self._unanswered_since_s: float | None = None
        #: When a round began to wait in vain; None once the draft spoke again.
        self._waited_since_s: float | None = None
        #: Sessions of other verifiers at this draft, when it last said.
        self._num_foreign_sessions = 0

    # -- connection ----------------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Say Hello. ``await_welcome`` takes in the answer."""
        self.channel.send(self._hello)

    def await_welcome(self, timeout_s: float, deadline_s: float) -> Welcome:
        """Shake hands before this moment of the monotonic clock, ``timeout_s`` after the start. Raises ``DraftRefused`` or
        ``DraftUnreachable``."""
        warned_of = None
        while self.welcome is None:
            remaining_ms = (deadline_s - time.monotonic()) * 1e3
            problem = self.channel.handshake_problem
            if remaining_ms <= 0:
                because = f": {problem}" if problem else ""
                raise DraftUnreachable(
                    f"no draft answered at {self.endpoint} within {timeout_s:.0f} s{because}"
                )
            if problem and problem != warned_of:
                logger.warning("draft at %s: %s", self.endpoint, problem)
                warned_of = problem
            try:
                message = self.channel.receive(min(remaining_ms, PING_INTERVAL_S * 1e3))
            except MalformedMessage as error:
                raise DraftRefused(f"the peer at {self.endpoint} speaks another protocol: {error}") from None
            if isinstance(message, Refuse):
                raise DraftRefused(f"the draft at {self.endpoint} refuses: {message.reason}")
            if isinstance(message, LinkBroken) or (message is None and self.channel.is_connected):
                # A greeting that was sent before the connection stood may be lost.
                self.greet()
            elif message is not None:
                self._take(message)
        return self.welcome

    def tend(self) -> None:
        """Take in what has arrived and keep the line alive. Called once a scheduler turn."""
        self.receive()
        now = time.monotonic()
        if now - self._last_ping_s >= PING_INTERVAL_S:
            self._last_ping_s = now
            if self._refusal is None:
                self._send(Ping(self._next_ticket, [session.key.request for session in self._sessions]))
            elif self.channel.is_connected:
                # Without a connection the greeting that was sent when it broke waits for the next one. A draft that is
                # stopped finds many when it goes on; all but the first tell it nothing.
                self.greet()
            if self._unanswered_since_s is None:
                self._unanswered_since_s = now
            elif now - self._unanswered_since_s > DOWN_AFTER_S:
                # Only greetings are queued for it now; what it then still holds is freed by the first.
                self._start_over("it does not answer")
                self._become("down")

    def ask_stats(self) -> bool:
        """Ask for the draft's counters; False when it is not there to answer."""
        return self.state == "alive" and self._send(Ping(self._next_ticket))

    def learn_anew(self) -> None:
        """The target has other weights: what the draft learnt of our rounds is forgotten. It is greeted again, so that
        requests are opened there again."""
        self.estimates = {}
        self._start_over("what it learnt is of other weights of the target")

    def disconnect(self) -> None:
        if self.channel.is_connected:
            self.channel.send(Refuse("the verifier leaves"))
        self.channel.close()

    # -- sessions ------------------------------------------------------------------------------------------------

    def open(self, session: VerifierSession) -> None:
        """Tell the draft of a request whose tokens are all certain (no bonus token is pending)."""
        self.adopt(session)
        session.is_held = self._open_at_draft(session, len(session.tokens))

    def adopt(self, session: VerifierSession) -> None:
        """Take a request over from another draft; its next outcome opens it here."""
        self._sessions.add(session)
        session.is_held, session.ticket = False, None

    def move_away(self, sessions: list[VerifierSession]) -> None:
        """These requests go on with another draft."""
        self.close(sessions, "moved")
        self._count(moved=len(sessions))

    def _open_at_draft(self, session: VerifierSession, num_tokens: int) -> bool:
        """Whether the draft was told of this request with so many of its tokens. It is not told of one that is longer than
        its context, nor is a draft that does not know us told of any: asked every round, neither may cost a copy."""
        fits = self.welcome is not None and num_tokens <= self.welcome.context_length
        if not fits or self._refusal is not None:
            return False
        return self._send(open_message(session, session.tokens[:num_tokens]))

    def close(self, sessions: Iterable[VerifierSession], reason: CloseReason) -> None:
        """Forget these sessions on both sides."""
        keys = []
        for session in sessions:
            self._sessions.discard(session)
            session.ticket = None
            keys.append(session.key)
        self._forget_settled_tickets()
        message = Close([key.request for key in keys], [key.generation for key in keys], reason)
        if keys and self._refusal is None and not self._send(message):
            self._start_over("the queue to it is full and a Close was lost")

    def num_sessions(self) -> int:
        return len(self._sessions)

    def num_tickets(self) -> int:
        """Rounds whose answer is awaited."""
        return len(self._tickets)

    def load(self) -> float:
        """Share of the draft's sessions that are taken, as far as is known here."""
        num_sessions = len(self._sessions) + self._num_foreign_sessions
        return num_sessions / (self.welcome.max_sessions if self.welcome else 1)

    # -- rounds --------------------------------------------------------------------------------------------------

    def send_outcomes(
        self, outcomes: list[RowOutcome], saguaro_c: float = 1.0, verify_ms: float = 0.0
    ) -> None:
        """Say how a verification ended. What the draft does not hold is opened again first. ``saguaro_c``: the scale of
        the next guesses (residual sampling). ``verify_ms``: what the verification took, 0 for a prompt."""
        rows: list[RowOutcome] = []
        for outcome in outcomes:
            session = outcome.session
            if session not in self._sessions:
                continue
            if not session.is_held:
                # Opened without the bonus token: for the draft this is a prompt whose first token came.
                session.is_held = self._open_at_draft(session, len(session.tokens) - 1)
                if not session.is_held:
                    session.proposed = session.ticket = None
                    continue
                self._count(reopened=1)
                outcome = RowOutcome(session, 0, outcome.bonus_token)
            rows.append(outcome)
        if not rows:
            return
        ticket = self._next_ticket
        self._next_ticket += 1
        sent = self._send(
            Round(
                ticket,
                [row.session.key.request for row in rows],
                [row.session.key.generation for row in rows],
                [len(row.session.tokens) for row in rows],
                [row.num_accepted for row in rows],
                [row.bonus_token for row in rows],
                saguaro_c,
                verify_ms,
            )
        )
        for row in rows:
            row.session.proposed = None if sent else NOTHING_PROPOSED
            row.session.ticket = ticket if sent else None
            row.session.is_held = row.session.is_held and sent
        self._forget_settled_tickets()
        if sent:
            self._tickets[ticket] = [row.session for row in rows]

    def is_worth_waiting(self, sessions: list[VerifierSession]) -> bool:
        """Whether proposals for these sessions are on their way."""
        return self.state == "alive" and any(session.ticket is not None for session in sessions)

    def give_up(self, sessions: list[VerifierSession], waited_ms: float) -> None:
        """The round goes on without what has not come, after it waited so long."""
        if self.is_worth_waiting(sessions):
            self._count(timeouts=1)
            self._waited_since_s = time.monotonic() - waited_ms / 1e3
            self._become("degraded")
        for session in sessions:
            session.ticket = None

    def _forget_settled_tickets(self) -> None:
        """Keep the tickets that a session waits for, so never more than there are sessions."""
        self._tickets = {
            ticket: sessions
            for ticket, sessions in self._tickets.items()
            if any(session.ticket == ticket for session in sessions)
        }

    # -- the line ------------------------------------------------------------------------------------------------

    def _send(self, message) -> bool:
        """Queue one message. False, and nothing sent, when the queue is full or the draft does not know us."""
        if self._refusal is not None:
            return False
        sent = self.channel.send(message)
        if not sent:
            self._count(sends_refused=1)
        return sent

    def receive(self) -> None:
        """Take in what has arrived."""
        for _ in range(_MAX_MESSAGES_AT_ONCE):
            try:
                message = self.channel.receive(0)
            except MalformedMessage as error:
                if not self.counts.malformed:  # The first is said, all are counted.
                    logger.warning("dropped what the draft at %s sent: %s", self.endpoint, error)
                self._count(malformed=1)
            else:
                if message is None:
                    return
                self._take(message)

    def _take(self, message) -> None:
        if isinstance(message, LinkBroken):
            self._start_over(message.reason)
            self._become("degraded")
            return
        self._unanswered_since_s = None
        if isinstance(message, Proposal):
            self._take_proposal(message)
        elif isinstance(message, Pong):
            self.draft_stats, self.estimates = message.stats, message.estimates
            self._num_foreign_sessions = max(0, message.stats.num_sessions - len(self._sessions))
        elif isinstance(message, Ping):
            self._send(Pong(message.nonce, DraftStats()))
        elif isinstance(message, Welcome):
            if self.welcome is None or message.boot_id != self.welcome.boot_id:
                for session in self._sessions:
                    session.is_held = False
            self.welcome, self._refusal = message, None
        elif isinstance(message, Refuse):
            self._start_over(message.reason)
            self._become("degraded")
            return
        self._learn_from_late_answer()
        self._become("alive")

    def _learn_from_late_answer(self) -> None:
        """A draft that speaks soon after it was not waited for any longer is slow; one that was gone was not."""
        if self._waited_since_s is not None:
            if (time.monotonic() - self._waited_since_s) * 1e3 <= CEILING_MS:
                self._limit.observe_slow_draft()
            self._waited_since_s = None

    def _start_over(self, reason: str) -> None:
        """What the draft holds of us is not certain: greet it, which frees all of it there, and open again what is
        still needed."""
        if reason != self._refusal:
            logger.warning("the draft at %s: %s", self.endpoint, reason)
        if self._refusal is None:
            # One greeting for many refusals: all that was on its way to a draft that was restarted brings one.
            for session in self._sessions:
                session.is_held = False
                session.ticket = None
            self._waited_since_s = None
            self._hello = msgspec.structs.replace(self._hello, greeting=self._hello.greeting + 1)
            self.greet()
            self._last_ping_s = time.monotonic()
        self._refusal = reason

    def _take_proposal(self, message: Proposal) -> None:
        sessions = self._tickets.get(message.ticket)
        if sessions is None:
            self._count(late_rows=len(message.rows))
            return
        for i, (row, source, token_ids) in enumerate(
            zip(message.rows, message.sources, message.token_ids, strict=True)
        ):
            if not 0 <= row < len(sessions):
                self._count(malformed=1)
                continue
            session = sessions[row]
            if session.ticket != message.ticket:
                self._count(late_rows=1)
                continue
            session.ticket = None
            if not self._is_legal(token_ids):
                self._count(malformed=1)
                session.proposed = NOTHING_PROPOSED
                session.is_held = False
                continue
            q_ids, q_probs = (message.q_ids[i], message.q_probs[i]) if message.q_ids else (b"", b"")
            if not self._is_law(q_ids, q_probs, len(token_ids)):
                # Without a law the tokens are verified as one-hot, which is exact whatever they were drawn from.
                self._count(malformed=1)
                q_ids = q_probs = b""
            session.proposed = ProposedRow(source, token_ids, q_ids, q_probs)
            if source == "unknown":
                session.is_held = False

    def _is_legal(self, token_ids: list[int]) -> bool:
        vocab_size = self._hello.vocab_size
        return len(token_ids) <= self._hello.lookahead and all(0 <= token < vocab_size for token in token_ids)

    def _is_law(self, q_ids: bytes, q_probs: bytes, num_tokens: int) -> bool:
        """Whether these are ``[num_tokens, M]`` of 4 bytes each, M within its limits, or nothing at all."""
        num_bytes = len(q_ids)
        if num_tokens == 0:
            return num_bytes == len(q_probs) == 0
        max_bytes = 4 * num_tokens * min(MAX_TOP_M, self._hello.vocab_size)
        return num_bytes == len(q_probs) <= max_bytes and num_bytes % (4 * num_tokens) == 0

    def _become(self, state: DraftState) -> None:
        if state != self.state:
            logger.log(
                logging.INFO if state == "alive" else logging.WARNING,
                "draft at %s is %s (was %s)",
                self.endpoint,
                state,
                self.state,
            )
            self.state = state

    def _count(self, **deltas: int) -> None:
        self.counts = self.counts._replace(
            **{name: getattr(self.counts, name) + d for name, d in deltas.items()}
        )


def open_message(session: VerifierSession, token_ids: list[int]) -> Open:
    """Tell the draft of this request with these tokens."""
    return Open(*session.key, token_ids, session.draft_temperature, session.law.seed)
