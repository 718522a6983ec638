"""CURVE keys: files, which endpoints need them, and that nobody without the right ones gets in."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_ssd import launch_draft
from sglang_ssd.wire.channel import DraftChannel, VerifierChannel
from sglang_ssd.wire.curve import (
    KEY_NAME,
    DraftKeys,
    VerifierKeys,
    generate_keys,
    is_loopback,
    load_draft_keys,
    load_verifier_keys,
    why_refused,
)
from sglang_ssd.wire.messages import Ping, Refuse

#: Only a failing test waits so long.
PATIENCE_MS = 20_000


class KeyFiles:
    """Pairs of a draft, of a verifier that it knows and of a stranger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("draft", "verifier", "stranger"):
            generate_keys(str(folder / name))
        (folder / "authorized").mkdir()
        self.authorize("verifier")

    def public(self, name: str) -> str:
        return str(self.folder / name / f"{KEY_NAME}.key")

    def secret(self, name: str) -> str:
        return str(self.folder / name / f"{KEY_NAME}.key_secret")

    def authorize(self, name: str) -> None:
        shutil.copy(self.public(name), self.folder / "authorized" / f"{name}.key")

    def draft(self) -> DraftKeys:
        return load_draft_keys("--s", self.secret("draft"), "--a", str(self.folder / "authorized"))

    def verifier(self, name: str = "verifier", draft: str = "draft") -> VerifierKeys:
        return load_verifier_keys("--s", self.secret(name), "--d", self.public(draft))


