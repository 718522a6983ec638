"""What must hold when nothing is served: neither side holds a request, a row or a KV slot."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

#: Set to 1 in tests: what is still held on an idle side ends its process.
STRICT_SWITCH = "SGLANG_SSD_STRICT_IDLE_CHECK"


class StillHeld(RuntimeError):
    """Something outlived the request that took it. Holds one line that names it."""


class IdleCheck:
    """Says once what an idle side still holds, and counts it; raises ``StillHeld`` instead where the switch is set."""

    def __init__(self) -> None:
        self.num_leaks = 0
        self._known: list[str] = []

    def look(self, held: list[str]) -> None:
        """``held``: what is held though no request is, [] when all is well. What was said before is not said again."""
        if held and held != self._known:
            line = f"held though nothing is served: {', '.join(held)}"
            if os.environ.get(STRICT_SWITCH) == "1":
                raise StillHeld(line)
            logger.error("%s", line)
            self.num_leaks += 1
        self._known = held
