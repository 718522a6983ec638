"""Measure the line between verifier and draft: from outcomes sent to proposals decoded, for cached hits.

The draft is a process of its own with the real loop, channel, sessions and slot tables; only its model's forwards are
stubbed. This process is the verifier, with the real client. Both transports, batch sizes 1, 8 and 64. A verify takes
as long as the draft needs to complete all branches, so that every round is a hit whose proposal is ready.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import options
import torch
from report import format_table, machine_facts, write_json
from tqdm import tqdm

from sglang_ssd.algorithm.round_limit import RoundLimit
from sglang_ssd.bridge.draft_runner import DraftModelRunner
from sglang_ssd.bridge.environment import use_cpu_engine
from sglang_ssd.draft.runner import DraftRunner
from sglang_ssd.draft.server import DraftIdentity, DraftServer
from sglang_ssd.verifier.draft_client import DraftClient, RowOutcome
from sglang_ssd.verifier.drafts import Drafts
from sglang_ssd.verifier.session import VerifierSession
from sglang_ssd.wire.channel import DraftChannel, RunDirectory
from sglang_ssd.wire.messages import PROTOCOL_VERSION, Hello, RowKey

VOCAB_SIZE, CONTEXT_LENGTH = 128, 2048
#: As large as the pools that a CPU server chooses: the cost of a slot list depends on its length.
NUM_SLOTS = 32_768
PROMPT_TOKENS = 64
#: Then a request ends and another takes its place.
ROUNDS_PER_REQUEST = 40
REST_S = 0.01
LONGEST_VERIFY_S = 60.0
#: Batch size -> what the design asks of the median.
TARGET_P50_MS = {1: 0.2, 8: None, 64: 1.0}


class StubModel(DraftModelRunner):
    """A model without weights: after any token it predicts 0, then 1, 2, ... Its rows and slots are the real ones."""

    def __init__(self, max_rows: int) -> None:
        self.device = "cpu"
        self.vocab_size, self.context_length = VOCAB_SIZE, CONTEXT_LENGTH
        self._tables = torch.zeros(max_rows + 1, CONTEXT_LENGTH, dtype=torch.int32)
        self._allocator = _FreeList()
        self._num_rows = self.max_decode_tokens = max_rows
        self._free_rows = list(range(max_rows, 0, -1))
        self._total_slots = NUM_SLOTS
        use_cpu_engine()
        from sglang_ssd.bridge.prefix_cache import PrefixCache

        self._prefixes = PrefixCache(None, self._allocator)
        self._logits = -torch.arange(VOCAB_SIZE, dtype=torch.float32)[None]

    def call_during_forwards(self, callback) -> None:
        """A stubbed forward has no layers between which to call it."""

    def extend(self, rows: list[int], prefix_lens: list[int], chunks: list[list[int]]) -> torch.Tensor:
        return self._logits.expand(len(rows), -1)

    def decode(self, layout, token_ids: list[int]) -> torch.Tensor:
        return self._logits.expand(len(token_ids), -1)


class _FreeList:
    """Slots as SGLang's allocator keeps them: one tensor of free ids, taken from its front and joined at its end."""

    device = "cpu"

    def __init__(self) -> None:
        self._free = torch.arange(1, NUM_SLOTS + 1)

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        if num_slots > len(self._free):
            return None
        taken, self._free = self._free.split([num_slots, len(self._free) - num_slots])
        return taken

    def free_group_begin(self) -> None:
        """SGLang gathers what is freed until the end of the group; here each free is cheap enough."""

    def free_group_end(self) -> None:
        pass

    def free(self, slots: torch.Tensor) -> None:
        self._free = torch.cat([self._free, slots])

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.free(slots)


