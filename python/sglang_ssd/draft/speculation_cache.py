"""The speculation cache of one request: outcome -> the path prepared for it."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_ssd.algorithm.outcome import Outcome
from sglang_ssd.draft.forking_paths import Path


class SpeculationCache:
    """Holds the branches of the round whose outcome is not known yet. Owns no slots: ``ForkingPaths`` does."""

    def __init__(self) -> None:
        self._branches: dict[Outcome, Path] = {}

    def __len__(self) -> int:
        return len(self._branches)

    def put(self, outcome: Outcome, branch: Path) -> None:
        self._branches[outcome] = branch

    def take(self, outcome: Outcome) -> Path | None:
        """The branch for ``outcome``, removed from the cache. None is a miss."""
        return self._branches.pop(outcome, None)

    def peek(self, outcome: Outcome) -> Path | None:
        """The branch for ``outcome``, left where it is."""
        return self._branches.get(outcome)

    def discard(self, branch: Path) -> None:
        """Forget one branch, wherever it stands."""
        self._branches = {outcome: path for outcome, path in self._branches.items() if path is not branch}

    def branches(self) -> Iterable[Path]:
        return self._branches.values()

    def clear(self) -> list[Path]:
        """Forget all branches and return them, so that their owner can release them."""
        branches = list(self._branches.values())
        self._branches = {}
        return branches
