"""Fuzz both ends of the line: mutated frames go through the decoders into both state machines, guided by coverage.

    python test/fuzz/fuzz_wire.py --seconds 600 --out fuzz.json

One input is one connection: the side that hears it and its frames. Ends with exit code 77 and the input in a file when
anything but ``MalformedMessage`` escapes, when a connection leaves something behind or takes too long, and with 1 when
the memory grows. Needs atheris (requirements/fuzz.txt).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import atheris
import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
with atheris.instrument_imports(include=["sglang_ssd.wire", "sglang_ssd.draft", "sglang_ssd.verifier"]):
    from fuzz.machines import Machines, conversations

SIDES = ("draft", "verifier")
INTERESTING = (0, 1, 2, 3, -1, 7, 49, 50, 2**31, 2**63, -(2**63), 0.0, -1.0, 1e300, math.nan, None, "", "hit")
#: Growth of the resident memory after a third of the time: libFuzzer keeps a corpus, nothing else may.
MAX_GROWTH_MIB = 64
#: libFuzzer counts wall time, and a shared machine may stop for minutes; ``machines.CPU_LIMIT_S`` is the tight limit.
_HANG_S = 1200


def pack(side: str, frames: list[bytes]) -> bytes:
    return msgspec.msgpack.encode([SIDES.index(side), frames])


def unpack(data: bytes) -> tuple[str, list[bytes]]:
    """Bytes that are no packed connection are one frame, for the draft or the verifier."""
    try:
        side, frames = msgspec.msgpack.decode(data, type=tuple[int, list[bytes]])
        return SIDES[side % 2], frames
    except (msgspec.DecodeError, RecursionError):
        return SIDES[sum(data[:1]) % 2], [data[1:]]


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change a value inside a frame, the bytes of a frame, or their order; keeps the envelope whole."""
    rng = random.Random(seed)
    side, frames = unpack(data)
    frames = list(frames) or [b""]
    i = rng.randrange(len(frames))
    kind = rng.randrange(6)
    if kind == 0:
        frames.insert(rng.randrange(len(frames) + 1), frames[i])
    elif kind == 1:
        frames[i], frames[-1] = frames[-1], frames[i]
    elif kind == 2:
        frames.insert(i, rng.choice(rng.choice(conversations())[1]))
    elif kind == 3:
        frames[i] = atheris.Mutate(frames[i], max(1, len(frames[i]) + 16)) if frames[i] else b"\x90"
    else:
        frames[i] = _with_another_value(frames[i], rng)
    mutated = pack(side, frames[:12])
    return mutated if len(mutated) <= max_size else data[:max_size]


def _with_another_value(frame: bytes, rng: random.Random) -> bytes:
    try:
        message = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frame
    return msgspec.msgpack.encode(_changed(message, rng))


def _changed(value, rng: random.Random):
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], _changed(value[i], rng), *value[i + 1 :]]
    others = [*INTERESTING]
    if isinstance(value, int) and not isinstance(value, bool):
        others += [value + 1, value - 1] if abs(value) < 2**62 else []
    if isinstance(value, list):
        others += [[], value + value, value * 40, value[1:]]
    if isinstance(value, bytes):
        others += [b"", value + bytes(4), value[4:]]
    return rng.choice(others)


class Run:
    """Counts inputs, watches the memory, and ends when the time is over."""

    def __init__(self, seconds: float, out: Path | None) -> None:
        self._machines, self._seconds, self._out = Machines(), seconds, out
        self._process = psutil.Process()
        self._started_s = time.monotonic()
        self._num_inputs = 0
        self._settled_mib: float | None = None

    def one_input(self, data: bytes) -> None:
        self._machines.take(*unpack(data))
        self._num_inputs += 1
        elapsed_s = time.monotonic() - self._started_s
        if self._settled_mib is None and elapsed_s > self._seconds / 3:
            self._settled_mib = self._memory_mib()
        if elapsed_s > self._seconds:
            self._end(elapsed_s)

    def _memory_mib(self) -> float:
        return self._process.memory_info().rss / 2**20

    def _end(self, elapsed_s: float) -> None:
        growth_mib = self._memory_mib() - self._settled_mib
        figures = {
            "seconds": round(elapsed_s, 1),
            "connections": self._num_inputs,
            "frames": dict(self._machines.taken.most_common()),
            "slowest_connection_cpu_ms": round(self._machines.slowest_cpu_ms, 1),
            "memory_mib_after_a_third": round(self._settled_mib, 1),
            "memory_growth_mib": round(growth_mib, 1),
            "atheris": version("atheris"),
        }
        print(json.dumps(figures, indent=2), flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        # libFuzzer never returns.
        os._exit(1 if growth_mib > MAX_GROWTH_MIB else 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--out", type=Path, help="JSON with the figures")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    args = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as corpus:
        for i, conversation in enumerate(conversations()):
            (Path(corpus) / str(i)).write_bytes(pack(*conversation))
        flags = ["-max_len=8192", f"-timeout={_HANG_S}", "-rss_limit_mb=2048", f"-seed={args.seed}"]
        atheris.Setup(
            [sys.argv[0], *flags, corpus], Run(args.seconds, args.out).one_input, custom_mutator=mutate
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
