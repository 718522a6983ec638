"""Servers under test: each on a free port and with a temporary directory of its own, so that whatever one leaves behind
is found. Asked over HTTP, stopped with SIGINT."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil
import requests

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 240.0


class Answer(NamedTuple):
    """What ``/generate`` said about one prompt."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]

    @property
    def sources(self) -> list[str]:
        return self.meta_info["ssd_sources"]

    @property
    def accept_lengths(self) -> list[int]:
        return self.meta_info["ssd_accept_lengths"]


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Printable characters; a token id of the test pair is a byte."""
    return Random(seed).choices(range(32, 127), k=num_tokens)


def request(
    input_ids: list[int], max_new_tokens: int = 32, fields: dict[str, Any] | None = None, **sampling: Any
) -> dict[str, Any]:
    """A body for ``/generate``, greedy unless ``sampling`` says otherwise. ``fields`` stand beside its parameters."""
    params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **sampling}
    return {"input_ids": input_ids, "sampling_params": params, **(fields or {})}


class Server:
    """One server, its process and the directory that holds its log and its temporary files."""

    def __init__(self, command: list[str], folder: Path, variables: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        prefix = ["env", *(f"{name}={value}" for name, value in (variables or {}).items())]
        self.process = start([*command, "--host", "127.0.0.1", "--port", str(self.port)], folder, prefix)
        self._is_ready = False

    # -- life ----------------------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        if self._is_ready:
            return
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.log_tail()}"
            try:
                if requests.get(f"{self.url}/health_generate", timeout=30).ok:
                    self._is_ready = True
                    return
            except requests.RequestException:
                pass  # It does not listen yet.
            time.sleep(0.5)
        # The tests that ask for it later fail at once.
        self.process.kill()
        raise AssertionError(f"no answer within {START_TIMEOUT_S:.0f} s\n{self.log_tail()}")

    def stop(self) -> None:
        """Send SIGINT, as Ctrl-C does. Raises AssertionError unless it ends with code 0 and leaves nothing behind."""
        self.process.send_signal(signal.SIGINT)
        try:
            exit_code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        left = left_behind(self.folder)
        assert (exit_code, left) == (0, []), f"exit code {exit_code}, left {left}\n{self.log_tail()}"

    def draft_process(self, endpoint: str | None = None) -> psutil.Process:
        """The draft that this server started; the one that listens there, where it started several."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        drafts = [child for child in children if "sglang_ssd.launch_draft" in child.cmdline()]
        (draft,) = [draft for draft in drafts if endpoint is None or endpoint in draft.cmdline()]
        return draft

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-30:])

    # -- requests ------------------------------------------------------------------------------------------------

    def post(self, path: str, body: dict[str, Any], **options: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=ANSWER_TIMEOUT_S, **options)

    def ask(self, body: dict[str, Any]) -> Answer:
        return self.ask_batch(body)[0]

    def ask_batch(self, body: dict[str, Any]) -> list[Answer]:
        """The answers of one HTTP request that holds several prompts or asks for n samples."""
        response = self.post("/generate", body)
        assert response.ok, f"{response.status_code} {response.text}\n{self.log_tail()}"
        answers = response.json()
        return [
            Answer(answer["text"], answer["output_ids"], answer["meta_info"])
            for answer in (answers if isinstance(answers, list) else [answers])
        ]

    def ask_all(self, bodies: list[dict[str, Any]], num_at_once: int, stagger_s: float = 0.0) -> list[Answer]:
        """Answers in order. ``stagger_s`` apart, so that requests join a batch that runs already."""

        def ask(index: int) -> Answer:
            time.sleep(stagger_s * (index % num_at_once))
            return self.ask(bodies[index])

        with ThreadPoolExecutor(num_at_once) as threads:
            return list(threads.map(ask, range(len(bodies))))

    @contextmanager
    def streaming(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a stream; leaving the block closes the connection, also in the middle."""
        with self.post(path, {**body, "stream": True}, stream=True) as response:
            assert response.ok, f"{response.status_code} {response.text}"
            lines = (line.removeprefix(b"data: ") for line in response.iter_lines(chunk_size=1))
            yield (json.loads(line) for line in lines if line.startswith(b"{"))

    # -- figures -------------------------------------------------------------------------------------------------

    def ssd_states(self) -> list[dict[str, Any]]:
        """Our part of ``/server_info``, one entry a data-parallel rank. The draft's figures in it are a second old at most
        while requests run."""
        return [state["ssd"] for state in self.info()["internal_states"]]

    def ssd_state(self) -> dict[str, Any]:
        """That of the first rank."""
        return self.ssd_states()[0]

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        return requests.get(f"{self.url}/server_info", timeout=ANSWER_TIMEOUT_S).json()

    def num_used_tokens(self) -> int:
        """KV slots of the target that running requests hold."""
        loads = requests.get(f"{self.url}/v1/loads", timeout=ANSWER_TIMEOUT_S).json()["loads"]
        return sum(load["num_used_tokens"] for load in loads)

    def wait_until_free(self, timeout_s: float = 15.0) -> None:
        """Wait until no request holds anything, on either side. Raises AssertionError with what is still held."""
        held = wait_for(lambda: not (held := self._held()) or held, timeout_s)
        assert held is True, f"still held: {held}"

    def wait_until_alive(self, timeout_s: float = 15.0) -> None:
        """Wait until all drafts of all ranks are: one answer that is late makes a draft degraded until it speaks again.
        Raises AssertionError with the states."""

        def states() -> list[str]:
            return [draft["state"] for state in self.ssd_states() for draft in state["drafts"]]

        seen = wait_for(lambda: set(seen := states()) == {"alive"} or seen, timeout_s)
        assert seen is True, seen

    def _held(self) -> dict[str, int]:
        states = self.ssd_states()
        draft = states[-1]["draft"]
        held = {
            "open_sessions": sum(state["open_sessions"] for state in states),
            "draft's sessions": draft["num_sessions"],
            "draft's branch rows": draft["num_branch_rows"],
            "draft's KV slots": draft["total_kv_slots"] - draft["free_kv_slots"],
            "draft's rows": draft["total_rows"] - draft["free_rows"],
            "target's KV slots": self.num_used_tokens(),
        }
        return {name: number for name, number in held.items() if number}


class Draft:
    """A draft that no server started, in its own namespace where a prefix for its command says so."""

    def __init__(self, arguments: list[str], folder: Path, prefix: list[str] | None = None) -> None:
        self.folder = folder
        self.process = start(["sglang_ssd.launch_draft", *arguments], folder, prefix or [])

    def wait_until_ready(self) -> None:
        is_up = wait_for(
            lambda: "listens on" in self.log() or self.process.poll() is not None, START_TIMEOUT_S
        )
        assert is_up is True and self.process.poll() is None, self.log()

    def stop(self) -> None:
        """Send SIGTERM. Raises AssertionError unless it ends with code 0 and leaves nothing behind."""
        self.process.terminate()
        try:
            exit_code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        left = left_behind(self.folder)
        assert (exit_code, left) == (0, []), f"exit code {exit_code}, left {left}\n{self.log()}"

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    """Poll until ``condition`` returns True; its last value."""
    deadline = time.monotonic() + timeout_s
    while (value := condition()) is not True and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


class Ended(NamedTuple):
    """A command that ran to its end, and what it left behind."""

    exit_code: int
    output: str
    left: list[str]


def run_to_end(command: list[str], folder: Path, timeout_s: float = 120.0) -> Ended:
    """Run a server command that must end by itself. Raises ``subprocess.TimeoutExpired`` when it does not."""
    process = start(command, folder)
    try:
        exit_code = process.wait(timeout_s)
    finally:
        left = left_behind(folder)
    return Ended(exit_code, (folder / "log").read_text(encoding="utf-8", errors="replace"), left)


def start(command: list[str], folder: Path, prefix: list[str] | tuple[()] = ()) -> subprocess.Popen:
    """Start ``python -m`` a command with its output in ``folder/log`` and its temporary files in ``folder/tmp``."""
    (folder / "tmp").mkdir(parents=True)
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Processors of requests are unpickled by the server: it must find the module that defines them.
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def left_behind(folder: Path) -> list[str]:
    """Processes and directories of a server that should have ended; the processes are killed. They are known by their
    temporary directory, which no other process has. Helpers of Python's own may take a moment."""
    wait_for(lambda: not _processes_of(folder), timeout_s=5.0)
    left = _processes_of(folder)
    names = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    return [*names, *(path.name for path in (folder / "tmp").glob("sglang-ssd-*"))]


def _processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder / "tmp"):
                found.append(process)
        except psutil.Error:
            pass  # It has ended, or is somebody else's.
    return found


def free_port() -> int:
    """One below those that the kernel gives away by itself, and so may have given away before the server asks for it."""
    while True:
        port = Random().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
