"""A toy draft model whose memory is its KV slots: what it predicts depends on the tokens that it reads through them.

If a slot is freed too early, shared wrongly or remapped to the wrong place, the toy reads other tokens and predicts
something else, so that equality with ``continuation`` checks the bookkeeping of forking paths.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import NamedTuple

import torch

from sglang_ssd.algorithm.lookahead import Size
from sglang_ssd.bridge.draft_runner import Capacity
from sglang_ssd.draft.forking_paths import Guess
from sglang_ssd.draft.policy import DraftPolicy
from sglang_ssd.draft.runner import Chunk, Lane, Position
from sglang_ssd.wire.messages import Hello

VOCAB_SIZE = 50


def ranks_after(tokens: list[int], num_candidates: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The toy language model: a permutation of the vocabulary that depends on all tokens."""
    seed = 0
    for token in tokens:
        seed = (seed * 31 + token + 1) % 1_000_003
    order = list(range(VOCAB_SIZE))
    random.Random(seed).shuffle(order)
    return [token for token in order if token < vocab_size][:num_candidates]


def guess_after(tokens: list[int], position: Position) -> Guess:
    assert position.index == len(tokens) - 1, "a guess is made at the index of the last token before it"
    ranks = ranks_after(tokens, position.num_candidates, position.law.vocab_size)
    return Guess(ranks[0], ranks)


