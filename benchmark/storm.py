"""Serve through a storm of faults: the draft is killed, stopped, slowed, restarted and garbled, and nobody notices.

An async server on the test pair has its draft in a process of its own, behind a proxy. While requests arrive, greedy and
with seeds, a script with a seed does to the draft and to the line whatever comes to its mind:

  kill       SIGKILL; the draft is started again a little later, and mostly left alone until it has loaded
  replace    the same, with other weights
  stop       SIGSTOP for some seconds
  slow       stopped half of the time, in short turns
  garble     frames between the two lose a bit, get lost, come twice, or come late

Every answer is compared with that of plain decoding (--ssd-mode off), recorded before the storm. After it the draft
must be back, and nothing may be held on either side. The exit code is 1 when an answer was lost or wrong, something was
held, or a draft ended by itself. (What is served while the draft is down: draft_down.py.)
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import options
import zmq
from measurement import first_difference
from report import format_table, machine_facts, write_json
from serving import Request, Server, ServerFailed, serving

from sglang_ssd.bridge.idle_check import STRICT_SWITCH
from sglang_ssd.draft_process import LAUNCHER
from sglang_ssd.test_pair import PairPaths, write_pair
from sglang_ssd.wire.channel import RunDirectory

LOOKAHEAD, BUDGET, ROUND_TIMEOUT_MS = 3, 12, 500
SHORTEST_ANSWER, LONGEST_ANSWER = 40, 240
#: Of target and draft: a pool by free memory might find none where others come and go.
POOL = ("--max-total-tokens", "32768")
#: Requests in flight at most; those that come later wait for one to end.
NUM_AT_ONCE = 32
FAULTS = ("kill", "replace", "stop", "slow", "garble")
#: A draft needs this to load, and the client to notice that it is back.
RECOVERY_TIMEOUT_S = 600.0


# -- the draft and the line to it ------------------------------------------------------------------------------------


class Draft:
    """A draft process that can be killed and started again. ``num_died`` counts those that ended by themselves."""

    def __init__(self, endpoint: str, cores: str, log_path: Path) -> None:
        self._command = [*LAUNCHER, "--endpoint", endpoint, "--device", "cpu", "--cores", cores, *POOL]
        self._log_path = log_path
        self._process: subprocess.Popen | None = None
        self._ready_fd: int | None = None
        self.num_started = self.num_died = 0

    def start(self, model: Path) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._ready_fd, child_fd = os.pipe()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--model-path", str(model), "--ready-fd", str(child_fd)],
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[child_fd],
                start_new_session=True,
            )
        os.close(child_fd)
        self.num_started += 1

    def wait_until_ready(self, is_over: threading.Event) -> None:
        """Until it listens, or has ended, or ``is_over``."""
        while not is_over.is_set() and not select.select([self._ready_fd], [], [], 0.2)[0]:
            pass

    def signal(self, number: int) -> None:
        if self.is_running():
            self._process.send_signal(number)

    def is_running(self) -> bool:
        """A draft that ended without being told to is counted, once."""
        if self._process is not None and self._process.poll() is not None:
            self.num_died += 1
            self._forget()
        return self._process is not None

    def kill(self) -> None:
        if self.is_running():
            self._process.kill()
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        os.close(self._ready_fd)
        self._process = self._ready_fd = None


class Weather(NamedTuple):
    """What happens to one frame of a hundred."""

    flipped: int = 0
    lost: int = 0
    doubled: int = 0
    late: int = 0


CALM, STORMY = Weather(), Weather(flipped=4, lost=4, doubled=4, late=4)


class Line:
    """A proxy between one verifier and the draft, in a thread of its own; ``weather`` may change at any time."""

    def __init__(self, front: str, back: str, seed: int) -> None:
        self.weather = CALM
        self.garbled: Counter[str] = Counter()
        self.num_frames = 0
        self._front, self._back = front, back
        self._random = Random(seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="line")
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        verifiers = context.socket(zmq.ROUTER)
        verifiers.bind(self._front)
        poller = zmq.Poller()
        poller.register(verifiers, zmq.POLLIN)
        to_draft: dict[bytes, zmq.Socket] = {}
        late: list[tuple[zmq.Socket, list[bytes]]] = []
        while not self._is_over.is_set():
            ready = dict(poller.poll(100))
            overtaken, late = late, []
            if verifiers in ready:
                peer, frame = verifiers.recv_multipart()
                if peer not in to_draft:
                    to_draft[peer] = context.socket(zmq.DEALER)
                    to_draft[peer].setsockopt(zmq.IDENTITY, peer)
                    to_draft[peer].connect(self._back)
                    poller.register(to_draft[peer], zmq.POLLIN)
                self._pass_on(to_draft[peer], [], frame, late)
            for peer, socket in to_draft.items():
                if socket in ready:
                    self._pass_on(verifiers, [peer], socket.recv(), late)
            for socket, frames in overtaken:
                socket.send_multipart(frames)
        for socket in (verifiers, *to_draft.values()):
            socket.close(linger=0)
        context.term()

    def _pass_on(self, socket: zmq.Socket, address: list[bytes], frame: bytes, late: list) -> None:
        """An empty frame says that the connection is new: it always arrives."""
        self.num_frames += 1
        fate = self._fate() if frame else None
        if fate is not None:
            self.garbled[fate] += 1
        if fate == "flipped":
            place = self._random.randrange(len(frame))
            bit = 1 << self._random.randrange(8)
            frame = frame[:place] + bytes([frame[place] ^ bit]) + frame[place + 1 :]
        if fate == "late":
            late.append((socket, [*address, frame]))
        elif fate != "lost":
            for _ in range(2 if fate == "doubled" else 1):
                socket.send_multipart([*address, frame])

    def _fate(self) -> str | None:
        number = self._random.randrange(100)
        for fate, share in self.weather._asdict().items():
            if number < share:
                return fate
            number -= share
        return None


class Storm:
    """Faults at random points, in a thread of its own, until ``end``."""

    def __init__(self, draft: Draft, line: Line, models: Sequence[Path], seed: int, pause_s: float) -> None:
        self.faults: Counter[str] = Counter()
        self._draft, self._line, self._models = draft, line, models
        self._random, self._pause_s = Random(seed), pause_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm")
        self._thread.start()

    def end(self) -> None:
        """Let the fault that is under way end; then all is calm, and a draft runs."""
        self._is_over.set()
        self._thread.join()
        self._line.weather = CALM
        if not self._draft.is_running():
            self._draft.start(self._models[0])

    def _run(self) -> None:
        order: list[str] = []
        while not self._is_over.wait(self._random.uniform(0.2, 1.8) * self._pause_s):
            # All of them in every round, in another order.
            order = order or self._random.sample(FAULTS, len(FAULTS))
            fault = order.pop()
            self.faults[fault] += 1
            getattr(self, f"_{fault}")()

    def _kill(self) -> None:
        self._restart(self._models[0])

    def _replace(self) -> None:
        self._restart(self._models[1 + self._random.randrange(len(self._models) - 1)])

    def _restart(self, model: Path) -> None:
        self._draft.kill()
        self._is_over.wait(self._random.uniform(0.0, 2.0) * self._pause_s)
        self._draft.start(model)
        if self._random.random() < 0.75:
            self._draft.wait_until_ready(self._is_over)

    def _stop(self) -> None:
        self._draft.signal(signal.SIGSTOP)
        self._is_over.wait(self._random.uniform(0.1, 2.0) * self._pause_s)
        self._draft.signal(signal.SIGCONT)

    def _slow(self) -> None:
        until = time.monotonic() + self._random.uniform(0.5, 2.0) * self._pause_s
        while time.monotonic() < until and not self._is_over.is_set():
            self._draft.signal(signal.SIGSTOP)
            time.sleep(0.05)
            self._draft.signal(signal.SIGCONT)
            time.sleep(0.05)

    def _garble(self) -> None:
        self._line.weather = STORMY
        self._is_over.wait(self._random.uniform(0.5, 2.0) * self._pause_s)
        self._line.weather = CALM


# -- requests --------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How many requests got the answer of plain decoding, another one, or none; and who proposed, by rounds."""

    num_requests: int
    num_lost: int
    num_wrong: int
    sources: dict[str, int]


