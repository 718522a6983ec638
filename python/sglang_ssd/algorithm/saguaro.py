"""Saguaro sampling: a draft distribution that leaves the residual on the tokens that the cache is prepared for."""

from __future__ import annotations

import torch

from sglang_ssd.algorithm.inverse_cdf import inverse_cdf


def saguaro_probs(logits: torch.Tensor, fan_out: torch.Tensor, c: float) -> torch.Tensor:
    """sigma_{F,C} of the paper (arXiv 2603.03251) on truncated logits: C * exp(z) in the top F, exp(z) elsewhere.

    ``logits`` float ``[N, M]``, the draft's top M over its temperature, highest first; ``fan_out`` integers ``[N]``,
    the F in force at the position of each row; ``c`` in [0, 1], 1 = off. Returns float32 ``[N, M]``: the q to ship,
    the law of :func:`sample_sparse`, whose rows sum to 1 within rounding.

    A row with no weight outside its top F is not scaled (its limit for C to 0). NaN counts as -inf; a row without
    a finite logit becomes uniform, which is as exact as any q. Raises ValueError when ``c`` is not in [0, 1].
    """
    if not 0.0 <= c <= 1.0:
        raise ValueError(f"c must be in [0, 1], got {c}")
    limits = torch.finfo(torch.float32)
    finite = logits.to(torch.float64).nan_to_num(nan=-torch.inf).clamp(limits.min, limits.max)
    weights = finite.softmax(-1)
    is_cached = torch.arange(logits.shape[-1], device=logits.device) < fan_out[:, None]
    has_rest = weights.masked_fill(is_cached, 0.0).sum(-1, keepdim=True) > 0
    weights = torch.where(is_cached & has_rest, c * weights, weights)
    return (weights / weights.sum(-1, keepdim=True)).to(torch.float32)


def sample_sparse(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw an index of each row from exactly the float32 ``probs`` ``[N, M]`` that are shipped.

    Their law is ``probs`` over their own sum in float64, which is how :func:`.verification.verify_residual` reads q.
    ``uniforms`` ``[N]`` in [0, 1), independent of the verifier's. Returns int64 ``[N]``.
    """
    return inverse_cdf(probs, uniforms)


#: Values of C that ``--ssd-saguaro-c auto`` chooses from.
SCALES = (1.0, 0.7, 0.5, 0.3, 0.1)
