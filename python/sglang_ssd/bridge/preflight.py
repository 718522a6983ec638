"""What can be known to fail before anything is started: models, vocabularies, the port. One line each."""

from __future__ import annotations

import filecmp
import os
import socket
from typing import NamedTuple

from sglang_ssd.bridge.server_args import SSDServerArgs, tokenizer_fingerprint


class ModelFacts(NamedTuple):
    """What the start needs to know of a model: sizes in tokens and bytes, and the dtype it will run in."""

    path: str
    dtype: str
    vocab_size: int
    context_length: int
    kv_token_bytes: int
    weight_bytes: int


def model_facts(option: str, path: str, dtype: str, device: str, trust_remote_code: bool) -> ModelFacts:
    """Read a model's configuration. Raises ValueError in one line that names the option."""
    from transformers import AutoConfig

    from sglang_ssd.bridge.memory import bytes_per_kv_token, weight_file_bytes

    if (
        os.path.sep in path
        and path.startswith((".", os.path.sep, "~"))
        and not os.path.isdir(os.path.expanduser(path))
    ):
        raise ValueError(f"{option} {path}: no such folder")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001  (hub clients and parsers raise what they like)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{option} {path}: no model can be read there ({reason})") from None
    text = config.get_text_config()
    stored_dtype = str(getattr(text, "dtype", None)).removeprefix("torch.")
    if dtype == "auto" and device == "cpu" and stored_dtype == "float32":
        # SGLang's "auto" turns float32 into float16, which CPUs emulate slowly.
        dtype = "float32"
    stored = 4 if stored_dtype == "float32" else 2
    itemsize = 4 if dtype in ("float32", "float") else 2
    weights = weight_file_bytes(path) * itemsize // stored
    context = getattr(text, "max_position_embeddings", 4096)
    return ModelFacts(path, dtype, text.vocab_size, context, bytes_per_kv_token(text, itemsize), weights)


def check_same_vocabulary(target: ModelFacts, draft: ModelFacts) -> None:
    """Raise ValueError in one line unless an id means the same token to both models."""
    files = [os.path.join(model.path, "tokenizer.json") for model in (target, draft)]
    if all(map(os.path.exists, files)) and filecmp.cmp(*files, shallow=False):
        return
    fingerprints = [tokenizer_fingerprint(model.path) for model in (target, draft)]
    if all(fingerprints) and fingerprints[0] != fingerprints[1]:
        raise ValueError(
            f"--speculative-draft-model-path {draft.path}: its tokenizer is not that of --model-path {target.path} "
            f"(vocabularies of {draft.vocab_size} and {target.vocab_size} tokens)"
        )
    if not all(fingerprints) and target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"--speculative-draft-model-path {draft.path}: vocabulary of {draft.vocab_size} tokens, "
            f"{target.vocab_size} in --model-path {target.path}"
        )


def reserve_port(args: SSDServerArgs) -> socket.socket:
    """A socket that keeps the HTTP port for us as long as it is open; the server may listen there, as it reuses addresses.

    Without it a connection of our own may be given the port while models load (gloo and torch listen where the kernel
    likes), and SGLang does not end when it then cannot listen. Raises ValueError in one line when the port is taken.
    """
    family = socket.AF_INET6 if ":" in (args.host or "") else socket.AF_INET
    reservation = socket.socket(family)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((args.host or "127.0.0.1", args.port))
    except OSError as error:
        reservation.close()
        raise ValueError(f"--port {args.port}: {error.strerror or error}") from None
    return reservation
