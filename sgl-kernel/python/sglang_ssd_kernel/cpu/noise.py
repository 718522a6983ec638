"""The noise that target and draft share, in torch: for the references of the sampling kernels, and csrc/cpu/noise.h for these.

As ``sglang_ssd.algorithm.shared_noise``, which this package does not import.
"""

from __future__ import annotations

import torch

from ..cpu_stand_in.functions import murmur_hash32_cpu

#: The stream of uniforms that residual sampling draws with, as ``shared_noise.Stream.DRAFT``.
_DRAFT_STREAM = 0


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """g, float64 [N, M]. ``seeds`` and ``positions`` int64 [N], ``token_ids`` int64 [M] or [N, M]."""
    hashed = murmur_hash32_cpu(seeds, positions, token_ids).double()
    exponential = -(hashed / ((1 << 32) - 1)).log()
    return -exponential.clamp(2.0**-32, torch.finfo(torch.float64).max).log()


def draft_uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1) in steps of 2^-32, float64 [N]: hashes of an id that no vocabulary reaches."""
    token_ids = torch.tensor([-1 - _DRAFT_STREAM])
    return murmur_hash32_cpu(seeds, positions, token_ids)[:, 0].double() / (1 << 32)
