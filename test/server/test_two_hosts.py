"""A draft on another host: CURVE over a link with 2 ms of delay each way and 1% loss, strangers, and a link that is cut."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path

import pytest
import zmq
from server.conftest import SHARED_FLAGS
from server.link import THERE, Link, why_no_link
from server.running import Draft, Server, prompt, request, wait_for

from sglang_ssd.wire.channel import VerifierChannel
from sglang_ssd.wire.curve import KEY_NAME, generate_keys, load_verifier_keys
from sglang_ssd.wire.messages import Hello, Ping, Refuse, decode_to_verifier, encode

ENDPOINT = f"tcp://{THERE}:5577"
NAMES = ("draft", "server", "friend", "stranger")
PATIENCE_S = 60.0
#: What the draft logs of keys that it does not know, and of no or the wrong ones.
KEYS_REFUSED = ("is in no file of", "the ZeroMQ handshake failed")


class Hosts:
    """The server here, its draft there, and the keys of everybody."""

    def __init__(self, pair, folder: Path, stack: contextlib.ExitStack) -> None:
        self.keys = folder / "keys"
        for name in NAMES:
            generate_keys(str(self.keys / name))
        authorized = self.keys / "authorized"
        authorized.mkdir()
        for name in ("server", "friend"):
            shutil.copy(self.public(name), authorized / f"{name}.key")
        self.link = stack.enter_context(contextlib.closing(Link(delay_s=0.002, loss=0.01, seed=1)))
        keys = ["--curve-secret-key", self.secret("draft"), "--curve-authorized-keys", str(authorized)]
        self.draft = Draft(
            ["--model-path", str(pair.draft), "--device", "cpu", "--endpoint", ENDPOINT, *keys],
            folder / "draft",
            self.link.prefix(),
        )
        stack.callback(self.draft.stop)
        keys = [
            "--ssd-curve-secret-key",
            self.secret("server"),
            "--ssd-curve-draft-key",
            self.public("draft"),
        ]
        target = ["--device", "cpu", "--model-path", str(pair.target)]
        self.server = Server(
            ["sglang_ssd.launch_server", *target, *SHARED_FLAGS, "--ssd-draft-endpoint", ENDPOINT, *keys],
            folder / "server",
        )
        stack.callback(self.server.stop)
        self.draft.wait_until_ready()
        self.server.wait_until_ready()

    def public(self, name: str) -> str:
        return str(self.keys / name / f"{KEY_NAME}.key")

    def secret(self, name: str) -> str:
        return str(self.keys / name / f"{KEY_NAME}.key_secret")

    def keys_of(self, name: str, draft: str = "draft"):
        return load_verifier_keys("--s", self.secret(name), "--d", self.public(draft))

    @contextlib.contextmanager
    def dealer(self, name: str):
        """A peer that may say anything, with this one's keys."""
        keys = self.keys_of(name)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
            dealer.curve_serverkey = keys.draft_public
            dealer.connect(ENDPOINT)
            yield dealer

    def refused(self) -> int:
        """Connections that the draft refused, as its server last heard."""
        return self.server.ssd_state()["draft"]["connections_refused"]


@pytest.fixture(scope="module")
def hosts(pair, tmp_path_factory):
    if reason := why_no_link():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield Hosts(pair, tmp_path_factory.mktemp("hosts"), stack)


def bodies(seed: int, num: int, num_new: int = 40) -> list[dict]:
    return [
        request(prompt(seed + i, 10 + 9 * i), num_new, ignore_eos=True, temperature=0.8 * (i % 2), sampling_seed=i)
        for i in range(num)
    ]  # fmt: skip


