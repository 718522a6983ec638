"""KV slots of branches: rows that share the slots of a request's prefix and own the slots of their tails.

    main row     | prompt and committed tokens | t* | s1 | s2 | ... | sK |
    branch (1,x) | ------- shared ------------ | t* | s1 | x  | x1 | x2 ...     own slots from x on
    branch (K,y) | ------- shared ------------ | t* | s1 | s2 | ... | sK | y | y1 ...

The winning branch is committed by writing its slot ids into the main row: its KV is never computed again. All changes
of ownership happen in the methods of ``ForkingPaths``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch


class SlotPool(Protocol):
    """Rows and KV slots, as the draft's model runner hands them out."""

    def take_row(self) -> int | None: ...
    def give_row(self, row: int) -> None: ...
    def take_slots(self, num_slots: int) -> torch.Tensor | None: ...
    def give_slots(self, row: int, start: int, end: int) -> None: ...
    def together(self) -> AbstractContextManager[None]: ...
    def write_slots(self, row: int, start: int, slots: torch.Tensor) -> None: ...
    def copy_slots(self, source: int, target: int, start: int, end: int) -> None: ...
    def take_prefix(self, row: int, token_ids: list[int]) -> SharedPrefix: ...
    def keep_prefix(self, row: int, token_ids: list[int], prefix: SharedPrefix) -> None: ...


class SharedPrefix(Protocol):
    """KV that an ended request left: ``slots`` int64 [tokens]. They belong to the pool's cache."""

    slots: torch.Tensor


class SparseLaw(NamedTuple):
    """The law that a token was drawn from, as it is shipped: int32 [M] ids and float32 [M] probabilities."""

    ids: bytes
    probs: bytes


class Guess(NamedTuple):
    """What the draft thinks of one position: the token it proposes, the candidates for a bonus token, best first, and
    the law that the token was drawn from (None where it was not drawn: greedy rows and shared noise)."""

    token: int
    ranks: list[int]
    q: SparseLaw | None = None


@dataclass(slots=True)
class Path:
    """One line of tokens: the request itself or one guess of how it goes on.

    row:         its line of the slot table.
    length:      tokens that are certain on this path (committed ones, and the guessed outcome of a branch).
    num_shared:  leading tokens whose slots belong to the main row, and for the main path itself to ``prefix``.
    num_cached:  leading tokens whose KV is computed.
    pending:     the tokens from ``num_cached`` on that the next forward takes.
    drafted:     tokens drafted after ``length``, and ``q`` the laws they were drawn from.
    ranks:       ranks[j]: the draft's candidates, best first, for the token after ``length + j``.
    prefix:      what the main path began with.
    """

    row: int
    length: int
    num_shared: int
    num_cached: int
    pending: list[int]
    drafted: list[int] = field(default_factory=list)
    q: list[SparseLaw | None] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)
    prefix: SharedPrefix | None = None

    @property
    def num_guesses(self) -> int:
        """Guesses that a forward of the pending tokens owes, one after each of the last so many tokens. More than one
        where tokens were proposed without the model."""
        return len(self.drafted) - len(self.ranks) + 1

    def advance(self, guesses: Sequence[Guess], lookahead: int) -> None:
        """Take in a forward of all pending tokens. ``guesses``: what the draft thinks of the tokens after the last
        ``num_guesses`` of them."""
        self.num_cached += len(self.pending)
        self.pending = []
        self.ranks.extend(guess.ranks for guess in guesses)
        if len(self.drafted) < lookahead:
            self.draft(guesses[-1])

    def propose(self, token_ids: Sequence[int]) -> None:
        """Propose tokens that the model did not draft; the next forward takes them all."""
        self.drafted.extend(token_ids)
        self.q.extend([None] * len(token_ids))
        self.pending.extend(token_ids)

    def draft(self, guess: Guess) -> None:
        """Propose the guessed token; the next forward takes it."""
        self.drafted.append(guess.token)
        self.q.append(guess.q)
        self.pending = [guess.token]

    def forget_drafts(self) -> None:
        self.drafted, self.q, self.ranks = [], [], []


class ForkingPaths:
    """Owns rows and slots of all paths. Methods that need room return None or False, and change nothing, without it."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool

    def open(self, token_ids: Sequence[int]) -> Path | None:
        """A main path with its prompt pending, but for what an ended request left; the last token is forwarded in any case,
        since a guess follows from it."""
        row = self._pool.take_row()
        if row is None:
            return None
        prefix = self._pool.take_prefix(row, list(token_ids[:-1]))
        num_cached = prefix.slots.numel()
        pending = list(token_ids[num_cached:])
        return Path(row, len(token_ids), num_cached, num_cached, pending, prefix=prefix)

    def close(self, main: Path, token_ids: Sequence[int]) -> None:
        """The request ended: leave the KV of its tokens to later ones, and free the rest. ``token_ids``: its certain
        tokens."""
        kept = min(main.num_cached, main.length)
        self._pool.give_slots(main.row, kept, main.num_cached)
        self._pool.keep_prefix(main.row, list(token_ids[:kept]), main.prefix)
        self._pool.give_row(main.row)

    def fork(self, main: Path, num_accepted: int, bonus_token: int) -> Path | None:
        """A branch for the outcome (num_accepted, bonus_token) of the main path's proposal."""
        row = self._pool.take_row()
        if row is None:
            return None
        shared = main.length + num_accepted
        self._pool.copy_slots(main.row, row, 0, shared)
        return Path(row, shared + 1, num_shared=shared, num_cached=shared, pending=[bonus_token])

    def reserve(self, path: Path, num_tokens: int) -> bool:
        """Give slots to the next ``num_tokens`` pending tokens, ahead of their forward."""
        slots = self._pool.take_slots(num_tokens)
        if slots is None:
            return False
        self._pool.write_slots(path.row, path.num_cached, slots)
        return True

    def give_back(self, path: Path) -> None:
        """Undo ``reserve``: the forward of the pending tokens did not happen."""
        self._pool.give_slots(path.row, path.num_cached, path.num_cached + len(path.pending))

    def adopt(self, main: Path, branch: Path) -> None:
        """The branch's outcome came true: the main path goes on with the branch's tokens and slots."""
        self._pool.give_slots(main.row, branch.num_shared, main.num_cached)
        self._pool.copy_slots(branch.row, main.row, branch.num_shared, branch.num_cached)
        main.length, main.num_cached = branch.length, branch.num_cached
        main.pending, main.drafted, main.q, main.ranks = (
            branch.pending,
            branch.drafted,
            branch.q,
            branch.ranks,
        )
        self._pool.give_row(branch.row)

    def rewind(self, main: Path, num_accepted: int, bonus_token: int) -> None:
        """No branch stands for the outcome: keep the accepted tokens, drop the rest, go on from the bonus token."""
        kept = main.length + num_accepted
        # Tokens that stay and have no KV yet: certain ones that no forward took in, and the last drafted one.
        uncached = main.pending[: max(0, main.length - main.num_cached)]
        uncached += main.drafted[max(0, main.num_cached - main.length) : num_accepted]
        self._pool.give_slots(main.row, min(kept, main.num_cached), main.num_cached)
        main.num_cached = min(kept, main.num_cached)
        main.length = kept + 1
        main.pending = [*uncached, bonus_token]
        main.forget_drafts()

    def release(self, *paths: Path) -> None:
        """Free the rows and the slots that these branches own."""
        with self._pool.together():
            for path in paths:
                self._pool.give_slots(path.row, path.num_shared, path.num_cached)
                self._pool.give_row(path.row)