def serve_draft(endpoint: str, max_rows: int, core: int, ready: Connection) -> None:
    """The draft process. Tells the endpoint it listens on, and serves until SIGTERM."""
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    use_cpu_engine()
    warnings.simplefilter("ignore")  # SGLang says at import what a CPU does not support.
    importlib.import_module("sglang_ssd.bridge.cpu_attention")  # Else the first forward does, for seconds.
    channel = DraftChannel(endpoint)
    server = DraftServer(
        channel, DraftRunner(StubModel(max_rows)), DraftIdentity("stub", "", max(TARGET_P50_MS))
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready.send(channel.endpoint)
    server.run()
    channel.close()


@contextmanager
def draft_process(endpoint: str, budget: int, core: int) -> Iterator[str]:
    """A draft on a core of its own. Yields the endpoint it listens on."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    max_rows = max(TARGET_P50_MS) * (1 + budget)
    process = spawn.Process(target=serve_draft, args=(endpoint, max_rows, core, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


class Verifier:
    """A batch of requests on the verifier's side; every verification accepts all tokens."""

    def __init__(self, endpoint: str, lookahead: int, budget: int, batch_size: int) -> None:
        hello = Hello(PROTOCOL_VERSION, VOCAB_SIZE, "", lookahead, budget, CONTEXT_LENGTH, "stub")
        limit = RoundLimit(10_000.0)
        self.drafts = Drafts([DraftClient(endpoint, hello, limit)], limit)
        self.drafts.connect(timeout_s=60)
        self._expected = [0] * lookahead
        self._batch_size = batch_size
        self._num_requests = self._num_rounds = 0
        self._sessions: list[VerifierSession] = []

    def round(self) -> float:
        """One round. Returns seconds from outcome to proposal. Raises RuntimeError unless every row is a hit."""
        emitted = [*self._expected, 0]
        if not self._sessions:
            self._enter()
            emitted = [0]
        self._verify()
        for session in self._sessions:
            session.tokens.extend(emitted)
        outcomes = [RowOutcome(session, len(emitted) - 1, 0) for session in self._sessions]
        started = time.perf_counter()
        self.drafts.send_outcomes(outcomes)
        proposals = self.drafts.collect(self._sessions)
        seconds = time.perf_counter() - started
        if any(p.source != "hit" or p.token_ids != self._expected for p in proposals):
            raise RuntimeError(f"a round was no hit: {proposals}")
        self._num_rounds += 1
        if self._num_rounds % ROUNDS_PER_REQUEST == 0:
            self.drafts.close(self._sessions, "finished")
            self._sessions = []
        return seconds

    def _enter(self) -> None:
        for _ in range(self._batch_size):
            self._num_requests += 1
            self._sessions.append(VerifierSession(RowKey(self._num_requests, 0), None, [1] * PROMPT_TOKENS))
            self.drafts.open(self._sessions[-1])

    def _verify(self) -> None:
        """Take as long as the draft needs to complete all branches (it has no more forwards to run), and then some, so
        that it sleeps as it would in the rest of a long verify. Raises RuntimeError when it never comes to rest."""
        deadline, num_forwards = time.monotonic() + LONGEST_VERIFY_S, None
        while num_forwards != (num_forwards := self.drafts.refresh_stats(timeout_s=1.0).forwards):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the draft is not done after {LONGEST_VERIFY_S:.0f} s")
            time.sleep(REST_S)


class Latency(NamedTuple):
    """``early_outcomes`` of 0: every proposal was complete before its outcome was sent."""

    transport: str
    batch_size: int
    p50_ms: float
    p99_ms: float
    target_p50_ms: float | None
    early_outcomes: int


def measure(transport: str, endpoint: str, batch_size: int, args: argparse.Namespace) -> Latency:
    verifier = Verifier(endpoint, args.lookahead, args.budget, batch_size)
    rounds = tqdm(range(args.rounds), desc=f"{transport}, B={batch_size}", unit="round", leave=False)
    early = verifier.drafts.refresh_stats().early_outcomes
    seconds = [verifier.round() for _ in rounds]
    early = verifier.drafts.refresh_stats(timeout_s=1.0).early_outcomes - early
    verifier.drafts.disconnect()
    p50, p99 = (1e3 * value for value in percentiles(seconds))
    return Latency(transport, batch_size, p50, p99, TARGET_P50_MS[batch_size], early)


def percentiles(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts, cores = machine_facts(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    directory = RunDirectory()
    latencies = []
    try:
        for transport, endpoint in {"ipc": directory.endpoint("draft"), "tcp": "tcp://127.0.0.1:*"}.items():
            with draft_process(endpoint, args.budget, cores[-1]) as served:
                latencies += [measure(transport, served, batch_size, args) for batch_size in TARGET_P50_MS]
    finally:
        directory.close()
    print(format_table([name.replace("_", " ") for name in Latency._fields], latencies))
    value = {"latencies": [latency._asdict() for latency in latencies], "machine": facts}
    write_json(args.out, value | {"arguments": options.arguments_as_json(args)})
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("transport", __doc__)
    parser.add_speculation(lookahead=7, budget=8)
    parser.add_count("--rounds", 300, "rounds measured of each kind", lowest=2)
    parser.add_out("transport.json")
    args = parser.parse_args(argv)
    if args.budget <= args.lookahead:
        parser.error(f"--budget {args.budget}: must be above --lookahead {args.lookahead}")
    return args


if __name__ == "__main__":
    options.run_script(main, "transport", RuntimeError)
