"""One of a few settings, chosen by the speed that was measured under each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Option = TypeVar("Option")


class OnlineChoice(Generic[Option]):
    """Chooses online among ``options``: the one under which most tokens are emitted a millisecond.

    Each option is tried for ``trial_rounds``; then the best is kept, and after every ``keep_rounds`` of it another one
    is tried again, in turns, since acceptance, hit rate and load drift. One option means that nothing is chosen.
    """

    def __init__(self, options: Sequence[Option], trial_rounds: int = 32, keep_rounds: int = 256) -> None:
        """Raises ValueError without options."""
        if not options:
            raise ValueError("options must hold at least one, got none")
        self._options = tuple(options)
        self._trial_rounds = trial_rounds
        self._keep_rounds = keep_rounds
        self.forget()

    def forget(self) -> None:
        """Try every option anew: what was measured holds no longer."""
        self._tokens_per_ms: list[float | None] = [None] * len(self._options)
        self._current = 0
        self._last_trial = 0
        self._is_trial = True
        self._num_rounds, self._tokens, self._ms = 0, 0, 0.0

    @property
    def current(self) -> Option:
        """The option in force."""
        return self._options[self._current]

    def observe(self, num_tokens: int, round_ms: float) -> None:
        """Take in one round that ran under ``current``."""
        if len(self._options) == 1:
            return
        self._num_rounds += 1
        self._tokens += num_tokens
        self._ms += round_ms
        if self._num_rounds >= (self._trial_rounds if self._is_trial else self._keep_rounds):
            self._tokens_per_ms[self._current] = self._tokens / self._ms if self._ms > 0 else 0.0
            self._num_rounds, self._tokens, self._ms = 0, 0, 0.0
            self._choose_next()

    def _choose_next(self) -> None:
        if None in self._tokens_per_ms:
            self._current = self._tokens_per_ms.index(None)
        elif self._is_trial:
            self._current = max(range(len(self._options)), key=lambda i: self._tokens_per_ms[i])
            self._is_trial = False
        else:
            others = [(self._last_trial + i) % len(self._options) for i in range(1, len(self._options) + 1)]
            self._current = self._last_trial = next(i for i in others if i != self._current)
            self._is_trial = True
