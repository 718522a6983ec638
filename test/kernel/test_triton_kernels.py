"""The Triton kernels in Triton's interpreter: ``interpreted_*.py``, in one process that starts with the interpreter on.

Triton reads the switch when kernels are defined, and this process may have imported it already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_ssd_kernel import (
    DevicePlan,
    PlanLimits,
    draw_and_agree,
    fork_attention,
    sample_saguaro,
    sample_shared_noise,
    verify_residual,
)
from sglang_ssd_kernel.triton.fork_attention import fork_attention as triton_fork_attention

FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.timeout(0)  # each of its tests has its own
def test_in_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_samplers_of_cpu_tensors_are_the_references():
    """Without the interpreter, which this process has not."""
    rows = {"seeds": torch.arange(3), "positions": torch.arange(3), "is_greedy": torch.arange(3) == 1}
    ones = torch.ones(3, dtype=torch.float64)
    logits = torch.randn(3, 50)
    drafted = sample_shared_noise(logits, ones, **rows, num_ranked=2, top_m=8)
    assert drafted.ranked_ids.shape == (3, 2)
    saguaro = sample_saguaro(logits, ones, **rows, fan_out=torch.arange(3), c=ones, num_ranked=2, top_m=8)
    assert saguaro.q.shape == (3, 8)
    no_proposal = {
        "proposed": torch.zeros(3, 0, dtype=torch.int64),
        "lengths": torch.zeros(3, dtype=torch.int64),
    }
    assert draw_and_agree(logits[:, None], **rows, **no_proposal).token_ids.shape == (3, 1)
    verified = verify_residual(
        p=logits.softmax(-1)[:, None].expand(-1, 2, -1).contiguous(),
        proposed=drafted.token_ids[:, None],
        lengths=torch.ones(3, dtype=torch.int64),
        is_one_hot=rows["is_greedy"],
        q_ids=saguaro.top_ids[:, None],
        q_probs=saguaro.q[:, None],
        accept_uniforms=ones[:, None] / 2,
        bonus_uniforms=ones / 2,
    )
    assert verified.num_accepted.shape == (3,)


def test_fork_attention_on_a_cpu_wants_a_fork_plan():
    limits = PlanLimits(rows=1, groups=1, depth=0, prefix_slots=1, prefix_len=1, group_rows=1)
    q, pool = torch.zeros(1, 2, 16), torch.zeros(4, 1, 16)
    with pytest.raises(ValueError, match=r"ForkPlan: DevicePlan.*\(1, 2, 16\)"):
        fork_attention(q, pool, pool, DevicePlan(limits, "cpu"), 1.0)
    with pytest.raises(ValueError, match=r"No kernel for cpu.*\(1, 2, 16\)"):
        triton_fork_attention(q, pool, pool, DevicePlan(limits, "cpu"), 1.0)


def test_the_package_imports_no_triton_for_a_cpu():
    program = "import sys; from sglang_ssd_kernel import fork_attention; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
