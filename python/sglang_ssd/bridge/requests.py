"""Reading SGLang's requests: what one asked for, as a ``SamplingLaw``.

Seams: ``SamplingParams`` (temperature 0 arrives as temperature 1 with top_k 1; "all" is a large top_k), the stop
tokens that ``min_new_tokens`` forbids (those of SGLang's own penalizer).
"""

from __future__ import annotations

import hashlib

from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ssd.algorithm.target_law import SamplingLaw


def sampling_law(request) -> SamplingLaw:
    """What this request asked for."""
    params = request.sampling_params
    is_greedy = params.top_k <= 1
    return SamplingLaw(
        temperature=0.0 if is_greedy else params.temperature,
        seed=request_seed(request.rid, params),
        top_k=0 if params.top_k >= TOP_K_ALL else params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=_stop_token_ids(request) if params.min_new_tokens else (),
        logit_bias=tuple((int(token), value) for token, value in (params.logit_bias or {}).items()),
    )


def request_seed(rid: str, params) -> int:
    """The seed of a request's noise. Without one it comes from the request id, which is random and the same on all
    ranks."""
    if params.sampling_seed is not None:
        return params.sampling_seed
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "big", signed=True)


def _stop_token_ids(request) -> tuple[int, ...]:
    tokenizer = request.tokenizer
    ids = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    if tokenizer is not None:
        ids |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(token for token in ids if token is not None))
