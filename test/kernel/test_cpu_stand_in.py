"""The CPU stand-in for ``sgl_kernel``: each function against a slow reference, and how the module is found.

References are plain loops, published MurmurHash3 values, and SGLang's own Triton kernels (``triton_twins.py``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd_kernel.cpu_stand_in import CPU_ENGINE_VARIABLE, functions

KERNEL_DISTRIBUTION = Path(__file__).resolve().parents[2] / "sgl-kernel"
UNTOUCHED = -7  # fills outputs, to see what was not written
int_types = st.sampled_from([torch.int32, torch.int64])


# ---------------------------------------------------------------------------------------------------------------------
# KV slots of ragged ranges
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def ragged_ranges(draw):
    """(rows of the requests, starts, ends, row length): ranges within distinct rows of a request-to-token table."""
    pool_len = draw(st.integers(1, 9))
    batch_size = draw(st.integers(0, 5))
    rows = draw(st.permutations(range(batch_size + 2)))[:batch_size]
    bounds = [sorted(draw(st.tuples(*[st.integers(0, pool_len)] * 2))) for _ in range(batch_size)]
    dtype = draw(int_types)
    starts = torch.tensor([start for start, _ in bounds], dtype=dtype)
    ends = torch.tensor([end for _, end in bounds], dtype=dtype)
    return torch.tensor(rows, dtype=torch.int64), starts, ends, pool_len


def cells(rows, starts, ends):
    """Every (row, column) of the ranges, request after request."""
    return [
        (row, column)
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for column in range(start, end)
    ]


@settings(deadline=None)
@given(ragged_ranges(), st.integers(0, 3))
def test_assign_req_to_token_pool(ranges, num_spare_slots):
    rows, starts, ends, pool_len = ranges
    expected = torch.full((rows.numel() + 2, pool_len), UNTOUCHED, dtype=torch.int32)
    table = expected.clone()
    slots = torch.arange(100, 100 + len(cells(rows, starts, ends)) + num_spare_slots)
    for slot, (row, column) in zip(slots.tolist(), cells(rows, starts, ends), strict=False):
        expected[row, column] = slot
    functions.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, pool_len)
    assert torch.equal(table, expected)


@settings(deadline=None)
@given(ragged_ranges(), st.integers(0, 3), int_types)
def test_assign_extend_cache_locs(ranges, num_spare_slots, slot_type):
    rows, starts, ends, pool_len = ranges
    table = torch.arange((rows.numel() + 2) * pool_len, dtype=torch.int32).view(-1, pool_len)
    found = [int(table[cell]) for cell in cells(rows, starts, ends)]
    slots = torch.full((len(found) + num_spare_slots,), UNTOUCHED, dtype=slot_type)
    functions.assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, pool_len)
    assert slots.tolist() == found + [UNTOUCHED] * num_spare_slots


@pytest.mark.parametrize(
    "name", ["assign_req_to_token_pool_cpu", "assign_extend_cache_locs_cpu"], ids=lambda name: name
)
@pytest.mark.parametrize(
    ("start", "end", "num_slots", "message"),
    [
        (3, 2, 9, "start_offset"),
        (-1, 2, 9, "start_offset"),
        (0, 5, 9, "row of 4"),
        (0, 3, 2, "out_cache_loc"),
    ],
)
def test_ragged_ranges_are_checked(name, start, end, num_slots, message):
    table = torch.zeros(2, 4, dtype=torch.int32)
    slots = torch.zeros(num_slots, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        getattr(functions, name)(
            torch.tensor([0]), table, torch.tensor([start]), torch.tensor([end]), slots, table.shape[1]
        )


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), int_types)
def test_assign_draft_cache_locs_contiguous(batch_size, topk, num_steps, first_len, len_type):
    pool_len = first_len + batch_size + topk * num_steps
    table = torch.randperm((batch_size + 1) * pool_len).int().view(-1, pool_len)
    rows = torch.arange(1, batch_size + 1)
    seq_lens = torch.arange(first_len, first_len + batch_size, dtype=len_type)
    expected = [
        int(table[row, seq_len + column])
        for row, seq_len in zip(rows.tolist(), seq_lens.tolist(), strict=True)
        for column in range(topk * num_steps)
    ]
    slots = torch.full((batch_size * topk * num_steps,), UNTOUCHED)
    functions.assign_draft_cache_locs_contiguous_cpu(rows, table, seq_lens, slots, pool_len, topk, num_steps)
    assert slots.tolist() == expected


# ---------------------------------------------------------------------------------------------------------------------
# KV copies, accepted tokens, input ids
# ---------------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda slots: st.tuples(
            st.just(slots),
            st.lists(st.integers(0, slots - 1), unique=True),
            st.lists(st.integers(0, slots - 1), min_size=slots, max_size=slots),
        )
    ),
    int_types,
)
def test_copy_all_layer_kv_cache(case, loc_type):
    num_slots, targets, sources = case
    sources = sources[: len(targets)]
    buffers = [torch.randn(num_slots, 2, 3), torch.randn(num_slots, 5).bfloat16()]
    expected = [buffer.clone() for buffer in buffers]
    for before, after in zip(buffers, expected, strict=True):
        for target, source in zip(targets, sources, strict=True):
            after[target] = before[source]
    functions.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].nbytes for buffer in buffers]),
        torch.tensor(targets, dtype=loc_type),
        torch.tensor(sources, dtype=loc_type),
    )
    assert all(torch.equal(got, want) for got, want in zip(buffers, expected, strict=True))


@pytest.mark.parametrize(("targets", "sources", "message"), [([0, -2], [1, 1], "-2"), ([0], [1, 1], "shape")])
def test_copy_all_layer_kv_cache_checks_slots(targets, sources, message):
    buffer = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=message):
        functions.copy_all_layer_kv_cache_cpu(
            torch.tensor([buffer.data_ptr()], dtype=torch.uint64),
            torch.tensor([8]),
            torch.tensor(targets),
            torch.tensor(sources),
        )


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(lambda width: st.tuples(st.just(width), st.lists(st.integers(1, width)))))
def test_fill_bonus_tokens(case):
    width, lengths = case
    tokens = torch.randperm(len(lengths) * width).int().view(-1, width)
    bonus = torch.full((len(lengths),), UNTOUCHED, dtype=torch.int32)
    functions.fill_bonus_tokens_cpu(tokens, torch.tensor(lengths, dtype=torch.int32), bonus, width)
    assert bonus.tolist() == [int(tokens[row, length - 1]) for row, length in enumerate(lengths)]


def test_fill_bonus_tokens_checks_lengths():
    with pytest.raises(ValueError, match="accept_lens"):
        functions.fill_bonus_tokens_cpu(torch.zeros(2, 3), torch.tensor([3, 4]), torch.zeros(2), 3)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_fill_accept_out_cache_loc(accept_index):
    slots = torch.randperm(10)
    packed = torch.full((len(accept_index) * 3,), UNTOUCHED)
    functions.fill_accept_out_cache_loc_cpu(torch.tensor(accept_index, dtype=torch.int32), slots, packed)
    accepted = [int(slots[index]) for row in accept_index for index in row if index != -1]
    assert packed.tolist() == accepted + [UNTOUCHED] * (packed.numel() - len(accepted))


def test_fill_accept_out_cache_loc_checks_room():
    with pytest.raises(ValueError, match="accept_out_cache_loc holds 1"):
        functions.fill_accept_out_cache_loc_cpu(torch.tensor([0, 1]), torch.arange(4), torch.zeros(1))


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=5), st.booleans())
def test_rotate_input_ids(lengths, with_select_index):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ids = torch.arange(sum(lengths))
    new_tokens = torch.arange(-1, -1 - len(lengths), -1)
    select = [start + length // 2 for start, length in zip(starts, lengths, strict=True)]
    expected = []
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        part = list(range(start, start + length))
        shifted = part[1:] + part[-1:]
        if length:
            shifted[select[i] - start if with_select_index else -1] = int(new_tokens[i])
        expected += shifted
    functions.rotate_input_ids_cpu(
        ids,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        new_tokens[:, None],
        torch.tensor(select) if with_select_index else None,
    )
    assert ids.tolist() == expected


# ---------------------------------------------------------------------------------------------------------------------
# Trees
# ---------------------------------------------------------------------------------------------------------------------


class Tree:
    """The outputs of ``build_tree_kernel_efficient_cpu`` for a batch, and the arguments that filled them."""

    def __init__(self, parent_list, selected, seq_lens, topk, depth, mode):
        batch_size, num_tokens = len(seq_lens), len(selected[0]) + 1
        prefix = sum(seq_lens) if mode == functions.TREE_MASK_FULL else 0
        self.mask = torch.ones(num_tokens * (prefix + batch_size * num_tokens), dtype=torch.bool)
        self.positions = torch.full((batch_size * num_tokens,), UNTOUCHED)
        self.index, self.next_token, self.next_sibling = (
            torch.full((batch_size, num_tokens), -1) for _ in range(3)
        )
        self.arguments = (
            torch.tensor(parent_list),
            torch.tensor(selected),
            torch.tensor(seq_lens),
            self.mask,
            self.positions,
            self.index,
            self.next_token,
            self.next_sibling,
            topk,
            depth,
            num_tokens,
            mode,
        )

    def outputs(self):
        return [
            output.tolist()
            for output in (self.mask, self.positions, self.index, self.next_token, self.next_sibling)
        ]


def test_build_tree_of_a_drawn_example():
    # Candidates 0, 1 continue the root; group 1 (candidates 2, 3) continues 0, group 2 (candidates 4, 5) continues 1.
    # Selected 0, 1, 3, 4, 5: tokens 1, 2 below the root, token 3 below 1, tokens 4 and 5 below 2.
    tree = Tree([[-1, 0, 1]], [[0, 1, 3, 4, 5]], [2], topk=2, depth=2, mode=functions.TREE_MASK_FULL)
    functions.build_tree_kernel_efficient_cpu(*tree.arguments)
    assert tree.positions.tolist() == [2, 3, 3, 4, 4, 4]
    assert tree.index.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert tree.next_token.tolist() == [[1, 3, 4, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, -1, 5, -1]]
    assert tree.mask.view(6, 8)[:, :2].all()
    assert tree.mask.view(6, 8)[:, 2:].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_build_tree_refuses_a_packed_mask():
    tree = Tree([[-1]], [[0]], [2], topk=1, depth=1, mode=2)
    with pytest.raises(NotImplementedError, match="build_tree_kernel_efficient_cpu: tree_mask_mode 2"):
        functions.build_tree_kernel_efficient_cpu(*tree.arguments)


def verify(tree, candidates, target, num_steps, function=functions.verify_tree_greedy_cpu):
    """(predicts, accept_index, accept_token_num) of a greedy verification, as lists."""
    predicts = torch.full((candidates.numel(),), UNTOUCHED, dtype=torch.int32)
    accept_index = torch.full((candidates.shape[0], num_steps), -1, dtype=torch.int32)
    accept_token_num = torch.full((candidates.shape[0],), UNTOUCHED, dtype=torch.int32)
    function(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
        candidates=candidates,
        retrive_index=tree.index,
        retrive_next_token=tree.next_token,
        retrive_next_sibling=tree.next_sibling,
        target_predict=target,
    )
    return predicts.tolist(), accept_index.tolist(), accept_token_num.tolist()


@settings(deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda k: st.lists(
            st.tuples(*[st.lists(st.integers(0, 2), min_size=k + 1, max_size=k + 1)] * 2), min_size=1
        )
    )
)
def test_verify_chain_greedy(rows):
    """On chains the tree walk is the plain rule: accept while the drafted token equals the target's argmax."""
    drafted, target = (torch.tensor(part) for part in zip(*rows, strict=True))
    batch_size, width = drafted.shape
    tree = Tree(
        [list(range(-1, width - 2))] * batch_size,
        [list(range(width - 1))] * batch_size,
        [3] * batch_size,
        topk=1,
        depth=width - 1,
        mode=functions.TREE_MASK_QUERY_ONLY,
    )
    functions.build_tree_kernel_efficient_cpu(*tree.arguments)
    predicts, accept_index, accept_token_num = [], [], []
    for row, (tokens, wanted) in enumerate(zip(drafted.tolist(), target.tolist(), strict=True)):
        count = 0
        while count < width - 1 and tokens[count + 1] == wanted[count]:
            count += 1
        accept_token_num.append(count)
        accept_index.append([row * width + i if i <= count else -1 for i in range(width)])
        predicts += [wanted[i] if i <= count else UNTOUCHED for i in range(width)]
    assert verify(tree, drafted, target, num_steps=width) == (predicts, accept_index, accept_token_num)


