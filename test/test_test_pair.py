"""The tiny test pair has the figures that tests of speculation rely on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ssd.test_pair import SPECIAL_TOKENS, PairPaths, _byte_characters, main, write_pair

NUM_PROMPTS, PROMPT_LENGTH, NUM_NEW_TOKENS = 8, 24, 64


class Run(NamedTuple):
    """Greedy continuations by the target, and both models' logits over them [prompts, new tokens, vocab]."""

    tokens: torch.Tensor
    target_logits: torch.Tensor
    stepwise_target_logits: torch.Tensor
    draft_logits: torch.Tensor


def _greedy_run(paths: PairPaths) -> Run:
    target = AutoModelForCausalLM.from_pretrained(paths.target).eval()
    draft = AutoModelForCausalLM.from_pretrained(paths.draft).eval()
    assert target.dtype == draft.dtype == torch.float32
    printable = torch.Generator().manual_seed(7)
    ids = step = torch.randint(32, 127, (NUM_PROMPTS, PROMPT_LENGTH), generator=printable)
    cache, step_logits = None, []
    with torch.no_grad():
        for _ in range(NUM_NEW_TOKENS):
            output = target(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            step_logits.append(output.logits[:, -1])
            step = step_logits[-1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, step], dim=1)
        new = slice(PROMPT_LENGTH - 1, -1)
        return Run(
            tokens=ids[:, PROMPT_LENGTH:],
            target_logits=target(ids).logits[:, new],
            stepwise_target_logits=torch.stack(step_logits, dim=1),
            draft_logits=draft(ids).logits[:, new],
        )


def _agreement(run: Run) -> float:
    return (run.target_logits.argmax(-1) == run.draft_logits.argmax(-1)).float().mean().item()


def _overlap(run: Run) -> float:
    return torch.minimum(run.target_logits.softmax(-1), run.draft_logits.softmax(-1)).sum(-1).mean().item()


@pytest.fixture(scope="module")
def normal_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _greedy_run(write_pair(tmp_path_factory.mktemp("pair")))


def test_draft_is_as_good_as_a_real_one(normal_run: Run) -> None:
    log_p = normal_run.target_logits.log_softmax(-1)
    entropy_nats = -(log_p.exp() * log_p).sum(-1).mean().item()
    assert entropy_nats == pytest.approx(3.7, abs=0.15)
    assert _agreement(normal_run) == pytest.approx(0.81, abs=0.05)
    assert _overlap(normal_run) == pytest.approx(0.90, abs=0.02)


def test_margins_exceed_numeric_noise(normal_run: Run) -> None:
    """Greedy tokens of one model do not depend on how its rows are batched."""
    top_two = normal_run.target_logits.topk(2, dim=-1).values
    margins = (top_two[..., 0] - top_two[..., 1]).flatten()
    noise = (normal_run.target_logits - normal_run.stepwise_target_logits).abs().max().item()
    assert margins.min().item() > 10 * noise
    smallest_margin_of_a_short_run = margins.view(NUM_PROMPTS, -1)[:, :32].amin(dim=1)
    assert smallest_margin_of_a_short_run.median().item() > 0.01


def test_greedy_runs_do_not_loop(normal_run: Run) -> None:
    for tokens in normal_run.tokens.tolist():
        assert len(set(tokens)) > NUM_NEW_TOKENS / 2
        for period in range(1, 9):
            assert tokens[-3 * period :] != tokens[-period:] * 3


def test_useless_draft_is_right_by_chance_only(tmp_path: Path) -> None:
    assert _agreement(_greedy_run(write_pair(tmp_path, draft="useless"))) < 0.03


def test_identical_draft_is_always_right(tmp_path: Path) -> None:
    paths = write_pair(tmp_path, draft="identical")
    for file in sorted(paths.target.iterdir()):
        assert file.read_bytes() == (paths.draft / file.name).read_bytes()


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = [
        (write_pair(tmp_path / str(i), seed=seed).target / "model.safetensors").read_bytes()
        for i, seed in enumerate((0, 0, 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_tokenizer_is_bytes_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_pair(tmp_path, context_length=512).target)
    text = "Grüße, 世界!\n\t<b>"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(set(_byte_characters())) == 256
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(
        range(256, 256 + len(SPECIAL_TOKENS))
    )
    assert len(tokenizer) == 320
    assert tokenizer.model_max_length == 512
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


def test_chat_template_marks_the_turns(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_pair(tmp_path).target)
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "ok"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>hi<|assistant|>yes<|eos|><|user|>ok<|assistant|>"


def test_sizes_are_arguments(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(
        write_pair(tmp_path, context_length=96, vocab_size=300).target
    )
    assert target.config.max_position_embeddings == 96
    assert target.get_input_embeddings().num_embeddings == 300


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--vocab-size", "256"], "vocab_size=256"),
        (["--context-length", "0"], "context_length=0"),
        (["--draft", "bad"], "--draft"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), *arguments])
    assert stopped.value.code != 0
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