def continuation(tokens: list[int], num_tokens: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Greedy continuation of the toy language model."""
    path = list(tokens)
    for _ in range(num_tokens):
        path.append(ranks_after(path, 1, vocab_size)[0])
    return path[len(tokens) :]


class ToyPrefix(NamedTuple):
    slots: torch.Tensor
    tokens: tuple[int, ...]


class ToyPool:
    """Rows and slots that check their own use: a slot is given back once, and only by who took it."""

    def __init__(self, num_rows: int, num_slots: int, width: int = 4096) -> None:
        self.num_rows, self.num_slots = num_rows, num_slots
        self.free_rows = list(range(num_rows, 0, -1))
        self.free_slots = list(range(num_slots, 0, -1))
        self.table = torch.zeros(num_rows + 1, width, dtype=torch.int32)
        self.token_of_slot: dict[int, int] = {}
        #: Slot of the last token of each prefix that ended requests left, and the prefixes that are read now.
        self.left_behind: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[int, ...]] = []

    def capacity(self) -> Capacity:
        """Slots of prefixes that nobody reads count as free."""
        free_slots = len(self.free_slots) + len(self._evictable())
        return Capacity(free_slots, self.num_slots, len(self.free_rows), self.num_rows)

    def take_row(self) -> int | None:
        return self.free_rows.pop() if self.free_rows else None

    def give_row(self, row: int) -> None:
        assert row not in self.free_rows
        self.free_rows.append(row)

    def take_slots(self, num_slots: int) -> torch.Tensor | None:
        if num_slots > len(self.free_slots):
            self.evict()
        if num_slots > len(self.free_slots):
            return None
        return torch.tensor([self.free_slots.pop() for _ in range(num_slots)], dtype=torch.int64)

    def give_slots(self, row: int, start: int, end: int) -> None:
        for slot in self.table[row, start:end].tolist():
            assert slot not in self.free_slots, f"slot {slot} is given back twice"
            self.token_of_slot.pop(slot, None)
            self.free_slots.append(slot)

    @contextmanager
    def together(self):
        yield

    def write_slots(self, row: int, start: int, slots: torch.Tensor) -> None:
        self.table[row, start : start + slots.numel()] = slots.to(torch.int32)

    def copy_slots(self, source: int, target: int, start: int, end: int) -> None:
        self.table[target, start:end] = self.table[source, start:end]

    def take_prefix(self, row: int, token_ids: list[int]) -> ToyPrefix:
        slots = []
        while len(slots) < len(token_ids) and (key := tuple(token_ids[: len(slots) + 1])) in self.left_behind:
            slots.append(self.left_behind[key])
        self.table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        prefix = ToyPrefix(torch.tensor(slots, dtype=torch.int64), tuple(token_ids[: len(slots)]))
        self.locked.append(prefix.tokens)
        return prefix

    def keep_prefix(self, row: int, token_ids: list[int], prefix: ToyPrefix) -> None:
        assert self.read(row, len(token_ids)) == list(token_ids), "the KV of other tokens is left behind"
        self.locked.remove(prefix.tokens)
        for position, slot in enumerate(self.table[row, : len(token_ids)].tolist()):
            key = tuple(token_ids[: position + 1])
            if key not in self.left_behind:
                self.left_behind[key] = slot
            elif position >= len(prefix.tokens):
                self.give_slots(row, position, position + 1)

    def evict(self) -> None:
        """Free what nobody reads."""
        for key in self._evictable():
            slot = self.left_behind.pop(key)
            assert slot not in self.free_slots, f"slot {slot} is left behind and given back"
            self.token_of_slot.pop(slot, None)
            self.free_slots.append(slot)

    def _evictable(self) -> list[tuple[int, ...]]:
        return [
            key for key in self.left_behind if not any(locked[: len(key)] == key for locked in self.locked)
        ]

    def store(self, row: int, position: int, token: int) -> None:
        self.token_of_slot[int(self.table[row, position])] = token

    def read(self, row: int, length: int) -> list[int]:
        return [self.token_of_slot[slot] for slot in self.table[row, :length].tolist()]


class ToyRunner:
    """Stands for ``DraftRunner``."""

    def __init__(self, num_rows: int = 64, num_slots: int = 2048, context_length: int = 1024) -> None:
        self.pool = ToyPool(num_rows, num_slots)
        self.vocab_size = VOCAB_SIZE
        self.context_length = context_length
        #: Small, so that forwards are split as well.
        self.max_tokens = 16
        self.num_tokens_forwarded = 0
        #: Called in the middle of the next forward, once: what arrives then.
        self.in_the_middle = None
        self._callback = lambda: None

    def call_during_forwards(self, callback) -> None:
        self._callback = callback

    def _run_middle(self) -> None:
        if self.in_the_middle is not None:
            happening, self.in_the_middle = self.in_the_middle, None
            happening()
        self._callback()

    def extend(self, chunks: list[Chunk]) -> list[Guess]:
        self._run_middle()
        guesses = []
        for path, num_tokens, position in chunks:
            for offset, token in enumerate(path.pending[:num_tokens]):
                self.pool.store(path.row, path.num_cached + offset, token)
            self.num_tokens_forwarded += num_tokens
            guesses.append(guess_after(self.pool.read(path.row, path.num_cached + num_tokens), position))
        return guesses

    def step(self, lanes: list[Lane]) -> None:
        self._run_middle()
        assert sum(len(lane.path.pending) for lane in lanes) <= self.max_tokens
        for lane in lanes:  # All KV is written before any is read, as in a real forward.
            for offset, token in enumerate(lane.path.pending):
                self.pool.store(lane.path.row, lane.path.num_cached + offset, token)
        for lane in lanes:
            path = lane.path
            assert path.pending, "a lane without a token"
            self.num_tokens_forwarded += len(path.pending)
            tokens = self.pool.read(path.row, path.num_cached + len(path.pending))
            guesses = [
                guess_after(
                    tokens[: len(tokens) - back],
                    lane.position._replace(index=lane.position.index - back),
                )
                for back in reversed(range(path.num_guesses))
            ]
            path.advance(guesses, lane.lookahead)


class ToyChannel:
    """Stands for ``DraftChannel``: messages wait in a list, answers are kept by peer."""

    def __init__(self) -> None:
        self.inbox: list = []
        self.sent: dict[bytes, list] = {}
        self.gone: set[bytes] = set()
        self.num_refused = 0

    def receive(self, timeout_ms):
        if not self.inbox:
            return None
        received = self.inbox.pop(0)
        if isinstance(received, Exception):
            raise received
        return received

    def send(self, peer: bytes, message) -> bool:
        if peer in self.gone:
            return False
        self.sent.setdefault(peer, []).append(message)
        return True


class _PatientPolicy(DraftPolicy):
    def answers_now(self, num_ready) -> bool:
        return False


def patient_policy(hello: Hello) -> DraftPolicy:
    """A policy that always drafts all K tokens and forks evenly, so that nothing depends on the clock."""
    return _PatientPolicy(Size(hello.lookahead, hello.fan_out_budget), "uniform", hello.fallback)
