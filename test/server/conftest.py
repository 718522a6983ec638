"""Servers that all tests in this folder share: each is started when a test first asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from server.running import Server

from sglang_ssd.bridge.environment import OVERLAP_SWITCH
from sglang_ssd.test_pair import PairPaths, write_pair

PAGE_SIZE = 16
#: KV slots of the paged server: three of the requests that its tests send, with prompt and output.
PAGED_TOTAL_TOKENS = 640
#: Each server is three processes that hold torch.
MAX_ALIVE = 3
ALWAYS_ALIVE = ("async", "off")
#: These run the loop that a GPU runs: a batch starts before the result of the one before is looked at.
OVERLAPPED = ("sync", "paged", "parallel")

LOOKAHEAD = 3
SHARED_FLAGS = [
    *("--speculative-num-steps", str(LOOKAHEAD)),
    *("--ssd-fan-out-budget", "12"),
    "--enable-custom-logit-processor",
    "--constrained-json-disable-any-whitespace",
    # Pools by free memory would depend on what else the machine does.
    *("--max-total-tokens", "32768"),
    *("--ssd-draft-max-total-tokens", "32768"),
]
FLAGS = {
    # Long prompts come in chunks, with pages of one token.
    "async": ["--enable-metrics", "--chunked-prefill-size", "256"],
    # Its weights can be updated.
    "sync": ["--ssd-mode", "sync", "--reasoning-parser", "deepseek-r1", "--no-ssd-pack-weights"],
    "off": ["--ssd-mode", "off", "--reasoning-parser", "deepseek-r1"],
    "parallel": ["--tp-size", "2"],
    "replicated": ["--dp-size", "2", "--max-total-tokens", "8192"],
    # The scheduler takes in more requests than the pool can finish, and prompts in chunks.
    "paged": [
        *("--page-size", str(PAGE_SIZE)),
        *("--max-total-tokens", str(PAGED_TOTAL_TOKENS)),
        *("--schedule-conservativeness", "0.05"),
        *("--chunked-prefill-size", "64"),
        *("--ssd-round-timeout-ms", "1000"),
    ],
}


class Fleet:
    """Servers by name. The oldest that is no oracle makes room for another; all are stopped at the end."""

    def __init__(self, pair: PairPaths, folder: Path) -> None:
        self._pair = pair
        self._folder = folder
        self._servers: dict[str, Server] = {}
        self._num_started = 0

    def start(self, name: str) -> None:
        """Start a server unless it runs, without waiting for it."""
        if name in self._servers:
            return
        others = [other for other in self._servers if other not in ALWAYS_ALIVE]
        if len(self._servers) >= MAX_ALIVE and others:
            self.stop(others[0])
        self._num_started += 1
        command = launch_command(self._pair, *SHARED_FLAGS, *FLAGS[name])
        variables = {OVERLAP_SWITCH: "1"} if name in OVERLAPPED else {}
        folder = self._folder / f"{name}-{self._num_started}"
        self._servers[name] = Server(command, folder, variables)

    def get(self, name: str) -> Server:
        """A server that answers."""
        self.start(name)
        self._servers[name].wait_until_ready()
        return self._servers[name]

    def stop(self, name: str) -> None:
        """Stop a server and check that nothing of it is left; the next ``get`` starts a new one."""
        self._servers.pop(name).stop()

    def stop_all(self) -> None:
        self.stop_all_but()

    def stop_all_but(self, *kept: str) -> None:
        failures = []
        for name in [name for name in self._servers if name not in kept]:
            try:
                self.stop(name)
            except AssertionError as error:
                failures.append(f"{name}: {error}")
        assert not failures, "\n".join(failures)


def launch_command(pair: PairPaths, *flags: str) -> list[str]:
    """The launcher's module and arguments for this pair."""
    models = ["--model-path", str(pair.target), "--speculative-draft-model-path", str(pair.draft)]
    return ["sglang_ssd.launch_server", "--device", "cpu", *models, *flags]


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> PairPaths:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def fleet(pair, tmp_path_factory):
    fleet = Fleet(pair, tmp_path_factory.mktemp("servers"))
    for name in ALWAYS_ALIVE:
        fleet.start(name)
    yield fleet
    fleet.stop_all()


@pytest.fixture
def async_server(fleet) -> Server:
    return fleet.get("async")


@pytest.fixture
def sync_server(fleet) -> Server:
    return fleet.get("sync")


@pytest.fixture
def off_server(fleet) -> Server:
    """Plain decoding of the same target: the oracle."""
    return fleet.get("off")


@pytest.fixture
def parallel_server(fleet) -> Server:
    return fleet.get("parallel")


@pytest.fixture
def replicated_server(fleet) -> Server:
    return fleet.get("replicated")


@pytest.fixture
def paged_server(fleet) -> Server:
    return fleet.get("paged")
