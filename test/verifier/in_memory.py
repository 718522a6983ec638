"""The lines between ``Drafts`` and their drafts, in memory and without real time, so that every test decides what arrives,
what is lost and how long nothing is heard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from sglang_ssd.algorithm.round_limit import RoundLimit
from sglang_ssd.verifier import draft_client, drafts
from sglang_ssd.verifier.draft_client import DraftClient
from sglang_ssd.verifier.drafts import Drafts
from sglang_ssd.wire.channel import LinkBroken, MalformedFromPeer, Received
from sglang_ssd.wire.messages import (
    Hello,
    MalformedMessage,
    ToDraft,
    ToVerifier,
    decode_to_draft,
    decode_to_verifier,
    encode,
)


class Clock:
    """Stands for ``time``."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Line:
    """Stands for ``VerifierChannel``; ``DraftEnd`` is its other end."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.to_draft: deque[bytes] = deque()
        self.to_verifier: deque[bytes | LinkBroken] = deque()
        self.is_connected = True
        self.handshake_problem: str | None = None
        self.is_full = False
        #: What the draft said is still on its way.
        self.is_stalled = False
        self.is_closed = False
        #: Who the draft hears. A verifier that is started again is somebody else.
        self.peer = b"verifier 1"
        #: Called when the verifier waits and nothing is there: the draft's chance to speak.
        self.when_waiting: Callable[[], None] = lambda: None

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.clock.now_s = now_s

    @property
    def has_news(self) -> bool:
        return bool(self.to_verifier) and not self.is_stalled

    # -- VerifierChannel ---------------------------------------------------------------------------------------------

    def send(self, message: ToDraft) -> bool:
        if self.is_full:
            return False
        self.to_draft.append(encode(message))
        return True

    def receive(self, timeout_ms: float) -> ToVerifier | LinkBroken | None:
        wait_for_any([self], timeout_ms)
        if not self.has_news:
            return None
        news = self.to_verifier.popleft()
        return news if isinstance(news, LinkBroken) else decode_to_verifier(news)

    def close(self) -> None:
        self.is_closed = True

    # -- the draft's end ---------------------------------------------------------------------------------------------

    def heard(self) -> list[ToDraft]:
        """What the client has sent since the last call."""
        messages = [decode_to_draft(frame) for frame in self.to_draft]
        self.to_draft.clear()
        return messages

    def say(self, *messages: ToVerifier) -> None:
        self.to_verifier.extend(encode(message) for message in messages)

    def breaks(self) -> None:
        """The connection ends, and what was on its way is lost. It is made again with ``is_connected``."""
        self.to_draft.clear()
        self.to_verifier.clear()
        self.to_verifier.append(LinkBroken("the connection broke"))
        self.is_connected = False


def wait_for_any(lines: list[Line], timeout_ms: float) -> None:
    """Stands for that of ``wire.channel``."""
    if timeout_ms <= 0 or any(line.has_news for line in lines):
        return
    for line in lines:
        line.when_waiting()
    if not any(line.has_news for line in lines):
        # At least so much that it is later: a remainder may be too small to change the sum.
        lines[0].clock.now_s += max(timeout_ms, 1e-3) / 1e3


class DraftEnd:
    """Stands for ``DraftChannel``."""

    num_refused = 0

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


def drafts_on(lines: list[Line], hello: Hello, limit: RoundLimit, patch: pytest.MonkeyPatch) -> Drafts:
    """Clients that speak over ``lines``, which share a clock, and take the time from it; not connected yet."""
    waiting = iter(lines)
    patch.setattr(draft_client, "VerifierChannel", lambda endpoint, keys: next(waiting))
    for module in (draft_client, drafts):
        patch.setattr(module, "time", lines[0].clock)
    patch.setattr(drafts, "wait_for_any", wait_for_any)
    clients = [DraftClient(f"ipc://in-memory-{index}", hello, limit) for index in range(len(lines))]
    return Drafts(clients, limit)
