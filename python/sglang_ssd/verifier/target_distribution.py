"""p for every position of a verified run, and the target's own draws from it.

The first token after a prompt and the verified ones go through the same code: a prompt is a run of length 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ssd.algorithm.shared_noise import draw
from sglang_ssd.algorithm.target_law import SamplingLaw, add_bias, log_probs, penalise_run
from sglang_ssd.bridge.constraints import apply_processors, mask_grammars


class TargetRow(NamedTuple):
    """One request in a batch. ``output_ids``: its output so far, the pending bonus token included. ``run``: what is
    proposed after it. ``position``: index of the last token before the first draw, as the noise counts positions."""

    law: SamplingLaw
    output_ids: list[int]
    run: list[int]
    position: int


def adjust_logits(logits: torch.Tensor, rows: list[TargetRow], batch, verify_ids: torch.Tensor) -> None:
    """Turn raw logits into those of the law that plain decoding would have at each position, in place.

    logits: float [B, W, V]. verify_ids: int64 [B, W], the pending token and the proposal.
    """
    for i, row in enumerate(rows):
        penalise_run(logits[i], row.law, row.output_ids, row.run)
    mask_grammars(batch, verify_ids, logits)
    for i, row in enumerate(rows):
        add_bias(logits[i], row.law)
    apply_processors(batch, [row.run for row in rows], logits)


def draw_targets(logits: torch.Tensor, rows: list[TargetRow]) -> torch.Tensor:
    """The target's token at every position: greedy rows take the argmax, sampled rows the perturbed argmax.

    logits: float [B, W, V], adjusted. Returns int64 [B, W]. Exact for any proposal: each draw depends on p and on the
    noise of (seed, position) alone.
    """
    num_rows, width, vocab_size = logits.shape
    flat = logits.view(-1, vocab_size)
    laws = [row.law for row in rows for _ in range(width)]
    device = logits.device
    positions = torch.tensor([row.position + j for row in rows for j in range(width)], device=device)
    seeds = torch.tensor([law.seed for law in laws], dtype=torch.int64, device=device)
    is_greedy = torch.tensor([law.is_greedy for law in laws], device=device)
    return draw(log_probs(flat, laws), seeds, positions, is_greedy).view(num_rows, width)
