"""Forwards of lanes: paths become rows of one decode batch, grouped by the request whose prefix they share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import torch

from sglang_ssd.bridge.draft_runner import DraftModelRunner
from sglang_ssd.draft.forking_paths import Guess, Path, SparseLaw
from sglang_ssd.wire.messages import Sampling
from sglang_ssd_kernel import ForkLayout, largest_top_m, sample_saguaro, sample_shared_noise

#: Likeliest tokens that the noise is added to. Any guess is exact, so this bounds cost and acceptance only.
DEFAULT_TOP_M = 64


class DraftLaw(NamedTuple):
    """How one request's guesses are drawn: the temperature of the draft's logits (0: greedy), the seed of the noise,
    whether target and draft share that noise or q is shipped for residual sampling, and the number of ids that may be
    proposed: a verifier's vocabulary may be padded to fewer than the draft's."""

    temperature: float
    seed: int
    sampling: Sampling
    vocab_size: int

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_residual(self) -> bool:
        return self.sampling == "residual" and not self.is_greedy


class Position(NamedTuple):
    """What a guess needs to know besides the logits.

    index: of the last token before it. num_candidates: ranks that forks can need. fan_out and saguaro_c: the F and C
    that Saguaro sampling scales with (residual sampling only).
    """

    law: DraftLaw
    index: int
    num_candidates: int
    fan_out: int
    saguaro_c: float


class Lane(NamedTuple):
    """A path that goes through the next forward, and the position that is guessed after its last pending token.
    ``base_row`` is its request's main row."""

    path: Path
    base_row: int
    position: Position
    lookahead: int


class Chunk(NamedTuple):
    """The next ``num_tokens`` of a prompt, and the position that is guessed after them."""

    path: Path
    num_tokens: int
    position: Position


class DraftRunner:
    """The draft model as the draft's loop sees it."""

    def __init__(self, model: DraftModelRunner, top_m: int = DEFAULT_TOP_M) -> None:
        self._model = model
        self._top_m = top_m
        #: Rows and KV slots.
        self.pool = model
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.max_tokens = model.max_decode_tokens
        #: Candidates that the device's sampler can rank; a larger budget is spread over more positions or not spent.
        self._most_ranked = largest_top_m(torch.device(model.device).type) or model.vocab_size

    def call_during_forwards(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called now and then while a forward runs; it may raise to end the forward."""
        self._model.call_during_forwards(callback)

    def extend(self, chunks: list[Chunk]) -> list[Guess]:
        """Forward chunks of prompts in one batch. Returns the guess after each chunk's last token."""
        logits = self._model.extend(
            [chunk.path.row for chunk in chunks],
            [chunk.path.num_cached for chunk in chunks],
            [chunk.path.pending[: chunk.num_tokens] for chunk in chunks],
        )
        return self._guess(logits, [chunk.position for chunk in chunks])

    def step(self, lanes: list[Lane]) -> None:
        """Forward the pending tokens of all lanes in one batch and advance their paths.

        Each pending token is a decode row; a path with two (an uncached draft token and the bonus token) takes two
        rows of the same slots, the second of which sees the first, since KV is written before it is read.
        """
        lanes = sorted(lanes, key=lambda lane: lane.base_row)
        rows, lens, tokens, shared_lens = [], [], [], []
        guessed_rows, guessed_positions = [], []
        sizes: dict[int, int] = {}
        for path, base_row, last, _ in lanes:
            for num_before, token in enumerate(path.pending, path.num_cached):
                rows.append(path.row)
                lens.append(num_before + 1)
                tokens.append(token)
                shared_lens.append(path.num_shared if path.row != base_row else lens[-1])
            for back in reversed(range(path.num_guesses)):
                guessed_rows.append(len(rows) - 1 - back)
                guessed_positions.append(last._replace(index=last.index - back))
            sizes[base_row] = sizes.get(base_row, 0) + len(path.pending)
        layout = ForkLayout(list(sizes.values()), list(sizes), rows, shared_lens, lens)
        logits = self._model.decode(layout, tokens)
        guesses = iter(self._guess(logits[guessed_rows], guessed_positions))
        for lane in lanes:
            lane.path.advance(list(islice(guesses, lane.path.num_guesses)), lane.lookahead)

    def _guess(self, logits: torch.Tensor, positions: list[Position]) -> list[Guess]:
        """What the draft thinks of the tokens at these positions. logits: float [rows, V], one row a position."""
        laws = [position.law for position in positions]
        num_candidates = max(position.num_candidates for position in positions)
        has_both_rules = len({law.sampling for law in laws if not law.is_greedy}) > 1
        kinds = [(law.vocab_size, has_both_rules and law.is_residual) for law in laws]
        if len(set(kinds)) == 1:
            return self._guess_alike(logits, positions, num_candidates)
        # Verifiers with different rules, or vocabularies.
        guesses: list[Guess | None] = [None] * len(positions)
        for kind in set(kinds):
            rows = [row for row, other in enumerate(kinds) if other == kind]
            part = self._guess_alike(logits[rows], [positions[row] for row in rows], num_candidates)
            for row, guess in zip(rows, part, strict=True):
                guesses[row] = guess
        return guesses

    def _guess_alike(
        self, logits: torch.Tensor, positions: list[Position], num_candidates: int
    ) -> list[Guess]:
        """All rows have one vocabulary, and those that are not greedy draw by the same rule.

        Shared noise: the target's noise on the top M tokens. Residual: the draft's own law, truncated to its top M and
        scaled by Saguaro, which is kept with the token; candidates for the bonus token are then the likeliest ones, as
        the residual is left on them.
        """
        laws = [position.law for position in positions]
        logits = logits[:, : laws[0].vocab_size]
        num_ranked = min(num_candidates, logits.shape[1], self._most_ranked)
        columns = (
            self._column([law.temperature for law in laws], torch.float64),
            self._column([law.seed for law in laws], torch.int64),
            self._column([position.index for position in positions], torch.int64),
            self._column([law.is_greedy for law in laws], torch.bool),
        )
        top_m = num_ranked if all(law.is_greedy for law in laws) else max(self._top_m, num_ranked)
        sizes = {"num_ranked": num_ranked, "top_m": top_m}
        if not any(law.is_residual for law in laws):
            drafted = sample_shared_noise(logits, *columns, **sizes)
            return [Guess(ranks[0], ranks) for ranks in drafted.ranked_ids.tolist()]
        fan_out = self._column([position.fan_out for position in positions], torch.int64)
        saguaro_c = self._column([position.saguaro_c for position in positions], torch.float64)
        drafted = sample_saguaro(logits, *columns, fan_out, saguaro_c, **sizes)
        ids, probs = drafted.top_ids.to("cpu", torch.int32).numpy(), drafted.q.cpu().numpy()
        drawn = zip(drafted.token_ids.tolist(), drafted.ranked_ids.tolist(), ids, probs, laws, strict=True)
        return [
            Guess(token, ranks, None if law.is_greedy else SparseLaw(row_ids.tobytes(), q.tobytes()))
            for token, ranks, row_ids, q, law in drawn
        ]

    def _column(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._model.device)