def storm_requests(num: int, seed: int) -> list[Request]:
    """Every other one is greedy, the others have a seed."""
    rng = Random(seed)
    return [any_request(rng, i, (SHORTEST_ANSWER, LONGEST_ANSWER), longest_prompt=120) for i in range(num)]


def any_request(rng: Random, index: int, answer_lengths: tuple[int, int], longest_prompt: int) -> Request:
    """``any_sampling`` of a random prompt."""
    sampling = any_sampling(index, rng.getrandbits(62), rng.randint(*answer_lengths))
    return Request(rng.choices(range(32, 127), k=rng.randint(4, longest_prompt)), sampling)


def any_sampling(index: int, seed: int, num_tokens: int) -> dict[str, Any]:
    """Greedy for every other index, seeded for the others; ended by its length alone."""
    return {
        "temperature": 0.8 * (index % 2),
        "sampling_seed": seed,
        "max_new_tokens": num_tokens,
        "ignore_eos": True,
    }


def answers_over(
    server: Server, requests: Sequence[Request], seconds: float, seed: int
) -> list[list[int] | None]:
    """Output ids of requests that arrive at random times; None for one that failed."""
    rng = Random(seed)
    arrivals_s = sorted(rng.uniform(0.0, seconds) for _ in requests)
    started_s = time.monotonic()

    def ask(request: Request) -> Any:
        try:
            return server.ask([request])[0]
        except ServerFailed as error:
            print(error, file=sys.stderr)
            return None

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        futures = []
        for arrival_s, request in zip(arrivals_s, requests, strict=True):
            time.sleep(max(0.0, started_s + arrival_s - time.monotonic()))
            futures.append(pool.submit(ask, request))
        return [future.result() for future in futures]


