"""SGLang's sampler with our draw: plain decoding (``--ssd-mode off``) then samples with the same noise as speculation.

Seams: ``Sampler._sample_from_probs``, ``ModelRunner.sampler``, and ``SamplingBatchInfo.adjusted_from_schedule_batch``
(a hook that SGLang leaves empty), through which every request gets its seed; SGLang itself keeps seeds only under
``--enable-deterministic-inference``, which no CPU backend may use.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ssd.algorithm.host_values import constant
from sglang_ssd.algorithm.target_law import SamplingLaw, truncate
from sglang_ssd.bridge.requests import request_seed
from sglang_ssd_kernel import draw_and_agree


class SharedNoiseSampler(Sampler):
    """Draws by the Gumbel-max rule with the noise of (seed, position, token id)."""

    def _sample_from_probs(self, probs, sampling_info: SamplingBatchInfo, positions, simple_sampling_case):
        top_ks = sampling_info.top_ks.tolist()
        is_greedy = tuple(top_k <= 1 for top_k in top_ks)
        laws = [
            # An argmax is the same whatever else is cut.
            SamplingLaw()
            if greedy
            else SamplingLaw(
                temperature=1.0, top_k=0 if top_k >= TOP_K_ALL else top_k, top_p=top_p, min_p=min_p
            )
            for greedy, top_k, top_p, min_p in zip(
                is_greedy, top_ks, sampling_info.top_ps.tolist(), sampling_info.min_ps.tolist(), strict=True
            )
        ]
        # A copy: SGLang reads the logprobs of the whole law off ``probs`` afterwards.
        scores = truncate(probs.clone(), laws).log_()
        seeds = sampling_info.sampling_seed
        no_tokens, no_lengths = seeds.new_zeros(seeds.shape[0], 0), torch.zeros_like(seeds)
        positions = positions.to(torch.int64).contiguous()
        drawn = draw_and_agree(
            scores.unsqueeze(1),
            seeds,
            positions,
            constant(is_greedy, torch.bool, probs.device),
            no_tokens,
            no_lengths,
        )
        return drawn.token_ids[:, 0], None


def install_shared_noise_sampler(model_runner) -> None:
    """Make a target's plain sampling draw with shared noise."""

    def keep_seeds(self: SamplingBatchInfo, batch, vocab_size: int) -> None:
        seeds = [request_seed(request.rid, request.sampling_params) for request in batch.reqs]
        self.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=self.device)

    SamplingBatchInfo.adjusted_from_schedule_batch = keep_seeds
    model_runner.sampler = SharedNoiseSampler()
