"""Forwards of lanes: paths become rows of one decode batch, grouped by the request whose prefix they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_ssd.algorithm.shared_noise import perturbed_top
from sglang_ssd.bridge.draft_runner import DraftModelRunner
from sglang_ssd.draft.forking_paths import Path

#: Likeliest tokens that the noise is added to. Any guess is exact, so this bounds cost and acceptance only.
DEFAULT_TOP_M = 64


class DraftLaw(NamedTuple):
    """How one request's guesses are drawn: the temperature of the draft's logits (0: greedy) and the seed of the noise
    that target and draft share."""

    temperature: float
    seed: int


class Lane(NamedTuple):
    """A path that goes through the next forward. ``base_row`` is its request's main row."""

    path: Path
    base_row: int
    law: DraftLaw
    num_candidates: int
    lookahead: int


class DraftRunner:
    """The draft model as the draft's loop sees it."""

    def __init__(self, model: DraftModelRunner, top_m: int = DEFAULT_TOP_M) -> None:
        self._model = model
        self._top_m = top_m
        #: Rows and KV slots.
        self.pool = model
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self._num_proposable = model.vocab_size

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Propose only ids below ``vocab_size``: a verifier's vocabulary may be padded to fewer ids than the draft's."""
        self._num_proposable = min(self._num_proposable, vocab_size)

    def call_during_forwards(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called now and then while a forward runs; it may raise to end the forward."""
        self._model.call_during_forwards(callback)

    def extend(
        self, row: int, prefix_len: int, token_ids: list[int], law: DraftLaw, num_candidates: int
    ) -> list[int]:
        """Forward a chunk of a prompt. Returns the ranks after its last token."""
        logits = self._model.extend(row, prefix_len, token_ids)
        return self._rank(logits, [law], [prefix_len + len(token_ids) - 1], num_candidates)[0]

    def step(self, lanes: list[Lane]) -> None:
        """Forward the pending tokens of all lanes in one batch and advance their paths.

        Each pending token is a decode row; a path with two (an uncached draft token and the bonus token) takes two
        rows of the same slots, the second of which sees the first, since KV is written before it is read.
        """
        from sglang_ssd.bridge.cpu_attention import ForkLayout

        lanes = sorted(lanes, key=lambda lane: lane.base_row)
        rows, positions, tokens, shared_lens, ends = [], [], [], [], []
        sizes: dict[int, int] = {}
        for path, base_row, *_ in lanes:
            for offset, token in enumerate(path.pending):
                position = path.num_cached + offset
                rows.append(path.row)
                positions.append(position)
                tokens.append(token)
                shared_lens.append(path.num_shared if path.row != base_row else position + 1)
            ends.append(len(rows) - 1)
            sizes[base_row] = sizes.get(base_row, 0) + len(path.pending)
        logits = self._model.decode(
            rows, positions, tokens, ForkLayout(list(sizes.values()), list(sizes), shared_lens)
        )
        ranks = self._rank(
            logits[ends],
            [lane.law for lane in lanes],
            [positions[end] for end in ends],
            max(lane.num_candidates for lane in lanes),
        )
        for lane, candidates in zip(lanes, ranks, strict=True):
            lane.path.advance(candidates, lane.lookahead)

    def _rank(
        self, logits: torch.Tensor, laws: list[DraftLaw], positions: list[int], num_candidates: int
    ) -> list[list[int]]:
        """Guesses of the target's draws, best first. logits: float [rows, V]; positions: [rows], of the last token
        before each draw. Returns [rows][num_candidates] token ids."""
        logits = logits[:, : self._num_proposable]
        num_candidates = min(num_candidates, logits.shape[1])
        if all(law.temperature == 0.0 for law in laws):
            return logits.topk(num_candidates, dim=-1).indices.tolist()
        device = logits.device
        ranked = perturbed_top(
            logits,
            torch.tensor([law.temperature for law in laws], dtype=torch.float64, device=device),
            torch.tensor([law.seed for law in laws], dtype=torch.int64, device=device),
            torch.tensor(positions, device=device),
            torch.tensor([law.temperature == 0.0 for law in laws], device=device),
            num_ranked=num_candidates,
            top_m=max(self._top_m, num_candidates),
        )
        return ranked.token_ids.tolist()
