"""Exact verification of a proposal, by agreement with the target's own draws or by the paper's residual sampling.

The two rules must never be crossed. :func:`agree` is for greedy rows and for shared noise; :func:`verify_residual`
needs uniforms independent of the noise that the draft drew with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from sglang_ssd.algorithm.inverse_cdf import inverse_cdf

# How far from 1 the float32 probabilities of a shipped q may sum.
_SUM_TOLERANCE = 1e-3


class Verified(NamedTuple):
    """Outcomes of a batch, int64 ``[B]`` each.

    ``num_accepted`` drafts, 0..K; the ``bonus_tokens`` after them; ``num_malformed``, the proposed positions whose q
    could not be used as shipped (0 from :func:`agree`).
    """

    num_accepted: torch.Tensor
    bonus_tokens: torch.Tensor
    num_malformed: torch.Tensor


def accepted_histogram(num_accepted: torch.Tensor, lookahead: int) -> torch.Tensor:
    """How many rows accepted 0, 1, .. K = ``lookahead`` drafts; int64 ``[K + 1]``."""
    return torch.bincount(num_accepted, minlength=lookahead + 1)


def agree(target_tokens: torch.Tensor, proposed: torch.Tensor, lengths: torch.Tensor) -> Verified:
    """Accept while the proposal equals the target's own draws; the bonus is the target's draw after that.

    ``target_tokens`` int64 ``[B, K + 1]`` from :func:`.shared_noise.draw`; ``proposed`` int64 ``[B, K]``; ``lengths``
    int64 ``[B]``, 0..K: what lies beyond is padding and rejected. Exact for any proposal, because only draws of the
    target are emitted.
    """
    num_accepted = _leading((proposed == target_tokens[:, :-1]) & _is_proposed(proposed, lengths))
    bonus_tokens = target_tokens.gather(-1, num_accepted[:, None])[:, 0]
    return Verified(num_accepted, bonus_tokens, torch.zeros_like(num_accepted))


def verify_residual(
    p: torch.Tensor,
    proposed: torch.Tensor,
    lengths: torch.Tensor,
    is_one_hot: torch.Tensor,
    q_ids: torch.Tensor,
    q_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
) -> Verified:
    """Accept x iff u * q(x) < p(x); at the first rejection draw the bonus from max(p - q, 0), normalised.

    Where nothing is proposed q is 0, so that after a whole proposal the same draw is from p.

    ``p`` float ``[B, K + 1, V]``, the target's distributions (NaN and infinite count as 0); ``proposed`` int64
    ``[B, K]``; ``lengths`` int64 ``[B]``, 0..K: what lies beyond is padding; ``is_one_hot`` bool ``[B]``: rows whose
    proposal was not sampled, verified with q = 1 at x (accept with p(x), else draw from p without x); ``q_ids`` int64
    and ``q_probs`` float32 ``[B, K, M]``: the laws that the other rows were drawn from, as
    :func:`.saguaro.sample_sparse` reads them, in any order, padded with probability 0; ``accept_uniforms`` ``[B, K]``
    and ``bonus_uniforms`` ``[B]`` in [0, 1), float64 for the finest law, independent of the draft's.

    The emitted tokens have the law p whatever q is, if q is the law that x was drawn from (Leviathan et al. 2023,
    arXiv 2211.17192). A q that cannot be it is counted and not used; both substitutes emit p given any x: one-hot
    for a q that is no distribution (sum, sign, NaN, duplicate or unknown ids), rejection with q = 0 when q(x) is not
    in (0, 1] or x is no token.
    """
    batch_size, _, vocab_size = p.shape
    q = _proposal_law(proposed, lengths, is_one_hot, q_ids, q_probs, vocab_size)

    tokens = proposed.clamp(0, vocab_size - 1)
    p_of_token = _masses(p[:, :-1].gather(-1, tokens[..., None])[..., 0])
    q_of_token = torch.where(q.token_ids == tokens[..., None], q.probs, 0.0).sum(-1)
    accepts = (q_of_token > 0) & (accept_uniforms * q_of_token < p_of_token)
    num_accepted = _leading(accepts)

    rows = torch.arange(batch_size, device=p.device)
    p_at_bonus = _masses(p[rows, num_accepted])
    q_ids_at_bonus = pad(q.token_ids, (0, 0, 0, 1))[rows, num_accepted]
    q_at_bonus = pad(q.probs, (0, 0, 0, 1))[rows, num_accepted]
    residual = p_at_bonus.scatter_add(-1, q_ids_at_bonus, -q_at_bonus).clamp_(min=0.0)
    # Rounding can reject a token although p exceeds q nowhere.
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_at_bonus)
    return Verified(num_accepted, inverse_cdf(weights, bonus_uniforms), q.is_malformed.sum(-1))


class _ProposalLaw(NamedTuple):
    """q to verify with: ids int64 and probabilities float64 ``[B, K, M + 1]``, all 0 where nothing is proposed.

    The last column is the proposed token itself, for one-hot rows. ``is_malformed`` bool ``[B, K]``.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor
    is_malformed: torch.Tensor


def _proposal_law(
    proposed: torch.Tensor,
    lengths: torch.Tensor,
    is_one_hot: torch.Tensor,
    q_ids: torch.Tensor,
    q_probs: torch.Tensor,
    vocab_size: int,
) -> _ProposalLaw:
    is_proposed = _is_proposed(proposed, lengths)
    is_token = (proposed >= 0) & (proposed < vocab_size)
    probs = q_probs.to(torch.float64)
    totals = probs.sum(-1, keepdim=True)

    has_mass = probs != 0
    sorted_ids = torch.where(has_mass, q_ids, -1).sort().values
    has_duplicates = ((sorted_ids[..., 1:] == sorted_ids[..., :-1]) & (sorted_ids[..., 1:] >= 0)).any(-1)
    has_unknown = (has_mass & ((q_ids < 0) | (q_ids >= vocab_size))).any(-1)
    sums_to_one = (totals[..., 0] - 1).abs() <= _SUM_TOLERANCE
    is_distribution = (probs >= 0).all(-1) & sums_to_one & ~has_duplicates & ~has_unknown
    q_of_token = torch.where(q_ids == proposed[..., None], probs, 0.0).sum(-1)
    may_propose = is_token & (q_of_token > 0) & (q_of_token <= 1 + _SUM_TOLERANCE)

    is_declared_one_hot = is_proposed & is_one_hot[:, None] & is_token
    is_usable = is_proposed & ~is_one_hot[:, None] & is_distribution & may_propose
    is_substituted = is_proposed & ~is_one_hot[:, None] & ~is_distribution & may_propose
    shipped = torch.where(is_usable[..., None], probs / totals, 0.0)
    one_hot = (is_declared_one_hot | is_substituted)[..., None].to(torch.float64)
    return _ProposalLaw(
        token_ids=torch.cat((q_ids, proposed[..., None]), dim=-1).clamp(0, vocab_size - 1),
        probs=torch.cat((shipped, one_hot), dim=-1),
        is_malformed=is_proposed & ~is_usable & ~is_declared_one_hot,
    )


def _is_proposed(proposed: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(proposed.shape[1], device=proposed.device) < lengths[:, None]


def _leading(accepts: torch.Tensor) -> torch.Tensor:
    """The number of True values that each row starts with."""
    return accepts.to(torch.int64).cumprod(-1).sum(-1)


def _masses(p: torch.Tensor) -> torch.Tensor:
    return p.to(torch.float64).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0.0)
