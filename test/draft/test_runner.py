"""The draft's guesses of each law, from logits that a model without weights returns."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import torch

from sglang_ssd.algorithm.saguaro import saguaro_probs, sample_sparse
from sglang_ssd.algorithm.shared_noise import Stream, perturbed_top, seeded_uniforms
from sglang_ssd.draft import runner
from sglang_ssd.draft.forking_paths import Path
from sglang_ssd.draft.runner import Chunk, DraftLaw, DraftRunner, Position

VOCAB_SIZE, TOP_M, NUM_CANDIDATES = 500, 20, 4
LAWS = {
    "greedy": DraftLaw(0.0, 1, "shared-noise", VOCAB_SIZE),
    "greedy residual": DraftLaw(0.0, 1, "residual", VOCAB_SIZE),
    "shared": DraftLaw(0.7, 2, "shared-noise", VOCAB_SIZE),
    "hot": DraftLaw(1.3, 3, "shared-noise", VOCAB_SIZE),
    "residual": DraftLaw(0.9, 4, "residual", VOCAB_SIZE),
}


class GivenLogits:
    """A draft model whose next logits are given."""

    device, vocab_size, context_length, max_decode_tokens = "cpu", VOCAB_SIZE, 2048, 128

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def extend(self, rows, prefix_lens, chunks) -> torch.Tensor:
        return self._logits[: len(rows)]


def guesses_of(logits, laws):
    """The runner's guesses and the positions it made them at: one chunk a law."""
    runner = DraftRunner(GivenLogits(logits), top_m=TOP_M)
    positions = [
        Position(law, 40 + i, NUM_CANDIDATES - i % 2, i % 3, (0.5, 1.0, 0.1)[i % 3])
        for i, law in enumerate(laws)
    ]
    paths = [Path(row=i + 1, length=1, num_shared=0, num_cached=0, pending=[7]) for i in range(len(laws))]
    return runner.extend([Chunk(path, 1, at) for path, at in zip(paths, positions)]), positions


def check(guess, row, position):
    """One guess against ``sglang_ssd.algorithm``, row float [1, V]."""
    law, columns = position.law, (torch.tensor([position.law.seed]), torch.tensor([position.index]))
    if not law.is_residual:
        temperature, is_greedy = torch.tensor([law.temperature]).double(), torch.tensor([law.is_greedy])
        ranked = perturbed_top(
            row, temperature, *columns, is_greedy, num_ranked=len(guess.ranks), top_m=TOP_M
        )
        assert guess.ranks == ranked.token_ids[0].tolist()
        assert guess.token == guess.ranks[0] and guess.q is None
        return
    top = row.float().sort(descending=True, stable=True)
    ids = np.frombuffer(guess.q.ids, np.int32).tolist()
    assert ids == top.indices[0, :TOP_M].tolist()
    assert guess.ranks == ids[: len(guess.ranks)]
    q = torch.tensor(np.frombuffer(guess.q.probs, np.float32))[None]
    tempered = top.values[:, :TOP_M].double() / law.temperature
    torch.testing.assert_close(
        q, saguaro_probs(tempered, torch.tensor([position.fan_out]), position.saguaro_c)
    )
    assert guess.token == ids[sample_sparse(q, seeded_uniforms(*columns, Stream.DRAFT))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "names",
    [
        ("greedy",),
        ("greedy", "greedy residual"),
        ("shared", "hot"),
        ("residual", "residual"),
        ("greedy", "shared", "greedy", "hot"),
        ("residual", "greedy residual", "residual"),
        ("residual", "shared", "greedy", "hot", "greedy residual", "residual"),  # of several verifiers
    ],
    ids=" ".join,
)
def test_guesses_are_those_of_the_algorithm(names, dtype):
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        logits = (torch.randn(len(names), VOCAB_SIZE, generator=random) * 2).to(dtype)
        # The last: of verifiers whose vocabularies are padded to fewer ids, to as many as the draft's, and to more.
        for sizes in ([VOCAB_SIZE], [333], [333, VOCAB_SIZE, 2, VOCAB_SIZE + 12]):
            laws = [
                LAWS[name]._replace(vocab_size=size) for name, size in zip(names, cycle(sizes), strict=False)
            ]
            guesses, positions = guesses_of(logits, laws)
            for row, (guess, position) in enumerate(zip(guesses, positions, strict=True)):
                assert len(guess.ranks) == min(NUM_CANDIDATES, position.law.vocab_size)
                check(guess, logits[row : row + 1, : position.law.vocab_size], position)


def test_a_device_may_rank_fewer_candidates_than_the_budget_asks_for(monkeypatch):
    monkeypatch.setattr(runner, "largest_top_m", lambda device: 2)
    guesses, _ = guesses_of(torch.randn(2, VOCAB_SIZE), [LAWS["greedy"]] * 2)
    assert [len(guess.ranks) for guess in guesses] == [2, 2]
