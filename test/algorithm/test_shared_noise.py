from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from sglang_ssd.algorithm.shared_noise import (
    Stream,
    _contenders,
    _row_states,
    draw,
    gumbel_noise,
    perturbed_top,
    seeded_uniforms,
)

NUM_DRAWS = 1_000_000
P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
SEEDS = st.integers(-(2**63), 2**63 - 1)


def rotate(x: int, count: int) -> int:
    return ((x << count) | (x >> (32 - count))) % 2**32


def murmur3_state(data: bytes) -> int:
    """The state after all whole blocks."""
    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = rotate(block * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        state = (rotate(state ^ block, 13) * 5 + 0xE6546B64) % 2**32
    return state


def murmur3_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of whole blocks, as published."""
    h = murmur3_state(data) ^ len(data)
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def token_id_with_hash(h: int, seed: int, position: int) -> int:
    """murmur3_32 run backwards to its last block."""

    def divide(x: int, constant: int) -> int:
        return x * pow(constant, -1, 2**32) % 2**32

    h = divide(h ^ (h >> 16), 0xC2B2AE35)
    h = divide(h ^ (h >> 13) ^ (h >> 26), 0x85EBCA6B)
    state = h ^ (h >> 16) ^ 16
    block = rotate(divide((state - 0xE6546B64) % 2**32, 5), 19)
    block ^= murmur3_state(struct.pack("<QI", seed % 2**64, position))
    return divide(rotate(divide(block, 0x1B873593), 17), 0xCC9E2D51)


def noise_of_hash(h: int) -> float:
    exponential = math.inf if h == 0 else -math.log(h / (2**32 - 1))
    return -math.log(min(max(exponential, 2.0**-32), torch.finfo(torch.float64).max))


def no(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, dtype=torch.bool)


def random_seeds(num_rows: int, generator_seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(generator_seed)
    return torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)


def test_reference_hash_gives_the_published_values() -> None:
    assert murmur3_32(b"") == 0
    assert murmur3_32(b"test") == 0xBA6BD213
    assert murmur3_32(b"\0\0\0\0") == 0x2362F9DE
    assert murmur3_32(b"\xff\xff\xff\xff") == 0x76293B50
    assert murmur3_32(b"\x21\x43\x65\x87") == 0xF55B516B


@pytest.mark.parametrize("h", [0, 1, 2**31 - 1, 2**31, 2**32 - 3, 2**32 - 2, 2**32 - 1])
def test_noise_at_the_ends_of_the_hash(h: int) -> None:
    token_id = token_id_with_hash(h, seed=-5, position=77)
    assert murmur3_32(struct.pack("<qII", -5, 77, token_id)) == h
    noise = gumbel_noise(torch.tensor([-5]), torch.tensor([77]), torch.tensor([token_id])).item()
    assert noise == pytest.approx(noise_of_hash(h), rel=1e-12)
    assert noise <= 32 * math.log(2)


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_noise_is_that_of_the_hash_of_seed_position_and_id(seed: int, position: int, token_id: int) -> None:
    h = murmur3_32(struct.pack("<QII", seed % 2**64, position, token_id))
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([[token_id]]))
    assert noise.dtype == torch.float64
    assert noise.item() == pytest.approx(noise_of_hash(h), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("stream", Stream)
def test_uniforms_are_hashes_of_ids_beyond_any_vocabulary(stream: Stream) -> None:
    uniforms = seeded_uniforms(torch.tensor([[7, -3]]), torch.tensor([[11, 12]]), stream)
    expected = [
        murmur3_32(struct.pack("<QII", seed % 2**64, position, 2**32 - 1 - stream)) / 2**32
        for seed, position in ((7, 11), (-3, 12))
    ]
    assert uniforms.tolist() == [expected]


def unpruned_draw(
    log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, is_greedy: torch.Tensor
):
    noise = gumbel_noise(seeds, positions, torch.arange(log_probs.shape[1])) * ~is_greedy[:, None]
    return (log_probs.double() + noise).argmax(-1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 5, 333, 20_000]),
    st.sampled_from([0.0, 0.3, 1.0, 3.0, 30.0]),
    st.sampled_from([0.0, 0.5, 0.999]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, -50.0, 50.0]),
)
def test_pruned_draw_equals_the_unpruned(
    generator_seed: int, vocab_size: int, spread: float, excluded: float, dtype: torch.dtype, shift: float
) -> None:
    """Peaked, flat and tied rows, excluded tokens, greedy rows in between, and rows that are not normalised."""
    generator = torch.Generator().manual_seed(generator_seed)
    logits = torch.randn(6, vocab_size, generator=generator, dtype=dtype) * spread
    logits[torch.rand(6, vocab_size, generator=generator) < excluded] = -math.inf
    logits[:, 0] = 0.0
    arguments = (
        logits.log_softmax(-1) + shift,
        torch.randint(-(2**63), 2**63 - 1, (6,), generator=generator),
        torch.randint(0, 2**20, (6,), generator=generator),
        torch.rand(6, generator=generator) < 0.3,
    )
    assert torch.equal(draw(*arguments), unpruned_draw(*arguments))


def test_pruned_draw_equals_the_unpruned_at_a_real_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.3, 1.0, 1.5, 100.0):
        log_probs = (torch.randn(16, 151_936, generator=generator) * 3 / temperature).log_softmax(-1)
        arguments = (log_probs, random_seeds(16, 1), torch.arange(16), no(16))
        assert torch.equal(draw(*arguments), unpruned_draw(*arguments))


def test_contenders_are_all_that_reach_the_bound() -> None:
    """Every token contends at the bound of its own score, and few do without reaching it."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = 50_000
    log_probs = (torch.randn(1, vocab_size, generator=generator) * 3).log_softmax(-1)
    for seed in range(30):
        seeds = torch.tensor([seed])
        scores = log_probs + gumbel_noise(seeds, seeds, torch.arange(vocab_size))
        for token in (*scores[0].topk(3).indices.tolist(), seed, 1000 + seed):
            bound = scores[0, token].item()
            contenders = _contenders(log_probs, _row_states(seeds, seeds), bound).token_ids
            assert token in contenders
            reaching = torch.where(scores[0] >= bound)[0]
            assert set(reaching.tolist()) <= set(contenders.tolist())
            assert len(contenders) < 3 * len(reaching) + 100


def test_a_winner_below_the_likely_bound_is_found() -> None:
    """A row whose only token has the quietest noise of 10^6, so that nothing reaches the first pruning bound."""
    seeds = torch.arange(NUM_DRAWS)
    quietest = gumbel_noise(seeds, torch.zeros_like(seeds), torch.tensor([0]))[:, 0].argmin()
    for log_prob in (0.0, -1.0, -1000.0):
        log_probs = torch.tensor([[log_prob, -math.inf]])
        assert draw(log_probs, seeds[quietest, None], torch.tensor([0]), no(1)).tolist() == [0]


def test_rows_do_not_depend_on_their_batch() -> None:
    log_probs = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    seeds, positions = random_seeds(300, 1), torch.arange(300)
    is_greedy = positions % 3 == 0
    batched = draw(log_probs, seeds, positions, is_greedy)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    assert torch.equal(
        draw(log_probs[order], seeds[order], positions[order], is_greedy[order]), batched[order]
    )
    alone = [
        draw(*(x[i : i + 1] for x in (log_probs, seeds, positions, is_greedy))).item() for i in range(50)
    ]
    assert alone == batched[:50].tolist()


def test_ties_go_to_the_lowest_id() -> None:
    greedy = torch.ones(1, dtype=torch.bool)
    zero = torch.zeros(1, dtype=torch.int64)
    assert draw(torch.tensor([[-2.0, -1.0, -1.0]]), zero, zero, greedy).tolist() == [1]
    # A tie under noise: the difference of the noises of two tokens is the difference of their log p.
    noise = gumbel_noise(zero, zero, torch.arange(2))
    log_probs = -noise
    assert draw(log_probs, zero, zero, no(1)).tolist() == [0]
    ranked = perturbed_top(log_probs, torch.ones(1), zero, zero, no(1), num_ranked=2, top_m=2)
    assert ranked.token_ids.tolist() == [[0, 1]]
    ranked = perturbed_top(torch.zeros(1, 3), zero, zero, zero, greedy, num_ranked=3, top_m=3)
    assert ranked.token_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize(
    ("log_probs", "token"),
    [
        ([math.nan, -1.0, math.nan, -math.inf], 1),
        ([0.0, math.inf, math.nan, math.inf], 1),
        ([math.nan] * 4, 0),
        ([-math.inf] * 4, 0),
        ([-math.inf, math.nan, -math.inf, -3e38], 3),
    ],
)
def test_scores_that_are_not_finite(log_probs: list[float], token: int, is_greedy: bool) -> None:
    for seed in range(20):
        row = (torch.tensor([log_probs]), torch.tensor([seed]), torch.tensor([3]), torch.tensor([is_greedy]))
        assert draw(*row).tolist() == [token]


def test_excluded_tokens_are_never_drawn() -> None:
    log_probs = torch.tensor([0.0, -math.inf, 0.0, -math.inf]).log_softmax(-1).expand(10_000, 4)
    tokens = draw(log_probs, random_seeds(10_000, 3), torch.zeros(10_000, dtype=torch.int64), no(10_000))
    assert set(tokens.tolist()) == {0, 2}


def test_arguments_need_one_value_a_row() -> None:
    log_probs, rows = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"positions must have shape \(2,\), got \(3,\)"):
        draw(log_probs, rows, torch.zeros(3, dtype=torch.int64), no(2))
    with pytest.raises(ValueError, match="num_ranked must be from 1 to 3 .* got 4"):
        perturbed_top(log_probs, torch.ones(2), rows, rows, no(2), num_ranked=4, top_m=64)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 40), st.floats(0.1, 2.0))
