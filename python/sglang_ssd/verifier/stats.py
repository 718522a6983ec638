"""What a verifier counts: one place for ``/server_info``, Prometheus and the log line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from sglang_ssd.verifier.draft_client import ClientCounts, DraftClient, DraftState
from sglang_ssd.verifier.session import RoundRecord

logger = logging.getLogger(__name__)


class RoundCounts(msgspec.Struct):
    """Sums since start. A round is one verify forward; hits, misses and emitted tokens count its rows."""

    rounds: int = 0
    rows: int = 0
    hits: int = 0
    misses: int = 0
    emitted: int = 0
    proposed: int = 0
    accepted: int = 0
    first_rounds: int = 0
    first_hits: int = 0
    malformed_laws: int = 0
    non_finite_logits: int = 0
    ngrams_held_back: int = 0
    draft_wait_ms: float = 0.0
    verify_ms: float = 0.0


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class VerifierStats:
    """Counts rounds, says so once an interval, and feeds Prometheus where SGLang's metrics are on."""

    def __init__(self, log_interval_rounds: int, metrics_labels: dict[str, str] | None) -> None:
        self.counts = RoundCounts()
        self._log_interval_rounds = log_interval_rounds
        self._logged = RoundCounts()
        self._metrics = _Metrics(metrics_labels) if metrics_labels is not None else None

    def add_round(
        self,
        records: list[RoundRecord],
        num_first: int,
        num_first_hits: int,
        wait_ms: float,
        verify_ms: float,
    ) -> None:
        """Take in one verify forward. ``num_first``: rows whose request had its first verification."""
        counts, hits = self.counts, sum(record.source == "hit" for record in records)
        emitted = sum(record.accept_length for record in records)
        num_proposed = sum(record.num_proposed for record in records)
        counts.rounds += 1
        counts.rows += len(records)
        counts.hits += hits
        counts.misses += len(records) - hits
        counts.emitted += emitted
        counts.proposed += num_proposed
        counts.accepted += emitted - len(records)
        counts.first_rounds += num_first
        counts.first_hits += num_first_hits
        counts.draft_wait_ms += wait_ms
        counts.verify_ms += verify_ms
        if self._metrics is not None:
            self._metrics.add(
                hits, len(records) - hits, num_proposed, emitted - len(records), wait_ms, verify_ms
            )
        if counts.rounds - self._logged.rounds >= self._log_interval_rounds:
            self._log()

    def count_unusable(self, *, malformed_laws: int = 0, non_finite_logits: int = 0) -> None:
        """Laws of the draft that were not used, and positions where the target's logits hold NaN or +inf. The first of
        each is said, all are counted."""
        counts = self.counts
        if malformed_laws and not counts.malformed_laws:
            logger.warning("the draft sent a law that its token cannot be drawn from: verified without it")
        if non_finite_logits and not counts.non_finite_logits:
            logger.warning("the target's logits hold NaN or +inf: NaN counts as impossible")
        counts.malformed_laws += malformed_laws
        counts.non_finite_logits += non_finite_logits
        if self._metrics is not None and (malformed_laws or non_finite_logits):
            self._metrics.add_unusable(malformed_laws, non_finite_logits)

    def count_held_back(self, num_ngrams: int) -> None:
        """Proposals that were not verified, since a verify without any is so much shorter."""
        self.counts.ngrams_held_back += num_ngrams
        if self._metrics is not None:
            self._metrics.add_held_back(num_ngrams)

    def show_drafts(self, clients: Sequence[DraftClient]) -> None:
        """Bring the series of the drafts up to date."""
        if self._metrics is not None:
            self._metrics.show_drafts(clients)

    def _log(self) -> None:
        now, then = self.counts, self._logged
        rows, rounds = now.rows - then.rows, now.rounds - then.rounds
        logger.info(
            "SSD: %d rounds, hit rate %.3f, accept length %.2f, draft wait %.2f ms, verify %.2f ms",
            now.rounds,
            ratio(now.hits - then.hits, rows),
            ratio(now.emitted - then.emitted, rows),
            ratio(now.draft_wait_ms - then.draft_wait_ms, rounds),
            ratio(now.verify_ms - then.verify_ms, rounds),
        )
        self._logged = msgspec.structs.replace(now)

    def snapshot(self) -> dict[str, Any]:
        """Figures for people: ratios and means a round next to the sums."""
        counts = self.counts
        return {
            "rounds": counts.rounds,
            "rows": counts.rows,
            "hits": counts.hits,
            "misses": counts.misses,
            "hit_rate": ratio(counts.hits, counts.rows),
            "first_rounds": counts.first_rounds,
            "first_hit_rate": ratio(counts.first_hits, counts.first_rounds),
            "accept_length": ratio(counts.emitted, counts.rows),
            "proposed": counts.proposed,
            "accepted": counts.accepted,
            "malformed_laws": counts.malformed_laws,
            "non_finite_logits": counts.non_finite_logits,
            "ngrams_held_back": counts.ngrams_held_back,
            "draft_wait_ms": ratio(counts.draft_wait_ms, counts.rounds),
            "verify_ms": ratio(counts.verify_ms, counts.rounds),
        }


