"""Load a server with many streams, some of which leave in the middle: nothing may be lost, wrong, held or growing.

Plain decoding and an async server of the test pair get the same requests, --streams of them at a time, after as many
others as it takes until the pools and heaps of both have been touched once (--warm-ups). Every fifth
client closes its connection at a random point, before the first token included. Told is the gap between two events of
a stream, as a user sees it (an event of SSD brings several tokens), and a token's share of it; and the resident memory
of the scheduler and the draft over time. The exit code is 1 when an answer is missing, incomplete or another one than
plain decoding's, when something is held at the end, or when memory grows by more than --max-growth-mib over the second
half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import options
import psutil
from report import format_table, machine_facts, new_figure, save_figure, write_json
from serving import REQUEST_TIMEOUT_S, Request, Server, ServerFailed, serving
from storm import any_request, held
from tqdm import tqdm

MODES = ("off", "async")
LOOKAHEAD, BUDGET = 3, 12
SHORTEST_ANSWER, LONGEST_ANSWER = 8, 48
SHARE_LEAVING = 0.2
#: Little more than the streams need, so that the first half uses all of it: a page that is touched first is no growth.
KV_TOKENS = 24576
MEMORY_INTERVAL_S = 1.0
SETTLE_TIMEOUT_S = 60.0


class Stream(NamedTuple):
    """What one client saw: when which number of tokens had come (seconds, tokens), and the tokens. ``is_complete``: the
    server ended it, with all tokens that were asked for."""

    is_complete: bool
    has_left: bool
    arrivals: list[tuple[float, int]]
    output_ids: list[int]


class MemorySample(NamedTuple):
    seconds: float
    scheduler_mib: float
    draft_mib: float


class Figures(NamedTuple):
    """One mode under load. Gaps are between events of a stream, token shares are gaps over the tokens of the event."""

    mode: str
    num_requests: int
    num_complete: int
    num_left: int
    num_lost: int
    num_wrong: int
    tokens_per_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    token_p50_ms: float
    token_p99_ms: float
    scheduler_growth_mib: float
    draft_growth_mib: float


class Memory:
    """Samples the resident memory of a server's scheduler and draft, in a thread of its own, while the block lasts."""

    def __init__(self, server: Server) -> None:
        family = psutil.Process(server.pid).children(recursive=True)
        self._schedulers = [process for process in family if process.name().startswith("sglang::schedul")]
        self._drafts = [process for process in family if "sglang_ssd.launch_draft" in process.cmdline()]
        self.samples: list[MemorySample] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        while not self._is_over.wait(MEMORY_INTERVAL_S):
            seconds = time.monotonic() - started
            self.samples.append(MemorySample(seconds, _mib(self._schedulers), _mib(self._drafts)))


