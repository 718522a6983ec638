"""The channels over real sockets: order, several verifiers, peers that leave or misbehave, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time

import pytest
import zmq

from sglang_ssd.wire.channel import (
    MAX_MESSAGE_BYTES,
    DraftChannel,
    LinkBroken,
    MalformedFromPeer,
    RunDirectory,
    VerifierChannel,
)
from sglang_ssd.wire.messages import MalformedMessage, Open, Ping, Refuse, Round, decode_to_draft

#: Only a failing test waits so long.
PATIENCE_MS = 20_000


@pytest.fixture
def directory():
    run_directory = RunDirectory()
    yield run_directory
    run_directory.close()


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request, directory) -> str:
    return directory.endpoint("draft") if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def draft(endpoint):
    with contextlib.closing(DraftChannel(endpoint)) as channel:
        yield channel


def verifier_of(draft: DraftChannel):
    return contextlib.closing(VerifierChannel(draft.endpoint))


@contextlib.contextmanager
def raw_dealer(endpoint: str):
    """A peer that may say anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        yield dealer


def test_the_endpoint_can_be_read_back(draft, endpoint):
    assert draft.endpoint == endpoint or draft.endpoint.startswith("tcp://127.0.0.1:")
    assert not draft.endpoint.endswith(":0")


def test_messages_arrive_whole_and_in_order_in_both_directions(draft):
    with verifier_of(draft) as verifier:
        sent = [
            Open(1, 0, list(range(100_000))),
            *(Round(t, [1], [0], [5 + t], [0], [7]) for t in range(200)),
        ]
        for message in sent:
            assert verifier.send(message)
        received = [draft.receive(PATIENCE_MS) for _ in sent]
        assert [r.message for r in received] == sent
        (peer,) = {r.peer for r in received}
        for nonce in range(200):
            assert draft.send(peer, Ping(nonce))
        assert [verifier.receive(PATIENCE_MS).nonce for _ in range(200)] == list(range(200))


def test_two_verifiers_are_told_apart(draft):
    with verifier_of(draft) as one, verifier_of(draft) as two:
        one.send(Ping(1))
        two.send(Ping(2))
        peers = {r.message.nonce: r.peer for r in (draft.receive(PATIENCE_MS), draft.receive(PATIENCE_MS))}
        assert peers.keys() == {1, 2} and peers[1] != peers[2]
        draft.send(peers[2], Refuse("two"))
        draft.send(peers[1], Refuse("one"))
        assert one.receive(PATIENCE_MS) == Refuse("one")
        assert two.receive(PATIENCE_MS) == Refuse("two")
        assert one.receive(0) is None and two.receive(0) is None


def test_a_verifier_may_connect_before_the_draft_listens(directory):
    with contextlib.closing(VerifierChannel(directory.endpoint("draft"))) as verifier:
        verifier.send(Ping(1))
        with contextlib.closing(DraftChannel(directory.endpoint("draft"))) as draft:
            assert draft.receive(PATIENCE_MS).message == Ping(1)


def test_receive_times_out(draft):
    assert draft.receive(0) is None
    assert draft.receive(20) is None
    with verifier_of(draft) as verifier:
        assert verifier.receive(0) is None
        assert verifier.receive(20) is None
        assert verifier.receive(-5) is None


def test_nobody_there_times_out(directory):
    with contextlib.closing(VerifierChannel(directory.endpoint("nobody"))) as verifier:
        assert verifier.send(Ping(1)), "queued until somebody listens"
        assert verifier.receive(20) is None


def test_a_full_queue_refuses_and_does_not_raise(directory, monkeypatch):
    monkeypatch.setattr("sglang_ssd.wire.channel.QUEUE_LIMIT_MESSAGES", 8)
    with contextlib.closing(VerifierChannel(directory.endpoint("nobody"))) as verifier:
        sent = [verifier.send(Ping(nonce)) for nonce in range(10)]
        assert sent == [True] * 8 + [False] * 2


def test_a_peer_that_is_gone_or_never_was_is_not_sent_to(draft):
    assert not draft.send(b"never seen", Ping(1))
    with verifier_of(draft) as verifier:
        verifier.send(Ping(1))
        peer = draft.receive(PATIENCE_MS).peer
        assert draft.send(peer, Ping(2))
    deadline = time.monotonic() + PATIENCE_MS / 1e3
    while draft.send(peer, Ping(3)):
        assert time.monotonic() < deadline, "a closed peer is still sent to"
        time.sleep(0.01)