class _Metrics:
    """``sglang_ssd_*`` series beside SGLang's own, in the same multi-process registry."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)

        def counter(name: str, text: str):
            return Counter(f"sglang_ssd_{name}", text, names).labels(**labels)

        def histogram(name: str, text: str):
            buckets = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
            return Histogram(f"sglang_ssd_{name}", text, names, buckets=buckets).labels(**labels)

        self._hits = counter("hits", "Rows whose proposal was prepared before the outcome was known.")
        self._misses = counter("misses", "Rows whose proposal was not prepared.")
        self._proposed = counter("proposed_tokens", "Draft tokens verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted.")
        self._malformed_laws = counter("malformed_laws", "Proposed tokens whose law could not be used.")
        self._non_finite_logits = counter("non_finite_logits", "Positions with NaN or +inf in their logits.")
        self._ngrams_held_back = counter("ngrams_held_back", "N-gram proposals that were not worth a verify.")
        self._wait_ms = histogram("draft_wait_ms", "Milliseconds a round waited for proposals.")
        self._verify_ms = histogram("verify_ms", "Milliseconds of the target's verify forward.")
        self._labels = labels
        self._draft_state = Gauge(
            "sglang_ssd_draft_state",
            "1 for the state that the draft is in, by the place of its endpoint.",
            [*names, "draft", "state"],
            multiprocess_mode="mostrecent",
        )
        self._draft_events = Counter(
            "sglang_ssd_draft_events",
            "What went wrong on the line to a draft and was dropped, and requests that moved or were opened again.",
            [*names, "draft", "event"],
        )
        self._shown: dict[int, tuple[DraftState | None, ClientCounts]] = {}

    def show_drafts(self, clients: Sequence[DraftClient]) -> None:
        for index, client in enumerate(clients):
            state, counts = self._shown.get(index, (None, ClientCounts()))
            if client.state != state:
                for name in get_args(DraftState):
                    series = self._draft_state.labels(**self._labels, draft=index, state=name)
                    series.set(name == client.state)
            if client.counts is not counts:
                for event, before, now in zip(ClientCounts._fields, counts, client.counts, strict=True):
                    self._draft_events.labels(**self._labels, draft=index, event=event).inc(now - before)
            self._shown[index] = (client.state, client.counts)

    def add_unusable(self, malformed_laws: int, non_finite_logits: int) -> None:
        self._malformed_laws.inc(malformed_laws)
        self._non_finite_logits.inc(non_finite_logits)

    def add_held_back(self, num_ngrams: int) -> None:
        self._ngrams_held_back.inc(num_ngrams)

    def add(
        self, hits: int, misses: int, proposed: int, accepted: int, wait_ms: float, verify_ms: float
    ) -> None:
        self._hits.inc(hits)
        self._misses.inc(misses)
        self._proposed.inc(proposed)
        self._accepted.inc(accepted)
        self._wait_ms.observe(wait_ms)
        self._verify_ms.observe(verify_ms)