def _mib(processes: Sequence[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / 2**20


def load_requests(num: int, seed: int) -> list[tuple[Request, int | None]]:
    """Requests, greedy and seeded in turns, and after how many events their client leaves."""
    rng, requests = Random(seed), []
    for i in range(num):
        request = any_request(rng, i, (SHORTEST_ANSWER, LONGEST_ANSWER), longest_prompt=64)
        leaves = rng.random() < SHARE_LEAVING
        requests.append((request, rng.randrange(LONGEST_ANSWER // 2) if leaves else None))
    return requests


async def stream(
    session: aiohttp.ClientSession, url: str, request: Request, leave_after: int | None
) -> Stream:
    """Read one stream, up to ``leave_after`` events."""
    body = {"input_ids": request.input_ids, "sampling_params": request.sampling, "stream": True}
    arrivals: list[tuple[float, int]] = []
    output_ids: list[int] = []
    finish = None
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            if leave_after == 0:
                return Stream(False, True, [], [])
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                output_ids, finish = event["output_ids"], event["meta_info"]["finish_reason"]
                arrivals.append((time.perf_counter(), len(output_ids)))
                if leave_after is not None and len(arrivals) >= leave_after and finish is None:
                    return Stream(False, True, arrivals, output_ids)
    except (aiohttp.ClientError, TimeoutError, KeyError) as error:
        print(f"a stream broke: {error!r}")
    is_complete = finish is not None and len(output_ids) == request.sampling["max_new_tokens"]
    return Stream(is_complete, False, arrivals, output_ids)


async def stream_all(
    server: Server, requests: Sequence[tuple[Request, int | None]], num_at_once: int, label: str
):
    """All streams in order, so many at a time."""
    turns = asyncio.Semaphore(num_at_once)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with tqdm(desc=label, total=len(requests), unit="stream") as progress:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def one(request: Request, leave_after: int | None) -> Stream:
                async with turns:
                    seen = await stream(session, server.url, request, leave_after)
                progress.update()
                return seen

            return await asyncio.gather(*(one(*request) for request in requests))


def gaps(streams: Sequence[Stream]) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds between events of a stream, and a token's share of each; first events have no gap."""
    steps = [
        (later[0] - earlier[0], later[1] - earlier[1])
        for seen in streams
        for earlier, later in zip(seen.arrivals, seen.arrivals[1:], strict=False)
        if later[1] > earlier[1]
    ]
    seconds, tokens = np.array(steps, dtype=float).reshape(-1, 2).T
    return seconds * 1e3, seconds * 1e3 / tokens


def growth_mib(seconds: Sequence[float], mib: Sequence[float]) -> float:
    """By how much the memory grew over the second half of the time, as the line of least squares says."""
    half = seconds[-1] / 2
    late = [(s, m) for s, m in zip(seconds, mib, strict=True) if s >= half]
    if len(late) < 2:
        return 0.0
    x, y = np.array(late).T
    return float(np.polyfit(x, y, 1)[0] * (x[-1] - x[0]))


def summarize(
    mode: str,
    requests: Sequence[tuple[Request, int | None]],
    streams: Sequence[Stream],
    seconds: float,
    samples: Sequence[MemorySample],
    plain: Sequence[Stream],
) -> Figures:
    whole, shares = gaps(streams)
    times = [sample.seconds for sample in samples]
    return Figures(
        mode=mode,
        num_requests=len(requests),
        num_complete=sum(seen.is_complete for seen in streams),
        num_left=sum(seen.has_left for seen in streams),
        num_lost=sum(not seen.is_complete and not seen.has_left for seen in streams),
        num_wrong=sum(differ(seen, oracle) for seen, oracle in zip(streams, plain, strict=True)),
        tokens_per_s=sum(len(seen.output_ids) for seen in streams) / seconds,
        gap_p50_ms=float(np.percentile(whole, 50)),
        gap_p99_ms=float(np.percentile(whole, 99)),
        token_p50_ms=float(np.percentile(shares, 50)),
        token_p99_ms=float(np.percentile(shares, 99)),
        scheduler_growth_mib=growth_mib(times, [sample.scheduler_mib for sample in samples]),
        draft_growth_mib=growth_mib(times, [sample.draft_mib for sample in samples]),
    )


def differ(seen: Stream, oracle: Stream) -> bool:
    """Whether the tokens of two streams differ, as far as both were read."""
    both = min(len(seen.output_ids), len(oracle.output_ids))
    return seen.output_ids[:both] != oracle.output_ids[:both]


def held_at_last(server: Server) -> dict[str, int]:
    """What is still held when all clients have left for a while."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (still := held(server.ssd_state())) and time.monotonic() < deadline:
        pass
    return still


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts, requests = machine_facts(), load_requests(args.num_requests, args.seed)
    warm_ups = load_requests(args.warm_ups, args.seed + 1)
    figures: list[Figures] = []
    memory: dict[str, list[MemorySample]] = {}
    gaps_ms: dict[str, np.ndarray] = {}
    plain: list[Stream] = []
    still_held: dict[str, int] = {}
    with options.temporary_test_pair() as pair:
        for mode in MODES:
            arguments = options.server_arguments(
                pair, mode, dtype="float32", lookahead=LOOKAHEAD, budget=BUDGET
            )
            arguments += ["--max-total-tokens", str(KV_TOKENS), "--max-running-requests", str(args.streams)]
            if mode == "async":
                arguments += ["--ssd-draft-max-total-tokens", str(KV_TOKENS)]
            with serving(arguments, options.log_path(args.out, mode), mode) as server:
                if warm_ups:
                    asyncio.run(stream_all(server, warm_ups, args.streams, f"{mode}, warm-up"))
                with Memory(server) as sampled:
                    started = time.perf_counter()
                    streams = asyncio.run(stream_all(server, requests, args.streams, mode))
                    seconds = time.perf_counter() - started
                if mode == "async":
                    still_held = held_at_last(server)
            plain = plain or streams
            memory[mode], gaps_ms[mode] = sampled.samples, gaps(streams)[0]
            figures.append(summarize(mode, requests, streams, seconds, sampled.samples, plain))
    return report(args, facts, figures, memory, gaps_ms, still_held)


def report(
    args,
    facts,
    figures: Sequence[Figures],
    memory: dict[str, list[MemorySample]],
    gaps_ms: dict[str, np.ndarray],
    still_held: dict[str, int],
) -> int:
    print(f"\n{format_table([name.replace('_', ' ') for name in Figures._fields], figures)}\n")
    print(f"held at the end: {still_held or 'nothing'}")
    value: dict[str, Any] = {
        "modes": [row._asdict() for row in figures],
        "held_at_the_end": still_held,
        "memory": {mode: [list(sample) for sample in samples] for mode, samples in memory.items()},
        "machine": facts,
        "arguments": options.arguments_as_json(args),
    }
    write_json(args.out, value)
    plot(args.out.with_suffix(".png"), memory, gaps_ms)
    is_bad = any(
        row.num_lost
        or row.num_wrong
        or row.num_complete + row.num_left != row.num_requests
        or max(row.scheduler_growth_mib, row.draft_growth_mib) > args.max_growth_mib
        for row in figures
    )
    return 1 if is_bad or still_held else 0


def plot(path: Path, memory: dict[str, list[MemorySample]], gaps_ms: dict[str, np.ndarray]) -> None:
    figure, axes = new_figure(num_columns=2)
    for mode, samples in memory.items():
        seconds = [sample.seconds for sample in samples]
        axes[0].plot(seconds, [sample.scheduler_mib for sample in samples], label=f"{mode}: scheduler")
        if any(sample.draft_mib for sample in samples):
            axes[0].plot(seconds, [sample.draft_mib for sample in samples], label=f"{mode}: draft")
    axes[0].set(xlabel="seconds", ylabel="resident memory, MiB", ylim=(0, None))
    for mode, values in gaps_ms.items():
        axes[1].plot(np.sort(values), np.linspace(0, 1, len(values)), label=mode)
    axes[1].set(xlabel="gap between two events, ms", ylabel="share of gaps", xscale="log")
    for ax in axes:
        ax.legend()
    save_figure(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options.Parser("load", __doc__)
    parser.add_count("--num-requests", 2000, "requests of each mode")
    parser.add_count("--warm-ups", 4000, "requests before them, of which only the memory is left", lowest=0)
    parser.add_count("--streams", 200, "of them at a time")
    parser.add_count("--seed", 1, "of requests and of clients that leave", lowest=0)
    parser.add_argument(
        "--max-growth-mib",
        type=float,
        default=32.0,
        help="of a process over the second half (default: %(default)s)",
    )
    parser.add_out("load.json", "; the plot lies beside it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options.run_script(main, "load", ServerFailed)
