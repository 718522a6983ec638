"""ZeroMQ channels: DEALER on the verifier, ROUTER on the draft. They move messages and know nothing of their content.

Nothing here waits without a limit, and nothing a peer sends can raise anything but ``MalformedMessage``.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import tempfile
from typing import NamedTuple

import zmq

from sglang_ssd.wire.messages import (
    MalformedMessage,
    Refuse,
    ToDraft,
    ToVerifier,
    decode_to_draft,
    decode_to_verifier,
    encode,
)

#: Larger than any legal message (a prompt of a million tokens); ZeroMQ drops the connection of who sends more.
MAX_MESSAGE_BYTES = 16 << 20
#: Messages queued for one peer before sends are refused.
QUEUE_LIMIT_MESSAGES = 4096


class Received(NamedTuple):
    """One message and the peer that sent it."""

    peer: bytes
    message: ToDraft


class RunDirectory:
    """A private directory (mode 0700) for ``ipc://`` sockets, removed on ``close``."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="sglang-ssd-")

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class VerifierChannel:
    """The verifier's end of a connection to one draft. Raises ``OSError`` for an endpoint that is none."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_limits(self._socket)
        # A new identity for each connection: a draft can never mistake us for a predecessor that left sessions open.
        self._socket.setsockopt(zmq.IDENTITY, b"v" + secrets.token_bytes(8))
        self._was_connected = False
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise OSError(f"cannot connect to {endpoint}: {error}") from None

    def send(self, message: ToDraft) -> bool:
        """Queue one message. False, and nothing sent, when the queue to the draft is full."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: float) -> ToVerifier | None:
        """The next message, or None after ``timeout_ms``. Raises ``MalformedMessage``. A connection that broke and was
        made again reads as a ``Refuse``: what was on its way may be lost, so that nothing the draft holds is certain.
        """
        if not self._socket.poll(max(0, timeout_ms)):
            return None
        frame = self._socket.recv()
        if frame:
            return decode_to_verifier(frame)
        # The empty frame with which the draft's socket starts a connection.
        if self._was_connected:
            return Refuse("the connection broke and was made again")
        self._was_connected = True
        return self.receive(timeout_ms)

    def close(self) -> None:
        self._socket.close(linger=200)
        self._context.term()


class DraftChannel:
    """The draft's end: one socket for all verifiers. Raises ``OSError`` when it cannot listen there."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _set_limits(self._socket)
        # Sending to a peer that is gone must say so instead of dropping silently.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A verifier whose connection broke comes back under its identity, maybe before we see the old one break.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # An empty frame tells a verifier that its connection is new.
        self._socket.setsockopt(zmq.PROBE_ROUTER, 1)
        try:
            if _is_served(endpoint):
                raise OSError("another process listens there")
            self._socket.bind(endpoint)
        except (OSError, zmq.ZMQError) as error:
            self._socket.close(linger=0)
            self._context.term()
            raise OSError(f"cannot listen on {endpoint}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_ms: float | None) -> Received | None:
        """The next message, None after ``timeout_ms`` (None: wait). Raises ``MalformedFromPeer``."""
        if not self._socket.poll(timeout_ms):
            return None
        peer, *frames = self._socket.recv_multipart()
        try:
            if len(frames) != 1:
                raise MalformedMessage(f"{len(frames)} frames instead of one")
            return Received(peer, decode_to_draft(frames[0]))
        except MalformedMessage as error:
            raise MalformedFromPeer(peer, str(error)) from None

    def send(self, peer: bytes, message: ToVerifier) -> bool:
        """Queue one message for ``peer``. False when that peer is gone or does not read."""
        try:
            self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=200)
        self._context.term()
        if self.endpoint.startswith("ipc://"):
            path = self.endpoint.removeprefix("ipc://")
            if os.path.exists(path):
                os.unlink(path)


class MalformedFromPeer(MalformedMessage):
    """A malformed message and who sent it, so that the answer can be a Refuse."""

    def __init__(self, peer: bytes, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


def _is_served(endpoint: str) -> bool:
    """Whether a process listens on this ``ipc://`` endpoint. ZeroMQ would take the path away from it without a word;
    a file that a killed process left behind is free to take."""
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(endpoint.removeprefix("ipc://")) in (0, errno.EAGAIN)


def _set_limits(zmq_socket: zmq.Socket) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 200)
    zmq_socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT_MESSAGES)
    zmq_socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT_MESSAGES)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
