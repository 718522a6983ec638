"""The draft's sampler in Triton's interpreter. ``test_triton_kernels.py`` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_ssd.algorithm.saguaro import saguaro_probs, sample_sparse
from sglang_ssd.algorithm.shared_noise import Stream, perturbed_top, seeded_uniforms
from sglang_ssd_kernel.cpu.draft_sampler import Drafted, reference
from sglang_ssd_kernel.triton import draft_sampler
from sglang_ssd_kernel.triton.draft_sampler import sample


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that kernels are given holds what nobody expects."""
    new_empty = torch.Tensor.new_empty

    def poison(self, *args, **kwargs):
        tensor = new_empty(self, *args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def arguments(num_rows, vocab_size, dtype=torch.float32, seed=0, spread=3.0):
    random = torch.Generator().manual_seed(seed)
    return {
        "logits": (torch.randn(num_rows, vocab_size, generator=random) * spread).to(dtype),
        "temperatures": torch.rand(num_rows, generator=random, dtype=torch.float64) + 0.3,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=random),
        "positions": torch.randint(0, 2**20, (num_rows,), generator=random),
        "is_greedy": torch.arange(num_rows) % 3 == 1,
    }


def saguaro_arguments(num_rows):
    return {"fan_out": torch.arange(num_rows) % 5, "c": torch.linspace(0, 1, num_rows, dtype=torch.float64)}


def assert_same(actual: Drafted, expected: Drafted):
    for name in ("token_ids", "ranked_ids", "top_ids", "top_logits"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-14, atol=1e-14)
    assert (actual.q is None) == (expected.q is None)
    if actual.q is not None:
        torch.testing.assert_close(actual.q, expected.q, rtol=2e-7, atol=1e-30)


@pytest.mark.parametrize(
    ("vocab_size", "top_m", "num_ranked", "dtype"),
    [
        (1, 64, 1, torch.float32),
        (5, 3, 3, torch.bfloat16),
        (64, 64, 8, torch.float16),
        (300, 1, 1, torch.bfloat16),
        (1000, 64, 8, torch.float32),
        (5000, 37, 5, torch.bfloat16),
        (5000, 37, 5, torch.float16),
        (8191, 128, 128, torch.float32),
        (8191, 128, 128, torch.bfloat16),
    ],
)
def test_both_laws(vocab_size, top_m, num_ranked, dtype):
    """bfloat16 and float16 have ties everywhere: at the cut to the top M and in every rank."""
    given_rows, sizes = arguments(3, vocab_size, dtype), {"num_ranked": num_ranked, "top_m": top_m}
    assert_same(sample(**given_rows, **sizes), reference(**given_rows, **sizes))
    given_rows |= saguaro_arguments(3)
    assert_same(sample(**given_rows, **sizes), reference(**given_rows, **sizes))


def test_a_real_vocabulary():
    given_rows = arguments(2, 151_936)
    sizes = {"num_ranked": 8, "top_m": 64}
    assert_same(sample(**given_rows, **sizes), reference(**given_rows, **sizes))


ODD = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-40]


@settings(max_examples=6)
@given(st.lists(st.sampled_from(ODD), min_size=1, max_size=150), st.data())
def test_odd_logits(values, data):
    """Ties, NaN and infinities, of which a row may have nothing else."""
    given_rows = arguments(3, len(values))
    given_rows["logits"] = torch.tensor([values, values[::-1], [math.nan] * len(values)])
    top_m = data.draw(st.integers(1, min(len(values), 128)))
    sizes = {"num_ranked": data.draw(st.integers(1, top_m)), "top_m": top_m}
    actual = sample(**given_rows, **sizes)
    assert_same(actual, reference(**given_rows, **sizes))
    assert not actual.scores.isnan().any()
    given_rows |= saguaro_arguments(3)
    actual = sample(**given_rows, **sizes)
    assert_same(actual, reference(**given_rows, **sizes))
    assert not actual.q.isnan().any()


