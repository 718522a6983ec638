"""One request's logits, to the bit, in whatever batch and width they are computed; and the check at start that says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_ssd.bridge.environment import use_cpu_engine
from sglang_ssd.test_pair import write_pair

use_cpu_engine()
pytest.importorskip("sglang.srt.layers.linear")
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402

from sglang_ssd.bridge import bit_equality  # noqa: E402
from sglang_ssd_kernel import is_compiled  # noqa: E402

SCRIPT = Path(__file__).with_name("logits_of_batches.py")
needs_kernels = pytest.mark.skipif(is_compiled() is None, reason="holds with compiled kernels")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair")).target


def logits_of_batches(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_equal_across_batch_sizes_and_lookaheads(target, dtype):
    found = logits_of_batches(str(target), dtype, "16")
    assert found["differing"] == []
    assert found["check"]["holds"], found["check"]["reason"]
    assert found["check"]["num_shapes"] == 5


@needs_kernels
def test_the_check_and_the_logits_agree_where_it_does_not_hold(target):
    """torch's own linear in float32 gives one to three rows other bits than four: no packing, no floor on rows."""
    found = logits_of_batches(str(target), "float32", "2", "unpacked")
    assert not found["check"]["holds"]
    assert "in float32: 1 rows give other bits than" in found["check"]["reason"]
    assert "decode of 2" in found["differing"] and "K=1 of 1" in found["differing"]


class OnOneRow(UnquantizedLinearMethod):
    """Linear, but for the last bit of a chosen row count."""

    def __init__(self, odd_count: int) -> None:
        self.odd_count = odd_count

    def apply(self, layer, x, bias=None):
        out = torch.stack([layer.weight @ row for row in x])
        return out + 1e-3 if x.shape[0] == self.odd_count else out


@pytest.mark.parametrize("count", [1, 7, 16, 64, 256])
def test_each_row_count_is_looked_at(count):
    layer = torch.nn.Linear(8, 3, bias=False)
    layer.quant_method = OnOneRow(count)
    counts = (*bit_equality.ROW_COUNTS, *bit_equality.PROMPT_ROW_COUNTS)
    with torch.inference_mode():
        assert bit_equality._differing_row_count(layer, counts) == (1 if count == 256 else count)
        layer.quant_method = OnOneRow(0)
        assert bit_equality._differing_row_count(layer, counts) is None


def runner_of(model: torch.nn.Module, **changes) -> SimpleNamespace:
    options = {"tp_size": 1, "attention_backend": "torch_native", "kv_cache_dtype": "auto"} | changes
    dtype = torch.bfloat16
    kv_dtype = dtype if options["kv_cache_dtype"] == "auto" else torch.float8_e5m2
    return SimpleNamespace(
        model=model, server_args=SimpleNamespace(**options), dtype=dtype, kv_cache_dtype=kv_dtype
    )


@needs_kernels
@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        (SiluAndMul(), {}, ""),
        (SiluAndMul(), {"tp_size": 2}, ""),
        (SiluAndMul(), {"tp_size": 4}, "--tp-size 4: "),
        (SiluAndMul(), {"attention_backend": "intel_amx"}, "--attention-backend intel_amx: "),
        (SiluAndMul(), {"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2: "),
        (GeluAndMul(), {}, "not known to compute row by row: GeluAndMul"),
        (torch.nn.Conv1d(1, 1, 1), {}, "not known to compute row by row: Conv1d"),
    ],
)
def test_what_is_not_known_to_hold_is_named(model, changes, reason):
    found = bit_equality.check_bit_equality(runner_of(torch.nn.ModuleList([model]), **changes))
    assert found.holds == (not reason)
    assert found.reason.startswith(reason) and bool(found.reason) == bool(reason)
