"""Drawing from weights with given uniforms."""

from __future__ import annotations

import torch


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index of each row at which the running sum of its weights first exceeds u times their total.

    ``weights`` float ``[N, W]``, non-negative and finite, of any total; ``uniforms`` ``[N]`` in [0, 1). Returns int64
    ``[N]``. In float64. An index of weight 0 is never drawn, except index 0 from a row without any weight.
    """
    running = weights.to(torch.float64).cumsum(-1)
    totals = running[:, -1]
    # u < 1 in float64 keeps u times the total below the total, so the index found has weight.
    indices = torch.searchsorted(running, (uniforms * totals)[:, None], right=True)[:, 0]
    return indices.masked_fill(totals == 0, 0)
