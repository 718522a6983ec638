"""The draft's loop: receive, choose the most urgent forward, run it, answer, and fork while the verifier works.

One forward a turn. Who comes first:
1. proposals that a verifier waits for (a miss, or a winner that is not complete): their rows alone;
2. prompts, in chunks, and forking paths, in turns.

A hit does not even wait for the forward that runs: between its layers the loop looks for outcomes, answers those whose
branch is complete, and ends a forward that nobody needs any more. What these outcomes change is done after it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import msgspec

from sglang_ssd.algorithm.fallback import Fallback
from sglang_ssd.algorithm.lookahead import Size
from sglang_ssd.algorithm.outcome import Outcome
from sglang_ssd.bridge.idle_check import IdleCheck
from sglang_ssd.draft.forking_paths import ForkingPaths, Path
from sglang_ssd.draft.policy import DraftPolicy
from sglang_ssd.draft.runner import Chunk, DraftLaw, DraftRunner, Lane, Position
from sglang_ssd.draft.session import Due, Session
from sglang_ssd.wire.channel import DraftChannel, MalformedFromPeer, Received
from sglang_ssd.wire.messages import (
    MAX_OPEN_REQUESTS,
    MAX_VERIFIERS,
    PROTOCOL_VERSION,
    Close,
    DraftStats,
    Hello,
    Open,
    Ping,
    Pong,
    Proposal,
    Refuse,
    Round,
    RowKey,
    Source,
    Welcome,
    why_incompatible,
)

logger = logging.getLogger(__name__)

#: Prompt tokens of one forward. Small enough that an outcome of another request does not wait long.
PREFILL_CHUNK_TOKENS = 256
#: Messages taken in before the next forward, or kept for after this one: who floods the draft waits, and others do not.
MAX_MESSAGES_AT_ONCE = 1024
#: Sessions of a verifier that said nothing for so long are freed; it re-opens what it still needs.
SILENT_PEER_S = 120.0


class DraftIdentity(NamedTuple):
    """What this draft tells of itself in the handshake."""

    model: str
    tokenizer_fingerprint: str
    max_sessions: int


@dataclass
class Peer:
    """One verifier. ``denied`` holds requests that go on without proposals: no room, or the context ends."""

    hello: Hello
    policy: DraftPolicy
    saguaro_c: float = 1.0
    sessions: dict[int, Session] = field(default_factory=dict)
    denied: set[RowKey] = field(default_factory=set)
    last_heard_s: float = field(default_factory=time.monotonic)


class ForwardNotNeeded(Exception):
    """Raised between the layers of a forward whose outcomes are all known by now."""


class DraftServer:
    """Serves any number of verifiers over one channel with one model."""

    def __init__(
        self,
        channel: DraftChannel,
        runner: DraftRunner,
        identity: DraftIdentity,
        make_policy: Callable[[Hello], DraftPolicy] | None = None,
    ) -> None:
        self._make_policy = make_policy or policy_for
        self._channel = channel
        self._runner = runner
        self._identity = identity
        self._paths = ForkingPaths(runner.pool)
        self._peers: dict[bytes, Peer] = {}
        self._counts = _Counts()
        self._idle_check = IdleCheck()
        self._prefill_was_last = False
        self._deferred: deque[Received | MalformedFromPeer] = deque()
        self._answered_rows: set[tuple[bytes, int, int]] = set()
        self._undecided: set[Session] | None = None
        runner.call_during_forwards(self._look_for_outcomes)
        self._boot_id = uuid.uuid4().hex
        self._stopping = False

    def run(self) -> None:
        """Serve until ``stop``."""
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        """Take in what has come, answer first, then run the most urgent forward and open new branches."""
        self._receive(wait=not self._has_work())
        self._answer_ready()
        self._run_urgent_forward()
        self._answer_ready()
        self._fork()

    def stop(self) -> None:
        """End ``run`` after the current turn. Safe in a signal handler."""
        self._stopping = True

    def stats(self) -> DraftStats:
        """Counters since start."""
        capacity = self._runner.pool.capacity()
        sessions = self._sessions()
        return DraftStats(
            num_sessions=len(sessions),
            num_branch_rows=sum(len(session.cache) for session in sessions),
            free_kv_slots=capacity.free_slots,
            total_kv_slots=capacity.total_slots,
            free_rows=capacity.free_rows,
            total_rows=capacity.total_rows,
            connections_refused=self._channel.num_refused,
            idle_leaks=self._idle_check.num_leaks,
            **self._estimates(),
            **msgspec.structs.asdict(self._counts),
        )

    def held_at_rest(self) -> list[str]:
        """What is held though no session is open, in words; [] when all is free. KV that ended requests left for later
        ones counts as free."""
        if self._sessions():
            return []
        capacity = self._runner.pool.capacity()
        held = {
            "KV slots": capacity.total_slots - capacity.free_slots,
            "rows": capacity.total_rows - capacity.free_rows,
            "rows answered early": len(self._answered_rows),
        }
        return [f"{number} {name}" for name, number in held.items() if number]

    def _estimates(self) -> dict[str, float | None]:
        """What the verifiers' rounds taught: means over verifiers, the largest size, and the lowest threshold."""
        policies = [peer.policy for peer in self._peers.values()]
        if not policies:
            return {}
        size = max(policy.size for policy in policies)
        return {
            "lookahead": size.lookahead,
            "fan_out_budget": size.budget,
            "acceptance": fmean(policy.acceptance() for policy in policies),
            "power_law_r": fmean(policy.estimator.power_law_r(after_hit=True) for policy in policies),
            "fallback_threshold": min(
                (b for policy in policies if (b := policy.fallback_threshold()) is not None), default=None
            ),
        }

    # -- receive -------------------------------------------------------------------------------------------------

    def _receive(self, wait: bool) -> None:
        """Take in all messages that are there; with ``wait``, up to half a second for the first."""
        wait = wait and not self._deferred
        if wait:
            self._idle_check.look(self.held_at_rest())
        timeout_ms = 500 if wait else 0
        for _ in range(MAX_MESSAGES_AT_ONCE):
            received = self._deferred.popleft() if self._deferred else self._poll(timeout_ms)
            if received is None:
                break
            timeout_ms = 0
            if isinstance(received, MalformedFromPeer):
                self._counts.messages_malformed += 1
                logger.warning("refusing a peer: %s", received)
                self._send(received.peer, Refuse(str(received)))
                self._forget(received.peer)
            else:
                self._dispatch(received.peer, received.message)
        self._forget_silent_peers()

    def _poll(self, timeout_ms: float) -> Received | MalformedFromPeer | None:
        try:
            return self._channel.receive(timeout_ms)
        except MalformedFromPeer as error:
            return error

    def _look_for_outcomes(self) -> None:
        """Between the layers of a forward: answer complete hits. Raises ``ForwardNotNeeded`` when the forward only
        forks and all its requests have their outcomes, none of which needs its rows."""
        while len(self._deferred) < MAX_MESSAGES_AT_ONCE and (received := self._poll(0)) is not None:
            # What came before may change the session this round speaks of: then it waits its turn.
            is_first = all(isinstance(earlier, Received) and isinstance(earlier.message, (Round, Ping))
                           for earlier in self._deferred)  # fmt: skip
            self._deferred.append(received)
            if is_first and isinstance(received, Received) and isinstance(received.message, Round):
                self._answer_complete_hits(received.peer, received.message)
        if self._undecided is not None and not self._undecided:
            raise ForwardNotNeeded

    def _answer_complete_hits(self, peer_id: bytes, message: Round) -> None:
        """Send the proposals that are complete. This comes before all bookkeeping, and touches no session: a forward
        may be running over them."""
        peer = self._peers.get(peer_id)
        rows, branches = [], []
        for row, key in enumerate(message.keys()):
            session = peer.sessions.get(key.request) if peer else None
            outcome = Outcome(message.num_accepted[row], message.bonus_tokens[row])
            answer = (peer_id, message.ticket, row)
            if (
                session is None
                or session.due is not None
                or session.needs_prefill
                or answer in self._answered_rows
            ):
                continue
            if not session.applies(key, outcome, message.committed_lens[row]):
                continue
            branch = session.cache.peek(outcome)
            is_complete = branch is not None and len(branch.drafted) >= session.lookahead
            if self._undecided is not None and (branch is None or is_complete):
                self._undecided.discard(session)
            if is_complete:
                rows.append(row)
                branches.append(branch)
                self._answered_rows.add(answer)
        if rows:
            self._send(peer_id, proposal(message.ticket, rows, ["hit"] * len(rows), branches))

    def _dispatch(self, peer_id: bytes, message) -> None:
        if isinstance(message, Hello):
            self._greet(peer_id, message)
            return
        if isinstance(message, Refuse):
            if peer_id in self._peers:
                target = self._peers[peer_id].hello.target_model
                logger.info("verifier of %s left: %s", target, message.reason)
            self._forget(peer_id)
            return
        if isinstance(message, Pong):
            return
        peer = self._peers.get(peer_id)
        if isinstance(message, Ping):
            if peer is not None and message.open_requests is not None:
                self._keep_only(peer, set(message.open_requests))
            # A verifier that this process does not know must greet first: it may know our predecessor.
            self._send(peer_id, self._pong(message, peer) if peer else Refuse("say Hello first"))
        elif peer is None:
            self._send(peer_id, Refuse("say Hello first"))
        elif isinstance(message, Open):
            self._open(peer_id, peer, message)
        elif isinstance(message, Round):
            self._answer_complete_hits(peer_id, message)
            self._take_round(peer_id, peer, message)
        elif isinstance(message, Close):
            self._close(peer, message)
        if peer is not None:
            peer.last_heard_s = time.monotonic()

    def _pong(self, ping: Ping, peer: Peer) -> Pong:
        return Pong(ping.nonce, self.stats(), peer.policy.estimator.snapshot()._asdict())

    def _greet(self, peer_id: bytes, hello: Hello) -> None:
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            draft_model=self._identity.model,
            vocab_size=self._runner.vocab_size,
            context_length=self._runner.context_length,
            max_sessions=self._identity.max_sessions,
            kv_capacity_tokens=self._runner.pool.capacity().total_slots,
            boot_id=self._boot_id,
        )
        reason = why_incompatible(hello, welcome, self._identity.tokenizer_fingerprint)
        if reason is None and peer_id not in self._peers and len(self._peers) >= MAX_VERIFIERS:
            reason = f"this draft serves {MAX_VERIFIERS} verifiers already"
        if reason:
            logger.warning("refusing a verifier of %s: %s", hello.target_model, reason)
            self._send(peer_id, Refuse(reason))
            return
        known = self._peers.get(peer_id)
        if known is not None and known.hello == hello:
            # Said again since our Welcome was late or lost. What we hold of this verifier is newer than that Hello.
            known.last_heard_s = time.monotonic()
            self._send(peer_id, welcome)
            return
        self._forget(peer_id)
        self._peers[peer_id] = Peer(hello, self._make_policy(hello))
        self._send(peer_id, welcome)
        logger.info(
            "verifier of %s joined: K=%d, fan-out budget %d",
            hello.target_model,
            hello.lookahead,
            hello.fan_out_budget,
        )

    def _open(self, peer_id: bytes, peer: Peer, message: Open) -> None:
        self._drop(peer, message.request)
        if len(peer.sessions) + len(peer.denied) >= MAX_OPEN_REQUESTS:
            self._send(peer_id, Refuse(f"more than {MAX_OPEN_REQUESTS} requests are open at a time"))
            self._forget(peer_id)
            return
        hello = peer.hello
        key = RowKey(message.request, message.generation)
        peer.denied.discard(key)
        main = None
        if (
            message.token_ids
            and len(self._sessions()) < self._identity.max_sessions
            and self._fits(message.token_ids, hello.lookahead)
        ):
            main = self._paths.open(message.token_ids)
        if main is None:
            self._counts.opens_denied += 1
            peer.denied.add(key)
            return
        self._counts.prompt_tokens_cached += main.num_cached
        law = DraftLaw(message.temperature, message.seed, hello.sampling, hello.vocab_size)
        peer.sessions[message.request] = Session(
            key,
            message.token_ids,
            main,
            law,
            peer.policy.size,
            hello.fan_out_budget + 1,
            self._paths,
            peer.policy.allocate,
        )

    def _fits(self, token_ids: list[int], lookahead: int) -> bool:
        return self._has_context(len(token_ids), lookahead) and all(
            0 <= t < self._runner.vocab_size for t in token_ids
        )

    def _has_context(self, length: int, lookahead: int) -> bool:
        """Whether a proposal, a bonus token and a branch after them still lie within the draft's context."""
        return length + 2 * (lookahead + 1) <= self._runner.context_length

    def _take_round(self, peer_id: bytes, peer: Peer, message: Round) -> None:
        """Look every outcome up; what needs no forward is answered in this turn."""
        unanswerable: list[tuple[int, Source]] = []
        self._counts.rounds += 1
        missed: list[Session] = []
        peer.policy.observe_round(
            sum(message.num_accepted) + len(message.num_accepted), len(message.requests), message.verify_ms
        )
        peer.saguaro_c = message.saguaro_c if 0.0 <= message.saguaro_c <= 1.0 else 1.0
        for row, key in enumerate(message.keys()):
            session = peer.sessions.get(key.request)
            outcome = Outcome(message.num_accepted[row], message.bonus_tokens[row])
            is_token = 0 <= outcome.bonus_token < self._runner.vocab_size
            if key in peer.denied:
                unanswerable.append((row, "none"))
                continue
            if (
                session is None
                or not is_token
                or not session.applies(key, outcome, message.committed_lens[row])
            ):
                # Not held here, or not as the verifier has it: it opens the session again.
                self._drop(peer, key.request)
                self._counts.rows_unknown += 1
                unanswerable.append((row, "unknown"))
                continue
            if len(session.cache) and not session.is_cache_complete:
                self._counts.early_outcomes += 1
            known = {
                "source": session.source,
                "num_proposed": len(session.main.drafted),
                "num_accepted": outcome.num_accepted,
                "bonus_rank": session.bonus_rank(outcome),
            }
            peer.policy.observe_ngram(session.ngram_instead, session.committed(outcome))
            hit = session.take_outcome(outcome, Due(message.ticket, row, "neural"), peer.policy.size)
            peer.policy.observe_outcome(**known, hit=hit)
            self._counts.hits += hit
            answer = (peer_id, message.ticket, row)
            if answer in self._answered_rows:
                session.answered()
            elif session.needs_prefill and len(session.main.pending) > PREFILL_CHUNK_TOKENS:
                # The verifier is ahead of a long prompt: it does not wait for it.
                session.answered()
                unanswerable.append((row, "none"))
            if not self._has_context(session.main.length, peer.hello.lookahead):
                if session.due is not None:
                    unanswerable.append((row, "none"))
                self._deny(peer, session)
            elif session.due is not None and not hit and not session.needs_prefill:
                missed.append(session)
        self._answered_rows -= {(peer_id, message.ticket, row) for row in range(len(message.requests))}
        unanswerable += self._back_up(peer, missed, len(message.requests))
        if unanswerable:
            rows, sources = zip(*unanswerable, strict=True)
            self._send(peer_id, Proposal(message.ticket, list(rows), list(sources), [[] for _ in rows]))

    def _back_up(self, peer: Peer, missed: list[Session], batch_size: int) -> list[tuple[int, Source]]:
        """Answer these misses from the requests' own tokens where that is the better backup; otherwise the model drafts
        for them next. Returns the rows that get nothing."""
        policy, nothing = peer.policy, []
        by_ngram = policy.choose_fallback(batch_size) is Fallback.NGRAM
        for session in missed if by_ngram or policy.compares_fallbacks else []:
            started = time.perf_counter()
            token_ids = session.ngram_proposal()
            policy.observe_ngram_ms((time.perf_counter() - started) * 1e3)
            if not by_ngram:
                session.ngram_instead = token_ids
            elif token_ids:
                session.answer_by_ngram(token_ids)
                self._counts.ngram_answers += 1
            else:
                nothing.append((session.due.row, "none"))
                session.answered()
        policy.observe_waiting(bool(missed) and not by_ngram)
        return nothing

    def _close(self, peer: Peer, message: Close) -> None:
        for request, generation in zip(message.requests, message.generations, strict=True):
            peer.denied.discard(RowKey(request, generation))
            session = peer.sessions.get(request)
            if session is not None and session.key.generation <= generation:
                self._drop(peer, request)

    # -- forwards ------------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return any(
            session.needs_answer or session.needs_prefill or session.fork_lanes()
            for session in self._sessions()
        )

    def _run_urgent_forward(self) -> None:
        sessions = self._sessions()
        urgent = [session for session in sessions if session.needs_answer]
        if urgent:
            ms = self._run_lanes([(session, [session.main]) for session in urgent])
            self._counts.backup_ms += ms
            self._counts.backup_forwards += 1
            for peer in {id(peer): peer for session in urgent if (peer := self._peer_of(session))}.values():
                peer.policy.observe_depth(ms, len(urgent))
            return
        prompts = [session for session in sessions if session.needs_prefill]
        forks = [(session, lanes) for session in sessions if (lanes := session.fork_lanes())]
        if prompts and not (forks and self._prefill_was_last):
            self._prefill_was_last = True
            # Those that a verifier waits for go first.
            self._run_prefill(sorted(prompts, key=lambda session: session.due is None))
        elif forks:
            self._prefill_was_last = False
            self._undecided = {session for session, _ in forks}
            ended_early = self._counts.forwards_ended_early
            ms = self._run_lanes(forks)
            self._counts.fork_ms += ms
            self._counts.fork_forwards += 1
            self._undecided = None
            if self._counts.forwards_ended_early == ended_early:
                self._observe_fork_depth(ms, forks)

    def _observe_fork_depth(self, ms: float, forks: list[tuple[Session, list[Path]]]) -> None:
        num_rows = sum(len(lanes) for _, lanes in forks)
        for peer in {id(peer): peer for session, _ in forks if (peer := self._peer_of(session))}.values():
            peer.policy.estimator.observe_draft_depth(ms, num_rows)

    def _run_prefill(self, prompts: list[Session]) -> None:
        """Forward as much of these prompts, in order, as one forward may take."""
        started = time.perf_counter()
        free, work = PREFILL_CHUNK_TOKENS, []
        for session in prompts:
            main, num_tokens = session.main, min(free, len(session.main.pending))
            if not num_tokens:
                break
            if not self._paths.reserve(main, num_tokens):
                self._starve(session)
                continue
            self._count_tokens(session, main, num_tokens)
            work.append((session, Chunk(main, num_tokens, self._position(session, main, num_tokens))))
            free -= num_tokens
        if not work:
            return
        guesses = self._runner.extend([chunk for _, chunk in work])
        for (session, chunk), guess in zip(work, guesses, strict=True):
            session.take_prefill(guess, chunk.num_tokens)
        self._counts.forwards += 1
        self._counts.prefill_forwards += 1
        self._counts.prefill_ms += (time.perf_counter() - started) * 1e3

    def _run_lanes(self, work: list[tuple[Session, list[Path]]]) -> float:
        """Forward the pending tokens of all these paths in one batch, or as few as hold them. Returns milliseconds."""
        started = time.perf_counter()
        lanes: list[Lane] = []
        for session, paths in work:
            for path in paths:
                if self._paths.reserve(path, len(path.pending)):
                    self._count_tokens(session, path, len(path.pending))
                    position = self._position(session, path, len(path.pending))
                    lanes.append(Lane(path, session.main.row, position, session.drafts_up_to(path)))
                elif path is session.main:
                    self._starve(session)
                    lanes = [lane for lane in lanes if lane.base_row != session.main.row]
                    break
                else:
                    self._counts.branches_denied += 1
                    session.cache.discard(path)
                    self._paths.release(path)
        parts = split_lanes(lanes, self._runner.max_tokens)
        for done, part in enumerate(parts):
            try:
                self._runner.step(part)
                self._counts.forwards += 1
            except ForwardNotNeeded:
                self._counts.forwards_ended_early += 1
                for lane in chain.from_iterable(parts[done:]):
                    self._paths.give_back(lane.path)
                break
        return (time.perf_counter() - started) * 1e3

    def _count_tokens(self, session: Session, path: Path, num_tokens: int) -> None:
        self._counts.tokens_forwarded += num_tokens
        self._counts.kv_tokens_recomputed += session.num_recomputed(path, num_tokens)

    def _position(self, session: Session, path: Path, num_forwarded: int) -> Position:
        """The position that a forward of the path's next ``num_forwarded`` tokens guesses."""
        depth = min(len(path.drafted), session.lookahead)
        return Position(
            session.law,
            index=path.num_cached + num_forwarded - 1,
            num_candidates=session.num_candidates,
            fan_out=session.fan_out_at(depth) if session.law.is_residual else 0,
            saguaro_c=self._peer_of(session).saguaro_c if session.law.is_residual else 1.0,
        )

    def _starve(self, session: Session) -> None:
        """No KV slot is left for the request itself: it goes on without proposals, and others get its room."""
        self._counts.branches_denied += session.drop_branches()
        for peer_id, peer in self._peers.items():
            if peer is self._peer_of(session):
                if session.due is not None:
                    self._send(peer_id, Proposal(session.due.ticket, [session.due.row], ["none"], [[]]))
                self._deny(peer, session)
                return

    # -- answer and fork -----------------------------------------------------------------------------------------

    def _answer_ready(self) -> None:
        """Send every complete proposal, and those for which waiting would cost more than it brings; the rows of one
        ticket in one message."""
        for peer_id, peer in self._peers.items():
            waiting = [session for session in peer.sessions.values() if session.needs_answer]
            is_enough = bool(waiting) and peer.policy.answers_now([len(s.main.drafted) for s in waiting])
            self._counts.short_answers += len(waiting) if is_enough else 0
            ready: dict[int, list[Session]] = {}
            for session in peer.sessions.values():
                if session.can_answer or (is_enough and session.needs_answer):
                    ready.setdefault(session.due.ticket, []).append(session)
            for ticket, sessions in ready.items():
                rows = [session.due.row for session in sessions]
                sources = [session.due.source if session.main.drafted else "none" for session in sessions]
                self._send(peer_id, proposal(ticket, rows, sources, [session.main for session in sessions]))
                for session in sessions:
                    session.answered()

    def _fork(self) -> None:
        """Open branches for the outcomes of the rounds that verifiers work on now."""
        for session in self._sessions():
            if session.due is None and session.budget and not session.needs_prefill:
                opened, denied = session.fork()
                self._counts.branches_drafted += opened
                self._counts.branches_denied += denied

    # -- sessions and peers --------------------------------------------------------------------------------------

    def _sessions(self) -> list[Session]:
        return [session for peer in self._peers.values() for session in peer.sessions.values()]

    def _peer_of(self, session: Session) -> Peer | None:
        """The verifier of this session, None once the session has ended."""
        return next((p for p in self._peers.values() if p.sessions.get(session.key.request) is session), None)

    def _drop(self, peer: Peer, request: int) -> None:
        session = peer.sessions.pop(request, None)
        if session is not None:
            session.close()

    def _keep_only(self, peer: Peer, requests: set[int]) -> None:
        for request in peer.sessions.keys() - requests:
            self._drop(peer, request)
        peer.denied = {key for key in peer.denied if key.request in requests}

    def _deny(self, peer: Peer, session: Session) -> None:
        """End a session whose request goes on without proposals."""
        self._drop(peer, session.key.request)
        peer.denied.add(session.key)

    def _forget(self, peer_id: bytes) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            self._keep_only(peer, set())

    def _forget_silent_peers(self) -> None:
        now = time.monotonic()
        for peer_id in [p for p, peer in self._peers.items() if now - peer.last_heard_s > SILENT_PEER_S]:
            logger.info("a verifier was silent for %d s: its sessions are freed", SILENT_PEER_S)
            self._forget(peer_id)

    def _send(self, peer_id: bytes, message) -> None:
        if not self._channel.send(peer_id, message):
            self._counts.replies_dropped += 1


