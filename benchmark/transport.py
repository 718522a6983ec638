"""Measure the line between verifier and draft: from outcomes sent to proposals decoded, for cached hits.

The draft is a process of its own with the real loop, channel, sessions and slot tables; only its model's forwards are
stubbed. This process is the verifier, with the real client. Both transports, batch sizes 1, 8 and 64. Between rounds
the verifier sleeps for as long as the draft needs to complete all branches, so that every round is a hit whose
proposal is ready.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from report import RESULTS, format_table, machine_facts, write_json
from tqdm import tqdm

from sglang_ssd.bridge.draft_runner import DraftModelRunner
from sglang_ssd.draft.server import DraftIdentity, DraftServer
from sglang_ssd.verifier.draft_client import DraftClient, RowOutcome
from sglang_ssd.verifier.session import VerifierSession
from sglang_ssd.wire.channel import DraftChannel, RunDirectory
from sglang_ssd.wire.messages import PROTOCOL_VERSION, Hello, RowKey

VOCAB_SIZE, CONTEXT_LENGTH = 32_000, 4096
#: As large as the pools that a CPU server chooses: the cost of a slot list depends on its length.
NUM_SLOTS = 32_768
PROMPT_TOKENS = 64
#: Then a request ends and another takes its place.
ROUNDS_PER_REQUEST = 20
TARGET_P50_MS = {1: 0.2, 8: None, 64: 1.0}


class StubRunner:
    """Stands for ``DraftRunner``: after any token it predicts 0, then 1, 2, ... The slot tables are the real ones."""

    def __init__(self, max_rows: int) -> None:
        self.pool = _Tables(max_rows)
        self.vocab_size, self.context_length = VOCAB_SIZE, CONTEXT_LENGTH

    def limit_vocabulary(self, vocab_size: int) -> None:
        """All predictions are small ids."""

    def call_during_forwards(self, callback) -> None:
        """A stubbed forward has no layers between which to call it."""

    def extend(self, row: int, prefix_len: int, token_ids: list[int], num_candidates: int) -> list[int]:
        return list(range(num_candidates))

    def step(self, lanes) -> None:
        for lane in lanes:
            lane.path.advance(list(range(lane.num_candidates)), lane.lookahead)


class _Tables(DraftModelRunner):
    """Rows and slots of ``DraftModelRunner`` without a model."""

    def __init__(self, max_rows: int) -> None:
        self.device = "cpu"
        self._tables = torch.zeros(max_rows + 1, CONTEXT_LENGTH, dtype=torch.int32)
        self._allocator = _FreeList()
        self._num_rows = max_rows
        self._free_rows = list(range(max_rows, 0, -1))
        self._total_slots = NUM_SLOTS


class _FreeList:
    """Slots as SGLang's allocator keeps them: one tensor of free ids, taken from its front and joined at its end."""

    def __init__(self) -> None:
        self._free = torch.arange(1, NUM_SLOTS + 1)

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        if num_slots > len(self._free):
            return None
        taken, self._free = self._free.split([num_slots, len(self._free) - num_slots])
        return taken

    def free(self, slots: torch.Tensor) -> None:
        self._free = torch.cat([self._free, slots])


def serve_draft(endpoint: str, max_rows: int, core: int, ready: Connection) -> None:
    """The draft process. Tells the endpoint it listens on, and serves until SIGTERM."""
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    channel = DraftChannel(endpoint)
    server = DraftServer(channel, StubRunner(max_rows), DraftIdentity("stub", "", max_sessions=64))
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready.send(channel.endpoint)
    server.run()
    channel.close()


