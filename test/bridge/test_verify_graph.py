"""Which verify input graphs are captured with. Captures need a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner import base_runner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ssd.bridge.self_check import drifted_seams
from sglang_ssd.bridge.speculative import register_algorithm
from sglang_ssd.bridge.verify_graph import install_verify_graph


def of_sglang(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker):
    return "SGLang's own"


@pytest.fixture
def algorithm(monkeypatch):
    """SSD as SGLang knows it, with the seams replaced for one test."""
    monkeypatch.setattr(
        ModelRunner, "_decode_cuda_graph_runner_cls", ModelRunner._decode_cuda_graph_runner_cls
    )
    monkeypatch.setattr(base_runner, "create_dummy_verify_input", of_sglang)
    register_algorithm(object)
    install_verify_graph()
    install_verify_graph()
    return SpeculativeAlgorithm.from_string("SSD")


def runner_class(spec_algorithm, is_draft_worker=False):
    runner = SimpleNamespace(spec_algorithm=spec_algorithm, is_draft_worker=is_draft_worker)
    return ModelRunner._decode_cuda_graph_runner_cls(runner)


def test_the_graph_of_a_verify_is_captured_with_its_input(algorithm):
    verifier = runner_class(algorithm)
    assert issubclass(verifier, DecodeCudaGraphRunner)
    captured = verifier.get_spec_info(SimpleNamespace(captured_req_width=5), num_tokens=40)
    assert (captured.draft_token_num, captured.custom_mask) == (5, None)
    assert captured.capture_hidden_mode == CaptureHiddenMode.NULL
    warm_up = base_runner.create_dummy_verify_input(algorithm, None, 5, False)
    assert (warm_up.draft_token_num, warm_up.custom_mask) == (5, None)


def test_the_seams_are_still_what_they_were(algorithm):
    assert drifted_seams() == []


def test_other_servers_keep_theirs(algorithm):
    plain = SpeculativeAlgorithm.NONE
    assert runner_class(plain) is DecodeCudaGraphRunner
    assert runner_class(algorithm, is_draft_worker=True) is DecodeCudaGraphRunner
    assert base_runner.create_dummy_verify_input(plain, None, 1, False) == "SGLang's own"
