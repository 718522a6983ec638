"""The scheduler of a verifier: SGLang's, plus sessions that open and close with its requests."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from sglang_ssd.algorithm.online_choice import OnlineChoice
from sglang_ssd.algorithm.round_limit import RoundLimit
from sglang_ssd.bridge.idle_check import IdleCheck
from sglang_ssd.bridge.parallel import is_first_rank
from sglang_ssd.bridge.process import fail_start
from sglang_ssd.bridge.scheduler import SchedulerBase
from sglang_ssd.bridge.server_args import ssd_options, target_facts
from sglang_ssd.verifier.draft_client import DraftClient, DraftRefused, DraftUnreachable
from sglang_ssd.verifier.drafts import Drafts
from sglang_ssd.verifier.stats import VerifierStats, ratio
from sglang_ssd.verifier.worker import SSDWorker
from sglang_ssd.wire.messages import PROTOCOL_VERSION, Hello

logger = logging.getLogger(__name__)


class SSDScheduler(SchedulerBase):
    """SGLang's scheduler that ties its worker to its drafts. With ``--ssd-mode off`` there is no worker of ours."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.options = ssd_options(self.server_args)
        self.stats: VerifierStats | None = None
        self.idle_check = IdleCheck()
        if isinstance(self.draft_worker, SSDWorker):
            self.stats = VerifierStats(self.server_args.decode_log_interval, self.metrics_labels())
            drafts = self._connect() if is_first_rank() else None
            self.saguaro_c = OnlineChoice(self.options.saguaro_scales)
            self.draft_worker.attach(
                drafts, self.stats, self.options.sampling, self.saguaro_c, self.options.draft_temperature
            )

    def _connect(self) -> Drafts:
        """Shake hands with the drafts; a server whose drafts do not fit does not start."""
        facts, options = target_facts(self), self.options
        if not options.draft_endpoints:
            fail_start("no draft: --ssd-draft-endpoint or SGLANG_SSD_DRAFT_ENDPOINT must name one")
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            vocab_size=facts.vocab_size,
            tokenizer_fingerprint=facts.tokenizer_fingerprint,
            lookahead=self.draft_worker.lookahead,
            fan_out_budget=options.fan_out_budget,
            context_length=facts.context_length,
            target_model=facts.model_name,
            sampling=options.sampling,
            fan_out=options.fan_out,
            fallback=options.fallback,
            adapts_lookahead=options.adapts_lookahead,
            adapts_budget=options.adapts_budget,
        )
        limit = RoundLimit(options.round_timeout_ms)
        try:
            drafts = Drafts(
                [DraftClient(address.endpoint, hello, limit, address.keys) for address in options.drafts()],
                limit,
            )
            drafts.connect(options.start_timeout_s)
        except (DraftRefused, DraftUnreachable, OSError, ValueError) as error:
            fail_start(str(error))
        for client in drafts.clients:
            logger.info("draft %s at %s is ready", client.welcome.draft_model, client.endpoint)
        return drafts

    @property
    def drafts(self) -> Drafts | None:
        return self.draft_worker.drafts if isinstance(self.draft_worker, SSDWorker) else None

    # -- SchedulerBase -------------------------------------------------------------------------------------------

    def refusal(self, sampling_params, request) -> str | None:
        if self.stats is None:
            return None
        for option, is_asked in (
            ("return_hidden_states", bool(request.return_hidden_states)),
            ("return_sampling_mask", bool(request.return_sampling_mask)),
            ("watermark", sampling_params.watermark is not None),
            ("beam_width", (sampling_params.beam_width or 1) > 1),
        ):
            if is_asked:
                return f"{option}: not served with --ssd-mode {self.options.mode}; --ssd-mode off serves it"
        return None

    def before_result(self, result) -> None:
        if self.stats is not None:
            self.draft_worker.settle(result)

    def before_pause(self) -> None:
        # A verify that lasted as long as a pause would be a wrong measurement.
        if self.stats is not None:
            self.draft_worker.settle()

    def after_batch(self) -> None:
        if self.stats is not None:
            self.draft_worker.close_departed()
        self._tend_drafts()

    def when_idle(self) -> None:
        if self.stats is not None and self.is_fully_idle():
            self.idle_check.look(self.draft_worker.held_at_rest())
            self.draft_worker.close_all()
        self._tend_drafts()

    def _tend_drafts(self) -> None:
        if self.drafts is not None:
            self.drafts.tend()
            self.stats.show_drafts(self.drafts.clients)

    def when_aborted(self, request) -> None:
        if self.stats is not None:
            self.draft_worker.forget(request)

    def when_weights_changed(self) -> None:
        if self.stats is not None:
            self.draft_worker.learn_anew()

    def request_info(self, rid: str) -> dict[str, list]:
        if self.stats is None:
            return {}
        records = self.draft_worker.take_records(rid)
        return {
            "ssd_sources": [record.source for record in records],
            "ssd_proposed_lengths": [record.num_proposed for record in records],
            "ssd_accept_lengths": [record.accept_length for record in records],
        }

    def state(self) -> dict[str, Any]:
        bit_equality = self.bit_equality and self.bit_equality._asdict()
        if self.stats is None:
            return {"mode": "off", "bit_equality": bit_equality}
        state: dict[str, Any] = {
            "mode": self.options.mode,
            "sampling": self.options.sampling,
            "bit_equality": bit_equality,
            "idle_leaks": self.idle_check.num_leaks,
            **self.stats.snapshot(),
        }
        if self.options.sampling == "residual":
            state["saguaro_c"] = self.saguaro_c.current
        if self.drafts is not None:
            draft = self.drafts.refresh_stats()
            state |= {
                "draft_alive": self.drafts.is_any_alive,
                "draft_state": self.drafts.state,
                "draft_round_ms": ratio(draft.fork_ms + draft.backup_ms, draft.rounds),
                "draft_forwards_per_round": ratio(draft.fork_forwards + draft.backup_forwards, draft.rounds),
                "branches_used": ratio(draft.hits, draft.branches_drafted),
                "round_timeout_ms": self.drafts.limit.ms,
                "open_sessions": self.drafts.num_sessions(),
                "client": self.drafts.counts._asdict(),
                "draft": msgspec.structs.asdict(draft),
                "estimates": self.drafts.estimates,
                "drafts": self.drafts.describe(),
            }
        return state