class Verifier:
    """A batch of requests on the verifier's side; every verification accepts all tokens."""

    def __init__(self, endpoint: str, lookahead: int, budget: int, batch_size: int) -> None:
        hello = Hello(PROTOCOL_VERSION, VOCAB_SIZE, "", lookahead, budget, CONTEXT_LENGTH, "stub")
        self.client = DraftClient(endpoint, hello, round_timeout_ms=10_000)
        self.client.connect(timeout_s=60)
        self._expected = [0] * lookahead
        self._batch_size = batch_size
        self._num_requests = self._num_rounds = 0
        self._sessions: list[VerifierSession] = []

    def round(self, pause_s: float) -> float:
        """One round after a pause that stands for the verify. Returns seconds from outcome to proposal. Raises
        ``AssertionError`` unless every row is a hit."""
        is_first = not self._sessions
        if is_first:
            self._enter()
        time.sleep(pause_s)
        emitted = [0] if is_first else [*self._expected, 0]
        for session in self._sessions:
            session.tokens.extend(emitted)
        outcomes = [RowOutcome(session, len(emitted) - 1, 0) for session in self._sessions]
        started = time.perf_counter()
        self.client.send_outcomes(outcomes)
        proposals = self.client.collect(self._sessions)
        seconds = time.perf_counter() - started
        assert all(p.source == "hit" and p.token_ids == self._expected for p in proposals), proposals
        self.client.tend()
        self._num_rounds += 1
        if self._num_rounds % ROUNDS_PER_REQUEST == 0:
            self.leave()
        return seconds

    def _enter(self) -> None:
        for _ in range(self._batch_size):
            self._num_requests += 1
            self._sessions.append(VerifierSession(RowKey(self._num_requests, 0), None, [1] * PROMPT_TOKENS))
            self.client.open(self._sessions[-1])

    def leave(self) -> None:
        self.client.close(self._sessions, "finished")
        self._sessions = []

    def early_outcomes(self) -> int:
        """Outcomes so far that came before the draft had completed the branches."""
        while self.client.draft_stats.rounds < self._num_rounds:
            self.client.tend()
            time.sleep(0.01)
        return self.client.draft_stats.early_outcomes


class Latency(NamedTuple):
    """``early_outcomes`` of 0: every proposal was complete before its outcome was sent."""

    transport: str
    batch_size: int
    p50_ms: float
    p99_ms: float
    target_p50_ms: float | None
    pause_ms: float
    early_outcomes: int


def measure(
    transport: str, endpoint: str, batch_size: int, draft_core: int, args: argparse.Namespace
) -> Latency:
    parent, child = multiprocessing.get_context("spawn").Pipe()
    draft = multiprocessing.get_context("spawn").Process(
        target=serve_draft, args=(endpoint, batch_size * (1 + args.budget), draft_core, child)
    )
    draft.start()
    child.close()
    try:
        verifier = Verifier(parent.recv(), args.lookahead, args.budget, batch_size)
        pause_s, early = 0.01 * batch_size**0.5, 0
        while True:  # Lengthen the pause until the draft is always done.
            try:
                for _ in range(ROUNDS_PER_REQUEST):
                    verifier.round(pause_s)
                if verifier.early_outcomes() == early:
                    break
            except AssertionError:
                verifier.leave()
            pause_s *= 2
            early = verifier.client.draft_stats.early_outcomes
        label = f"{transport}, B={batch_size}"
        seconds = [
            verifier.round(pause_s) for _ in tqdm(range(args.rounds), desc=label, unit="round", leave=False)
        ]
        early = verifier.early_outcomes() - early
        verifier.client.disconnect()
    finally:
        draft.terminate()
        draft.join()
    p50, p99 = (1e3 * value for value in percentiles(seconds))
    return Latency(transport, batch_size, p50, p99, TARGET_P50_MS[batch_size], 1e3 * pause_s, early)


def percentiles(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark/transport.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--lookahead", type=int, default=7, help="K (default: 7)")
    add("--budget", type=int, default=8, help="fan-out budget B, at least K + 1 (default: 8)")
    add("--rounds", type=int, default=300, help="rounds measured of each kind (default: 300)")
    add("--out", type=Path, default=RESULTS / "transport.json", help="JSON (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.lookahead < 1 or args.budget <= args.lookahead:
        parser.error(
            f"--lookahead {args.lookahead} --budget {args.budget}: needs K of 1 or more and B above K"
        )
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: must be 2 or more")
    facts, cores = machine_facts(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    directory = RunDirectory()
    try:
        endpoints = {"ipc": directory.endpoint("draft"), "tcp": "tcp://127.0.0.1:*"}
        latencies = [
            measure(transport, endpoint, batch_size, cores[-1], args)
            for transport, endpoint in endpoints.items()
            for batch_size in TARGET_P50_MS
        ]
    finally:
        directory.close()
    print(format_table([name.replace("_", " ") for name in Latency._fields], latencies))
    value = {"latencies": [latency._asdict() for latency in latencies], "machine": facts}
    write_json(args.out, value | {"arguments": vars(args) | {"out": args.out.name}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