def test_draft_ranks_its_most_likely_tokens_by_perturbed_score(
    generator_seed: int, num_ranked: int, top_m: int, temperature: float
) -> None:
    num_ranked = min(num_ranked, top_m)
    generator = torch.Generator().manual_seed(generator_seed)
    logits = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    logits[2, 7] = math.nan
    seeds, positions = random_seeds(3, generator_seed), torch.tensor([1, 2, 3])
    is_greedy = torch.tensor([False, True, False])
    temperatures = torch.tensor([temperature, 0.0, temperature], dtype=torch.float64)
    ranked = perturbed_top(
        logits, temperatures, seeds, positions, is_greedy, num_ranked=num_ranked, top_m=top_m
    )
    noise = gumbel_noise(seeds, positions, torch.arange(50))
    for row in range(3):
        clean = logits[row].nan_to_num(-math.inf)
        kept = clean.sort(descending=True).indices[:top_m]
        scores = clean if is_greedy[row] else clean / temperature + noise[row]
        best = kept[scores[kept].sort(descending=True).indices][:num_ranked]
        assert torch.equal(ranked.token_ids[row], best)
        torch.testing.assert_close(ranked.scores[row], scores[best])


def test_draft_that_is_the_target_is_always_right() -> None:
    logits = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * 2
    seeds, positions, is_greedy = random_seeds(500, 1), torch.arange(500), torch.arange(500) % 2 == 0
    ranked = perturbed_top(logits, torch.ones(500), seeds, positions, is_greedy, num_ranked=1, top_m=64)
    assert torch.equal(ranked.token_ids[:, 0], draw(logits.log_softmax(-1), seeds, positions, is_greedy))


