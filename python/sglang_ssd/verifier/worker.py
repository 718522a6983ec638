"""The verifier's round, top to bottom: collect proposals, verify, accept, send the outcome.

SGLang calls ``forward_batch_generation`` once a scheduler turn. The outcome leaves as soon as it is known, before the
scheduler's bookkeeping; proposals are collected at the next round's start, so the two overlap.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from sglang_ssd.algorithm.online_choice import OnlineChoice
from sglang_ssd.algorithm.target_law import SamplingLaw
from sglang_ssd.bridge.parallel import broadcast_from_first_rank
from sglang_ssd.bridge.requests import sampling_law
from sglang_ssd.bridge.speculative import SpecWorkerBase, Verified
from sglang_ssd.verifier.draft_client import RowOutcome
from sglang_ssd.verifier.drafts import Drafts
from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow, RoundRecord, VerifierSession
from sglang_ssd.verifier.stats import VerifierStats
from sglang_ssd.verifier.target_distribution import (
    Decision,
    TargetRow,
    adjust_logits,
    decide_by_residual,
    decide_by_shared_noise,
    draw_first_by_residual,
    draw_first_by_shared_noise,
)
from sglang_ssd.wire.messages import CloseReason, RowKey, Sampling


class SSDWorker(SpecWorkerBase):
    """Verifies proposals of a draft in another process. TP rank 0 speaks to it; all ranks run the same rounds."""

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.drafts: Drafts | None = None
        self.stats: VerifierStats | None = None
        self._sessions: dict[str, VerifierSession] = {}
        self._num_requests = 0
        self._draft_temperature: float | None = None
        self._sampling: Sampling = "shared-noise"
        self._saguaro_c = OnlineChoice((1.0,))

    def attach(
        self,
        drafts: Drafts | None,
        stats: VerifierStats,
        sampling: Sampling,
        saguaro_c: OnlineChoice[float],
        draft_temperature: float | None,
    ) -> None:
        """Tie the worker to its drafts: None on all TP ranks but the first. ``draft_temperature`` replaces that of sampled
        requests on the draft's side."""
        self.drafts, self.stats, self._draft_temperature = drafts, stats, draft_temperature
        self._sampling, self._saguaro_c = sampling, saguaro_c

    def learn_anew(self) -> None:
        """The target has other weights: forget what rounds of the old ones taught, here and at the drafts."""
        self._saguaro_c.forget()
        if self.drafts is not None:
            self.drafts.learn_anew()

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        return self._round(batch, on_publish)

    def _prefill(self, batch, on_publish, pp_proxy_tensors):
        # The draft reads the prompt while the target does.
        self._open_new(batch.reqs or [])
        started = time.perf_counter()
        if batch.forward_mode.is_idle() or batch.is_prefill_only:
            result = self.run_plain(batch, pp_proxy_tensors)
        else:
            prefilled = self.run_prefill(batch)
            result = prefilled.result
            result.next_token_ids = self._draw_first(batch, prefilled)
            self._send_first_tokens(batch, result.next_token_ids)
            self._observe_forward((time.perf_counter() - started) * 1e3)
        return self.prefill_result(batch, result, on_publish)

    def _draw_first(self, batch, prefilled: Verified) -> torch.Tensor:
        """The first tokens, int64 [B]: a prompt is a run of length 0."""
        rows = [
            TargetRow(self._law(request), list(request.output_ids), [], length - 1)
            for request, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
        ]
        no_proposal = torch.zeros(len(rows), 1, dtype=torch.int64, device=self.device)
        self._count_unusable(non_finite_logits=adjust_logits(prefilled.logits, rows, batch, no_proposal))
        if self._sampling == "residual":
            return draw_first_by_residual(prefilled.logits, rows)
        return draw_first_by_shared_noise(prefilled.logits, rows)

    def _round(self, batch, on_publish):
        sessions = [self._sessions.get(request.rid) for request in batch.reqs]
        started = time.perf_counter()
        proposals = self._collect(sessions)
        collected = time.perf_counter()
        is_plain = self.can_narrow and not any(proposal.token_ids for proposal in proposals)
        draft_tokens, lengths = pad(proposals, 0 if is_plain else self.lookahead, self.device)
        verified = self.run_verify(batch, draft_tokens)
        decision = self._decide(batch, verified, sessions, proposals, draft_tokens, lengths)
        decided = time.perf_counter()
        records = [
            RoundRecord(proposal.source, len(proposal.token_ids), accepted + 1)
            for proposal, accepted in zip(proposals, decision.num_accepted.tolist(), strict=True)
        ]
        # The draft learns what a verify takes, not what a plain step does.
        verify_ms = 0.0 if is_plain else (decided - collected) * 1e3
        self._send_outcomes(sessions, records, decision, verify_ms)
        self._count(sessions, records, (collected - started) * 1e3, (decided - collected) * 1e3)
        return self.verify_result(batch, verified, decision.token_ids, decision.num_accepted, on_publish)

    def _collect(self, sessions: list[VerifierSession | None]) -> list[ProposedRow]:
        """One proposal a row, the same on all ranks."""
        proposals = [NOTHING_PROPOSED] * len(sessions)
        if self.drafts is not None:
            known = [session for session in sessions if session is not None]
            by_session = dict(zip(known, self.drafts.collect(known), strict=True))
            proposals = [
                NOTHING_PROPOSED
                if session is None
                else by_session[session]
                if session.is_held
                else session.propose_ngram(self.lookahead)
                for session in sessions
            ]
        return broadcast_from_first_rank(proposals)

    def _decide(
        self,
        batch,
        verified: Verified,
        sessions,
        proposals,
        draft_tokens: torch.Tensor,
        lengths: torch.Tensor,
    ) -> Decision:
        """Which proposed tokens stand, and what follows them."""
        rows = [
            TargetRow(self._law(request), self._output_of(request, session), proposal.token_ids, length)
            for request, session, proposal, length in zip(
                batch.reqs, sessions, proposals, batch.seq_lens.tolist(), strict=True
            )
        ]
        verify_ids = torch.cat([verified.bonus_tokens.view(-1, 1), draft_tokens], dim=1)
        self._count_unusable(non_finite_logits=adjust_logits(verified.logits, rows, batch, verify_ids))
        if self._sampling == "residual":
            decision = decide_by_residual(verified.logits, rows, proposals, draft_tokens, lengths)
            self._count_unusable(malformed_laws=decision.num_malformed)
            return decision
        return decide_by_shared_noise(verified.logits, rows, draft_tokens, lengths)

    def _send_outcomes(
        self, sessions, records: list[RoundRecord], decision: Decision, verify_ms: float
    ) -> None:
        outcomes = []
        for session, record, tokens in zip(sessions, records, decision.token_ids.tolist(), strict=True):
            if session is None:
                continue
            session.tokens.extend(tokens[: record.accept_length])
            session.num_rounds += 1
            session.new_records.append(record)
            outcomes.append(RowOutcome(session, record.accept_length - 1, session.tokens[-1]))
        if self.drafts is not None:
            self.drafts.send_outcomes(outcomes, self._saguaro_c.current, verify_ms)

    def _count(self, sessions, records: list[RoundRecord], wait_ms: float, verify_ms: float) -> None:
        if self.stats is None:
            return
        first = [s is not None and s.num_rounds == 1 for s in sessions]
        first_hits = sum(
            is_first and record.source == "hit" for is_first, record in zip(first, records, strict=True)
        )
        self._saguaro_c.observe(sum(record.accept_length for record in records), wait_ms + verify_ms)
        self._observe_forward(verify_ms)
        self.stats.add_round(records, sum(first), first_hits, wait_ms, verify_ms)

    def _observe_forward(self, forward_ms: float) -> None:
        if self.drafts is not None:
            self.drafts.limit.observe_forward(forward_ms)

    def _count_unusable(self, **numbers: int) -> None:
        if self.stats is not None:
            self.stats.count_unusable(**numbers)

    # -- sessions ------------------------------------------------------------------------------------------------

    def _open_new(self, requests: list[Any]) -> None:
        """Open a session for every request that enters, or enters again after it was retracted."""
        for request in requests:
            generation = request.retraction_count
            session = self._sessions.get(request.rid)
            if session is not None and session.request is request and session.key.generation == generation:
                continue  # A later chunk of its prompt.
            if request.sampling_params.max_new_tokens <= 1:
                continue  # Nothing will be drafted.
            returns = session is not None and session.request is request
            if session is not None:
                self._leave([session], "retracted" if returns else "aborted")
            key = RowKey(session.key.request if returns else self._new_number(), generation)
            records = session.new_records if returns else []
            law = sampling_law(request)
            session = VerifierSession(
                key,
                request,
                [*request.origin_input_ids, *request.output_ids],
                law,
                0.0 if law.is_greedy else self._draft_temperature or law.temperature,
                new_records=records,
            )
            self._sessions[request.rid] = session
            if self.drafts is not None:
                self.drafts.open(session)

    def _send_first_tokens(self, batch, next_token_ids: torch.Tensor) -> None:
        """The first token of a prompt is an outcome too: nothing was proposed, and the bonus token is known."""
        outcomes = []
        for request, token in zip(batch.reqs, next_token_ids.tolist(), strict=True):
            session = self._sessions.get(request.rid)
            if session is None or session.is_closed or request is batch.chunked_req:
                continue
            session.tokens.append(token)
            outcomes.append(RowOutcome(session, 0, token))
        if self.drafts is not None:
            self.drafts.send_outcomes(outcomes)

    def _law(self, request) -> SamplingLaw:
        session = self._sessions.get(request.rid)
        return sampling_law(request) if session is None else session.law

    @staticmethod
    def _output_of(request, session: VerifierSession | None) -> list[int]:
        """Its output, where its law reads that: a long one is not copied every round for nothing."""
        if session is None:
            return list(request.output_ids)
        return session.tokens[len(request.origin_input_ids) :] if session.law.reads_output else []

    def close_departed(self) -> None:
        """Close the sessions of requests that finished, were aborted or retracted. Called after bookkeeping."""
        departed: dict[CloseReason, list[VerifierSession]] = {}
        for rid, session in list(self._sessions.items()):
            request = session.request
            if request.finished():
                is_abort = request.finished_reason.to_json()["type"] == "abort"
                departed.setdefault("aborted" if is_abort else "finished", []).append(session)
                del self._sessions[rid]
            elif request.is_retracted:
                # It waits to be opened again.
                departed.setdefault("retracted", []).append(session)
        for reason, sessions in departed.items():
            self._leave(sessions, reason)

    def forget(self, request) -> None:
        """This request was aborted outside a batch, while it waited."""
        session = self._sessions.get(request.rid)
        if session is not None and session.request is request:
            del self._sessions[request.rid]
            self._leave([session], "aborted")

    def _leave(self, sessions: list[VerifierSession], reason: CloseReason) -> None:
        """Tell the draft that these requests left, those of which it was not told yet."""
        left = [session for session in sessions if not session.is_closed]
        for session in left:
            session.is_closed = True
        if self.drafts is not None and left:
            self.drafts.close(left, reason)

    def held_at_rest(self) -> list[str]:
        """What is held for requests, in words; [] when all is free, as it must be when there are none."""
        held = {"sessions": len(self._sessions)}
        if self.drafts is not None:
            held |= {
                "sessions told to a draft": self.drafts.num_sessions(),
                "tickets": self.drafts.num_tickets(),
            }
        return [f"{number} {name}" for name, number in held.items() if number]

    def close_all(self) -> None:
        """Close whatever is still open."""
        sessions, self._sessions = list(self._sessions.values()), {}
        self._leave(sessions, "aborted")

    def take_records(self, rid: str) -> list[RoundRecord]:
        """Rounds of this request since the last call, for its ``meta_info``."""
        session = self._sessions.get(rid)
        if session is None:
            return []
        records, session.new_records = session.new_records, []
        return records

    def _new_number(self) -> int:
        self._num_requests += 1
        return self._num_requests


def pad(proposals: list[ProposedRow], lookahead: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Proposals as tensors: int64 [B, lookahead] token ids, padded with token 0, and int64 [B] lengths."""
    rows = [[*proposal.token_ids, *[0] * (lookahead - len(proposal.token_ids))] for proposal in proposals]
    lengths = [len(proposal.token_ids) for proposal in proposals]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device).view(len(proposals), lookahead)
    return tokens, torch.tensor(lengths, device=device)
