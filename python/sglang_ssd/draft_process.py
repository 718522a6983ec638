"""The draft as a child of a server: started, watched while it loads, and stopped with it."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable

from sglang_ssd.wire.channel import RunDirectory

logger = logging.getLogger(__name__)

#: A draft that was told to stop and did not is killed after this.
STOP_TIMEOUT_S = 5.0
#: How a draft is started.
LAUNCHER = (sys.executable, "-m", "sglang_ssd.launch_draft")


class DraftProcess:
    """Owns one draft process and the private directory of its socket."""

    def __init__(self, arguments: list[str]) -> None:
        self._run_directory = RunDirectory()
        self.endpoint = self._run_directory.endpoint("draft")
        self._ready_fd, child_fd = os.pipe()
        command = [*LAUNCHER, "--endpoint", self.endpoint, *arguments]
        # A session of its own: Ctrl-C reaches the server, which then stops its draft in order.
        self._process = subprocess.Popen(
            [*command, "--ready-fd", str(child_fd), "--stop-with-parent"],
            pass_fds=[child_fd],
            start_new_session=True,
        )
        os.close(child_fd)
        self._is_stopping = False

    def watch(self, on_failed_start: Callable[[str], None]) -> None:
        """In the background: call ``on_failed_start`` with one line if the draft ends before it is ready, and say so
        in the log if it ends later (the server goes on without it)."""
        threading.Thread(target=self._watch, args=(on_failed_start,), daemon=True, name="draft-watch").start()

    def _watch(self, on_failed_start: Callable[[str], None]) -> None:
        select.select([self._ready_fd], [], [])
        is_ready = bool(os.read(self._ready_fd, 16))
        os.close(self._ready_fd)
        exit_code = self._process.wait()
        if self._is_stopping:
            return
        if not is_ready:
            on_failed_start(
                f"the draft process ended while it was loading (exit code {exit_code}); see its lines above"
            )
            return
        logger.error(
            "the draft process at %s ended (exit code %s): requests go on without it",
            self.endpoint,
            exit_code,
        )

    def stop(self) -> None:
        """End the draft and remove its directory. May be called more than once."""
        self._is_stopping = True
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._run_directory.close()


def start_drafts(arguments: list[list[str]]) -> list[DraftProcess]:
    """A draft for each list of arguments. None stays when one cannot be started."""
    drafts: list[DraftProcess] = []
    try:
        for one in arguments:
            drafts.append(DraftProcess(one))
    except BaseException:
        for draft in drafts:
            draft.stop()
        raise
    return drafts