@pytest.fixture
def files(tmp_path) -> KeyFiles:
    return KeyFiles(tmp_path)


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_pair_once_and_keeps_the_secret(tmp_path):
    command = [sys.executable, "-m", "sglang_ssd.launch_draft", "--generate-key", str(tmp_path / "keys")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    secret, public = tmp_path / "keys" / f"{KEY_NAME}.key_secret", tmp_path / "keys" / f"{KEY_NAME}.key"
    assert str(secret) in done.stdout and str(public) in done.stdout
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "secret-key" not in public.read_text()
    before = secret.read_bytes()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and again.stderr.startswith("sglang_ssd.launch_draft: error: ")
    assert "exists already" in again.stderr and again.stderr.count("\n") == 1
    assert secret.read_bytes() == before


def test_a_draft_that_would_be_open_to_all_does_not_start(files):
    """One line that names the option, before the model is looked at."""
    secret, authorized = files.secret("draft"), str(files.folder / "authorized")
    keys = ["--curve-secret-key", secret, "--curve-authorized-keys", authorized]
    for flags, beginning in (
        (["--endpoint", "tcp://0.0.0.0:5577"], "--endpoint tcp://0.0.0.0:5577: other hosts can reach it"),
        (["--endpoint", "tcp://*:5577"], "--endpoint tcp://*:5577: "),
        (["--endpoint", "ipc:///run/draft", *keys], "--endpoint ipc:///run/draft: CURVE keys are for tcp"),
        (["--endpoint", "tcp://*:5577", *keys[:2]], f"--curve-secret-key {secret}: needs "),
        (["--endpoint", "tcp://*:5577", *keys[2:]], f"--curve-authorized-keys {authorized}: needs "),
        ([], "--endpoint is needed"),
    ):
        error = launch_error("--model-path", "/no/such/model", *flags)
        assert error.startswith(f"sglang_ssd.launch_draft: error: {beginning}"), error
    assert "--model-path is needed" in launch_error("--endpoint", "ipc:///run/draft")
    assert "--top-m 0: " in launch_error(
        "--model-path", "m", "--endpoint", "ipc:///run/draft", "--top-m", "0"
    )
    assert "--top-m 129: must be 1 to 128 on cuda" in launch_error(
        "--model-path", "m", "--endpoint", "ipc:///run/draft", "--top-m", "129", "--device", "cuda"
    )


def launch_error(*flags: str) -> str:
    """The one line with which this start ends."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        assert launch_draft.main(list(flags)) == 1
    assert error.getvalue().count("\n") == 1
    return error.getvalue()


def test_bad_key_files_are_named(files):
    def refusal(load, *args) -> str:
        with pytest.raises(ValueError) as caught:
            load(*args)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    authorized = str(files.folder / "authorized")
    empty = files.folder / "empty"
    empty.mkdir()
    broken = files.folder / "broken.key"
    broken.write_text("nothing")
    short = files.folder / "short.key"
    short.write_text('public-key = "abc"\n')
    mixed = files.folder / "mixed.key_secret"
    own, other = (Path(files.secret(name)).read_text() for name in ("draft", "verifier"))
    mixed.write_text(own.split("secret-key")[0] + "secret-key" + other.split("secret-key")[1])
    mixed.chmod(0o600)
    exposed = files.folder / "exposed.key_secret"
    shutil.copy(files.secret("draft"), exposed)
    exposed.chmod(0o644)

    for path in ("/no/such/file", broken, short, mixed, exposed, files.public("draft")):
        assert refusal(load_draft_keys, "--s", str(path), "--a", authorized).startswith(f"--s {path}: ")
    for path in ("/no/such/file", broken, short):
        assert refusal(load_verifier_keys, "--s", files.secret("verifier"), "--d", str(path)).startswith(
            f"--d {path}: "
        )
    for path in ("/no/such/folder", str(empty)):
        assert refusal(load_draft_keys, "--s", files.secret("draft"), "--a", path).startswith(f"--a {path}: ")


# -- which endpoints need keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "is_open", "is_closed"),
    [
        ("ipc:///run/draft", True, False),
        ("tcp://127.0.0.1:5555", True, True),
        ("tcp://127.8.0.1:5555", True, True),
        ("tcp://localhost:5555", True, True),
        ("tcp://[::1]:5555", True, True),
        ("tcp://lo:5555", True, True),
        ("tcp://0.0.0.0:5555", False, True),
        ("tcp://*:5555", False, True),
        ("tcp://[::]:5555", False, True),
        ("tcp://eth0:5555", False, True),
        ("tcp://10.0.0.1:5555", False, True),
        ("tcp://127.0.0.1:0;10.0.0.1:5555", False, True),
        ("tcp://127.0.0.1.example.org:5555", False, True),
        ("ws://127.0.0.1:5555", False, False),
        ("udp://127.0.0.1:5555", False, False),
        ("inproc://draft", False, False),
        ("/run/draft", False, False),
    ],
)
def test_what_other_hosts_can_reach_needs_keys(endpoint, is_open, is_closed):
    assert (why_refused(endpoint, has_keys=False) is None) == is_open
    assert (why_refused(endpoint, has_keys=True) is None) == is_closed


@pytest.mark.parametrize("channel", [DraftChannel, VerifierChannel])
@pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://0.0.0.0:0", "ws://127.0.0.1:0"])
def test_no_channel_is_open_to_all(channel, endpoint):
    with pytest.raises(OSError, match="cannot (listen on|connect to)") as caught:
        channel(endpoint)
    assert endpoint in str(caught.value) and "\n" not in str(caught.value)


def test_loopback_is_known_by_address():
    assert is_loopback("127.0.0.1") and is_loopback("[::1]")
    assert not is_loopback("") and not is_loopback("[::ffff:10.0.0.1]")


# -- who gets in -----------------------------------------------------------------------------------------------------


def serve(draft: DraftChannel, *verifiers: VerifierChannel, until) -> bool:
    """Answer pings and listen to the verifiers until this holds; whether it does in time."""
    deadline = time.monotonic() + PATIENCE_MS / 1e3
    while not (holds := until()) and time.monotonic() < deadline:
        received = draft.receive(5)
        if received is not None and isinstance(received.message, Ping):
            draft.send(received.peer, received.message)
        for verifier in verifiers:
            heard[verifier.endpoint, id(verifier)].append(verifier.receive(0))
    return holds


heard: dict = {}


@pytest.fixture
def connect():
    """Verifiers of a draft, and what they hear."""
    with contextlib.ExitStack() as stack:

        def open_one(endpoint: str, keys: VerifierKeys | None) -> VerifierChannel:
            channel = stack.enter_context(contextlib.closing(VerifierChannel(endpoint, keys)))
            heard[channel.endpoint, id(channel)] = []
            return channel

        yield open_one
        heard.clear()


def words(verifier: VerifierChannel) -> list:
    return [word for word in heard[verifier.endpoint, id(verifier)] if word not in (None, Ping(0))]


def test_only_who_is_authorized_gets_in_and_others_do_not_notice(files, connect, caplog):
    with contextlib.closing(DraftChannel("tcp://127.0.0.1:0", files.draft())) as draft:
        friend = connect(draft.endpoint, files.verifier())
        friend.send(Ping(1))
        assert serve(draft, friend, until=lambda: words(friend) == [Ping(1)])

        for keys in (files.verifier("stranger"), files.verifier(draft="stranger"), None):
            before = draft.num_refused
            stranger = connect(draft.endpoint, keys)
            stranger.send(Ping(2))
            assert serve(draft, friend, stranger, until=lambda before=before: draft.num_refused > before)
            assert not stranger.is_connected
            assert all(isinstance(word, Refuse) for word in words(stranger)), "at most that it is not known"
        with socket.create_connection(("127.0.0.1", int(draft.endpoint.rpartition(":")[2]))) as web:
            before = draft.num_refused
            web.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert serve(draft, friend, until=lambda: draft.num_refused > before)

        friend.send(Ping(3))
        assert serve(draft, friend, until=lambda: words(friend) == [Ping(1), Ping(3)])
        assert "refused a connection" in caplog.text and "is in no file of" in caplog.text
        assert friend.is_connected and friend.handshake_problem is None


def test_a_key_is_let_in_and_locked_out_while_the_draft_runs(files, connect):
    with contextlib.closing(DraftChannel("tcp://127.0.0.1:0", files.draft())) as draft:
        newcomer = connect(draft.endpoint, files.verifier("stranger"))
        assert serve(draft, newcomer, until=lambda: draft.num_refused > 0 and words(newcomer))
        assert "does not know the CURVE key" in words(newcomer)[0].reason
        files.authorize("stranger")
        assert serve(draft, newcomer, until=lambda: newcomer.is_connected)
        newcomer.send(Ping(1))
        assert serve(draft, newcomer, until=lambda: Ping(1) in words(newcomer))
        os.unlink(files.folder / "authorized" / "stranger.key")
        late = connect(draft.endpoint, files.verifier("stranger"))
        before = draft.num_refused
        assert serve(draft, newcomer, late, until=lambda: draft.num_refused > before)
        assert newcomer.is_connected and not late.is_connected


def test_a_verifier_does_not_trust_an_impostor(files, connect):
    """A draft without the key that the verifier expects learns nothing."""
    impostor = load_draft_keys("--s", files.secret("stranger"), "--a", str(files.folder / "authorized"))
    with contextlib.closing(DraftChannel("tcp://127.0.0.1:0", impostor)) as draft:
        verifier = connect(draft.endpoint, files.verifier())
        verifier.send(Ping(1))
        assert serve(draft, verifier, until=lambda: verifier.handshake_problem is not None)
        assert "CURVE" in verifier.handshake_problem and not verifier.is_connected
        assert draft.receive(50) is None


def test_a_draft_that_has_no_keys_is_not_spoken_to(files, connect):
    with contextlib.closing(DraftChannel("tcp://127.0.0.1:0")) as draft:
        verifier = connect(draft.endpoint, files.verifier())
        verifier.send(Ping(1))
        assert serve(draft, verifier, until=lambda: draft.num_refused > 0)
        assert draft.receive(50) is None and not verifier.is_connected


def test_nobody_fills_the_log(files, caplog):
    with contextlib.closing(DraftChannel("tcp://127.0.0.1:0", files.draft())) as draft:
        address = ("127.0.0.1", int(draft.endpoint.rpartition(":")[2]))
        for _ in range(40):
            with socket.create_connection(address) as web:
                web.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert serve(draft, until=lambda: draft.num_refused == 40)
    assert len([record for record in caplog.records if "refused a connection" in record.message]) == 6
