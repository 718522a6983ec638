"""What one server did, from its answers and its own counters; and Theorem 7 next to it. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from serving import Generation

from sglang_ssd.algorithm.theory import sd_tokens_per_ms, ssd_tokens_per_ms

MODES = ("plain", "sync", "async")
#: Two-sided 95% of a normal distribution.
Z_95 = 1.959964


class Measurement(NamedTuple):
    """What one server did with all prompts. Rates, lengths and times are means; None where the mode has no such thing.

    tokens_per_s:        tokens a second of wall time, prompts included.
    decode_tokens_per_s: tokens a second of one request after its first token: what Theorem 7 speaks of.
    accept_length, tokens_hit, tokens_miss: tokens a verification emits, over all rows and by source of the proposal.
    draft_round_ms, fork_ms: the draft's forwards a round, and those of them that ran beside the verify.
    backup_ms:           the draft's forwards that the verifier waited for, a round.
    draft_hit_rate:      hits a round as the draft counts them, the first token of a prompt included.
    """

    tokens_per_s: float
    decode_tokens_per_s: float
    first_token_ms: float
    num_tokens: float
    seconds: float
    rounds: float | None = None
    accept_length: float | None = None
    hit_rate: float | None = None
    tokens_hit: float | None = None
    tokens_miss: float | None = None
    verify_ms: float | None = None
    draft_wait_ms: float | None = None
    draft_round_ms: float | None = None
    fork_ms: float | None = None
    backup_ms: float | None = None
    draft_hit_rate: float | None = None


def summarize(
    generations: Sequence[Generation], seconds: float, before: dict[str, Any], after: dict[str, Any]
) -> Measurement:
    """``before`` and ``after`` are the server's own counts around the measured requests."""
    num_tokens = sum(answer.meta_info["completion_tokens"] for answer in generations)
    decode_seconds = sum(answer.seconds - answer.first_token_seconds for answer in generations)
    speed = Measurement(
        tokens_per_s=num_tokens / seconds,
        decode_tokens_per_s=(num_tokens - len(generations)) / decode_seconds,
        first_token_ms=1e3 * statistics.mean(answer.first_token_seconds for answer in generations),
        num_tokens=num_tokens,
        seconds=seconds,
    )
    if after["mode"] == "off":
        return speed

    def total(state: dict[str, Any], mean: str, count: str) -> float:
        return state[mean] * state[count]  # /server_info shows means since the start

    rounds, rows = after["rounds"] - before["rounds"], after["rows"] - before["rows"]
    draft = {
        name: after["draft"][name] - before["draft"][name]
        for name in ("rounds", "hits", "fork_ms", "backup_ms")
    }
    tokens = [tokens_by_source(answer.meta_info) for answer in generations]
    return speed._replace(
        rounds=rounds,
        accept_length=(total(after, "accept_length", "rows") - total(before, "accept_length", "rows")) / rows,
        hit_rate=(after["hits"] - before["hits"]) / rows,
        tokens_hit=mean([length for by_source in tokens for length in by_source["hit"]]),
        tokens_miss=mean([length for by_source in tokens for length in by_source["miss"]]),
        verify_ms=(total(after, "verify_ms", "rounds") - total(before, "verify_ms", "rounds")) / rounds,
        draft_wait_ms=(total(after, "draft_wait_ms", "rounds") - total(before, "draft_wait_ms", "rounds"))
        / rounds,
        draft_round_ms=(draft["fork_ms"] + draft["backup_ms"]) / draft["rounds"],
        fork_ms=draft["fork_ms"] / draft["rounds"],
        backup_ms=draft["backup_ms"] / draft["rounds"],
        draft_hit_rate=draft["hits"] / draft["rounds"],
    )


def mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def tokens_by_source(meta_info: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens of each verification of one request, by whether its proposal was a hit. The last verification counts
    only what the request still took: its end cuts the rest off."""
    left = meta_info["completion_tokens"] - 1  # the prefill's token
    tokens: dict[str, list[int]] = {"hit": [], "miss": []}
    for source, length in zip(meta_info["ssd_sources"], meta_info["ssd_accept_lengths"], strict=True):
        tokens["hit" if source == "hit" else "miss"].append(min(length, left))
        left -= min(length, left)
    return tokens


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two token lists differ, the end of the shorter one included; None if equal."""
    if a == b:
        return None
    return next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))


class Share(NamedTuple):
    """``part`` of ``whole`` trials, such as hits of rounds."""

    part: int
    whole: int

    @property
    def rate(self) -> float | None:
        return self.part / self.whole if self.whole else None

    def interval(self, z: float = Z_95) -> tuple[float, float]:
        """Wilson's score interval of the rate, 95% by default; all of [0, 1] without a trial."""
        if not self.whole:
            return 0.0, 1.0
        rate, spread = self.part / self.whole, z * z / self.whole
        centre = (rate + spread / 2) / (1 + spread)
        half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / self.whole + spread / (4 * self.whole))
        return max(0.0, centre - half), min(1.0, centre + half)

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "rate": self.rate, "interval_95": list(self.interval())}


def median(measurements: Sequence[Measurement]) -> Measurement:
    """Median of each field over repeats."""
    columns = zip(*measurements, strict=True)
    return Measurement(
        *(
            statistics.median(known) if (known := [v for v in column if v is not None]) else None
            for column in columns
        )
    )


class Prediction(NamedTuple):
    """Theorem 7 for one request at a time, and the times it was given."""

    ssd_tokens_per_s: float
    primary_ms: float
    backup_ms: float


def theorem_7(ssd: Measurement, sync: Measurement) -> Prediction:
    """Predict the decode speed of async from its own hit rate, tokens and times, and sync's time for a proposal.

    ``sync`` must have the draft on the same cores. The draft's whole round after a hit is what it forked beside the
    verify and what it still had to draft when the outcome came before the winner was complete: the forwards of the
    async draft that were waited for, less a whole proposal for each miss.
    """
    finishing_ms = ssd.backup_ms - (1.0 - ssd.draft_hit_rate) * sync.draft_round_ms
    primary_ms = ssd.fork_ms + (max(0.0, finishing_ms) / ssd.draft_hit_rate if ssd.draft_hit_rate else 0.0)
    tokens_per_ms = ssd_tokens_per_ms(
        hit_rate=ssd.hit_rate,
        tokens_hit=ssd.tokens_hit or 0.0,
        tokens_miss=ssd.tokens_miss or 0.0,
        verify_ms=ssd.verify_ms,
        primary_ms=primary_ms,
        backup_ms=sync.draft_wait_ms,
    )
    return Prediction(1e3 * tokens_per_ms, primary_ms, sync.draft_wait_ms)


def comparison(modes: dict[str, Measurement], ssd: Prediction | None) -> dict[str, float | None]:
    """Speed-ups of one accounting, and Theorem 7's async/sync next to the measured one, both of decoding alone."""
    plain, sync, async_ = (modes[mode] for mode in MODES)
    result = {
        "async/sync": async_.tokens_per_s / sync.tokens_per_s,
        "async/plain": async_.tokens_per_s / plain.tokens_per_s,
        "sync/plain": sync.tokens_per_s / plain.tokens_per_s,
        "decode async/sync": async_.decode_tokens_per_s / sync.decode_tokens_per_s,
        "theorem 7 async/sync": None,
    }
    if ssd is not None:
        # sync never hits: its tokens by miss are all its tokens, the cut-off ends left out as in async.
        sync_tokens_per_ms = sd_tokens_per_ms(sync.tokens_miss, sync.verify_ms, sync.draft_wait_ms)
        result["theorem 7 async/sync"] = ssd.ssd_tokens_per_s / (1e3 * sync_tokens_per_ms)
    return result