@pytest.mark.parametrize("top_m", [8, 64])
def test_shared_noise_is_that_of_the_algorithm(top_m):
    """Without ties, which the algorithm's cut to the top M breaks as torch pleases."""
    given_rows = arguments(4, 2000)
    actual = sample(**given_rows, num_ranked=8, top_m=top_m)
    expected = perturbed_top(**given_rows, num_ranked=8, top_m=top_m)
    assert torch.equal(actual.ranked_ids, expected.token_ids)
    assert torch.equal(actual.token_ids, expected.token_ids[:, 0])
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("c", [0.0, 0.1, 1.0])
def test_saguaro_is_that_of_the_algorithm(c):
    rows, num_rows = arguments(5, 2000), 5
    rows["is_greedy"][:] = False
    fan_out = torch.tensor([0, 1, 3, 15, 99])
    actual = sample(
        **rows, fan_out=fan_out, c=torch.full((num_rows,), c, dtype=torch.float64), num_ranked=3, top_m=16
    )
    top = rows["logits"].topk(16)
    probs = saguaro_probs(top.values.double() / rows["temperatures"][:, None], fan_out, c)
    torch.testing.assert_close(actual.q, probs, rtol=2e-7, atol=0)
    # The token is drawn from what is shipped, to the bit.
    drawn = sample_sparse(actual.q, seeded_uniforms(rows["seeds"], rows["positions"], Stream.DRAFT))
    assert torch.equal(actual.token_ids, actual.top_ids.gather(1, drawn[:, None])[:, 0])


def test_tokens_have_the_law_that_is_shipped():
    """Of the reference: the kernel draws the same tokens, more slowly here."""
    num_rows = 20_000
    rows = arguments(1, 40, spread=1.5)
    rows = {name: column.expand(num_rows, *column.shape[1:]).contiguous() for name, column in rows.items()}
    rows["seeds"] = torch.arange(num_rows)
    rows |= {"fan_out": torch.full((num_rows,), 2), "c": torch.full((num_rows,), 0.3, dtype=torch.float64)}
    drafted = reference(**rows, num_ranked=1, top_m=8)
    counts = (drafted.token_ids[:, None] == drafted.top_ids[0]).sum(0)
    assert chisquare(counts, drafted.q[0].double() / drafted.q[0].double().sum() * num_rows).pvalue > 1e-3
    few = {name: column[:4] for name, column in rows.items()}
    assert torch.equal(sample(**few, num_ranked=1, top_m=8).token_ids, drafted.token_ids[:4])


def test_rows_do_not_depend_on_their_batch():
    rows = arguments(3, 700)
    together = sample(**rows, num_ranked=4, top_m=16)
    for i in range(3):
        alone = sample(**{name: column[i : i + 1] for name, column in rows.items()}, num_ranked=4, top_m=16)
        assert torch.equal(alone.scores[0], together.scores[i])
        assert torch.equal(alone.ranked_ids[0], together.ranked_ids[i])


def test_rows_may_lie_apart():
    rows = arguments(3, 500)
    expected = sample(**rows, num_ranked=4, top_m=16)
    wide = torch.full((3, 1000), math.nan)
    wide[:, :500] = rows["logits"]
    assert_same(sample(**(rows | {"logits": wide[:, :500]}), num_ranked=4, top_m=16), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(0, 9)}, r"\(0, 9\)"),
        ({"logits": torch.zeros(2, 0)}, r"\(2, 0\)"),
        ({"logits": torch.zeros(9)}, r"\(9,\)"),
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, r"\(2, 9\) torch.float64"),
        ({"logits": torch.zeros(2, 18)[:, ::2]}, "contiguous"),
        ({"logits": torch.zeros(1, 1).expand(2, draft_sampler.GROUP * 8192 + 1)}, "contiguous|524288"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds .*\(3,\)"),
        ({"temperatures": torch.zeros(2)}, r"temperatures .*float32"),
        ({"is_greedy": torch.zeros(2)}, r"is_greedy .*float32"),
        ({"num_ranked": 0}, "0, 4"),
        ({"num_ranked": 5}, "5, 4"),
        ({"top_m": 200, "logits": torch.zeros(2, 300)}, "200"),
    ],
)
def test_bad_calls(changes, message):
    good = arguments(2, 9) | {"num_ranked": 2, "top_m": 4}
    with pytest.raises(ValueError, match=message):
        sample(**(good | changes))
