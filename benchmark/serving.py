"""A server under test: started on a free port, waited for, asked, stopped with SIGINT, and nothing of it left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import requests
from tqdm import tqdm

FIRST_PORT = 20000
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 1800.0
FLUSH_TIMEOUT_S = 60.0


class ServerFailed(RuntimeError):
    """The server did not start, did not answer or did not end. Ends with the last lines of its log."""


class Generation(NamedTuple):
    """One answer of ``/generate``, as a streaming client sees it: seconds to its first and to its last token."""

    output_ids: list[int]
    meta_info: dict[str, Any]
    seconds: float
    first_token_seconds: float


class Request(NamedTuple):
    """A prompt and its ``sampling_params``."""

    input_ids: list[int]
    sampling: dict[str, Any]


class Answer(NamedTuple):
    """What ``/generate`` said about one prompt, without a clock."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class Server:
    """A running server. ``pid`` is that of its main process, where we started it."""

    def __init__(self, url: str, log_path: Path, pid: int | None = None) -> None:
        self.url = url
        self.log_path = log_path
        self.pid = pid

    def generate(
        self, input_ids: list[int], max_new_tokens: int, temperature: float = 0.0, **fields: Any
    ) -> Generation:
        """Continue a prompt. ``fields`` are further ones of the request, such as return_logprob."""
        body = {
            "input_ids": input_ids,
            "sampling_params": {"temperature": temperature, "max_new_tokens": max_new_tokens},
            "stream": True,
            **fields,
        }
        started = time.perf_counter()
        first = answer = None
        try:
            with requests.post(
                f"{self.url}/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S
            ) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith(b"data: {"):
                        first = first or time.perf_counter()
                        answer = json.loads(line.removeprefix(b"data: "))
        except requests.RequestException as error:
            raise ServerFailed(f"/generate: {error}\n{self.log_tail()}") from None
        if answer is None or "error" in answer:
            raise ServerFailed(f"/generate answered {answer}\n{self.log_tail()}")
        return Generation(
            answer["output_ids"], answer["meta_info"], time.perf_counter() - started, first - started
        )

    def ask(self, batch: Sequence[Request]) -> list[Answer]:
        """The answers of one HTTP request that holds several prompts, each with its own parameters."""
        body = {
            "input_ids": [request.input_ids for request in batch],
            "sampling_params": [request.sampling for request in batch],
        }
        try:
            response = requests.post(f"{self.url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
            response.raise_for_status()
        except requests.RequestException as error:
            raise ServerFailed(f"/generate: {error}\n{self.log_tail()}") from None
        return [
            Answer(answer["text"], answer["output_ids"], answer["meta_info"]) for answer in response.json()
        ]

    def ask_all(
        self,
        batches: Sequence[Sequence[Request]],
        num_at_once: int,
        label: str,
        after_batch: Callable[[int], None] = lambda num_answered: None,
    ) -> list[Answer]:
        """Answers of all batches, in order, ``num_at_once`` HTTP requests in flight. ``after_batch`` is told how many
        of them were answered, while others are in flight."""
        answers: list[Answer] = []
        with ThreadPoolExecutor(num_at_once) as pool:
            progress = tqdm(pool.map(self.ask, batches), desc=label, total=len(batches), unit="request")
            for num_answered, of_batch in enumerate(progress, start=1):
                answers += of_batch
                after_batch(num_answered)
        return answers

    def kill_draft(self) -> None:
        """SIGKILL the draft that this server started."""
        children = psutil.Process(self.pid).children(recursive=True)
        drafts = [child for child in children if "sglang_ssd.launch_draft" in child.cmdline()]
        if len(drafts) != 1:
            raise ServerFailed(f"{len(drafts)} drafts run below process {self.pid}, not one")
        drafts[0].kill()

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        try:
            response = requests.get(f"{self.url}/server_info", timeout=60)
            response.raise_for_status()
        except requests.RequestException as error:
            raise ServerFailed(f"/server_info: {error}\n{self.log_tail()}") from None
        return response.json()

    def flush_cache(self) -> None:
        """Empty the prefix caches, of the draft as well. A request that was just answered may take a moment to leave."""
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while True:
            try:
                response = requests.post(f"{self.url}/flush_cache", timeout=60)
                if response.ok:
                    return
                if time.monotonic() > deadline:
                    response.raise_for_status()
            except requests.RequestException as error:
                raise ServerFailed(f"/flush_cache: {error}\n{self.log_tail()}") from None
            time.sleep(0.2)

    def ssd_state(self) -> dict[str, Any]:
        """Our part of ``/server_info``. A second later, so that a draft in the middle of a forward has ended it and can
        say its counters."""
        time.sleep(1.0)
        return self.info()["internal_states"][0]["ssd"]

    def log_tail(self, num_lines: int = 20) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"last lines of {self.log_path}:", *lines[-num_lines:]])


@contextmanager
def serving(
    arguments: list[str],
    log_path: Path,
    label: str = "server",
    launcher: Sequence[str] = ("-m", "sglang_ssd.launch_server"),
) -> Iterator[Server]:
    """``python -m sglang_ssd.launch_server`` with these arguments, its output in ``log_path``.

    Raises ``ServerFailed`` when it ends or does not answer within ``START_TIMEOUT_S``, and when something of it is
    left ``STOP_TIMEOUT_S`` after SIGINT; what is left is killed.
    """
    # Benchmarks that start at the same moment must not take each other's server for their own.
    port = free_port(FIRST_PORT + os.getpid() % 8192)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *launcher, "--host", "127.0.0.1", "--port", str(port)]
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C stops the benchmark, which then stops its server in order.
        process = subprocess.Popen(
            [*command, *arguments], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", log_path, process.pid)
    try:
        _wait_until_ready(server, process, label)
        yield server
    finally:
        _stop(process, server)


def free_port(first: int = FIRST_PORT) -> int:
    """The first port from ``first`` on that nobody listens on."""
    for port in range(first, 65536):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {first} on")


def _wait_until_ready(server: Server, process: subprocess.Popen, label: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with tqdm(desc=f"start {label}", bar_format="{desc}: {elapsed} {postfix}", leave=False) as bar:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise ServerFailed(f"no answer within {START_TIMEOUT_S:.0f} s\n{server.log_tail()}")
            try:
                if requests.get(f"{server.url}/health_generate", timeout=60).ok:
                    return
            except requests.RequestException:
                pass  # It does not listen yet.
            bar.set_postfix_str(server.log_tail(1).splitlines()[-1][:90])
            time.sleep(1.0)
    raise ServerFailed(f"the server ended with exit code {process.returncode}\n{server.log_tail()}")


def _stop(process: subprocess.Popen, server: Server) -> None:
    """SIGINT, as Ctrl-C does; then every process and socket of the server must be gone."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    family = {member: _name(member) for member in (parent, *parent.children(recursive=True))}
    sockets = [path for member in family for path in _our_sockets(member)]
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (alive := [member for member in family if _is_alive(member)]) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.1)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    left = [*(family[member] for member in alive), *(path for path in sockets if os.path.exists(path))]
    if left:
        raise ServerFailed(
            f"left {STOP_TIMEOUT_S:.0f} s after SIGINT: {', '.join(left)}\n{server.log_tail()}"
        )


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()}"
    except psutil.NoSuchProcess:
        return str(process.pid)


def _our_sockets(process: psutil.Process) -> list[str]:
    try:
        return [line.laddr for line in process.net_connections("unix") if "/sglang-ssd-" in line.laddr]
    except psutil.Error:
        return []  # It ended in the meantime.


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that ended and waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
