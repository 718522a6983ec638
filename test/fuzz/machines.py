"""Both state machines, each fed by a peer that says anything: whatever comes is taken or refused, and leaves nothing."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from draft.toy import VOCAB_SIZE, ToyChannel, ToyRunner
from verifier.in_memory import Line, drafts_on

from sglang_ssd.algorithm.round_limit import RoundLimit
from sglang_ssd.draft.server import DraftIdentity, DraftServer
from sglang_ssd.verifier.draft_client import RowOutcome
from sglang_ssd.verifier.session import VerifierSession
from sglang_ssd.wire.channel import MalformedFromPeer, Received
from sglang_ssd.wire.messages import (
    PROTOCOL_VERSION,
    Close,
    DraftStats,
    Hello,
    MalformedMessage,
    Open,
    Ping,
    Pong,
    Proposal,
    Refuse,
    Round,
    RowKey,
    Welcome,
    decode_to_draft,
    decode_to_verifier,
    encode,
)

#: Seconds of one core that the frames of one connection may take.
CPU_LIMIT_S = 10.0
PEER = b"anybody"
HELLO = Hello(PROTOCOL_VERSION, VOCAB_SIZE, "toy", 3, 6, 96, "the-target")
WELCOME = Welcome(PROTOCOL_VERSION, "the-draft", VOCAB_SIZE, 96, 8, 600, "boot")

#: What a verifier says, and what a draft answers: where mutations start.
CONVERSATIONS = {
    "draft": [
        [Open(1, 0, [3, 1, 4], 0.7, 5), Round(1, [1], [0], [4], [0], [7]), Close([1], [0], "finished")],
        [
            Open(1, 0, [3, 1, 4, 1, 5]),
            Open(2, 0, [2, 7, 1]),
            Round(1, [1, 2], [0, 0], [6, 4], [0, 0], [7, 8], 0.5, 3.0),
            Round(2, [1, 2], [0, 0], [7, 6], [0, 1], [7, 8]),
            Ping(4, [1]),
            Round(3, [1], [0], [9], [1], [3]),
        ],
        [HELLO, Open(1, 0, [9] * 90), Open(1, 1, [9] * 20), Round(1, [1], [1], [21], [0], [9]), Refuse("bye")],
    ],
    "verifier": [
        [WELCOME, Proposal(1, [0, 1], ["hit", "neural"], [[1, 2, 3], [4]]), Pong(1, DraftStats(), {"a": 1.0})],
        [Proposal(1, [1], ["ngram"], [[1]]), Proposal(1, [0], ["unknown"], [[]]), Ping(9)],
        [Proposal(1, [0], ["hit"], [[1, 2]], [bytes(16)], [bytes(16)]), Refuse("say Hello first"), WELCOME],
    ],
}  # fmt: skip


class Machines:
    """Takes the frames of one connection after another. Raises AssertionError when one leaves something behind or takes
    too long; no other exception is expected."""

    def __init__(self) -> None:
        self.channel = ToyChannel()
        self.runner = ToyRunner(num_rows=24, num_slots=600, context_length=96)
        self.draft = DraftServer(self.channel, self.runner, DraftIdentity("toy", "toy", 8))
        self.taken: Counter[str] = Counter()
        self.slowest_cpu_ms = 0.0

    def take(self, side: str, frames: list[bytes]) -> None:
        started_s = time.process_time()
        {"draft": self._to_draft, "verifier": self._to_verifier}[side](frames)
        cpu_s = time.process_time() - started_s
        self.slowest_cpu_ms = max(self.slowest_cpu_ms, cpu_s * 1e3)
        assert cpu_s < CPU_LIMIT_S, f"{cpu_s:.1f} s of one core"

    def _to_draft(self, frames: list[bytes]) -> None:
        self._say(HELLO)
        for frame in frames:
            try:
                message = decode_to_draft(frame)
            except MalformedMessage as error:
                self.taken["malformed"] += 1
                self.channel.inbox.append(MalformedFromPeer(PEER, str(error)))
                self.draft.turn()
            else:
                self._say(message)
        self._say(Refuse("the verifier leaves"))
        assert self.draft.held_at_rest() == []
        self.channel.sent.clear()

    def _say(self, message) -> None:
        """The frame arrives in the middle of a forward, if one is due."""
        self.taken[type(message).__name__] += 1
        received = Received(PEER, message)
        self.runner.in_the_middle = lambda: self.channel.inbox.append(received)
        self.draft.turn()
        if self.runner.in_the_middle is not None:
            self.runner.in_the_middle()
            self.runner.in_the_middle = None
        self.draft.turn()

    def _to_verifier(self, frames: list[bytes]) -> None:
        line = Line()
        with pytest.MonkeyPatch.context() as patch:
            drafts = drafts_on([line], HELLO, RoundLimit(100.0), patch)
            line.say(WELCOME)
            drafts.connect(timeout_s=1)
            sessions = [VerifierSession(RowKey(request, 0), None, [request, 2, 3]) for request in (1, 2)]
            for session in sessions:
                drafts.open(session)
            for frame in frames:
                self.taken[name_of(frame)] += 1
                for session in sessions:
                    session.tokens.append(7)
                drafts.send_outcomes([RowOutcome(session, 0, 7) for session in sessions])
                line.to_verifier.append(frame)
                for proposal in drafts.collect(sessions):
                    assert len(proposal.token_ids) <= HELLO.lookahead
                    assert all(0 <= token < VOCAB_SIZE for token in proposal.token_ids)
                drafts.tend()
                line.heard()
            drafts.close(sessions, "finished")
            assert drafts.num_sessions() == drafts.num_tickets() == 0


def name_of(frame: bytes) -> str:
    try:
        return type(decode_to_verifier(frame)).__name__
    except MalformedMessage:
        return "malformed"


def conversations() -> list[tuple[str, list[bytes]]]:
    """The side that hears it, and its frames."""
    return [
        (side, list(map(encode, messages))) for side, all_of in CONVERSATIONS.items() for messages in all_of
    ]
