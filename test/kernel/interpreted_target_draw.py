"""Target draws in Triton's interpreter. ``test_triton_kernels.py`` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_draft_sampler import ODD, poisoned  # noqa: F401

from sglang_ssd.algorithm import verification
from sglang_ssd.algorithm.shared_noise import draw, gumbel_noise
from sglang_ssd_kernel.cpu.target_draw import reference as reference_draw_and_agree
from sglang_ssd_kernel.triton import target_draw
from sglang_ssd_kernel.triton.target_draw import draw_and_agree, reference_residual, verify_residual


def draw_arguments(batch_size, width, vocab_size, dtype=torch.float32, seed=0, spread=3.0):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch_size, width, vocab_size, generator=random, dtype=torch.float64) * spread
    return {
        "scores": scores.log_softmax(-1).to(dtype),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=random),
        "positions": torch.randint(0, 2**20, (batch_size,), generator=random),
        "is_greedy": torch.arange(batch_size) % 3 == 1,
        "proposed": torch.zeros(batch_size, width - 1, dtype=torch.int64),
        "lengths": torch.full((batch_size,), width - 1),
    }


def assert_same(actual, expected):
    for name, values in expected._asdict().items():
        assert torch.equal(getattr(actual, name), values), name


def draws_of_the_algorithm(rows):
    batch_size, width, _ = rows["scores"].shape
    positions = rows["positions"][:, None] + torch.arange(width)
    columns = (rows["seeds"][:, None].expand_as(positions), positions)
    columns += (rows["is_greedy"][:, None].expand_as(positions),)
    return draw(rows["scores"].flatten(0, 1), *(column.flatten() for column in columns)).view(
        batch_size, width
    )


@pytest.mark.parametrize("dtype", target_draw.DTYPES)
@pytest.mark.parametrize(
    ("width", "vocab_size", "spread"), [(1, 1, 1.0), (3, 50, 3.0), (2, 9000, 0.0), (4, 4097, 1.0)]
)
def test_draws_are_those_of_the_algorithm(width, vocab_size, spread, dtype):
    rows = draw_arguments(3, width, vocab_size, dtype, spread=spread)
    actual = draw_and_agree(**rows)
    assert torch.equal(actual.token_ids, draws_of_the_algorithm(rows))
    assert_same(actual, reference_draw_and_agree(**rows))


def test_a_real_vocabulary():
    rows = draw_arguments(1, 2, 151_936)
    assert torch.equal(draw_and_agree(**rows).token_ids, draws_of_the_algorithm(rows))


def test_logits_and_temperatures():
    rows = draw_arguments(4, 2, 3000)
    temperatures = torch.tensor([0.3, 0.0, 1.0, 1e3], dtype=torch.float64)
    logits = rows["scores"] * 2 + 5
    tempered = logits.double() / torch.where(rows["is_greedy"], 1.0, temperatures)[:, None, None]
    rows["scores"] = tempered
    expected = draws_of_the_algorithm(rows)
    rows["scores"] = logits
    assert torch.equal(draw_and_agree(**rows, temperatures=temperatures).token_ids, expected)
    assert_same(draw_and_agree(**rows, temperatures=temperatures),
                reference_draw_and_agree(**rows, temperatures=temperatures))  # fmt: skip


@settings(max_examples=8)
@given(st.lists(st.sampled_from(ODD), min_size=1, max_size=70))
def test_odd_scores(values):
    rows = draw_arguments(2, 2, len(values))
    rows["scores"] = torch.tensor([values, [math.nan] * len(values)]).expand(2, -1, -1).contiguous()
    assert torch.equal(draw_and_agree(**rows).token_ids, draws_of_the_algorithm(rows))


def test_ties_go_to_the_lowest_id():
    """Scores that undo the noise, but for rounding: float64 decides, and the lowest of those that are equal then."""
    rows = draw_arguments(1, 1, 6000, torch.float64)
    tied = torch.arange(5, 6000, 200)  # in both blocks
    rows["scores"][:] = -math.inf
    rows["scores"][0, 0, tied] = -gumbel_noise(rows["seeds"], rows["positions"], tied)[0]
    assert torch.equal(draw_and_agree(**rows).token_ids, draws_of_the_algorithm(rows))
    rows["is_greedy"][:] = True
    rows["scores"][:] = 1.0
    assert draw_and_agree(**rows).token_ids.tolist() == [[0]]


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4))
def test_agreement(seed, batch_size, width):
    """Proposals that agree for a while, and lengths that end before."""
    rows = draw_arguments(batch_size, width, 30, seed=seed, spread=1.0)
    tokens = draws_of_the_algorithm(rows)
    random = torch.Generator().manual_seed(seed)
    wrong = torch.rand(batch_size, width - 1, generator=random) < 0.3
    rows["proposed"] = torch.where(wrong, -1, tokens[:, :-1])
    rows["lengths"] = torch.randint(0, width, (batch_size,), generator=random)
    actual = draw_and_agree(**rows)
    expected = verification.agree(tokens, rows["proposed"], rows["lengths"])
    assert torch.equal(actual.num_accepted, expected.num_accepted)
    assert torch.equal(actual.bonus_tokens, expected.bonus_tokens)
    assert_same(actual, reference_draw_and_agree(**rows))


def residual_arguments(batch_size, lookahead, vocab_size, num_q=4, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    p = (torch.randn(batch_size, lookahead + 1, vocab_size, generator=random) * 2).softmax(-1)
    # Tokens that are likely and so are proposed and accepted, among them.
    q_ids = (
        (p[:, :-1] + torch.rand(batch_size, lookahead, vocab_size, generator=random) / 20).topk(num_q).indices
    )
    q_probs = (torch.randn(q_ids.shape, generator=random)).softmax(-1)
    drawn = torch.randint(0, num_q, (batch_size, lookahead, 1), generator=random)
    return {
        "p": p.to(dtype),
        "proposed": q_ids.gather(-1, drawn)[..., 0],
        "lengths": torch.randint(0, lookahead + 1, (batch_size,), generator=random),
        "is_one_hot": torch.rand(batch_size, generator=random) < 0.2,
        "q_ids": q_ids,
        "q_probs": q_probs,
        "accept_uniforms": torch.rand(batch_size, lookahead, generator=random, dtype=torch.float64),
        "bonus_uniforms": torch.rand(batch_size, generator=random, dtype=torch.float64),
    }


def assert_residual_is_that_of_the_algorithm(rows):
    actual, expected = verify_residual(**rows), verification.verify_residual(**rows)
    assert_same(actual, expected)
    assert_same(actual, reference_residual(**rows))
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("lookahead", "vocab_size", "num_q"), [(1, 2, 1), (3, 60, 4), (3, 9000, 9), (7, 4097, 40)]
)
def test_residual(lookahead, vocab_size, num_q, dtype):
    rows = residual_arguments(4, lookahead, vocab_size, num_q, dtype=dtype)
    assert_residual_is_that_of_the_algorithm(rows)


def test_residual_without_a_proposal():
    rows = residual_arguments(3, 1, 50)
    rows["lengths"][:] = 0
    assert not assert_residual_is_that_of_the_algorithm(rows).num_accepted.any()


def test_no_residual_is_left_where_p_is_q():
    """Rounding may reject then: the bonus is drawn from p, and never a token of probability 0."""
    rows = residual_arguments(4, 1, 4, num_q=4)
    rows["p"][:, 0] = torch.tensor([0.5, 0.25, 0.25, 0.0])
    rows["q_ids"][:] = torch.arange(4)
    rows["q_probs"][:] = torch.tensor([0.5, 0.25, 0.25, 0.0])
    rows["proposed"][:] = torch.tensor([[0], [1], [2], [3]])
    rows["accept_uniforms"][:] = 1.0
    rows["bonus_uniforms"][:] = 1 - 2**-53
    rows["lengths"][:], rows["is_one_hot"][:] = 1, False
    actual = assert_residual_is_that_of_the_algorithm(rows)
    assert actual.num_accepted.tolist() == [0, 0, 0, 0]
    assert actual.bonus_tokens.tolist() == [2, 2, 2, 2]
    rows["p"][:, 0] = 0.0
    assert assert_residual_is_that_of_the_algorithm(rows).bonus_tokens.tolist() == [0, 0, 0, 0]


#: Every way in which one value of a draft or of the target can be wrong.
MALFORMED = [
    *(("proposed", value) for value in (-1, 12)),
    *(("q_ids", value) for value in (-1, 12, 2**40)),
    *(("q_probs", value) for value in (-0.1, math.nan, math.inf, 1.5, 0.0, 5e-4)),
    *(("p", value) for value in (math.nan, math.inf, -1.0)),
]


@settings(max_examples=2)
@given(st.integers(0, 2**32))
def test_malformed_laws(seed):
    """Each at a random position, of a whole proposal, alone and together with a token that q has twice."""
    rows = residual_arguments(2 * len(MALFORMED), 3, 12, seed=seed)
    rows["lengths"][:], random = 3, Random(seed)
    for request, (name, value) in enumerate(MALFORMED * 2):
        place = request, random.randrange(3)
        rows[name][place] = value
        if request >= len(MALFORMED):
            rows["q_ids"][place][0] = rows["q_ids"][place][1]
    assert assert_residual_is_that_of_the_algorithm(rows).num_malformed.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p": torch.zeros(3, 9)}, r"\(3, 9\)"),
        ({"p": torch.zeros(3, 3, 0)}, r"\(3, 3, 0\)"),
        ({"p": torch.zeros(3, 3, 9, dtype=torch.int32)}, "int32"),
        ({"proposed": torch.zeros(3, 3, dtype=torch.int64)}, r"proposed .*\(3, 2\).*\(3, 3\)"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, r"lengths .*\(2,\)"),
        ({"is_one_hot": torch.zeros(3)}, "is_one_hot .*float32"),
        ({"q_ids": torch.zeros(3, 2, 5, dtype=torch.int64)}, r"q_probs .*\(3, 2, 5\)"),
        (
            {"q_ids": torch.zeros(3, 2, 129, dtype=torch.int64), "q_probs": torch.zeros(3, 2, 129)},
            r"\(3, 2, 129\)",
        ),
        ({"accept_uniforms": torch.zeros(3, 2)}, "accept_uniforms .*float32"),
    ],
)
def test_bad_residual_calls(changes, message):
    with pytest.raises(ValueError, match=message):
        verify_residual(**(residual_arguments(3, 2, 9) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(0, 2, 9)}, r"\(0, 2, 9\)"),
        ({"seeds": torch.zeros(2)}, "seeds .*float32"),
        ({"is_greedy": torch.zeros(3, dtype=torch.bool)}, r"is_greedy .*\(3,\)"),
        ({"temperatures": torch.zeros(2)}, "temperatures .*float32"),
    ],
)
def test_bad_draw_calls(changes, message):
    with pytest.raises(ValueError, match=message):
        draw_and_agree(**(draw_arguments(2, 2, 9) | changes))
