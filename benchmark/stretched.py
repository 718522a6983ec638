"""A server or a draft whose forwards take stated times, for ``emulated.py``.

    python benchmark/stretched.py server|draft [flags of the launcher]

A server starts its draft with this file too. The real scheduler, wire and draft loop run; a forward that ends before its time sleeps for the rest, so that the core is
free meanwhile, as it is beside a GPU. Times come from the environment, since SGLang starts its processes itself:
``SSD_STRETCHED_VERIFY_MS`` for a target forward over running requests, ``SSD_STRETCHED_DEPTH_MS`` for a draft forward.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

VERIFY_MS, DEPTH_MS = "SSD_STRETCHED_VERIFY_MS", "SSD_STRETCHED_DEPTH_MS"


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


def run_scheduler(server_args, *args, **kwargs) -> None:
    """Entry of the scheduler process, where nothing is replaced yet: ours, with stretched forwards of the target."""
    from sglang_ssd import plugin
    from sglang_ssd.bridge.environment import use_cpu_engine

    use_cpu_engine()
    from sglang.srt.managers.tp_worker import TpModelWorker

    def is_running(batch=None, *_: Any, forward_batch=None, **__: Any) -> bool:
        mode = (forward_batch or batch).forward_mode
        return mode.is_decode() or mode.is_target_verify()

    stretch(TpModelWorker, "forward_batch_generation", float(os.environ[VERIFY_MS]), is_running)
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
    from sglang_ssd.bridge.draft_runner import DraftModelRunner

    stretch(DraftModelRunner, "_forward", float(os.environ[DEPTH_MS]))
    return launch_draft.main(flags)


if __name__ == "__main__":
    sys.exit(main())
