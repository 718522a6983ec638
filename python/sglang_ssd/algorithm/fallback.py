"""Which backup answers a miss: Theorem 17, and a choice that does not flicker around its threshold."""

from __future__ import annotations

import math
from enum import Enum

from sglang_ssd.algorithm.theory import check_probability


class Fallback(str, Enum):
    """The backup speculator: the draft model just in time, or a suffix match in the request's own tokens."""

    NEURAL = "neural"
    NGRAM = "ngram"


def fallback_threshold(
    *,
    hit_rate: float,
    tokens_hit: float,
    tokens_miss_slow: float,
    tokens_miss_fast: float,
    slow_ms: float,
    fast_ms: float,
    round_ms: float,
) -> float:
    """The batch size b* below which the slow, accurate backup is faster and from which on the fast one is.

    Theorem 17 of the paper (arXiv 2603.03251). With N the tokens of a round under the slow and the fast
    backup, the speeds N / (round + x * wait), x = 1 - hit_rate^b being the share of rounds in which some row
    waits, are equal at x* = round * (N_s - N_f) / (N_f * slow - N_s * fast); b* = ln(1 - x*) / ln(hit_rate).

    ``tokens_...`` are expected tokens of a round, bonus token included. ``round_ms`` is a round without
    misses, max(verify, draft round); ``slow_ms`` and ``fast_ms`` are what a miss adds to it. Returns a float,
    0 when the slow backup brings no more tokens and infinity when the fast one never wins. Raises ValueError
    when the fast backup takes longer than the slow one, for a hit rate outside [0, 1] and for a round that
    takes no time.
    """
    check_probability("hit_rate", hit_rate)
    if fast_ms > slow_ms:
        raise ValueError(f"fast_ms must be at most slow_ms, got {fast_ms} > {slow_ms}")
    if not round_ms > 0.0:
        raise ValueError(f"round_ms must be above 0, got {round_ms}")
    slow = hit_rate * tokens_hit + (1.0 - hit_rate) * tokens_miss_slow
    fast = hit_rate * tokens_hit + (1.0 - hit_rate) * tokens_miss_fast
    if slow <= fast:
        return 0.0
    cost_of_slow = fast * slow_ms - slow * fast_ms
    waiting_share = round_ms * (slow - fast) / cost_of_slow if cost_of_slow > 0.0 else math.inf
    if waiting_share >= 1.0:
        return math.inf
    return math.log1p(-waiting_share) / math.log(hit_rate) if hit_rate > 0.0 else 0.0


def choose_fallback(
    current: Fallback, batch_size: int, threshold: float, hysteresis: float = 0.1
) -> Fallback:
    """The backup for a batch, given the one used last and b*.

    A change needs the batch to be beyond the threshold by the share ``hysteresis``, so that noise in the
    estimates behind b*, or a batch that wanders by a row, does not switch it back and forth. Raises
    ValueError for a ``hysteresis`` outside [0, 1).
    """
    if not 0.0 <= hysteresis < 1.0:
        raise ValueError(f"hysteresis must be in [0, 1), got {hysteresis}")
    if current is Fallback.NEURAL:
        return Fallback.NGRAM if batch_size >= threshold * (1.0 + hysteresis) else Fallback.NEURAL
    return Fallback.NEURAL if batch_size < threshold * (1.0 - hysteresis) else Fallback.NGRAM
