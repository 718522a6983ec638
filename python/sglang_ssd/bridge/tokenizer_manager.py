"""n samples of one request: each gets noise of its own, also under one seed.

Seam: ``TokenizerManager._handle_batch_request`` expands n, ``_send_one_request`` sends each sample; the samples share
one ``SamplingParams``. Sample 0 keeps the seed, so that n = 1 and the first of n agree.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextvars import ContextVar

from sglang.srt.entrypoints.engine import init_tokenizer_manager as sglang_init
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_samples_sent: ContextVar[Counter[int] | None] = ContextVar("samples_sent", default=None)


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample ``sample`` of a request: the seed itself for 0, else mixed with it (splitmix64), signed."""
    if sample == 0:
        return seed
    bits = (seed + sample * _GOLDEN_RATIO) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    bits ^= bits >> 31
    return bits - 2**64 if bits >= 2**63 else bits


class SSDTokenizerManager(TokenizerManager):
    """SGLang's tokenizer manager; each of n samples leaves with a seed of its own."""

    async def _handle_batch_request(self, *args, **kwargs):
        # Every HTTP request runs in a context of its own, with which this ends.
        _samples_sent.set(Counter())
        async for response in super()._handle_batch_request(*args, **kwargs):
            yield response

    async def _send_one_request(self, tokenized_obj, *args, **kwargs):
        sent, params = _samples_sent.get(), getattr(tokenized_obj, "sampling_params", None)
        if sent is not None and params is not None and params.n > 1 and params.sampling_seed is not None:
            sample = sent[id(params)]
            sent[id(params)] += 1
            tokenized_obj.sampling_params = copy.copy(params)
            tokenized_obj.sampling_params.sampling_seed = sample_seed(params.sampling_seed, sample)
        return await super()._send_one_request(tokenized_obj, *args, **kwargs)


def init_tokenizer_manager(server_args, port_args):
    """SGLang's own start of the tokenizer manager, with ours in its place."""
    return sglang_init(server_args, port_args, TokenizerManagerClass=SSDTokenizerManager)