def goodness_of_fit(cells: torch.Tensor, law: torch.Tensor) -> float:
    counts = torch.bincount(cells, minlength=law.numel())
    return chisquare(counts.numpy(), (law.flatten() / law.sum() * cells.numel()).numpy()).pvalue


def draw_from_p(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return draw(P.log().expand(len(seeds), 4), seeds, positions, no(len(seeds)))


@pytest.mark.parametrize("kind", ["sequential", "random", "shifted"])
def test_law_across_positions(kind: str) -> None:
    seeds = {
        "sequential": torch.arange(NUM_DRAWS),
        "random": random_seeds(NUM_DRAWS, 5),
        "shifted": torch.arange(NUM_DRAWS) << 32,
    }[kind]
    tokens = [draw_from_p(seeds, torch.full_like(seeds, position)) for position in (17, 18, 19)]
    joint = P[:, None, None] * P[:, None] * P
    assert goodness_of_fit(tokens[0] * 16 + tokens[1] * 4 + tokens[2], joint) > 0.001


def test_law_across_neighbouring_seeds_and_long_sequences() -> None:
    one_request = draw_from_p(torch.full((NUM_DRAWS,), 42), torch.arange(NUM_DRAWS))
    assert goodness_of_fit(one_request[::2] * 4 + one_request[1::2], P[:, None] * P) > 0.001
    one_position = draw_from_p(torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 7))
    assert goodness_of_fit(one_position[::2] * 4 + one_position[1::2], P[:, None] * P) > 0.001


@pytest.mark.parametrize("stride", [1, 256, 32_768])
def test_law_across_token_ids(stride: int) -> None:
    """Neighbouring and far ids carry independent noise: the law is p, also jointly with the other ids' draw."""
    seeds, positions = random_seeds(NUM_DRAWS, 6), torch.arange(NUM_DRAWS)
    ids = 1000 + stride * torch.arange(8)
    tokens = [(P.log() + gumbel_noise(seeds, positions, half)).argmax(-1) for half in (ids[::2], ids[1::2])]
    assert goodness_of_fit(tokens[0] * 4 + tokens[1], P[:, None] * P) > 0.001


def test_uniform_streams_are_independent_of_each_other_and_of_the_noise() -> None:
    seeds, positions = torch.arange(NUM_DRAWS // 10) // 100, torch.arange(NUM_DRAWS // 10) % 100
    cells = [(seeded_uniforms(seeds, positions, stream) * 4).long() for stream in Stream]
    cells.append(draw_from_p(seeds, positions))
    for i, first in enumerate(cells):
        for second in cells[:i]:
            counts = torch.bincount(first * 4 + second, minlength=16).view(4, 4)
            assert chi2_contingency(counts.numpy()).pvalue > 0.001
    for uniforms in cells[:3]:
        assert goodness_of_fit(uniforms, torch.ones(4, dtype=torch.float64)) > 0.001