def compare(plain: Sequence[list[int]], answers: Sequence[Any]) -> Outcome:
    given = [(answer, ids) for answer, ids in zip(answers, plain, strict=True) if answer is not None]
    sources = Counter(source for answer, _ in given for source in answer.meta_info["ssd_sources"])
    num_wrong = sum(first_difference(answer.output_ids, ids) is not None for answer, ids in given)
    return Outcome(len(answers), len(answers) - len(given), num_wrong, dict(sources))


def held(state: dict[str, Any]) -> dict[str, int]:
    """What requests still hold on either side, and leaks that the idle checks found. The draft's figures are its last."""
    draft = state["draft"]
    figures = {
        "open_sessions": state["open_sessions"],
        "idle_leaks": state["idle_leaks"],
        "draft's idle_leaks": draft["idle_leaks"],
        "draft's sessions": draft["num_sessions"],
        "draft's branch rows": draft["num_branch_rows"],
        "draft's KV slots": draft["total_kv_slots"] - draft["free_kv_slots"],
        "draft's rows": draft["total_rows"] - draft["free_rows"],
    }
    return {name: number for name, number in figures.items() if number}


def held_after(server: Server) -> dict[str, int]:
    """What is still held once the draft is back. Raises ``ServerFailed`` when it does not come back."""
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while True:
        state = server.ssd_state()
        is_back = state["draft_state"] == "alive" and state["draft"]["total_rows"]
        if is_back and (not held(state) or time.monotonic() > deadline):
            return held(state)
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"the draft is {state['draft_state']} after {RECOVERY_TIMEOUT_S:.0f} s of calm"
            )


# -- the run ---------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A server, and the draft and the line behind it."""

    server: Server
    draft: Draft
    line: Line
    models: list[Path]