def policy_for(hello: Hello) -> DraftPolicy:
    """What a verifier asked for."""
    size = Size(hello.lookahead, hello.fan_out_budget)
    smallest = Size(
        1 if hello.adapts_lookahead else size.lookahead, 0 if hello.adapts_budget else size.budget
    )
    return DraftPolicy(size, hello.fan_out, hello.fallback, smallest)


def proposal(ticket: int, rows: list[int], sources: list[Source], paths: list[Path]) -> Proposal:
    """What these paths drafted, with the laws they were drawn from where residual sampling drew them."""
    token_ids = [path.drafted for path in paths]
    if not any(law for path in paths for law in path.q):
        return Proposal(ticket, rows, sources, token_ids)
    return Proposal(
        ticket,
        rows,
        sources,
        token_ids,
        [b"".join(law.ids for law in path.q if law) for path in paths],
        [b"".join(law.probs for law in path.q if law) for path in paths],
    )


def split_lanes(lanes: list[Lane], max_tokens: int) -> list[list[Lane]]:
    """The lanes in as few forwards of ``max_tokens`` pending tokens as hold them, in order."""
    parts: list[list[Lane]] = []
    free = 0
    for lane in lanes:
        num_tokens = len(lane.path.pending)
        if num_tokens > free:
            parts.append([])
            free = max_tokens
        parts[-1].append(lane)
        free -= num_tokens
    return parts


class _Counts(msgspec.Struct):
    """The counters of ``DraftStats`` that this loop keeps; those of the pools are read when asked for."""

    rounds: int = 0
    hits: int = 0
    early_outcomes: int = 0
    short_answers: int = 0
    ngram_answers: int = 0
    prompt_tokens_cached: int = 0
    forwards: int = 0
    fork_forwards: int = 0
    backup_forwards: int = 0
    prefill_forwards: int = 0
    forwards_ended_early: int = 0
    tokens_forwarded: int = 0
    kv_tokens_recomputed: int = 0
    branches_drafted: int = 0
    branches_denied: int = 0
    opens_denied: int = 0
    rows_unknown: int = 0
    messages_malformed: int = 0
    replies_dropped: int = 0
    fork_ms: float = 0.0
    backup_ms: float = 0.0
    prefill_ms: float = 0.0