def test_output_over_a_slow_and_lossy_link_equals_plain(hosts, off_server):
    asked = bodies(2500, 16)
    plain = [answer.output_ids for answer in off_server.ask_all(asked, num_at_once=4)]
    before = hosts.link.num_lost
    answers = hosts.server.ask_all(asked, num_at_once=4, stagger_s=0.05)
    assert [answer.output_ids for answer in answers] == plain
    assert sum(source == "hit" for answer in answers for source in answer.sources) > 0
    assert hosts.link.num_lost > before, "nothing was lost: send more"
    hosts.server.wait_until_free()


def test_strangers_are_refused_and_the_server_does_not_notice(hosts, off_server):
    """Without keys, with keys nobody knows, of another draft, of an old protocol, and with a frame that is too large."""
    asked = bodies(2600, 4, num_new=300)
    plain = [answer.output_ids for answer in off_server.ask_all(asked, num_at_once=4)]
    before, counts = hosts.refused(), hosts.server.ssd_state()["client"]
    answers: list = []
    serving = threading.Thread(target=lambda: answers.extend(hosts.server.ask_all(asked, num_at_once=4)))
    serving.start()
    try:
        with contextlib.ExitStack() as stack:
            for keys in (hosts.keys_of("stranger"), hosts.keys_of("friend", draft="stranger")):
                stack.enter_context(contextlib.closing(VerifierChannel(ENDPOINT, keys)))
            context = stack.enter_context(zmq.Context())
            keyless = stack.enter_context(context.socket(zmq.DEALER))
            keyless.setsockopt(zmq.LINGER, 0)
            keyless.connect(ENDPOINT)
            # One may be refused several times before another has come through.
            is_refused = wait_for(
                lambda: (
                    hosts.refused() >= before + 3 and all(why in hosts.draft.log() for why in KEYS_REFUSED)
                ),
                PATIENCE_S,
            )
            assert is_refused is True

        with hosts.dealer("friend") as old:
            hello = Hello(1, 320, "", 3, 8, 512, "an old server")
            old.send(encode(hello))
            old.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
            while isinstance(answer := decode_to_verifier(old.recv()), Ping):
                pass  # Is it still there? So the draft finds out whose connection ended.
            assert isinstance(answer, Refuse) and "protocol version 1" in answer.reason

        with hosts.dealer("friend") as giant:
            giant.send(bytes(64 << 20), copy=False)
            is_refused = wait_for(lambda: "or sent a frame of more than" in hosts.draft.log(), PATIENCE_S)
            assert is_refused is True
    finally:
        serving.join()
    assert [answer.output_ids for answer in answers] == plain
    hosts.server.wait_until_alive()
    state = hosts.server.ssd_state()
    assert state["client"]["malformed"] == 0
    assert state["client"]["reopened"] == counts["reopened"] and state["client"]["sends_refused"] == 0
    log = hosts.draft.log()
    for words in (*KEYS_REFUSED, "protocol version 1"):
        assert words in log, words


def test_a_link_that_is_cut_is_noticed_on_both_sides_and_heals(hosts, off_server):
    """No packet says that the other side is gone: heartbeats do."""
    asked = bodies(2700, 2, num_new=60)
    plain = [answer.output_ids for answer in off_server.ask_all(asked, num_at_once=2)]
    num_left = hosts.draft.log().count("left: its connection ended")
    hosts.link.is_cut = True
    try:
        assert [answer.output_ids for answer in hosts.server.ask_all(asked, num_at_once=2)] == plain
        assert wait_for(lambda: hosts.server.ssd_state()["draft_alive"] is False, PATIENCE_S) is True
        assert (
            wait_for(lambda: hosts.draft.log().count("left: its connection ended") > num_left, PATIENCE_S)
            is True
        )
    finally:
        hosts.link.is_cut = False

    def is_served() -> bool:
        (answer,) = hosts.server.ask_all(asked[:1], num_at_once=1)
        assert answer.output_ids == plain[0]
        return "hit" in answer.sources

    assert wait_for(is_served, PATIENCE_S) is True
    hosts.server.wait_until_alive()
    hosts.server.wait_until_free()
