"""The verify's CUDA graph: captured with the same input that rounds replay it with.

SGLang captures a graph of K+1 tokens a row for every speculative algorithm, but knows the verify input of its own ones only.
Without one Triton's and FA3's backends capture all the same, and FlashInfer's does not.

Seams: ``ModelRunner._decode_cuda_graph_runner_cls``, ``DecodeCudaGraphRunner.get_spec_info``, and ``create_dummy_verify_input``
as ``base_runner`` has it (warm-ups). Never run: no GPU was there; see docs/devices.md.
"""

from __future__ import annotations

from sglang_ssd.bridge.speculative import SSDAlgorithm


def install_verify_graph() -> None:
    """Call before the target's model runner is made. Doing it twice is harmless."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner import base_runner

    if hasattr(ModelRunner._decode_cuda_graph_runner_cls, "of_sglang"):
        return
    ModelRunner._decode_cuda_graph_runner_cls = _with_verify_runner(ModelRunner._decode_cuda_graph_runner_cls)
    base_runner.create_dummy_verify_input = _with_verify_input(base_runner.create_dummy_verify_input)


def verify_input(width: int):
    """A verify of ``width`` tokens a row as metadata see it: causal, no mask, no hidden states."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    return DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _with_verify_runner(of_sglang):
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    class VerifyGraphRunner(DecodeCudaGraphRunner):
        def get_spec_info(self, num_tokens: int):
            return verify_input(self.captured_req_width)

    def runner_class(self):
        is_verifier = isinstance(self.spec_algorithm, SSDAlgorithm) and not self.is_draft_worker
        return VerifyGraphRunner if is_verifier else of_sglang(self)

    runner_class.of_sglang = of_sglang
    return runner_class


def _with_verify_input(of_sglang):
    def create(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker):
        if isinstance(spec_algorithm, SSDAlgorithm) and not is_draft_worker:
            return verify_input(num_tokens_per_req)
        return of_sglang(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)

    return create
