"""The line between a ``DraftClient`` and its draft, in memory and without real time, so that every test decides what
arrives, what is lost and how long nothing is heard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from sglang_ssd.verifier import draft_client
from sglang_ssd.verifier.draft_client import DraftClient
from sglang_ssd.wire.channel import MalformedFromPeer, Received
from sglang_ssd.wire.messages import (
    Hello,
    MalformedMessage,
    ToDraft,
    ToVerifier,
    decode_to_draft,
    decode_to_verifier,
    encode,
)


class Line:
    """Stands for ``VerifierChannel``, for ``DraftChannel`` (``draft_end``) and for the client's clock."""

    def __init__(self) -> None:
        self.to_draft: deque[bytes] = deque()
        self.to_verifier: deque[bytes] = deque()
        self.is_full = False
        #: What the draft said is still on its way.
        self.is_stalled = False
        self.is_closed = False
        self.now_s = 1000.0
        #: Who the draft hears. A verifier that is started again is somebody else.
        self.peer = b"verifier 1"
        #: Called when the verifier waits and nothing is there: the draft's chance to speak.
        self.when_waiting: Callable[[], None] = lambda: None

    # -- VerifierChannel and clock -----------------------------------------------------------------------------------

    def send(self, message: ToDraft) -> bool:
        if self.is_full:
            return False
        self.to_draft.append(encode(message))
        return True

    def receive(self, timeout_ms: float) -> ToVerifier | None:
        if not self.to_verifier and timeout_ms > 0:
            self.when_waiting()
        if self.is_stalled or not self.to_verifier:
            self.now_s += max(0.0, timeout_ms) / 1e3
            return None
        return decode_to_verifier(self.to_verifier.popleft())

    def close(self) -> None:
        self.is_closed = True

    def monotonic(self) -> float:
        return self.now_s

    # -- the draft's end ---------------------------------------------------------------------------------------------

    def heard(self) -> list[ToDraft]:
        """What the client has sent since the last call."""
        messages = [decode_to_draft(frame) for frame in self.to_draft]
        self.to_draft.clear()
        return messages

    def say(self, *messages: ToVerifier) -> None:
        self.to_verifier.extend(encode(message) for message in messages)


class DraftEnd:
    """Stands for ``DraftChannel``."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def receive(self, timeout_ms: float | None) -> Received | None:
        if not self._line.to_draft:
            return None
        try:
            return Received(self._line.peer, decode_to_draft(self._line.to_draft.popleft()))
        except MalformedMessage as error:
            raise MalformedFromPeer(self._line.peer, str(error)) from None

    def send(self, peer: bytes, message: ToVerifier) -> bool:
        if peer == self._line.peer:
            self._line.say(message)
        return peer == self._line.peer


def client_on(line: Line, hello: Hello, round_timeout_ms: float, patch: pytest.MonkeyPatch) -> DraftClient:
    """A client that speaks over ``line`` and takes the time from it; not connected yet."""
    patch.setattr(draft_client, "VerifierChannel", lambda endpoint: line)
    patch.setattr(draft_client, "time", line)
    return DraftClient("ipc://in-memory", hello, round_timeout_ms)
