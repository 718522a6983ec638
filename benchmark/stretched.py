"""A server or a draft whose forwards take stated times, and that can tell when it did what: for ``emulated.py``,
``rounds.py`` and ``attention_share.py``.

    python benchmark/stretched.py server|draft [flags of the launcher]

A server starts its draft with this file too. The real scheduler, wire and draft loop run; a forward that ends before its
time sleeps for the rest, so that the core is free meanwhile, as it is beside a GPU. Times come from the environment, since
SGLang starts its processes itself: ``SSD_STRETCHED_VERIFY_MS`` for a target forward over running requests,
``SSD_STRETCHED_DEPTH_MS`` for a draft forward with what comes before and after it on the host. In the overlapped loop a
target forward returns at once, as a launch does, and who reads its tokens sleeps. With ``SSD_TRACE_DIR`` each
process writes its steps there, one ``[step, ticket, rows, start, end]`` a line, in seconds of the machine's own clock, and
the draft its outcomes, in a file of their own; with ``SSD_TRACE_ATTENTION`` the target's attention layers are steps as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

VERIFY_MS, DEPTH_MS = "SSD_STRETCHED_VERIFY_MS", "SSD_STRETCHED_DEPTH_MS"
TRACE_DIR, TRACE_ATTENTION = "SSD_TRACE_DIR", "SSD_TRACE_ATTENTION"


def add_times(parser: argparse.ArgumentParser) -> None:
    """The options that ``state_times`` reads."""
    add = parser.add_argument
    add("--verify-ms", type=float, default=11.5, help="a target forward (default: %(default)s)")
    add("--depth-ms", type=float, default=2.54, help="a draft forward (default: %(default)s)")
    add("--scale", type=float, default=1.0, help="stretches both times (default: %(default)s)")


def check_times(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for option in ("verify_ms", "depth_ms", "scale"):
        if not getattr(args, option) > 0:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: must be above 0")


def state_times(args: argparse.Namespace) -> tuple[float, float]:
    """Tell the servers to come how long a verify and a draft depth take: the milliseconds, which are returned."""
    verify_ms, depth_ms = args.scale * args.verify_ms, args.scale * args.depth_ms
    os.environ[VERIFY_MS], os.environ[DEPTH_MS] = str(verify_ms), str(depth_ms)
    return verify_ms, depth_ms


def stated_ms(variable: str) -> float:
    """0 where no time is stated: then a forward takes its own."""
    return float(os.environ.get(variable, "0"))


def stretch(
    owner: type, name: str, milliseconds: float, applies: Callable[..., bool] = lambda *_, **__: True
) -> None:
    """Let the method ``owner.name`` take ``milliseconds`` at least, where ``applies`` to its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def stretched(self, *args: Any, **kwargs: Any) -> Any:
        end = time.perf_counter() + milliseconds / 1e3
        result = method(self, *args, **kwargs)
        if applies(*args, **kwargs) and (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        return result

    setattr(owner, name, stretched)


def stretch_until_read(
    owner: type, name: str, reader: ModuleType, read: str, milliseconds: float, applies: Callable[..., bool]
) -> None:
    """Let what the method ``owner.name`` began take ``milliseconds`` until the function ``reader.read`` has read it."""
    method, function, ends_s = getattr(owner, name), getattr(reader, read), [0.0]

    @functools.wraps(method)
    def launched(self, *args: Any, **kwargs: Any) -> Any:
        if applies(*args, **kwargs):
            ends_s[0] = time.perf_counter() + milliseconds / 1e3
        return method(self, *args, **kwargs)

    @functools.wraps(function)
    def waiting(*args: Any) -> Any:
        time.sleep(max(0.0, ends_s[0] - time.perf_counter()))
        return function(*args)

    setattr(owner, name, launched)
    setattr(reader, read, waiting)


class Trace:
    """Writes one line a call of the methods that it follows."""

    def __init__(self, role: str) -> None:
        self._file = (Path(os.environ[TRACE_DIR]) / f"{role}-{os.getpid()}.jsonl").open("w", buffering=1)

    def follow_outcomes(self) -> None:
        """What every outcome taught the draft, as JSON objects: ``DraftPolicy.observe_outcome``."""
        from sglang_ssd.draft.policy import DraftPolicy

        observe_outcome, write = DraftPolicy.observe_outcome, self._file.write

        @functools.wraps(observe_outcome)
        def followed(self, **outcome: Any) -> None:
            write(json.dumps(outcome) + "\n")
            observe_outcome(self, **outcome)

        DraftPolicy.observe_outcome = followed

    def follow(self, owner: type, *names: str) -> None:
        """Every call of these methods."""
        for name in names:
            self._wrap(owner, name, lambda *_: (None, None))

    def follow_tickets(self, owner: type, *names: str) -> None:
        """The calls of these methods that take or return a round or a proposal."""
        for name in names:
            self._wrap(owner, name, ticket_and_rows)

    def _wrap(self, owner: type, name: str, told: Callable[..., Sequence[int | None] | None]) -> None:
        method, step, write = getattr(owner, name), f"{owner.__name__}.{name}", self._file.write

        @functools.wraps(method)
        def followed(self, *args: Any, **kwargs: Any) -> Any:
            result, start = None, time.perf_counter()
            try:
                result = method(self, *args, **kwargs)
                return result
            finally:
                end = time.perf_counter()
                if (of_message := told(result, *args)) is not None:
                    write(json.dumps([step, *of_message, start, end]) + "\n")

        setattr(owner, name, followed)


def ticket_and_rows(*values: Any) -> tuple[int, int] | None:
    """Of the round or the proposal among these, or inside a received one."""
    for message in (getattr(value, "message", value) for value in values):
        if hasattr(message, "ticket"):
            return message.ticket, len(message.rows if hasattr(message, "rows") else message.requests)
    return None


def run_scheduler(server_args, *args, **kwargs) -> None:
    """Entry of the scheduler process, where nothing is replaced yet: ours, with stretched forwards of the target."""
    from sglang_ssd import plugin
    from sglang_ssd.bridge.environment import use_cpu_engine

    use_cpu_engine()
    from sglang.srt.managers.tp_worker import TpModelWorker

    def is_running(batch=None, *_: Any, forward_batch=None, **__: Any) -> bool:
        mode = (forward_batch or batch).forward_mode
        return mode.is_decode() or mode.is_target_verify()

    forward = (TpModelWorker, "forward_batch_generation")
    if server_args.disable_overlap_schedule:
        stretch(*forward, stated_ms(VERIFY_MS), is_running)
    else:
        from sglang_ssd.verifier import worker

        stretch_until_read(*forward, worker, "emitted_tokens", stated_ms(VERIFY_MS), is_running)
    if TRACE_DIR in os.environ:
        from sglang_ssd.verifier.worker import SSDWorker
        from sglang_ssd.wire.channel import VerifierChannel

        trace = Trace("verifier")
        trace.follow(SSDWorker, "_round", "_collect", "run_verify", "_decide", "_send_outcomes")
        trace.follow_tickets(VerifierChannel, "send", "receive")
        if TRACE_ATTENTION in os.environ:
            from sglang_ssd.bridge.cpu_attention import CpuAttentionBackend

            trace.follow(CpuAttentionBackend, "forward_extend")
    plugin.run_scheduler(server_args, *args, **kwargs)


def main() -> int:
    role, *flags = sys.argv[1:]
    if role == "server":
        from sglang_ssd import draft_process, launch_server, plugin

        draft_process.LAUNCHER = (sys.executable, __file__, "draft")
        plugin.run_scheduler = run_scheduler
        return launch_server.main(flags)
    from sglang_ssd import launch_draft
    from sglang_ssd.bridge.environment import use_cpu_engine

    use_cpu_engine()
    from sglang_ssd.draft.runner import DraftRunner

    stretch(DraftRunner, "step", stated_ms(DEPTH_MS))
    if TRACE_DIR in os.environ:
        from sglang_ssd.wire.channel import DraftChannel

        Trace("outcomes").follow_outcomes()
        trace = Trace("draft")
        trace.follow(DraftRunner, "step")
        trace.follow_tickets(DraftChannel, "send", "receive")
    return launch_draft.main(flags)


if __name__ == "__main__":
    sys.exit(main())
