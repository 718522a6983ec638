"""ZeroMQ channels: DEALER on the verifier, ROUTER on the draft. They move messages and know nothing of their content.

Nothing here waits without a limit, and nothing a peer sends can raise anything but ``MalformedMessage``. Links that
break or never come to stand are read off ZeroMQ's monitor sockets; across TCP its heartbeats notice that the other end
is gone without a word.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from sglang_ssd.wire.curve import DraftKeys, VerifierKeys, is_authorized, why_refused
from sglang_ssd.wire.messages import (
    MAX_MESSAGE_BYTES,
    MalformedMessage,
    Ping,
    Refuse,
    ToDraft,
    ToVerifier,
    decode_to_draft,
    decode_to_verifier,
    encode,
)

logger = logging.getLogger(__name__)

#: Messages queued for one peer, and from it, before sends are refused.
QUEUE_LIMIT_MESSAGES = 512
#: TCP only: the other end is asked so often whether it is there, and given up when it does not answer for so long.
HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
#: A verifier whose draft is away tries again after the first time, and at last so seldom.
RECONNECT_MS, MAX_RECONNECT_MS = 100, 1000
#: From the end of a connection to the moment when the socket certainly knows that its peer is gone.
_SETTLE_S = 0.05

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Received(NamedTuple):
    """One message and the peer that sent it."""

    peer: bytes
    message: ToDraft


class LinkBroken(NamedTuple):
    """The connection to the draft ended: what was on its way may be lost, and nothing that the draft holds is certain.
    It is made again by itself."""

    reason: str


class RunDirectory:
    """A private directory (mode 0700) for ``ipc://`` sockets, removed on ``close``."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="sglang-ssd-")

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class VerifierChannel:
    """The verifier's end of a connection to one draft. Raises ``OSError`` for an endpoint that is none, or that may not
    be used without ``keys``."""

    def __init__(self, endpoint: str, keys: VerifierKeys | None = None) -> None:
        self.endpoint = endpoint
        self.is_connected = False
        #: Why no connection came to stand so far; None when one did.
        self.handshake_problem: str | None = None
        self._connect_again_at_s: float | None = None
        self._socket, self._monitor, self._poller, self._context = _open(
            zmq.DEALER, endpoint, keys is not None, "connect to", lambda s: self._connect(s, keys)
        )

    def _connect(self, zmq_socket: zmq.Socket, keys: VerifierKeys | None) -> None:
        # A new identity for each connection: a draft can never mistake us for a predecessor that left sessions open.
        zmq_socket.setsockopt(zmq.IDENTITY, b"v" + secrets.token_bytes(8))
        zmq_socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        zmq_socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        if keys is not None:
            zmq_socket.curve_publickey, zmq_socket.curve_secretkey = keys.public, keys.secret
            zmq_socket.curve_serverkey = keys.draft_public
        zmq_socket.connect(self.endpoint)

    def send(self, message: ToDraft) -> bool:
        """Queue one message. False, and nothing sent, when the queue to the draft is full or the message too large."""
        frame = encode(message)
        if len(frame) > MAX_MESSAGE_BYTES:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: float) -> ToVerifier | LinkBroken | None:
        """The next message, or None after ``timeout_ms``. Raises ``MalformedMessage``. A draft that does not know our key
        reads as its ``Refuse``."""
        deadline = time.monotonic() + timeout_ms / 1e3
        while True:
            ready = dict(self._poller.poll(_earlier_ms(deadline, self._connect_again_at_s)))
            # The end of a connection comes before what the next one brings.
            if self._monitor in ready:
                if (news := self._take_event()) is not None:
                    return news
            elif self._socket in ready:
                return decode_to_verifier(self._socket.recv())
            elif self._connect_again_at_s is not None and time.monotonic() >= self._connect_again_at_s:
                self._connect_again()
            elif time.monotonic() >= deadline:
                return None

    def _connect_again(self) -> None:
        """ZeroMQ does so by itself, but not after the draft refused us or broke its protocol."""
        self._connect_again_at_s = None
        with contextlib.suppress(zmq.ZMQError):  # It has forgotten the endpoint.
            self._socket.disconnect(self.endpoint)
        self._socket.connect(self.endpoint)

    def _take_event(self) -> Refuse | LinkBroken | None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected, self.handshake_problem = True, None
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._connect_again_at_s = time.monotonic() + MAX_RECONNECT_MS / 1e3
            return Refuse("it does not know the CURVE key of this verifier")
        elif event & _HANDSHAKE_FAILED:
            self._connect_again_at_s = time.monotonic() + MAX_RECONNECT_MS / 1e3
            self.handshake_problem = (
                "the ZeroMQ handshake failed; have both sides the right CURVE keys, or none?"
            )
        elif self.is_connected:
            self.is_connected = False
            self._connect_again()
            return LinkBroken("the connection broke")
        return None

    def register(self, poller: zmq.Poller) -> None:
        """Have ``poller`` wake up when there is something to receive."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._context.term()


def wait_for_any(channels: Iterable[VerifierChannel], timeout_ms: float) -> None:
    """Return when one of these channels has something to receive, or after ``timeout_ms``."""
    poller = zmq.Poller()
    for channel in channels:
        channel.register(poller)
    poller.poll(max(0.0, timeout_ms))


class DraftChannel:
    """The draft's end: one socket for all verifiers. Raises ``OSError`` when it cannot listen there, or may not without
    ``keys``. ``max_message_bytes``: a peer that sends more in one frame is disconnected."""

    def __init__(
        self, endpoint: str, keys: DraftKeys | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._keys = keys
        self._authenticator: ThreadAuthenticator | None = None
        #: Peers that were heard, and connections that ended, or never came to stand, since it was last looked.
        self._peers: set[bytes] = set()
        self._num_ended = 0
        self._look_at_s: float | None = None
        self._lost: list[bytes] = []
        self._refused: Counter[str] = Counter()
        self._socket, self._monitor, self._poller, self._context = _open(
            zmq.ROUTER, endpoint, keys is not None, "listen on", lambda s: self._bind(s, endpoint)
        )
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, zmq_socket: zmq.Socket, endpoint: str) -> None:
        zmq_socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        # Sending to a peer that is gone must say so instead of dropping silently.
        zmq_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A verifier whose connection broke comes back under its identity, maybe before we see the old one break.
        zmq_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if _is_served(endpoint):
            raise OSError("another process listens there")
        if self._keys is not None:
            zmq_socket.curve_publickey, zmq_socket.curve_secretkey = self._keys.public, self._keys.secret
            zmq_socket.curve_server = True
            self._authenticator = ThreadAuthenticator(zmq_socket.context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", self)
        try:
            zmq_socket.bind(endpoint)
        except zmq.ZMQError:
            self._stop_authenticator()
            raise

    @property
    def num_refused(self) -> int:
        """Connections that were refused: no key or the wrong one, another protocol, or no message within the limit."""
        return self._refused.total()

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator's thread: may the holder of this public key connect?"""
        is_known = is_authorized(key, self._keys.authorized_dir)
        if not is_known:
            logger.warning(
                "refusing a peer whose public key %s is in no file of %s",
                key.decode(),
                self._keys.authorized_dir,
            )
        return is_known

    def receive(self, timeout_ms: float | None) -> Received | None:
        """The next message, None after ``timeout_ms`` (None: wait). Raises ``MalformedFromPeer``. A connection that ended
        reads as its peer's ``Refuse``."""
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1e3
        while True:
            if self._lost:
                return Received(self._lost.pop(), Refuse("its connection ended"))
            ready = dict(self._poller.poll(_earlier_ms(deadline, self._look_at_s)))
            # What a peer sent before its connection ended comes first.
            if self._socket in ready:
                return self._take_frames()
            if self._monitor in ready:
                self._take_event()
            elif self._look_at_s is not None and time.monotonic() >= self._look_at_s:
                self._look_who_is_gone()
            elif deadline is not None and time.monotonic() >= deadline:
                return None

    def _take_frames(self) -> Received:
        peer, *frames = self._socket.recv_multipart()
        self._peers.add(peer)
        try:
            if len(frames) != 1:
                raise MalformedMessage(f"{len(frames)} frames instead of one")
            return Received(peer, decode_to_draft(frames[0]))
        except MalformedMessage as error:
            raise MalformedFromPeer(peer, str(error)) from None

    def _take_event(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event & _HANDSHAKE_FAILED:
            # Its connection ends too, which is not to be counted again.
            self._num_ended -= 1
            self._count_refused(
                "the ZeroMQ handshake failed (no CURVE keys, the wrong ones, or no peer of ours)"
            )
        elif event == zmq.EVENT_DISCONNECTED:
            self._num_ended += 1
            self._look_at_s = time.monotonic() + _SETTLE_S

    def _look_who_is_gone(self) -> None:
        """ZeroMQ says that a connection ended and not whose. A message that cannot be sent tells."""
        self._lost = [peer for peer in self._peers if not self._is_connected(peer)]
        self._peers.difference_update(self._lost)
        for _ in range(self._num_ended - len(self._lost)):
            self._count_refused(
                f"it said nothing, or sent a frame of more than {self._max_message_bytes} bytes, and was disconnected"
            )
        self._num_ended, self._look_at_s = 0, None

    def _is_connected(self, peer: bytes) -> bool:
        try:
            self._socket.send_multipart([peer, encode(Ping(0))], zmq.NOBLOCK)
        except zmq.Again:
            return True  # It does not read, but is there.
        except zmq.ZMQError:
            return False
        return True

    def _count_refused(self, why: str) -> None:
        self._refused[why] += 1
        times = self._refused[why]
        if times & (times - 1) == 0:  # The 1st, 2nd, 4th...: nobody fills our log.
            logger.warning("refused a connection to %s (%d times so far): %s", self.endpoint, times, why)

    def send(self, peer: bytes, message: ToVerifier) -> bool:
        """Queue one message for ``peer``. False when that peer is gone or does not read, or the message is too large."""
        frame = encode(message)
        if len(frame) > MAX_MESSAGE_BYTES:
            return False
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def close(self) -> None:
        self._stop_authenticator()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._context.term()
        if self.endpoint.startswith("ipc://"):
            path = self.endpoint.removeprefix("ipc://")
            if os.path.exists(path):
                os.unlink(path)

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class MalformedFromPeer(MalformedMessage):
    """A malformed message and who sent it, so that the answer can be a Refuse."""

    def __init__(self, peer: bytes, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class _Opened(NamedTuple):
    socket: zmq.Socket
    monitor: zmq.Socket
    poller: zmq.Poller
    context: zmq.Context


def _open(
    kind: int, endpoint: str, has_keys: bool, verb: str, attach: Callable[[zmq.Socket], None]
) -> _Opened:
    """A socket with its limits and its monitor, once ``attach`` bound or connected it. Raises OSError in one line, and
    nothing stays open."""
    if reason := why_refused(endpoint, has_keys):
        raise OSError(f"cannot {verb} {endpoint}: {reason}")
    context = zmq.Context()
    zmq_socket = context.socket(kind)
    _set_limits(zmq_socket, endpoint)
    monitor = zmq_socket.get_monitor_socket(
        _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    )
    try:
        attach(zmq_socket)
    except (OSError, zmq.ZMQError) as error:
        zmq_socket.disable_monitor()
        monitor.close(linger=0)
        zmq_socket.close(linger=0)
        context.term()
        raise OSError(f"cannot {verb} {endpoint}: {error}") from None
    poller = zmq.Poller()
    poller.register(zmq_socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    return _Opened(zmq_socket, monitor, poller, context)


def _set_limits(zmq_socket: zmq.Socket, endpoint: str) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 200)
    zmq_socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT_MESSAGES)
    zmq_socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT_MESSAGES)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if endpoint.startswith("tcp://"):
        zmq_socket.setsockopt(zmq.IPV6, "[" in endpoint)
        zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        # Told to the other end: without a word from us for so long it gives us up, whatever its own settings.
        zmq_socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)


def _is_served(endpoint: str) -> bool:
    """Whether a process listens on this ``ipc://`` endpoint. ZeroMQ would take the path away from it without a word;
    a file that a killed process left behind is free to take."""
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(endpoint.removeprefix("ipc://")) in (0, errno.EAGAIN)


def _remaining_ms(deadline: float) -> float:
    return max(0.0, (deadline - time.monotonic()) * 1e3)


def _earlier_ms(*deadlines: float | None) -> float | None:
    """Milliseconds to the first of these moments, None where none is given."""
    given = [deadline for deadline in deadlines if deadline is not None]
    return _remaining_ms(min(given)) if given else None