# ---------------------------------------------------------------------------------------------------------------------
# The hash
# ---------------------------------------------------------------------------------------------------------------------


def murmur3(data: bytes) -> int:
    """MurmurHash3, x86, 32 bits, hash seed 0, after its published description."""

    def rotate(word, bits):
        return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF

    hashed = 0
    for i in range(0, len(data), 4):
        block = data[i : i + 4]
        word = rotate(int.from_bytes(block, "little") * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        hashed ^= word
        if len(block) == 4:
            hashed = (rotate(hashed, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    hashed ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ hashed >> shift) * factor & 0xFFFFFFFF
    return hashed


def test_murmur_reference_gives_published_values():
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"The quick brown fox jumps over the lazy dog") == 0x2E4FF723


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=3),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    st.booleans(),
)
def test_murmur_hash32(rows, columns, unsigned_seed):
    seed, positions = (torch.tensor(part) for part in zip(*rows, strict=True))
    hashed = functions.murmur_hash32_cpu(
        seed.to(torch.uint64) if unsigned_seed else seed, positions, torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == [
        [
            murmur3((s % 2**64).to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little"))
            for c in columns
        ]
        for s, p in rows
    ]


# ---------------------------------------------------------------------------------------------------------------------
# How python finds it
# ---------------------------------------------------------------------------------------------------------------------


def run_python(code, cpu_engine=True, path=None):
    """Run code in a new interpreter; its standard output, stripped. ``path`` goes first on its ``sys.path``."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment[CPU_ENGINE_VARIABLE] = "1" if cpu_engine else "0"
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FIND = "import importlib.util; spec = importlib.util.find_spec('sgl_kernel'); print(spec and spec.origin)"
STAND_IN_FILE = os.path.join("cpu_stand_in", "sgl_kernel", "__init__.py")
requires_no_real_package = pytest.mark.skipif(
    not run_python(FIND).endswith(STAND_IN_FILE), reason="a real sgl_kernel is installed here"
)


@requires_no_real_package
def test_found_in_child_processes():
    code = """
import importlib.util, multiprocessing

if __name__ == "__main__":
    for method in multiprocessing.get_all_start_methods():
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.apply(importlib.util.find_spec, ("sgl_kernel",)).origin)
"""
    origins = run_python(code).splitlines()
    assert origins
    assert all(origin.endswith(STAND_IN_FILE) for origin in origins)


def test_absent_outside_of_cpu_engine_mode():
    assert not run_python(FIND, cpu_engine=False).endswith(STAND_IN_FILE)


@pytest.mark.parametrize("body", ["real = True", "raise ImportError('no driver')"])
def test_a_real_package_wins(tmp_path, body):
    """Also where the real one fails to import: that must be seen, not papered over."""
    package = tmp_path / "sgl_kernel" / "__init__.py"
    package.parent.mkdir()
    package.write_text(body)
    assert run_python(FIND, path=tmp_path) == str(package)
    code = (
        "try:\n    import sgl_kernel; print(sgl_kernel.real)\nexcept ImportError as error:\n    print(error)"
    )
    assert run_python(code, path=tmp_path) in ("True", "no driver")


def test_start_of_python_imports_two_modules():
    code = "import sys; print(sorted(m for m in sys.modules if m.partition('.')[0] in {'sglang_ssd_kernel', 'torch'}))"
    assert run_python(code) == "['sglang_ssd_kernel', 'sglang_ssd_kernel.cpu_stand_in']"
    assert run_python(
        f"import sys; before = set(sys.modules); {FIND}; print('torch' in sys.modules)"
    ).endswith("False")


@requires_no_real_package
def test_unknown_names_are_missing_and_unimplemented_ones_name_themselves():
    code = """
import importlib, torch, sgl_kernel

for name in sgl_kernel.__all__:
    assert callable(getattr(sgl_kernel, name)), name
assert not hasattr(sgl_kernel, "fused_experts")
assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
try:
    from sgl_kernel import fused_experts
except ImportError as error:
    print(error.name)
for submodule in ("mamba", "speculative"):
    module = importlib.import_module(f"sgl_kernel.{submodule}")
    for name, function in vars(module).items():
        if name.endswith(("_cpu", "_mask")):
            try:
                function(1, out=2)
            except NotImplementedError as error:
                print(error)
"""
    said = run_python(code).splitlines()
    assert said[0] == "sgl_kernel"
    assert [line.partition(" is not implemented by the CPU stand-in")[0] for line in said[1:]] == [
        "sgl_kernel.mamba.causal_conv1d_fn_cpu",
        "sgl_kernel.mamba.causal_conv1d_update_cpu",
        "sgl_kernel.mamba.chunk_gated_delta_rule_cpu",
        "sgl_kernel.speculative.reconstruct_indices_from_tree_mask",
    ]


@requires_no_real_package
def test_the_hash_is_an_operator_that_compiles():
    """SGLang's sampler reaches it through ``torch.ops`` inside of ``torch.compile``."""
    code = """
import torch, sgl_kernel

def draw(seed, positions, columns):
    return torch.ops.sgl_kernel.murmur_hash32_cpu.default(seed, positions, columns).to(torch.float64)

arguments = (torch.tensor([3, 4]).to(torch.uint64), torch.tensor([5, 6]), torch.arange(9))
compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
print(torch.equal(compiled(*arguments), draw(*arguments)))
"""
    assert run_python(code) == "True"


@requires_no_real_package
def test_sglang_finds_every_name_it_imports():
    pytest.importorskip("sglang")
    code = """
import importlib

for name in ("srt.managers.scheduler", "kernels.ops.speculative.multi_layer_eagle",
             "kernels.ops.speculative.reconstruct_tree", "kernels.ops.speculative.eagle"):
    importlib.import_module(f"sglang.{name}")
print("all imported")
"""
    assert run_python(code).endswith("all imported")


@requires_no_real_package
def test_equal_to_sglangs_triton_kernels():
    """Triton decides when it is imported whether it interprets its kernels, hence the process of their own."""
    pytest.importorskip("sglang")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("triton_twins.py")),
        ],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", CPU_ENGINE_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("build", ["build_wheel", "build_editable"])
def test_plain_and_editable_wheels_carry_the_pth_file(tmp_path, build):
    source = shutil.copytree(
        KERNEL_DISTRIBUTION, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info")
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import setuptools.build_meta as backend; backend.{build}({str(tmp_path)!r})",
        ],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sglang_ssd_kernel.pth" in names
    if build == "build_wheel":
        assert "sglang_ssd_kernel/cpu_stand_in/sgl_kernel/__init__.py" in names
        assert not [name for name in names if name.startswith("sgl_kernel/")]
