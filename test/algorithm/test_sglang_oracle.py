"""The shared noise against SGLang's own seeded sampler: its Triton hash, interpreted, and its Gumbel-max draw."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

# Triton reads TRITON_INTERPRET, and SGLang its CPU switch, when they are imported: hence a process of its own.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}

ORACLE = """
import torch
import triton
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
from sglang.srt.layers import sampler
from sglang_ssd.algorithm.shared_noise import draw, gumbel_noise

def murmur_hash32(seeds, positions, ids):
    hashes = torch.empty(len(seeds), len(ids), dtype=torch.uint32)
    grid = (len(seeds), triton.cdiv(len(ids), 1024))
    murmur_hash32_kernel[grid](seeds, positions, ids, hashes, len(seeds), len(ids), BLOCK_SIZE=1024)
    return hashes

sampler.murmur_hash32 = murmur_hash32
generator = torch.Generator().manual_seed(0)
num_rows, vocab_size = 12, 2000
seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
seeds[:4] = torch.tensor([0, 42, -1, -(2**63)])
positions = torch.randint(0, 2**31, (num_rows,), generator=generator)

# The noise bit for bit, from the hash of the Triton kernel.
noise = gumbel_noise(seeds, positions, torch.arange(vocab_size))
x = murmur_hash32(seeds.to(torch.uint64), positions, torch.arange(vocab_size)).to(torch.float64) / (2**32 - 1)
assert torch.equal(noise, -(-x.log()).clamp(2.0**-32, torch.finfo(torch.float64).max).log())

is_greedy = torch.zeros(num_rows, dtype=torch.bool)
for spread in (0.0, 1.0, 5.0):
    probs = (torch.randn(num_rows, vocab_size, generator=generator) * spread).softmax(-1)
    theirs = sampler.sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions)
    assert torch.equal(draw(probs.log(), seeds, positions, is_greedy), theirs.long())
print("equal")
"""


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.skipif(
    not (is_installed("sglang") and is_installed("triton")), reason="SGLang's sampler needs sglang and triton"
)
@pytest.mark.skipif(
    not (is_installed("sgl_kernel") or is_installed("sglang_ssd_kernel")),
    reason="SGLang's sampler imports a sgl_kernel or the stand-in for it",
)
def test_noise_and_draws_equal_those_of_the_seeded_sampler() -> None:
    command = [sys.executable, "-c", ORACLE]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip().endswith("equal"), result.stderr[-2000:]
