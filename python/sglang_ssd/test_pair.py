"""Write a tiny target and draft for tests: byte-level Llamas with random float32 weights, in about a second.

    python -m sglang_ssd.test_pair OUT_DIR [--draft normal|useless|identical] [--seed N] [--context-length N]
                                           [--vocab-size N]

``OUT_DIR/target`` and ``OUT_DIR/draft`` are Hugging Face folders. A token id below 256 is the byte of that
value, so a prompt's ids are its UTF-8 bytes; special tokens follow. Random weights are scaled so that the
pair behaves like a real one where speculation looks: next-token entropy, agreement and overlap of draft and
target. The figures are asserted in ``test/test_test_pair.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 256
NUM_LAYERS = 6
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_SIZE = HIDDEN_SIZE // NUM_HEADS

# Gains of the random matrices, found by experiment; the others have 1: variance out is variance in.
# Attention sharp enough that greedy decoding follows the context and falls in no loop; above, noise grows.
QUERY_KEY_GAIN = 1.5
LAST_LAYER_OUTPUT_GAIN = 0.3  # all that the draft, the target without its last layer, lacks
HEAD_GAIN = 2.2  # standard deviation of the logits

NUM_BYTES = 256
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLES)
DEFAULT_VOCAB_SIZE = 320
DEFAULT_CONTEXT_LENGTH = 2048
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

DraftKind = Literal["normal", "useless", "identical"]
Weights = dict[str, np.ndarray]


class PairPaths(NamedTuple):
    """The two model folders of a pair."""

    target: Path
    draft: Path


def write_pair(
    out_dir: Path | str,
    *,
    draft: DraftKind = "normal",
    seed: int = 0,
    context_length: int = DEFAULT_CONTEXT_LENGTH,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
) -> PairPaths:
    """Write ``out_dir/target`` and ``out_dir/draft``; the same arguments give the same bytes.

    Args:
        draft: ``normal`` is the target without its last layer, ``useless`` has independent weights,
            ``identical`` is the target itself.
        seed: of the weights.
        context_length: positions of both models, in tokens.
        vocab_size: rows of the vocabulary: 256 bytes, the special tokens, and reserved ones up to here.

    Raises:
        ValueError: a size is too small, or ``draft`` is none of the three kinds.
    """
    if draft not in get_args(DraftKind):
        raise ValueError(f"draft={draft!r} is not one of {', '.join(get_args(DraftKind))}")
    if vocab_size < NUM_BYTES + len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab_size={vocab_size} is below {NUM_BYTES + len(SPECIAL_TOKENS)}, bytes and special tokens"
        )
    if context_length < 1:
        raise ValueError(f"context_length={context_length} is below 1")

    target_weights = _random_weights(np.random.default_rng([seed, 0]), vocab_size)
    draft_weights, num_draft_layers = target_weights, NUM_LAYERS
    if draft != "identical":
        num_draft_layers = NUM_LAYERS - 1
        if draft == "useless":
            draft_weights = _random_weights(np.random.default_rng([seed, 1]), vocab_size)
        last_layer = _layer_prefix(NUM_LAYERS - 1)
        draft_weights = {name: w for name, w in draft_weights.items() if not name.startswith(last_layer)}

    paths = PairPaths(Path(out_dir) / "target", Path(out_dir) / "draft")
    for path, weights, num_layers in (
        (paths.target, target_weights, NUM_LAYERS),
        (paths.draft, draft_weights, num_draft_layers),
    ):
        path.mkdir(parents=True, exist_ok=True)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        _write_json(path / "config.json", _config(num_layers, context_length, vocab_size))
        _write_tokenizer(path, context_length, vocab_size)
    return paths


def _layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _random_weights(rng: np.random.Generator, vocab_size: int) -> Weights:
    """Weights of the target, named as in a Hugging Face Llama."""

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    ones = np.ones(HIDDEN_SIZE, dtype=np.float32)
    weights: Weights = {
        "model.embed_tokens.weight": rng.standard_normal((vocab_size, HIDDEN_SIZE), dtype=np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(vocab_size, HIDDEN_SIZE, HEAD_GAIN),
    }
    for layer in range(NUM_LAYERS):
        output_gain = LAST_LAYER_OUTPUT_GAIN if layer == NUM_LAYERS - 1 else 1.0
        layer_weights: Weights = {
            "input_layernorm.weight": ones,
            "self_attn.q_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE, QUERY_KEY_GAIN),
            "self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_SIZE, HIDDEN_SIZE, QUERY_KEY_GAIN),
            "self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_SIZE, HIDDEN_SIZE),
            "self_attn.o_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE, output_gain),
            "post_attention_layernorm.weight": ones,
            "mlp.gate_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "mlp.up_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "mlp.down_proj.weight": matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE, output_gain),
        }
        weights |= {_layer_prefix(layer) + name: weight for name, weight in layer_weights.items()}
    return weights


def _config(num_layers: int, context_length: int, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": context_length,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "bos_token_id": NUM_BYTES + SPECIAL_TOKENS.index(BOS),
        "eos_token_id": NUM_BYTES + SPECIAL_TOKENS.index(EOS),
        "pad_token_id": NUM_BYTES + SPECIAL_TOKENS.index(PAD),
    }


def _byte_characters() -> list[str]:
    """Byte-level BPE writes a byte as its own character where that prints, else as the next from U+0100."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {
        b: chr(NUM_BYTES + i) for i, b in enumerate(others)
    }
    return [characters[byte] for byte in range(NUM_BYTES)]


def _write_tokenizer(path: Path, context_length: int, vocab_size: int) -> None:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    num_reserved = vocab_size - NUM_BYTES - len(SPECIAL_TOKENS)
    reserved = [f"<|reserved_{i}|>" for i in range(num_reserved)]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL_TOKENS, *reserved)])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ssd.test_pair", description=__doc__.split("\n")[0]
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--draft", choices=get_args(DraftKind), default="normal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context-length", type=int, default=DEFAULT_CONTEXT_LENGTH, help="in tokens")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE)
    args = parser.parse_args(argv)
    try:
        paths = write_pair(
            args.out_dir,
            draft=args.draft,
            seed=args.seed,
            context_length=args.context_length,
            vocab_size=args.vocab_size,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"target: {paths.target}\ndraft: {paths.draft}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
