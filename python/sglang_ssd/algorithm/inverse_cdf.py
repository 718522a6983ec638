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
    # Below the total even where the product rounds up to it, so that the answer has weight.
    thresholds = torch.minimum(uniforms * totals, torch.nextafter(totals, totals.new_zeros(())))
    indices = torch.searchsorted(running, thresholds[:, None], right=True)[:, 0]
    return indices.masked_fill(totals == 0, 0)
