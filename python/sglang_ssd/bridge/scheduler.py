"""SGLang's scheduler with the hooks this project needs, each one seam.

A request that cannot be served exactly is refused with a 400 before it enters a queue (seam:
``handle_generate_request``, answered through ``send_abort_output``).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq, GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_device, get_observability, get_parallel

from sglang_ssd.bridge.constraints import why_processor_unusable
from sglang_ssd.bridge.process import fail_start
from sglang_ssd.bridge.server_args import SSDServerArgs, ssd_options

if TYPE_CHECKING:
    from sglang_ssd.bridge.bit_equality import BitEquality


class SchedulerBase(Scheduler):
    """Calls ``refusal``, ``before_result``, ``before_pause``, ``after_batch``, ``when_idle``, ``when_aborted``,
    ``when_weights_changed``, ``state`` and ``request_info`` of its subclass."""

    def refusal(self, sampling_params, request) -> str | None:
        """One line that names what cannot be served, None when all of it can."""
        return None

    def before_result(self, result) -> None:
        """Runs before the bookkeeping of a batch: in the overlapped loop, the next one may be under way."""

    def before_pause(self) -> None:
        """Runs when the engine is paused: in the overlapped loop, a batch may be under way."""

    def after_batch(self) -> None:
        """Runs after the bookkeeping of every batch."""

    def when_idle(self) -> None:
        """Runs at every turn without work."""

    def when_aborted(self, request) -> None:
        """Runs when a request ends outside a batch: in a queue, or between the chunks of its prompt."""

    def when_weights_changed(self) -> None:
        """Runs after the target's weights were updated, from wherever, or were said to be of another version."""

    def state(self) -> dict[str, Any]:
        """What ``/server_info`` shows under ``internal_states[i]["ssd"]``."""
        return {}

    def request_info(self, rid: str) -> dict[str, list]:
        """New entries for lists in a request's ``meta_info``."""
        return {}

    # -- seams ---------------------------------------------------------------------------------------------------

    def init_tp_model_worker(self) -> None:
        super().init_tp_model_worker()
        #: What ``--ssd-bit-equal`` found, None where it did not look.
        self.bit_equality: BitEquality | None = None
        if get_device().device == "cpu":
            self._prepare_cpu_model()
        if isinstance(self.server_args, SSDServerArgs):
            from sglang_ssd.bridge.sampler import install_shared_noise_sampler

            install_shared_noise_sampler(self.tp_worker.model_runner)

    def _prepare_cpu_model(self) -> None:
        from sglang_ssd.bridge.bit_equality import check_bit_equality, report
        from sglang_ssd.bridge.cpu_layers import prepare_model

        model_runner, options = self.tp_worker.model_runner, ssd_options(self.server_args)
        prepare_model(model_runner.model, options.pack_weights)
        if options.bit_equal == "off":
            return
        self.bit_equality = check_bit_equality(model_runner)
        if options.bit_equal == "on" and not self.bit_equality.holds:
            fail_start(f"--ssd-bit-equal on: {self.bit_equality.reason}")
        report(self.bit_equality)

    def handle_generate_request(self, recv_req, **kwargs) -> None:
        reason = self.refusal(recv_req.sampling_params, recv_req)
        if reason is None and self.server_args.enable_custom_logit_processor:
            reason = why_processor_unusable(recv_req.custom_logit_processor)
        if reason is None:
            super().handle_generate_request(recv_req, **kwargs)
            return
        finished_reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": reason}
        self.send_abort_output(AbortReq(rid=recv_req.rid, finished_reason=finished_reason), recv_req)

    def send_abort_output(self, abort_req: AbortReq, req) -> None:
        super().send_abort_output(abort_req, req)
        self.when_aborted(req)

    def process_batch_result(self, batch, result) -> None:
        self.before_result(result)
        super().process_batch_result(batch, result)
        self.after_batch()

    def pause_generation(self, recv_req) -> None:
        self.before_pause()
        super().pause_generation(recv_req)

    def on_idle(self) -> None:
        self.when_idle()
        super().on_idle()

    def record_weight_version_change(self, new_version: str | None) -> None:
        # All ways to update weights end here; the version may stay the same.
        super().record_weight_version_change(new_version)
        self.when_weights_changed()

    def get_internal_state(self, recv_req) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        output.internal_state["ssd"] = self.state()
        return output

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        request_info = self.request_info

        class Streamer(SchedulerOutputStreamer):
            has_additional_customized_info = True

            def build_additional_customized_info(self, reqs: list) -> dict[str, list]:
                columns: dict[str, list] = {}
                for i, request in enumerate(reqs):
                    for name, entries in request_info(request.rid).items():
                        columns.setdefault(name, [[] for _ in reqs])[i] = entries
                return columns

            def is_request_level_customized_info_key(self, key: str) -> bool:
                return key.startswith("ssd_")

        return Streamer

    def metrics_labels(self) -> dict[str, str] | None:
        """Labels of Prometheus series, None where SGLang exports none from this rank."""
        parallel = get_parallel()
        if not get_observability().enable_metrics or parallel.tp_rank != 0:
            return None
        labels = {"model_name": self.server_args.served_model_name or self.server_args.model_path}
        return labels if parallel.dp_rank is None else labels | {"dp_rank": str(parallel.dp_rank)}
