"""Decisions of a verification on given logits."""

from __future__ import annotations

import pytest
import torch

from sglang_ssd.algorithm.target_law import SamplingLaw
from sglang_ssd.verifier.session import NOTHING_PROPOSED
from sglang_ssd.verifier.target_distribution import TargetRow, decide_by_residual, decide_by_shared_noise
from sglang_ssd.verifier.worker import pad

VOCAB_SIZE, K = 20, 3
TEMPERATURES = (0.0, 0.5, 0.8, 1.5)


@pytest.mark.parametrize("rule", ["shared noise", "residual"])
@pytest.mark.parametrize("seed", range(5))
def test_without_proposals_a_plain_step_draws_what_a_verify_does(rule, seed):
    """A verify without proposals has one column on a CPU; no token may depend on that."""
    logits = torch.randn(len(TEMPERATURES), K + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    rows = [
        TargetRow(SamplingLaw(temperature=temperature, seed=seed + i), [], [], 7 + i)
        for i, temperature in enumerate(TEMPERATURES)
    ]
    proposals = [NOTHING_PROPOSED] * len(rows)
    drawn = []
    for width in (0, K):
        draft_tokens, lengths = pad(proposals, width, "cpu")
        assert draft_tokens.shape == (len(rows), width)
        shown = logits[:, : width + 1]
        decision = (
            decide_by_shared_noise(shown, rows, draft_tokens, lengths)
            if rule == "shared noise"
            else decide_by_residual(shown, rows, proposals, draft_tokens, lengths)
        )
        assert decision.num_accepted.tolist() == [0] * len(rows)
        drawn.append(decision.token_ids[:, 0].tolist())
    assert drawn[0] == drawn[1]
