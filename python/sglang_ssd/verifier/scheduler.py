"""The scheduler of a verifier: SGLang's, plus sessions that open and close with its requests."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from sglang_ssd.algorithm.online_choice import OnlineChoice
from sglang_ssd.bridge.idle_check import IdleCheck
from sglang_ssd.bridge.parallel import is_first_rank
from sglang_ssd.bridge.process import fail_start
from sglang_ssd.bridge.scheduler import SchedulerBase
from sglang_ssd.bridge.server_args import ssd_options, target_facts
from sglang_ssd.verifier.draft_client import DraftClient, DraftRefused, DraftUnreachable
from sglang_ssd.verifier.stats import VerifierStats, ratio
from sglang_ssd.verifier.worker import SSDWorker
from sglang_ssd.wire.messages import PROTOCOL_VERSION, Hello

logger = logging.getLogger(__name__)


class SSDScheduler(SchedulerBase):
    """SGLang's scheduler that ties its worker to a draft. With ``--ssd-mode off`` there is no worker of ours."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.options = ssd_options(self.server_args)
        self.stats: VerifierStats | None = None
        self.idle_check = IdleCheck()
        if isinstance(self.draft_worker, SSDWorker):
            self.stats = VerifierStats(self.server_args.decode_log_interval, self.metrics_labels())
            client = self._connect() if is_first_rank() else None
            self.saguaro_c = OnlineChoice(self.options.saguaro_scales)
            self.draft_worker.attach(
                client, self.stats, self.options.sampling, self.saguaro_c, self.options.draft_temperature
            )

    def _connect(self) -> DraftClient:
        """Shake hands with the draft; a server whose draft does not fit does not start."""
        facts, options = target_facts(self), self.options
        if options.draft_endpoint is None:
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
        try:
            client = DraftClient(options.draft_endpoint, hello, options.round_timeout_ms)
            welcome = client.connect(options.start_timeout_s)
        except (DraftRefused, DraftUnreachable, OSError) as error:
            fail_start(str(error))
        logger.info("draft %s at %s is ready", welcome.draft_model, options.draft_endpoint)
        return client

    @property
    def client(self) -> DraftClient | None:
        return self.draft_worker.client if isinstance(self.draft_worker, SSDWorker) else None

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

    def after_batch(self) -> None:
        if self.stats is not None:
            self.draft_worker.close_departed()
        if self.client is not None:
            self.client.tend()

    def when_idle(self) -> None:
        if self.stats is not None and self.is_fully_idle():
            self.idle_check.look(self.draft_worker.held_at_rest())
            self.draft_worker.close_all()
        if self.client is not None:
            self.client.tend()

    def when_aborted(self, request) -> None:
        if self.stats is not None:
            self.draft_worker.forget(request)

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
        if self.stats is None:
            return {"mode": "off"}
        state: dict[str, Any] = {
            "mode": self.options.mode,
            "sampling": self.options.sampling,
            "idle_leaks": self.idle_check.num_leaks,
            **self.stats.snapshot(),
        }
        if self.options.sampling == "residual":
            state["saguaro_c"] = self.saguaro_c.current
        if self.client is not None:
            draft = self.client.refresh_stats()
            state |= {
                "draft_alive": self.client.state == "alive",
                "draft_state": self.client.state,
                "draft_round_ms": ratio(draft.fork_ms + draft.backup_ms, draft.rounds),
                "open_sessions": self.client.num_sessions(),
                "client": self.client.counts._asdict(),
                "draft": msgspec.structs.asdict(draft),
                "estimates": self.client.estimates,
            }
        return state