def test_malformed_messages_name_their_peer_and_harm_nobody(draft):
    with verifier_of(draft) as verifier, raw_dealer(draft.endpoint) as vandal:
        for frames in ([b"nonsense"], [b"\xc1"], [b"one", b"two"], [b"", b"\x92\xa4Ping\x01"]):
            vandal.send_multipart(frames)
            with pytest.raises(MalformedFromPeer) as caught:
                draft.receive(PATIENCE_MS)
            draft.send(caught.value.peer, Refuse(str(caught.value)))
        assert vandal.poll(PATIENCE_MS)
        assert b"nonsense" not in vandal.recv()
        verifier.send(Ping(1))
        assert draft.receive(PATIENCE_MS).message == Ping(1)


def test_an_over_size_frame_drops_its_sender_only(draft, caplog):
    """Whether it said something before, or not: refused, counted and logged, and another verifier goes on."""
    with (
        verifier_of(draft) as verifier,
        raw_dealer(draft.endpoint) as giant,
        raw_dealer(draft.endpoint) as mute,
    ):
        verifier.send(Ping(1))
        giant.send(b"\x92\xa4Ping\x02")
        peers = {r.message.nonce: r.peer for r in (draft.receive(PATIENCE_MS), draft.receive(PATIENCE_MS))}
        giant.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        gone = draft.receive(PATIENCE_MS)
        assert gone.peer == peers[2] and isinstance(gone.message, Refuse), "nothing of the frame arrives"
        assert draft.num_refused == 0
        mute.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        assert until(lambda: draft.num_refused == 1, draft)
        assert f"more than {MAX_MESSAGE_BYTES} bytes" in caplog.text
        verifier.send(Ping(4))
        received = draft.receive(PATIENCE_MS)
        assert received.message == Ping(4) and received.peer == peers[1]
        assert draft.send(peers[1], Ping(5))
        assert until_received(verifier, Ping(5))


def receive_exactly(peer: socket.socket, num_bytes: int) -> bytes:
    """MSG_WAITALL does not wait on a socket with a timeout."""
    received = b""
    while len(received) < num_bytes:
        part = peer.recv(num_bytes - len(received))
        assert part, "the connection ended"
        received += part
    return received


def announce_a_frame(port: int, num_bytes: int) -> socket.socket:
    """A peer that speaks ZMTP 3.0 by hand, and says how much it is about to send."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_MS / 1e3)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    socket_type = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    ready = b"\x05READY" + socket_type
    peer.sendall(greeting)
    receive_exactly(peer, 64)
    peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
    assert b"READY" in receive_exactly(peer, 43)
    peer.sendall(b"\x02" + num_bytes.to_bytes(8, "big"))
    return peer


def test_a_gigabyte_is_refused_before_it_is_sent(caplog):
    with contextlib.closing(DraftChannel("tcp://127.0.0.1:0")) as draft, verifier_of(draft) as verifier:
        verifier.send(Ping(1))
        assert draft.receive(PATIENCE_MS).message == Ping(1)
        port = int(draft.endpoint.rpartition(":")[2])
        with contextlib.closing(announce_a_frame(port, 1 << 30)) as giant:
            assert giant.recv(1) == b"", "disconnected"
        assert until(lambda: draft.num_refused == 1, draft)
        assert "bytes, and was disconnected" in caplog.text
        with contextlib.closing(announce_a_frame(port, 1000)) as modest:
            modest.sendall(b"x" * 1000)
            with pytest.raises(MalformedFromPeer):
                draft.receive(PATIENCE_MS)
        verifier.send(Ping(2))
        assert until_received_from(draft, Ping(2))


def until_received_from(draft: DraftChannel, message) -> bool:
    """Whether this comes after the end of other connections."""
    while (received := draft.receive(PATIENCE_MS)) and isinstance(received.message, Refuse):
        pass
    return received is not None and received.message == message


def until_received(verifier: VerifierChannel, message) -> bool:
    """Whether this comes after pings of the draft's."""
    while (received := verifier.receive(PATIENCE_MS)) == Ping(0):
        pass
    return received == message


