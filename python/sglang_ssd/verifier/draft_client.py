"""The verifier's line to one draft: sessions, outcomes out, proposals in. Every wait has a limit.

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

from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow, VerifierSession
from sglang_ssd.wire.channel import VerifierChannel
from sglang_ssd.wire.messages import (
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


class RowOutcome(NamedTuple):
    """What one verification decided for one session, its tokens already committed."""

    session: VerifierSession
    num_accepted: int
    bonus_token: int


class DraftClient:
    """Speaks for TP rank 0 of one verifier to one draft."""

    def __init__(self, endpoint: str, hello: Hello, round_timeout_ms: float) -> None:
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
        self._round_timeout_ms = round_timeout_ms
        self._channel = VerifierChannel(endpoint)
        self._tickets: dict[int, list[VerifierSession]] = {}
        self._sessions: set[VerifierSession] = set()
        self._next_ticket = 1
        self._last_ping_s = 0.0
        self._unanswered_since_s: float | None = None

    # -- connection ----------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> Welcome:
        """Shake hands. Raises ``DraftRefused`` or ``DraftUnreachable``."""
        self._channel.send(self._hello)
        deadline = time.monotonic() + timeout_s
        while self.welcome is None:
            remaining_ms = (deadline - time.monotonic()) * 1e3
            if remaining_ms <= 0:
                raise DraftUnreachable(f"no draft answered at {self.endpoint} within {timeout_s:.0f} s")
            try:
                message = self._channel.receive(remaining_ms)
            except MalformedMessage as error:
                raise DraftRefused(f"the peer at {self.endpoint} speaks another protocol: {error}") from None
            if isinstance(message, Refuse):
                raise DraftRefused(message.reason)
            if message is not None:
                self._take(message)
        return self.welcome

    def tend(self) -> None:
        """Take in what has arrived and keep the line alive. Called once a scheduler turn."""
        self._receive(timeout_ms=0)
        now = time.monotonic()
        if now - self._last_ping_s >= PING_INTERVAL_S:
            self._last_ping_s = now
            if self._refusal is None:
                self._send(Ping(self._next_ticket, [session.key.request for session in self._sessions]))
            else:
                self._channel.send(self._hello)
            if self._unanswered_since_s is None:
                self._unanswered_since_s = now
            elif now - self._unanswered_since_s > DOWN_AFTER_S:
                # Nothing more is queued for it; what it then still holds is freed when it is greeted.
                self._start_over("it does not answer")
                self._become("down")

    def refresh_stats(self, timeout_s: float = 0.2) -> DraftStats:
        """The draft's counters as they are now, or as it last said when it does not answer in time."""
        known = self.draft_stats
        deadline = time.monotonic() + timeout_s
        if self.state == "alive" and self._send(Ping(self._next_ticket)):
            while self.draft_stats is known and (remaining_ms := (deadline - time.monotonic()) * 1e3) > 0:
                self._receive(remaining_ms)
        return self.draft_stats

    def disconnect(self) -> None:
        self._channel.send(Refuse("the verifier leaves"))
        self._channel.close()

    # -- sessions ------------------------------------------------------------------------------------------------

    def open(self, session: VerifierSession) -> None:
        """Tell the draft of a request whose tokens are all certain (no bonus token is pending)."""
        self._sessions.add(session)
        session.is_held = self._send(open_message(session, session.tokens))

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
                session.is_held = self._send(open_message(session, session.tokens[:-1]))
                self._count(reopened=int(session.is_held))
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

    def collect(self, sessions: list[VerifierSession]) -> list[ProposedRow]:
        """The proposals of these sessions. Waits for those that are on their way, up to the round's limit."""
        deadline = time.monotonic() + (self._round_timeout_ms / 1e3 if self.state == "alive" else 0.0)
        while any(session.ticket is not None for session in sessions):
            remaining_ms = (deadline - time.monotonic()) * 1e3
            self._receive(max(0.0, remaining_ms))
            if remaining_ms <= 0:
                self._give_up(sessions)
                break
        proposals = [session.proposed or NOTHING_PROPOSED for session in sessions]
        for session in sessions:
            session.proposed = None
        return proposals

    def _give_up(self, sessions: list[VerifierSession]) -> None:
        late = [session for session in sessions if session.ticket is not None]
        if not late:
            return
        for session in late:
            session.ticket = None
        if self.state == "alive":
            # Only here was anything waited for.
            self._count(timeouts=1)
            self._become("degraded")

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
        sent = self._channel.send(message)
        if not sent:
            self._count(sends_refused=1)
        return sent

    def _receive(self, timeout_ms: float) -> None:
        """Take in one message, waiting for it up to the limit, and the others that are already here."""
        for _ in range(_MAX_MESSAGES_AT_ONCE):
            try:
                message = self._channel.receive(timeout_ms)
            except MalformedMessage as error:
                if not self.counts.malformed:  # The first is said, all are counted.
                    logger.warning("dropped what the draft at %s sent: %s", self.endpoint, error)
                self._count(malformed=1)
            else:
                if message is None:
                    return
                self._unanswered_since_s = None
                self._take(message)
            timeout_ms = 0

    def _take(self, message) -> None:
        if isinstance(message, Proposal):
            self._take_proposal(message)
        elif isinstance(message, Pong):
            self.draft_stats, self.estimates = message.stats, message.estimates
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
        self._become("alive")

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
            self._channel.send(self._hello)
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
        """Whether these are ``[num_tokens, M]`` of 4 bytes each, M at most the vocabulary, or nothing at all."""
        num_bytes = len(q_ids)
        if num_tokens == 0:
            return num_bytes == len(q_probs) == 0
        max_bytes = 4 * num_tokens * self._hello.vocab_size
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
