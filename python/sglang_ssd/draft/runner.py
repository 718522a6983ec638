"""Forwards of lanes: paths become rows of one decode batch, grouped by the request whose prefix they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_ssd.bridge.draft_runner import DraftModelRunner
from sglang_ssd.draft.forking_paths import Path


class Lane(NamedTuple):
    """A path that goes through the next forward. ``base_row`` is its request's main row."""

    path: Path
    base_row: int
    num_candidates: int
    lookahead: int


class DraftRunner:
    """The draft model as the draft's loop sees it."""

    def __init__(self, model: DraftModelRunner) -> None:
        self._model = model
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

    def extend(self, row: int, prefix_len: int, token_ids: list[int], num_candidates: int) -> list[int]:
        """Forward a chunk of a prompt. Returns the ranks after its last token."""
        return self._rank(self._model.extend(row, prefix_len, token_ids), num_candidates)[0]

    def step(self, lanes: list[Lane]) -> None:
        """Forward the pending tokens of all lanes in one batch and advance their paths.

        Each pending token is a decode row; a path with two (an uncached draft token and the bonus token) takes two
        rows of the same slots, the second of which sees the first, since KV is written before it is read.
        """
        from sglang_ssd.bridge.cpu_attention import ForkLayout

        lanes = sorted(lanes, key=lambda lane: lane.base_row)
        rows, positions, tokens, shared_lens, ends = [], [], [], [], []
        sizes: dict[int, int] = {}
        for path, base_row, _, _ in lanes:
            for offset, token in enumerate(path.pending):
                position = path.num_cached + offset
                rows.append(path.row)
                positions.append(position)
                tokens.append(token)
                shared_lens.append(path.num_shared if path.row != base_row else position + 1)
            ends.append(len(rows) - 1)
            sizes[base_row] = sizes.get(base_row, 0) + len(path.pending)
        logits = self._model.decode(rows, positions, tokens, ForkLayout(list(sizes.values()), list(sizes), shared_lens))
        ranks = self._rank(logits[ends], max(lane.num_candidates for lane in lanes))
        for lane, candidates in zip(lanes, ranks, strict=True):
            lane.path.advance(candidates, lane.lookahead)


    def _rank(self, logits: torch.Tensor, num_candidates: int) -> list[list[int]]:
        """Token ids by falling logit. logits: float [rows, V] -> [rows][num_candidates]."""
        logits = logits[:, : self._num_proposable]
        return logits.topk(min(num_candidates, logits.shape[1]), dim=-1).indices.tolist()
