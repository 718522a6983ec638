"""p for every position of a verified run, and the target's own draws from it.

The first token after a prompt and the verified ones go through the same code: a prompt is a run of length 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_ssd.algorithm.host_values import constant, from_host, no_columns, to_device
from sglang_ssd.algorithm.inverse_cdf import inverse_cdf
from sglang_ssd.algorithm.shared_noise import Stream, seeded_uniforms
from sglang_ssd.algorithm.target_law import SamplingLaw, add_bias, log_probs, penalise_run, probabilities
from sglang_ssd.algorithm.verification import verify_residual
from sglang_ssd.bridge.constraints import apply_processors, mask_grammars
from sglang_ssd.verifier.session import ProposedRow
from sglang_ssd_kernel import draw_and_agree


class TargetRow(NamedTuple):
    """One request in a batch. ``output_ids``: its output so far, the pending bonus token included; may be left empty where
    nobody reads it. ``run``: what is proposed after it."""

    law: SamplingLaw
    output_ids: list[int]
    run: list[int]


def adjust_logits(
    logits: torch.Tensor, rows: list[TargetRow], batch, verify_ids: torch.Tensor
) -> torch.Tensor:
    """Turn raw logits into those of the law that plain decoding would have at each position, in place.

    logits: float [B, W, V]. verify_ids: int64 [B, W], the pending token and the proposal. Returns the largest logit of each
    position, [B, W], for ``count_non_finite``.
    """
    # Most laws do neither, and on a CPU even a look at a row's logits shows.
    for i, row in enumerate(rows):
        if row.law.reads_output:
            penalise_run(logits[i], row.law, row.output_ids, row.run)
    mask_grammars(batch, verify_ids, logits)
    for i, row in enumerate(rows):
        if row.law.logit_bias:
            add_bias(logits[i], row.law)
    apply_processors(batch, [(row.output_ids, row.run) for row in rows], logits)
    return logits.amax(-1)


def count_non_finite(largest: torch.Tensor) -> int:
    """Positions whose logits hold NaN or +inf, of which these are the largest: NaN wins every maximum, and compares to
    nothing. NaN is never drawn, so they stay harmless, but something is wrong with the model."""
    return sum(not value < math.inf for row in largest.tolist() for value in row)


class Decision(NamedTuple):
    """What a verification decided. token_ids: int64 [B, K+1], of which the first ``num_accepted + 1`` are emitted;
    num_accepted and bonus_tokens, the last that are emitted: int64 [B]; num_malformed: int64 [], proposed tokens whose law
    could not be used, None where none is read."""

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    bonus_tokens: torch.Tensor
    num_malformed: torch.Tensor | None


def decide_by_shared_noise(
    logits: torch.Tensor,
    rows: list[TargetRow],
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
) -> Decision:
    """Emit the target's own draws and accept proposals while they equal them: greedy rows take the argmax, sampled rows
    the perturbed argmax. Exact for any proposal: each draw depends on p and on the noise of (seed, position) alone.

    logits: float [B, W, V], adjusted, for W - 1 draft tokens of each row. positions: int64 [B], the index of the last token
    before the first draw, as the noise counts. draft_tokens: int64 [B, W - 1].
    """
    num_rows, width, vocab_size = logits.shape
    scores = log_probs(logits.view(-1, vocab_size), [row.law for row in rows for _ in range(width)])
    drawn = draw_and_agree(
        scores.view(num_rows, width, vocab_size),
        constant(tuple(row.law.seed for row in rows), torch.int64, logits.device),
        positions,
        constant(tuple(row.law.is_greedy for row in rows), torch.bool, logits.device),
        draft_tokens,
        lengths,
    )
    return Decision(*drawn, None)


def draw_first_by_shared_noise(
    logits: torch.Tensor, rows: list[TargetRow], positions: torch.Tensor
) -> torch.Tensor:
    """First tokens of prompts, int64 [B]: nothing is proposed. logits: float [B, 1, V], adjusted."""
    no_tokens = no_columns(len(rows), torch.int64, logits.device)
    no_lengths = constant((0,) * len(rows), torch.int64, logits.device)
    return decide_by_shared_noise(logits, rows, positions, no_tokens, no_lengths).bonus_tokens


def decide_by_residual(
    logits: torch.Tensor,
    rows: list[TargetRow],
    positions: torch.Tensor,
    proposals: list[ProposedRow],
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
) -> Decision:
    """The paper's rule for sampled rows; greedy rows agree with the argmax, which is the same rule for one-hot laws.

    The verifier's uniforms are streams of their own, independent of the draft's.
    """
    decision = decide_by_shared_noise(
        logits, [row._replace(law=row.law.as_greedy()) for row in rows], positions, draft_tokens, lengths
    )
    sampled = [i for i, row in enumerate(rows) if not row.law.is_greedy]
    if not sampled:
        return decision
    lookahead, device = draft_tokens.shape[1], logits.device
    chosen = constant(tuple(sampled), torch.int64, device)
    p = _normalised(logits[chosen], [rows[i] for i in sampled])
    q_ids, q_probs = _stack_laws([proposals[i] for i in sampled], lookahead, device)
    seeds = constant(tuple(rows[i].law.seed for i in sampled), torch.int64, device)
    starts = positions[chosen]
    depths = torch.arange(lookahead, device=device)
    verdict = verify_residual(
        p,
        draft_tokens[chosen],
        lengths[chosen],
        from_host([not proposals[i].q_ids for i in sampled], torch.bool, device),
        q_ids,
        q_probs,
        seeded_uniforms(seeds[:, None].expand(-1, lookahead), starts[:, None] + depths, Stream.ACCEPT),
        seeded_uniforms(seeds, starts, Stream.BONUS),
    )
    token_ids, num_accepted, bonus_tokens, _ = decision
    token_ids[chosen, :lookahead] = draft_tokens[chosen]
    token_ids[chosen, verdict.num_accepted] = verdict.bonus_tokens
    num_accepted[chosen] = verdict.num_accepted
    bonus_tokens[chosen] = verdict.bonus_tokens
    return Decision(token_ids, num_accepted, bonus_tokens, verdict.num_malformed.sum())


def draw_first_by_residual(
    logits: torch.Tensor, rows: list[TargetRow], positions: torch.Tensor
) -> torch.Tensor:
    """First tokens of prompts in residual mode, int64 [B]: plain draws from p. logits: float [B, 1, V], adjusted."""
    tokens = logits[:, 0].argmax(dim=-1)
    sampled = [i for i, row in enumerate(rows) if not row.law.is_greedy]
    if sampled:
        chosen = constant(tuple(sampled), torch.int64, logits.device)
        p = _normalised(logits[chosen], [rows[i] for i in sampled])[:, 0]
        seeds = constant(tuple(rows[i].law.seed for i in sampled), torch.int64, logits.device)
        tokens[chosen] = inverse_cdf(p, seeded_uniforms(seeds, positions[chosen], Stream.BONUS))
    return tokens


def _normalised(logits: torch.Tensor, rows: list[TargetRow]) -> torch.Tensor:
    """p, float32 [B, W, V], each row of it summing to 1."""
    num_rows, width, vocab_size = logits.shape
    laws = [row.law for row in rows for _ in range(width)]
    p = probabilities(logits.reshape(-1, vocab_size), laws)
    return (p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)).view(
        num_rows, width, vocab_size
    )


def _stack_laws(proposals: list[ProposedRow], lookahead: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse laws of all rows, int64 and float32 [B, K, M], padded with probability 0."""
    widths = [len(p.q_ids) // (4 * len(p.token_ids)) if p.q_ids else 0 for p in proposals]
    ids = torch.zeros(len(proposals), lookahead, max(1, *widths), dtype=torch.int64)
    probs = torch.zeros(ids.shape, dtype=torch.float32)
    for i, (proposal, width) in enumerate(zip(proposals, widths, strict=True)):
        if width:
            length = len(proposal.token_ids)
            shipped_ids = torch.frombuffer(bytearray(proposal.q_ids), dtype=torch.int32)
            shipped_probs = torch.frombuffer(bytearray(proposal.q_probs), dtype=torch.float32)
            ids[i, :length, :width] = shipped_ids.view(length, width)
            probs[i, :length, :width] = shipped_probs.view(length, width)
    return to_device(ids, device), to_device(probs, device)