@contextmanager
def stage(pair: PairPaths, other_drafts: Path, seed: int, log: Path, cores: tuple[str, str]):
    """An async server whose draft can be made to suffer. ``cores``: of target and draft."""
    models = [pair.draft]
    for kind in ("useless", "identical"):
        models.append(write_pair(other_drafts / kind, draft=kind, seed=seed).draft)
    with ExitStack() as stack:
        directory = RunDirectory()
        stack.callback(directory.close)
        draft = Draft(directory.endpoint("draft"), cores[1], log.with_name(f"{log.stem}-draft.log"))
        stack.callback(draft.kill)
        draft.start(models[0])
        line = Line(directory.endpoint("line"), directory.endpoint("draft"), seed)
        stack.callback(line.close)
        arguments = [
            *("--device", "cpu", "--dtype", "float32", "--model-path", str(pair.target)),
            *("--speculative-num-steps", str(LOOKAHEAD), "--ssd-fan-out-budget", str(BUDGET)),
            *("--ssd-draft-endpoint", directory.endpoint("line"), "--ssd-target-cores", cores[0]),
            *("--ssd-round-timeout-ms", str(ROUND_TIMEOUT_MS), *POOL),
        ]
        yield Stage(stack.enter_context(serving(arguments, log, "async")), draft, line, models)


def weather_the_storm(
    on: Stage,
    requests: Sequence[Request],
    plain: Sequence[list[int]],
    seconds: float,
    seed: int,
    pause_s: float,
) -> tuple[Outcome, dict[str, Any]]:
    """Answer all requests in a storm; afterwards wait until the draft is back. Returns what became of the requests, and
    of the rest."""
    storm = Storm(on.draft, on.line, on.models, seed, pause_s)
    try:
        answers = answers_over(on.server, requests, seconds, seed)
    finally:
        storm.end()
    still_held = held_after(on.server)
    state = on.server.ssd_state()
    rest = {
        "faults": dict(storm.faults),
        "frames_garbled": dict(on.line.garbled),
        "drafts_started": on.draft.num_started,
        "drafts_died": on.draft.num_died,
        "held_after": still_held,
        "client": state["client"],
    }
    return compare(plain, answers), rest


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ[STRICT_SWITCH] = "1"
    facts, requests = machine_facts(), storm_requests(args.num_requests, args.seed)
    with options.temporary_test_pair() as pair:
        cores = cores_of_both()
        plain_arguments = [
            *options.server_arguments(pair, "off", dtype="float32"),
            *("--ssd-target-cores", cores[0], *POOL),
        ]
        with serving(plain_arguments, options.log_path(args.out, "off"), "off") as off:
            answers = off.ask_all([[request] for request in requests], 8, "plain")
            plain = [answer.output_ids for answer in answers]
        log = options.log_path(args.out, "async")
        with stage(pair, pair.target.parent / "others", args.seed, log, cores) as on:
            outcome, rest = weather_the_storm(
                on, requests, plain, args.seconds, args.seed, pause_s=args.pause_s
            )
    return report(args, facts, outcome, rest)


def cores_of_both() -> tuple[str, str]:
    """The draft's core is the last one; plain decoding has those that the target of the async server has."""
    *target, draft = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, target or [draft])), str(draft)


def report(args, facts, outcome: Outcome, rest: dict[str, Any]) -> int:
    print(f"\n{format_table(Outcome._fields[:-1], [outcome[:-1]])}\n")
    for name, value in {"rounds by source": outcome.sources, **rest}.items():
        print(f"{name.replace('_', ' ')}: {value}")
    failures = outcome.num_lost + outcome.num_wrong + len(rest["held_after"]) + rest["drafts_died"]
    write_json(
        args.out,
        {
            **outcome._asdict(),
            **rest,
            "machine": facts,
            "arguments": options.arguments_as_json(args),
        },
    )
    return 1 if failures else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("storm", __doc__)
    parser.add_count("--num-requests", 300, "requests in the storm")
    parser.add_count("--seconds", 300, "over which they arrive")
    parser.add_count("--seed", 1, "of requests, arrivals and faults", lowest=0)
    add = parser.add_argument
    add("--pause-s", type=float, default=4.0, help="mean seconds between two faults (default: %(default)s)")
    parser.add_out("storm.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options.run_script(main, "storm")
