"""The Triton kernels compiled ahead of time, without a GPU, for those that users have. What the compilers say of each
is printed (``pytest -s``), and no default configuration may spill registers."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ssd_kernel.triton import draft_sampler, fork_attention, target_draw

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Bytes of shared memory that one program can have.
MOST_SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


class Usage(NamedTuple):
    """``spilled``: bytes of local memory a thread."""

    registers: int
    shared: int
    spilled: int


def compile_kernel(kernel, types: dict[str, str], constants: dict, target: GPUTarget):
    """``kernel`` compiled with arguments of ``types`` (those not named are int32), as a launch with the wide strides of
    real models specialises it: pointers and strides are multiples of 16."""
    options = {name: constants[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in constants.items() if name not in options}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
    }
    wide = [["tt.divisibility", 16]]
    attributes = {
        (place,): wide
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def usage_of(compiled, tmp_path) -> Usage:
    if "amdgcn" in compiled.asm:
        found = dict(
            re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"])
        )
        return Usage(
            int(found["vgpr_count"]), compiled.metadata.shared, int(found["private_segment_fixed_size"])
        )
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run(
        [tool, "--dump-resource-usage", path], check=True, capture_output=True, text=True
    ).stdout
    registers, stack, local = (
        int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    return Usage(registers, compiled.metadata.shared, stack + local)


def check(name, compiled, target, tmp_path):
    usage = usage_of(compiled, tmp_path)
    print(
        f"{name:42} {target:7} {usage.registers:4} registers {usage.shared:7} B shared {usage.spilled:5} B spilled"
    )
    assert usage.spilled == 0
    assert usage.shared <= MOST_SHARED[target]


targets = pytest.mark.parametrize("target", TARGETS)

#: dtype, query heads a kv head, width, rows of a group.
ATTENTIONS = [
    (torch.bfloat16, 4, 128, 1),
    (torch.bfloat16, 4, 128, 8),
    (torch.bfloat16, 4, 128, 24),
    (torch.bfloat16, 7, 64, 24),
    (torch.float16, 2, 256, 24),
    (torch.float32, 7, 64, 24),
    (torch.float32, 4, 128, 24),
]


def attention_types(dtype):
    value = f"*{TYPES[dtype]}"
    return (
        dict.fromkeys(("q", "k_pool", "v_pool", "out"), value)
        | dict.fromkeys(("states", "all_maxima", "all_sums"), "*fp32")
        | dict.fromkeys(fork_attention.PlanTensors._fields, "*i32")
        | {"scale": "fp32"}
    )


def ways_to_multiply(compiled):
    """Of the matrix products: the kind of instruction, its rows, and how many warps share the keys of a row."""
    layouts = re.findall(r"(nvidia_mma|amd_mfma)<\{(.*?)\}>", compiled.asm["ttgir"])
    return {
        (
            kind,
            *re.search(
                r"version\w* = (\d+).*warpsPerCTA = \[\d+, (\d+)\].*instrShape = \[(\d+)", text
            ).groups(),
        )
        for kind, text in layouts
    }


@targets
@pytest.mark.parametrize(
    "case", ATTENTIONS, ids=lambda case: f"{TYPES[case[0]]}-{case[1]}x{case[2]}-{case[3]}"
)
def test_fork_attention(case, target, tmp_path):
    """And both kernels multiply in the same way, on which a row's bits depend."""
    dtype, heads, width, group_rows = case
    limits = fork_attention.PlanLimits(768, 32, 8, 1 << 18, 1 << 13, group_rows)
    is_hip = TARGETS[target].backend == "hip"
    both = fork_attention.constants(dtype, heads, width, width, limits, is_hip=is_hip)
    ways = []
    for kernel, constants in zip((fork_attention._shared_kernel, fork_attention._finish_kernel), both):
        compiled = compile_kernel(kernel, attention_types(dtype), constants, TARGETS[target])
        name = f"{kernel.__name__} {TYPES[dtype]} {heads}x{width} tile {constants['TILE']}"
        check(name, compiled, target, tmp_path)
        ways.append(ways_to_multiply(compiled))
    assert ways[0] == ways[1]
    assert ways[0] or dtype == torch.float32


VOCAB_SIZE = 151_936
#: Types of the samplers' arguments that are no int32.
SAMPLER_TYPES = (
    dict.fromkeys(("group_maxima", "top_logits", "q", "q_probs"), "*fp32")
    | dict.fromkeys(("temperatures", "c", "out_scores", "block_scores", "law_probs", "sums"), "*fp64")
    | dict.fromkeys(("accept_uniforms", "bonus_uniforms"), "*fp64")
    | dict.fromkeys(("seeds", "positions", "fan_out", "token_ids", "ranked_ids", "top_ids"), "*i64")
    | dict.fromkeys(("proposed", "lengths", "num_accepted", "num_malformed", "bonus_tokens"), "*i64")
    | dict.fromkeys(("q_ids", "law_ids"), "*i64")
    | dict.fromkeys(("taken", "chosen", "block_tokens"), "*i32")
    | dict.fromkeys(("is_greedy", "is_one_hot"), "*i1")
)


@targets
@pytest.mark.parametrize("is_saguaro", [False, True], ids=["shared noise", "saguaro"])
def test_draft_sampler(is_saguaro, target, tmp_path):
    first, second = draft_sampler.constants(VOCAB_SIZE, num_ranked=8, top_m=64, is_saguaro=is_saguaro)
    absent = {} if is_saguaro else {"fan_out": None, "c": None, "q": None}
    types = SAMPLER_TYPES | {"logits": "*bf16"}
    for kernel, constants in (
        (draft_sampler._maxima_kernel, first),
        (draft_sampler._draw_kernel, second | absent),
    ):
        check(kernel.__name__, compile_kernel(kernel, types, constants, TARGETS[target]), target, tmp_path)


@targets
def test_target_draw(target, tmp_path):
    draw, agree = target_draw.draw_constants(VOCAB_SIZE)
    accept, block, bonus = target_draw.residual_constants(VOCAB_SIZE, num_q=64)
    types = SAMPLER_TYPES | {"scores": "*fp32", "p": "*fp32"}
    for kernel, constants in (
        (target_draw._block_draw_kernel, draw),
        (target_draw._agree_kernel, agree),
        (target_draw._accept_kernel, accept),
        (target_draw._block_sums_kernel, block),
        (target_draw._bonus_kernel, bonus),
    ):
        check(kernel.__name__, compile_kernel(kernel, types, constants, TARGETS[target]), target, tmp_path)