def test_a_message_that_no_peer_would_take_is_not_sent(draft):
    too_large = Open(1, 0, [1 << 20] * (MAX_MESSAGE_BYTES // 5 + 1))
    with verifier_of(draft) as verifier:
        assert not verifier.send(too_large)
        verifier.send(Ping(1))
        peer = draft.receive(PATIENCE_MS).peer
        assert not draft.send(peer, Refuse("x" * MAX_MESSAGE_BYTES))
        assert draft.send(peer, Ping(2)) and verifier.receive(PATIENCE_MS) == Ping(2)


def test_a_draft_of_short_context_takes_small_messages_only(directory):
    with (
        contextlib.closing(DraftChannel(directory.endpoint("draft"), max_message_bytes=1000)) as draft,
        raw_dealer(directory.endpoint("draft")) as peer,
    ):
        peer.send(b"x" * 1000)
        with pytest.raises(MalformedFromPeer):
            draft.receive(PATIENCE_MS)
        peer.send(b"x" * 1001)
        assert isinstance(draft.receive(PATIENCE_MS).message, Refuse)


def test_a_draft_that_sends_nonsense_raises_malformed_only(directory):
    with (
        contextlib.closing(VerifierChannel(directory.endpoint("draft"))) as verifier,
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
    ):
        router.setsockopt(zmq.LINGER, 0)
        router.bind(directory.endpoint("draft"))
        verifier.send(Ping(1))
        assert router.poll(PATIENCE_MS)
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"nonsense"])
        router.send_multipart([peer, b"two", b"frames"])
        for _ in range(3):
            with pytest.raises(MalformedMessage, match="no message of protocol"):
                verifier.receive(PATIENCE_MS)
        assert verifier.receive(0) is None


def test_a_draft_that_breaks_zeromqs_own_protocol_is_connected_to_again(directory):
    """ZeroMQ alone would give up its endpoint for ever."""
    with (
        contextlib.closing(VerifierChannel(directory.endpoint("draft"))) as verifier,
        zmq.Context() as context,
    ):
        for nonce in range(2):
            with context.socket(zmq.ROUTER) as router:
                router.setsockopt(zmq.LINGER, 0)
                router.bind(directory.endpoint("draft"))
                assert until(lambda: verifier.is_connected, verifier)
                verifier.send(Ping(nonce))
                assert router.poll(PATIENCE_MS)
                peer, frame = router.recv_multipart()
                assert decode_to_draft(frame) == Ping(nonce)
                router.send_multipart([peer, b"x" * (MAX_MESSAGE_BYTES + 1)])
                assert hears_that_it_broke(verifier)
            assert until(lambda: not verifier.is_connected, verifier), "to the one that ended in the meantime"


# -- connections that break ------------------------------------------------------------------------------------------


class Proxy:
    """A TCP hop that can lose the verifier's connection while the draft still believes in it."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._near: socket.socket | None = None
        self._far: list[socket.socket] = []
        self._is_stopping = False
        self._break_now = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def break_near_side(self) -> None:
        self._break_now.set()

    def _run(self) -> None:
        while not self._is_stopping:
            if self._near is None:
                if select.select([self._listener], [], [], 0.02)[0]:
                    self._near, _ = self._listener.accept()
                    self._far.append(socket.create_connection(("127.0.0.1", self._target_port)))
                continue
            far = self._far[-1]
            for readable in select.select([self._near, far], [], [], 0.02)[0]:
                (far if readable is self._near else self._near).sendall(readable.recv(1 << 16))
            if self._break_now.is_set():
                self._break_now.clear()
                self._near.close()
                self._near = None

    def close(self) -> None:
        self._is_stopping = True
        self._thread.join()
        for end in (self._listener, self._near, *self._far):
            if end is not None:
                end.close()


def until(condition, *channels) -> bool:
    """Whether ``condition`` comes true while these channels are listened to, as their loops do."""
    deadline = time.monotonic() + PATIENCE_MS / 1e3
    while not (holds := condition()) and time.monotonic() < deadline:
        for channel in channels:
            channel.receive(10)
    return holds


def hears_that_it_broke(verifier: VerifierChannel) -> bool:
    """The next that the verifier receives; the connection is not made again yet."""
    return isinstance(verifier.receive(PATIENCE_MS), LinkBroken) and not verifier.is_connected


def test_a_connection_that_breaks_is_made_again_and_says_so():
    """Under the same identity, although the draft's end of the old connection still looks alive."""
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(contextlib.closing(DraftChannel("tcp://127.0.0.1:0")))
        proxy = stack.enter_context(contextlib.closing(Proxy(int(draft.endpoint.rpartition(":")[2]))))
        verifier = stack.enter_context(contextlib.closing(VerifierChannel(proxy.endpoint)))
        verifier.send(Ping(1))
        peer = draft.receive(PATIENCE_MS).peer
        draft.send(peer, Ping(2))
        assert verifier.receive(PATIENCE_MS) == Ping(2)
        for _ in range(2):
            proxy.break_near_side()
            assert hears_that_it_broke(verifier)
            verifier.send(Ping(3))
            received = draft.receive(PATIENCE_MS)
            assert received.message == Ping(3) and received.peer == peer
            assert draft.send(peer, Ping(4))
            assert verifier.receive(PATIENCE_MS) == Ping(4)


