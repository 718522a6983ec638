"""Life of the server's processes: the scheduler's entry, and how a start fails in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)


def run_scheduler(scheduler_class_factory: Callable[[], type], *args, **kwargs) -> None:
    """Run SGLang's scheduler process with another Scheduler class (seam: the module's global is looked up by name)."""
    import sglang.srt.managers.scheduler as scheduler_module

    from sglang_ssd.bridge.self_check import SGLANG_VERSION, drifted_seams

    drifted = drifted_seams()
    if drifted:
        fail_start(
            f"this SGLang is not the {SGLANG_VERSION} that sglang-ssd is built on: " + "; ".join(drifted)
        )
    scheduler_module.Scheduler = scheduler_class_factory()
    scheduler_module.run_scheduler_process(*args, **kwargs)


def serve_http(server_args, run_scheduler_process: Callable[..., None]) -> None:
    """SGLang's HTTP server with another entry of its scheduler processes. Returns when it was told to stop."""
    from sglang.srt.entrypoints.http_server import launch_server

    from sglang_ssd.bridge.tokenizer_manager import init_tokenizer_manager

    launch_server(
        server_args,
        init_tokenizer_manager_func=init_tokenizer_manager,
        run_scheduler_process_func=run_scheduler_process,
    )


def start_engine(server_args, run_scheduler_process: Callable[..., None]):
    """SGLang's offline engine with another entry of its scheduler processes."""
    from sglang.srt.entrypoints.engine import Engine

    from sglang_ssd.bridge.tokenizer_manager import init_tokenizer_manager

    class SSDEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler_process)
        init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)

    return SSDEngine(server_args=server_args)


def kill_children() -> None:
    """Kill every process below this one."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False, wait_timeout=None)


def replace_scheduler(scheduler_class: type) -> None:
    """Have SGLang's plug-in loader put ``scheduler_class`` in the scheduler's place, unless it stands there already."""
    import sglang.srt.managers.scheduler as scheduler_module
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not issubclass(scheduler_module.Scheduler, scheduler_class):
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", scheduler_class, HookType.REPLACE)


def fail_start(reason: str) -> None:
    """End a scheduler process that cannot start, with one line and without a traceback, and its server with it."""
    logger.error("cannot start: %s", reason)
    sys.stderr.flush()
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(1)


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Send this process ``signal_number`` when its parent ends, however it ends (Linux)."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)
