"""All drafts of one verifier behind the verbs of one. A request stays with one draft for as long as that one answers.

A request goes to the draft with the smallest share of its sessions taken. When its draft is ``degraded`` or ``down`` and
another is ``alive``, the next outcome moves it there: it is opened again from its committed tokens. It stays there when
the first one is back; new requests fill that one up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import msgspec

from sglang_ssd.algorithm.round_limit import RoundLimit
from sglang_ssd.verifier.draft_client import ClientCounts, DraftClient, DraftState, RowOutcome
from sglang_ssd.verifier.session import NOTHING_PROPOSED, ProposedRow, VerifierSession
from sglang_ssd.wire.channel import wait_for_any
from sglang_ssd.wire.messages import CloseReason, DraftStats, Estimate

#: Figures of a draft that are no sums: of several drafts the mean, the largest or the smallest is shown.
_MEANS, _LARGEST, _SMALLEST = (
    ("acceptance", "power_law_r"),
    ("lookahead", "fan_out_budget"),
    ("fallback_threshold",),
)


class Drafts:
    """Speaks for TP rank 0 of one verifier to one or several drafts. No wait is longer than ``limit`` allows, however
    many drafts it is for."""

    def __init__(self, clients: Sequence[DraftClient], limit: RoundLimit) -> None:
        self.clients = tuple(clients)
        self.limit = limit
        self._homes: dict[VerifierSession, DraftClient] = {}

    # -- connection ----------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """Shake hands with every draft. Raises ``DraftRefused`` or ``DraftUnreachable``: who names a draft wants it."""
        deadline_s = time.monotonic() + timeout_s
        for client in self.clients:
            client.greet()
        for client in self.clients:
            client.await_welcome(timeout_s, deadline_s)

    def tend(self) -> None:
        """Take in what has arrived and keep the lines alive. Called once a scheduler turn."""
        for client in self.clients:
            client.tend()

    def learn_anew(self) -> None:
        """The target has other weights: no draft keeps what it learnt of our rounds."""
        for client in self.clients:
            client.learn_anew()

    def disconnect(self) -> None:
        for client in self.clients:
            client.disconnect()

    # -- sessions ------------------------------------------------------------------------------------------------

    def open(self, session: VerifierSession) -> None:
        """Choose a draft for a request whose tokens are all certain (no bonus token is pending), and tell it."""
        client = self._homes[session] = self._least_loaded()
        client.open(session)

    def close(self, sessions: Iterable[VerifierSession], reason: CloseReason) -> None:
        """Forget these sessions on both sides."""
        for client, rows in self._by_home(sessions).items():
            client.close(rows, reason)
            for session in rows:
                del self._homes[session]

    def num_sessions(self) -> int:
        return len(self._homes)

    def num_tickets(self) -> int:
        """Rounds whose answer is awaited."""
        return sum(client.num_tickets() for client in self.clients)

    # -- rounds --------------------------------------------------------------------------------------------------

    def send_outcomes(
        self, outcomes: list[RowOutcome], saguaro_c: float = 1.0, verify_ms: float = 0.0
    ) -> None:
        """Say how a verification ended, to each draft what concerns it. ``saguaro_c`` and ``verify_ms`` as in
        ``Round``."""
        self._move_from_lost(outcome.session for outcome in outcomes)
        for client, rows in self._by_home(outcome.session for outcome in outcomes).items():
            mine = set(rows)
            client.send_outcomes([row for row in outcomes if row.session in mine], saguaro_c, verify_ms)

    def collect(self, sessions: list[VerifierSession]) -> list[ProposedRow]:
        """The proposals of these sessions. Waits for those that are on their way, from all drafts together, up to the
        limit."""
        # A draft that owes nothing is not listened to now; ``tend`` takes in what else it says.
        rows = {
            client: mine
            for client, mine in self._by_home(sessions).items()
            if any(session.ticket is not None for session in mine)
        }
        started_s, limit_ms, waited_ms = time.monotonic(), self.limit.ms, 0.0
        is_any_awaited = bool(self._awaited(rows))
        for client in rows:
            client.receive()
        while (awaited := self._awaited(rows)) and waited_ms < limit_ms:
            wait_for_any([client.channel for client in awaited], limit_ms - waited_ms)
            for client in awaited:
                client.receive()
            waited_ms = (time.monotonic() - started_s) * 1e3
        if is_any_awaited and not awaited:
            self.limit.observe_wait(waited_ms)
        for client, mine in rows.items():
            client.give_up(mine, waited_ms)
        proposals = [session.proposed or NOTHING_PROPOSED for session in sessions]
        for session in sessions:
            session.proposed = None
        return proposals

    @staticmethod
    def _awaited(rows: dict[DraftClient, list[VerifierSession]]) -> list[DraftClient]:
        return [client for client, mine in rows.items() if client.is_worth_waiting(mine)]

    # -- who is where --------------------------------------------------------------------------------------------

    def _by_home(self, sessions: Iterable[VerifierSession]) -> dict[DraftClient, list[VerifierSession]]:
        """These sessions by their draft; those that were never opened, or are closed, are left out."""
        rows: dict[DraftClient, list[VerifierSession]] = {}
        for session in sessions:
            client = self._homes.get(session)
            if client is not None:
                rows.setdefault(client, []).append(session)
        return rows

    def _least_loaded(self) -> DraftClient:
        """Where a request goes: to a living draft if there is one."""
        return min(self.clients, key=lambda client: (client.state != "alive", client.load()))

    def _move_from_lost(self, sessions: Iterable[VerifierSession]) -> None:
        if not any(client.state == "alive" for client in self.clients):
            return
        for client, rows in self._by_home(sessions).items():
            if client.state == "alive":
                continue
            client.move_away(rows)
            for session in rows:
                self._homes[session] = self._least_loaded()
                self._homes[session].adopt(session)

    # -- figures -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> DraftState:
        """``alive`` and ``down`` when all are, else ``degraded``."""
        states = {client.state for client in self.clients}
        return states.pop() if len(states) == 1 else "degraded"

    @property
    def is_any_alive(self) -> bool:
        return any(client.state == "alive" for client in self.clients)

    @property
    def counts(self) -> ClientCounts:
        """Sums over the lines."""
        return ClientCounts(*map(sum, zip(*(client.counts for client in self.clients), strict=True)))

    @property
    def estimates(self) -> dict[str, Estimate]:
        """What the draft that serves this verifier most learnt of its rounds."""
        return max((client.estimates for client in self.clients), key=lambda e: e.get("num_rounds") or 0)

    def refresh_stats(self, timeout_s: float = 0.2) -> DraftStats:
        """The counters of all drafts as they are now, or as one last said when it does not answer in time."""
        deadline_s = time.monotonic() + timeout_s
        known = {client: client.draft_stats for client in self.clients if client.ask_stats()}
        while waiting := [c for c, stats in known.items() if c.draft_stats is stats and c.state == "alive"]:
            remaining_ms = (deadline_s - time.monotonic()) * 1e3
            if remaining_ms <= 0:
                break
            wait_for_any([client.channel for client in waiting], remaining_ms)
            for client in waiting:
                client.receive()
        return sum_of([client.draft_stats for client in self.clients])

    def describe(self) -> list[dict[str, Any]]:
        """One entry a draft for ``/server_info``, in the order of the endpoints."""
        return [
            {
                "endpoint": client.endpoint,
                "model": client.welcome.draft_model if client.welcome else None,
                "state": client.state,
                "open_sessions": client.num_sessions(),
                "client": client.counts._asdict(),
                "draft": msgspec.structs.asdict(client.draft_stats),
                "estimates": client.estimates,
            }
            for client in self.clients
        ]


def sum_of(stats: Sequence[DraftStats]) -> DraftStats:
    """The figures of several drafts as those of one."""
    columns = {name: [getattr(one, name) for one in stats] for name in DraftStats.__struct_fields__}
    known = {name: [value for value in column if value is not None] for name, column in columns.items()}
    combine = dict.fromkeys(columns, sum)
    combine |= dict.fromkeys(_MEANS, fmean) | dict.fromkeys(_LARGEST, max)
    combine |= dict.fromkeys(_SMALLEST, lambda values: min(values, default=None))
    return DraftStats(**{name: combine[name](values) for name, values in known.items()})
