"""The verifier's round, top to bottom: settle the one before, collect proposals, verify, decide.

SGLang calls ``forward_batch_generation`` once a scheduler turn. A forward is settled when the host learns what it emitted:
its tokens are committed and its outcome leaves for the draft. In the plain loop that is at once, before the scheduler's
bookkeeping. In the overlapped loop it is when the worker is called next: the bookkeeping of round T-1 and the scheduling of
round T+1 run while the device verifies round T, and nothing but the settling waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from sglang_ssd.algorithm.guess_worth import GuessWorth
from sglang_ssd.algorithm.host_values import constant, from_host, no_columns
from sglang_ssd.algorithm.online_choice import OnlineChoice
from sglang_ssd.algorithm.target_law import SamplingLaw
from sglang_ssd.bridge.constraints import has_processors
from sglang_ssd.bridge.parallel import broadcast_from_first_rank
from sglang_ssd.bridge.requests import sampling_law
from sglang_ssd.bridge.speculative import SpecWorkerBase, Verified, emitted_tokens, to_host
from sglang_ssd.verifier.draft_client import RowOutcome
from sglang_ssd.verifier.drafts import Drafts
from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow, RoundRecord, VerifierSession
from sglang_ssd.verifier.stats import VerifierStats
from sglang_ssd.verifier.target_distribution import (
    Decision,
    TargetRow,
    adjust_logits,
    count_non_finite,
    decide_by_residual,
    decide_by_shared_noise,
    draw_first_by_residual,
    draw_first_by_shared_noise,
)
from sglang_ssd.wire.messages import CloseReason, RowKey, Sampling


class InFlight(NamedTuple):
    """A forward of the target that is not settled yet.

    sessions:  [B], None where nothing is to be committed (no session, a chunk of a prompt that is not its last).
    proposals: [B], what was verified; None for prompts.
    largest, num_malformed: on the host once the result is, as ``adjust_logits`` and ``Decision`` tell of them.
    wait_ms:   what the round waited for its proposals.
    is_plain:  it verified nothing.
    is_alone:  no draft held any of its rows.
    """

    result: Any
    sessions: list[VerifierSession | None]
    proposals: list[ProposedRow] | None
    largest: torch.Tensor
    num_malformed: torch.Tensor | None
    launched_s: float
    wait_ms: float = 0.0
    is_plain: bool = False
    is_alone: bool = False


class CommittedRow(NamedTuple):
    """What one row of a settled forward verified, and the tokens that it emitted."""

    session: VerifierSession
    proposal: ProposedRow
    tokens: list[int]


class SSDWorker(SpecWorkerBase):
    """Verifies proposals of a draft in another process. TP rank 0 speaks to it; all ranks run the same rounds."""

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.drafts: Drafts | None = None
        self.stats: VerifierStats | None = None
        self._sessions: dict[str, VerifierSession] = {}
        self._in_flight: InFlight | None = None
        self._num_requests = 0
        self._draft_temperature: float | None = None
        self._sampling: Sampling = "shared-noise"
        self._saguaro_c = OnlineChoice((1.0,))
        self._guess_worth = GuessWorth()

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
        self._guess_worth.forget()
        if self.drafts is not None:
            self.drafts.learn_anew()

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
        self.settle()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        return self._round(batch, on_publish)

    def _prefill(self, batch, on_publish, pp_proxy_tensors):
        # The draft reads the prompt while the target does.
        self._open_new(batch.reqs or [])
        if batch.forward_mode.is_idle() or batch.is_prefill_only:
            return self.complete_prefill(batch, self.run_plain(batch, pp_proxy_tensors), on_publish)
        launched_s = time.perf_counter()
        rows = [TargetRow(self._law(request), list(request.output_ids), []) for request in batch.reqs]
        sessions = [
            None if request is batch.chunked_req else self._sessions.get(request.rid)
            for request in batch.reqs
        ]
        prefilled = self.run_prefill(batch)
        result = prefilled.result
        result.next_token_ids, largest = self._draw_first(batch, prefilled.logits, rows)
        self._launched(InFlight(result, sessions, None, to_host(largest), None, launched_s))
        return self.complete_prefill(batch, result, on_publish)

    def _draw_first(
        self, batch, logits: torch.Tensor, rows: list[TargetRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tokens, int64 [B], and the largest logits: a prompt is a run of length 0."""
        no_proposal = torch.zeros(len(rows), 1, dtype=torch.int64, device=self.device)
        largest = adjust_logits(logits, rows, batch, no_proposal)
        positions = batch.seq_lens - 1
        if self._sampling == "residual":
            return draw_first_by_residual(logits, rows, positions), largest
        return draw_first_by_shared_noise(logits, rows, positions), largest

    def _round(self, batch, on_publish):
        sessions = [self._sessions.get(request.rid) for request in batch.reqs]
        started_s = time.perf_counter()
        proposals = self._collect(sessions)
        launched_s = time.perf_counter()
        is_plain = self.can_narrow and not any(proposal.token_ids for proposal in proposals)
        draft_tokens, lengths = pad(proposals, 0 if is_plain else self.lookahead, self.device)
        rows = self._rows(batch, sessions, proposals)
        verified = self.run_verify(batch, draft_tokens)
        decision, largest = self._decide(batch, verified, rows, proposals, draft_tokens, lengths)
        result = self.verify_result(verified, decision.token_ids, decision.num_accepted)
        self._launched(
            InFlight(
                result,
                sessions,
                proposals,
                to_host(largest),
                None if decision.num_malformed is None else to_host(decision.num_malformed),
                launched_s,
                (launched_s - started_s) * 1e3,
                is_plain,
                is_alone(sessions),
            )
        )
        return self.complete_verify(batch, result, decision.bonus_tokens, on_publish)

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
            num_guesses = sum(bool(proposal.token_ids) for proposal in proposals)
            # Without a guess the verify would be narrower.
            is_narrower = self.can_narrow and num_guesses and is_alone(known)
            if is_narrower and not self._guess_worth.is_worth(num_guesses, len(proposals)):
                self.stats.count_held_back(num_guesses)
                proposals = [NOTHING_PROPOSED] * len(sessions)
        return broadcast_from_first_rank(proposals)

    def _rows(self, batch, sessions, proposals) -> list[TargetRow]:
        """What decides each row, known on the host before the forward."""
        reads_all = has_processors(batch)
        rows = []
        for request, session, proposal in zip(batch.reqs, sessions, proposals, strict=True):
            law = self._law(request)
            tokens = session.tokens if session else [*request.origin_input_ids, *request.output_ids]
            # A long output is not copied every round for nothing.
            output = tokens[len(request.origin_input_ids) :] if reads_all or law.reads_output else []
            rows.append(TargetRow(law, output, proposal.token_ids))
        return rows

    def _decide(
        self,
        batch,
        verified: Verified,
        rows: list[TargetRow],
        proposals: list[ProposedRow],
        draft_tokens: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[Decision, torch.Tensor]:
        """Which proposed tokens stand and what follows them, and the largest logits."""
        largest = adjust_logits(verified.logits, rows, batch, verified.token_ids)
        # The noise of a draw is that of the index before it: of the pending bonus token, which follows what is committed.
        logits, positions = verified.logits, batch.seq_lens
        if self._sampling == "residual":
            return decide_by_residual(logits, rows, positions, proposals, draft_tokens, lengths), largest
        return decide_by_shared_noise(logits, rows, positions, draft_tokens, lengths), largest

    # -- settling ------------------------------------------------------------------------------------------------

    def _launched(self, forward: InFlight) -> None:
        self._in_flight = forward
        if not self.is_overlapped:
            self.settle()

    def settle(self, result=None) -> None:
        """Take in what the forward under way emitted, if there is one; where ``result`` is given, only if it is that
        forward's. Waits for the device."""
        forward = self._in_flight
        if forward is None or (result is not None and forward.result is not result):
            return
        self._in_flight = None
        emitted = emitted_tokens(forward.result)
        forward_ms = (time.perf_counter() - forward.launched_s) * 1e3
        proposals = forward.proposals or [NOTHING_PROPOSED] * len(emitted)
        committed = [
            CommittedRow(session, proposal, tokens)
            for session, proposal, tokens in zip(forward.sessions, proposals, emitted, strict=True)
            if session is not None and session.is_current
        ]
        for session, _, tokens in committed:
            session.tokens.extend(tokens)
        # The draft learns what a verify takes, not what a plain step or a prompt does.
        verifies = forward.proposals is not None and not forward.is_plain
        self._send_outcomes(committed, forward_ms if verifies else 0.0)
        self._count(forward, committed, forward_ms)

    def _send_outcomes(self, committed: list[CommittedRow], verify_ms: float) -> None:
        """The first token of a prompt is an outcome too: nothing was proposed, and the bonus token is known."""
        outcomes = [RowOutcome(session, len(tokens) - 1, tokens[-1]) for session, _, tokens in committed]
        if self.drafts is not None:
            self.drafts.send_outcomes(outcomes, self._saguaro_c.current, verify_ms)

    def _count(self, forward: InFlight, committed: list[CommittedRow], forward_ms: float) -> None:
        if self.drafts is not None:
            self.drafts.limit.observe_forward(forward_ms)
        if self.stats is None:
            return
        num_malformed = 0 if forward.num_malformed is None else int(forward.num_malformed)
        self.stats.count_unusable(
            malformed_laws=num_malformed, non_finite_logits=count_non_finite(forward.largest)
        )
        # The overlapped loop verifies once more for requests that have ended.
        if forward.proposals is None or not committed:
            return
        records, num_first, num_first_hits = [], 0, 0
        for session, proposal, tokens in committed:
            record = RoundRecord(proposal.source, len(proposal.token_ids), len(tokens))
            session.num_rounds += 1
            session.new_records.append(record)
            records.append(record)
            num_first += session.num_rounds == 1
            num_first_hits += session.num_rounds == 1 and record.source == "hit"
        num_emitted = sum(record.accept_length for record in records)
        self._saguaro_c.observe(num_emitted, forward.wait_ms + forward_ms)
        if forward.is_alone:
            num_guesses = sum(record.num_proposed > 0 for record in records)
            self._guess_worth.observe(num_guesses, num_emitted - len(records), forward_ms)
        self.stats.add_round(records, num_first, num_first_hits, forward.wait_ms, forward_ms)

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

    def _law(self, request) -> SamplingLaw:
        session = self._sessions.get(request.rid)
        return sampling_law(request) if session is None else session.law

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
        held = {"sessions": len(self._sessions), "forwards under way": int(self._in_flight is not None)}
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


def is_alone(sessions: Iterable[VerifierSession | None]) -> bool:
    """Whether no draft holds any of these."""
    return not any(session is not None and session.is_held for session in sessions)


def pad(proposals: list[ProposedRow], lookahead: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Proposals as tensors: int64 [B, lookahead] token ids, padded with token 0, and int64 [B] lengths."""
    lengths = constant(tuple(len(proposal.token_ids) for proposal in proposals), torch.int64, device)
    if lookahead == 0:
        return no_columns(len(proposals), torch.int64, device), lengths
    rows = [[*proposal.token_ids, *[0] * (lookahead - len(proposal.token_ids))] for proposal in proposals]
    return from_host(rows, torch.int64, device), lengths
