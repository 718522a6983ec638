"""How long a verifier waits for a proposal before its round goes on without it."""

from __future__ import annotations

import math

#: Until this many waits were measured, and always at most: the first rounds hold compilation and cold caches.
MIN_WAITS = 64
CEILING_MS = 10_000.0
#: Always at least: a lost TCP segment that is sent again, another process's turn on the core.
FLOOR_MS = 500.0
#: The slowest recent wait times this. A round that waited in vain counts as a wait as long as the limit.
WAIT_FACTOR = 4.0
#: The slowest recent forward of the target times this. The draft reads the same prompts, with a smaller model.
FORWARD_FACTOR = 2.0
#: What is recent: between this many observations and twice as many.
RECENT = 512


def round_limit_ms(num_waits: int, slowest_wait_ms: float, slowest_forward_ms: float) -> float:
    """The limit in milliseconds after ``num_waits`` measured waits, from the slowest recent ones."""
    if num_waits < MIN_WAITS:
        return CEILING_MS
    measured = max(WAIT_FACTOR * slowest_wait_ms, FORWARD_FACTOR * slowest_forward_ms)
    return min(CEILING_MS, max(FLOOR_MS, measured))


class RoundLimit:
    """The limit in force: ``fixed_ms`` where the user named one, else ``round_limit_ms`` of what was observed."""

    def __init__(self, fixed_ms: float | None = None) -> None:
        self._fixed_ms = fixed_ms
        self._num_waits = 0
        self._waits, self._forwards = RecentMaximum(RECENT), RecentMaximum(RECENT)

    @property
    def ms(self) -> float:
        if self._fixed_ms is not None:
            return self._fixed_ms
        return round_limit_ms(self._num_waits, self._waits.value, self._forwards.value)

    def observe_wait(self, wait_ms: float) -> None:
        """A round got all its proposals after this wait; 0 when they were there before it looked."""
        self._num_waits += 1
        self._waits.observe(wait_ms)

    def observe_slow_draft(self) -> None:
        """A round waited in vain for a draft that lives: its answers must be waited for longer."""
        self.observe_wait(self.ms)

    def observe_forward(self, forward_ms: float) -> None:
        """What a forward of the target took, of a prompt or of a verification."""
        self._forwards.observe(forward_ms)


class RecentMaximum:
    """The largest of the last ``window`` to ``2 * window`` observations, 0 without any."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._now = self._before = 0.0
        self._num_now = 0

    @property
    def value(self) -> float:
        return max(self._now, self._before)

    def observe(self, value: float) -> None:
        """Values that are not finite are ignored."""
        if not math.isfinite(value):
            return
        if self._num_now == self._window:
            self._before, self._now, self._num_now = self._now, 0.0, 0
        self._now = max(self._now, value)
        self._num_now += 1
