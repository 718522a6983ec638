"""The draft's GPU attention backend: ``interpreted_fork_backend.py``, in a process with Triton's interpreter on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ssd.test_pair import write_pair

pytest.importorskip("sglang")
SCRIPT = Path(__file__).with_name("interpreted_fork_backend.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    draft = write_pair(tmp_path_factory.mktemp("pair")).draft
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(draft)],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("forward", ["forks", "prompt", "decode"])
def test_logits_are_those_of_the_cpu_backend(report, forward):
    assert report[forward] < 1e-5


def test_a_captured_plan_serves_padded_batches_with_the_bits_of_an_eager_forward(report):
    assert report["graph"] == dict.fromkeys(("same_bits", "padding_is_0", "same_plan", "layout_taken"), True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("nothing", None),
        ("sliding_window_size", "layer 4 has a sliding window"),
        ("logit_cap", "layer 4 has capped scores"),
        ("k_scale", "layer 4 has scaled keys or values"),
        ("is_cross_attention", "layer 4 has cross attention"),
        ("tp_q_head_num", "the model has no attention layers, or layers of different shapes"),
        ("use_mla_backend", "the model has latent attention (MLA)"),
        ("sinks", "attention backend triton-fork: layer 0 passes sinks; choose another"),
    ],
)
def test_what_it_does_not_compute_is_refused(report, change, reason):
    assert report["refused"][change] == reason
