"""Decisions of a verification on given logits."""

from __future__ import annotations

import pytest
import torch

from sglang_ssd.algorithm.host_values import constant
from sglang_ssd.algorithm.target_law import SamplingLaw
from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow
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
        TargetRow(SamplingLaw(temperature=temperature, seed=seed + i), [], [])
        for i, temperature in enumerate(TEMPERATURES)
    ]
    positions = torch.arange(7, 7 + len(rows))
    proposals = [NOTHING_PROPOSED] * len(rows)
    drawn = []
    for width in (0, K):
        draft_tokens, lengths = pad(proposals, width, "cpu")
        assert draft_tokens.shape == (len(rows), width)
        shown = logits[:, : width + 1]
        decision = (
            decide_by_shared_noise(shown, rows, positions, draft_tokens, lengths)
            if rule == "shared noise"
            else decide_by_residual(shown, rows, positions, proposals, draft_tokens, lengths)
        )
        assert decision.num_accepted.tolist() == [0] * len(rows)
        assert decision.bonus_tokens.tolist() == decision.token_ids[:, 0].tolist()
        drawn.append(decision.token_ids[:, 0].tolist())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("rule", ["shared noise", "residual"])
def test_a_decision_leaves_no_trace_in_what_the_next_one_reads(rule):
    """Tensors that come again round after round are made once: whoever wrote to one would change later draws."""
    random = torch.Generator().manual_seed(3)
    laws = [
        SamplingLaw(),
        SamplingLaw(temperature=0.7, seed=5, top_k=4),
        SamplingLaw(temperature=1.2, seed=-9, top_p=0.8, min_p=0.05),
        SamplingLaw(temperature=0.9, seed=2),
    ]
    rows = [TargetRow(law, [], [1, 2]) for law in laws]
    positions = torch.arange(11, 11 + len(laws))
    proposals = [ProposedRow("hit", [1, 2]) for _ in laws]
    logits = torch.randn(len(laws), 3, VOCAB_SIZE, generator=random)

    def decide():
        draft_tokens, lengths = pad(proposals, 2, "cpu")
        if rule == "residual":
            return decide_by_residual(logits.clone(), rows, positions, proposals, draft_tokens, lengths)
        return decide_by_shared_noise(logits.clone(), rows, positions, draft_tokens, lengths)

    constant.cache_clear()
    first, second, third = decide(), decide(), decide()
    assert constant.cache_info().hits > 0
    for again in (second, third):
        assert torch.equal(again.token_ids, first.token_ids)
        assert torch.equal(again.num_accepted, first.num_accepted)
        assert torch.equal(again.bonus_tokens, first.bonus_tokens)
    last = first.token_ids.gather(1, first.num_accepted[:, None])[:, 0]
    assert torch.equal(first.bonus_tokens, last), "the bonus token is the last that is emitted"