def test_a_draft_that_is_started_again_is_noticed_without_asking(directory):
    with contextlib.closing(VerifierChannel(directory.endpoint("draft"))) as verifier:
        for is_first in (True, False, False):
            with contextlib.closing(DraftChannel(directory.endpoint("draft"))) as draft:
                assert until(lambda: verifier.is_connected, verifier)
                if is_first:
                    verifier.send(Ping(1))
                    draft.send(draft.receive(PATIENCE_MS).peer, Ping(2))
                    assert verifier.receive(PATIENCE_MS) == Ping(2)
            assert hears_that_it_broke(verifier)


def test_a_verifier_that_is_gone_reads_as_its_refuse(draft):
    """However it ended: what the draft holds for it is free at once. Others hear a ping at most."""
    with verifier_of(draft) as other:
        other.send(Ping(1))
        assert draft.receive(PATIENCE_MS).message == Ping(1)
        with verifier_of(draft) as verifier:
            verifier.send(Ping(2))
            verifier.send(Ping(3))
            peer = draft.receive(PATIENCE_MS).peer
        assert draft.receive(PATIENCE_MS) == (peer, Ping(3)), "what it sent comes first"
        gone = draft.receive(PATIENCE_MS)
        assert gone.peer == peer and isinstance(gone.message, Refuse)
        assert draft.receive(0) is None and draft.num_refused == 0
        assert other.receive(100) in (None, Ping(0)) and other.receive(0) is None


# -- endpoints and files ---------------------------------------------------------------------------------------------


def test_a_taken_endpoint_is_one_line_of_oserror_and_stays_served(draft):
    with pytest.raises(OSError, match="cannot listen on") as caught:
        DraftChannel(draft.endpoint)
    assert draft.endpoint in str(caught.value) and "\n" not in str(caught.value)
    with verifier_of(draft) as verifier:
        verifier.send(Ping(1))
        assert draft.receive(PATIENCE_MS).message == Ping(1)


def test_the_socket_file_of_a_killed_draft_is_no_obstacle(directory):
    path = directory.endpoint("draft").removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert os.path.exists(path)
    with (
        contextlib.closing(DraftChannel(directory.endpoint("draft"))) as draft,
        verifier_of(draft) as verifier,
    ):
        verifier.send(Ping(1))
        assert draft.receive(PATIENCE_MS).message == Ping(1)


@pytest.mark.parametrize("channel", [DraftChannel, VerifierChannel])
@pytest.mark.parametrize("endpoint", ["no endpoint", "tcp://127.0.0.1:port", "ipc:///" + "x" * 200])
def test_an_endpoint_that_is_none_is_one_line_of_oserror(channel, endpoint):
    with pytest.raises(OSError, match="cannot (listen on|connect to)") as caught:
        channel(endpoint)
    assert endpoint in str(caught.value) and "\n" not in str(caught.value)


def test_run_directory_is_private_and_leaves_nothing():
    directory = RunDirectory()
    assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
    draft = DraftChannel(directory.endpoint("draft"))
    assert os.listdir(directory.path) == ["draft"]
    draft.close()
    assert os.listdir(directory.path) == []
    other = RunDirectory()
    assert other.path != directory.path
    for run_directory in (directory, other):
        DraftChannel(run_directory.endpoint("draft"))  # Killed: it never closes.
        run_directory.close()
        run_directory.close()
        assert not os.path.exists(run_directory.path)
