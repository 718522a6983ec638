"""The CPU sampling kernels, in every build this processor runs and as torch references, against ``sglang_ssd.algorithm``."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_builds import build  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_ssd.algorithm.saguaro import saguaro_probs, sample_sparse
from sglang_ssd.algorithm.shared_noise import Stream, draw, gumbel_noise, perturbed_top, seeded_uniforms
from sglang_ssd.algorithm.verification import agree
from sglang_ssd_kernel import draw_and_agree, sample_saguaro, sample_shared_noise

DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])

#: Spreads and special values of logits: peaked and flat rows, rows of ties, and what no model should say.
KINDS = ("peaked", "flat", "tied", "constant", "rising", "masked", "odd", "nothing")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that kernels are given holds what nobody expects."""
    new_empty = torch.Tensor.new_empty

    def poison(self, *args, **kwargs):
        tensor = new_empty(self, *args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def logits_of(kind, num_rows, vocab_size, random):
    x = torch.randn(num_rows, vocab_size, generator=random)
    match kind:
        case "peaked":
            return x * 10
        case "tied":
            return (x * 2).round()
        case "constant":
            return torch.zeros_like(x)
        case "rising":
            return x.sort().values
        case "masked":
            return x.masked_fill(torch.rand(x.shape, generator=random) < 0.99, -math.inf)
        case "odd":
            odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38])
            return torch.where(
                torch.rand(x.shape, generator=random) < 0.3,
                odd[torch.randint(0, 7, x.shape, generator=random)],
                x,
            )
        case "nothing":
            return x.masked_fill(x > 0, math.nan).masked_fill(x <= 0, -math.inf)
    return x


class Rows:
    """Random rows: logits and the columns that a sampler wants."""

    def __init__(self, num_rows, vocab_size, dtype, kind="peaked", seed=0, greedy=0.3):
        random = torch.Generator().manual_seed(seed)
        self.logits = logits_of(kind, num_rows, vocab_size, random).to(dtype)
        self.temperatures = torch.rand(num_rows, generator=random, dtype=torch.float64) * 1.5 + 0.2
        self.seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=random)
        self.positions = torch.randint(0, 2**20, (num_rows,), generator=random)
        self.is_greedy = torch.rand(num_rows, generator=random) < greedy
        self.fan_out = torch.randint(0, 12, (num_rows,), generator=random)
        self.c = torch.tensor([0.0, 0.05, 0.5, 1.0], dtype=torch.float64)[torch.arange(num_rows) % 4]

    @property
    def columns(self):
        return self.temperatures, self.seeds, self.positions, self.is_greedy


sizes = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 200, 1000, 5003])


# ---------------------------------------------------------------------------------------------------------------------
# Draft
# ---------------------------------------------------------------------------------------------------------------------


def top_by_definition(logits, count):
    """Largest first, ties by the lowest id, NaN as -inf."""
    clean = logits.float().masked_fill(logits.isnan(), -math.inf)
    top = clean.sort(dim=-1, descending=True, stable=True)
    return top.indices[:, :count], top.values[:, :count]


@settings(max_examples=120)
@given(
    st.integers(0, 2**32),
    st.sampled_from(KINDS),
    sizes,
    st.integers(1, 100),
    st.integers(1, 12),
    st.sampled_from(DTYPES),
)
def test_draft_ranks_as_the_algorithm(seed, kind, vocab_size, top_m, num_ranked, dtype):
    top_m = min(top_m, vocab_size)
    num_ranked = min(num_ranked, top_m)
    rows = Rows(5, vocab_size, dtype, kind, seed)
    drafted = sample_shared_noise(rows.logits, *rows.columns, num_ranked=num_ranked, top_m=top_m)
    expected = perturbed_top(rows.logits, *rows.columns, num_ranked=num_ranked, top_m=top_m)
    assert torch.equal(drafted.ranked_ids, expected.token_ids)
    torch.testing.assert_close(drafted.scores, expected.scores, rtol=1e-14, atol=1e-14)
    assert torch.equal(drafted.token_ids, expected.token_ids[:, 0])
    ids, values = top_by_definition(rows.logits, top_m)
    assert torch.equal(drafted.top_ids, ids)
    assert torch.equal(drafted.top_logits, values)
    assert drafted.q is None


@dtypes
@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_draft_at_a_real_vocabulary(num_rows, dtype):
    """bfloat16 logits of this size tie at every cut."""
    for seed in range(3):
        rows = Rows(num_rows, 151_936, dtype, "flat", seed)
        drafted = sample_shared_noise(rows.logits, *rows.columns, num_ranked=12, top_m=64)
        expected = perturbed_top(rows.logits, *rows.columns, num_ranked=12, top_m=64)
        assert torch.equal(drafted.ranked_ids, expected.token_ids)


@settings(max_examples=120)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), sizes, st.integers(1, 100), st.sampled_from(DTYPES))
def test_saguaro_draws_as_the_algorithm(seed, kind, vocab_size, top_m, dtype):
    top_m = min(top_m, vocab_size)
    rows = Rows(8, vocab_size, dtype, kind, seed)
    drafted = sample_saguaro(
        rows.logits, *rows.columns, rows.fan_out, rows.c, num_ranked=min(3, top_m), top_m=top_m
    )
    ids, values = top_by_definition(rows.logits, top_m)
    assert torch.equal(drafted.top_ids, ids)
    assert torch.equal(drafted.ranked_ids, ids[:, :3])
    tempered = values.double() / torch.where(rows.is_greedy, 1.0, rows.temperatures)[:, None]
    assert torch.equal(drafted.scores, tempered[:, :3])
    uniforms = seeded_uniforms(rows.seeds, rows.positions, Stream.DRAFT)
    for row in range(8):
        this = slice(row, row + 1)
        if rows.is_greedy[row]:
            assert drafted.q[row].tolist() == [1.0] + [0.0] * (top_m - 1)
            assert drafted.token_ids[row] == ids[row, 0]
            continue
        q = saguaro_probs(tempered[this], rows.fan_out[this], float(rows.c[row]))
        torch.testing.assert_close(drafted.q[this], q, rtol=3e-7, atol=1e-37)
        assert drafted.token_ids[row] == ids[row, sample_sparse(drafted.q[this], uniforms[this])]


@pytest.mark.parametrize("c", [1.0, 0.3])
def test_saguaro_draws_by_its_law(c):
    """The tokens of many seeds have the law that comes with them."""
    num_rows = 20_000
    logits = torch.tensor([[1.0, 0.4, 0.9, -0.5, -3.0, 0.0]]).expand(num_rows, 6)
    drafted = sample_saguaro(
        logits,
        torch.full((num_rows,), 0.8, dtype=torch.float64),
        torch.arange(num_rows) * 7919,
        torch.full((num_rows,), 12),
        torch.zeros(num_rows, dtype=torch.bool),
        torch.full((num_rows,), 2),
        torch.full((num_rows,), c, dtype=torch.float64),
        num_ranked=1,
        top_m=5,
    )
    assert drafted.q.unique(dim=0).shape[0] == 1
    counts = torch.stack([(drafted.token_ids == token).sum() for token in drafted.top_ids[0]])
    expected = drafted.q[0].double() / drafted.q[0].double().sum() * num_rows
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001


@dtypes
def test_draft_rows_may_be_wider_than_their_vocabulary(dtype):
    """A slice of wider rows, as of a draft whose vocabulary is padded further than the target's."""
    rows = Rows(4, 300, dtype, "flat")
    narrow = rows.logits[:, :277].clone()
    rows.logits[:, 277:] = 1e6
    for sample in (
        lambda logits: sample_shared_noise(logits, *rows.columns, num_ranked=3, top_m=20),
        lambda logits: sample_saguaro(logits, *rows.columns, rows.fan_out, rows.c, num_ranked=3, top_m=20),
    ):
        for found, expected in zip(sample(rows.logits[:, :277]), sample(narrow)):
            assert found is expected is None or torch.equal(found, expected)


def test_float16_goes_to_the_reference():
    rows = Rows(4, 300, torch.float16, "tied")
    drafted = sample_shared_noise(rows.logits, *rows.columns, num_ranked=3, top_m=20)
    assert torch.equal(
        drafted.ranked_ids, perturbed_top(rows.logits, *rows.columns, num_ranked=3, top_m=20).token_ids
    )


def test_draft_rows_do_not_depend_on_threads():
    rows = Rows(16, 1000, torch.float32, "flat")
    num_threads = torch.get_num_threads()
    expected = sample_saguaro(rows.logits, *rows.columns, rows.fan_out, rows.c, num_ranked=3, top_m=20)
    torch.set_num_threads(2)
    try:
        found = sample_saguaro(rows.logits, *rows.columns, rows.fan_out, rows.c, num_ranked=3, top_m=20)
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


COLUMNS = {
    "temperatures": torch.ones(2, dtype=torch.float64), "seeds": torch.arange(2), "positions": torch.arange(2),
    "is_greedy": torch.zeros(2, dtype=torch.bool), "fan_out": torch.arange(2),
    "c": torch.ones(2, dtype=torch.float64),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2)}, r"logits .*\(2,\)"),
        ({"logits": torch.zeros(0, 5)}, r"logits .*\(0, 5\)"),
        ({"logits": torch.zeros(2, 0)}, r"logits .*\(2, 0\)"),
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, r"logits .*int64"),
        ({"logits": torch.zeros(2, 10)[:, ::2]}, r"contiguous in V"),
        ({"seeds": torch.arange(3)}, r"seeds .*\(3,\)"),
        ({"seeds": torch.arange(2, dtype=torch.int32)}, r"seeds .*int32"),
        ({"temperatures": torch.ones(2)}, r"temperatures .*float32"),
        ({"positions": torch.arange(4)[::2]}, r"positions"),
        ({"is_greedy": torch.zeros(2, dtype=torch.int64)}, r"is_greedy .*int64"),
        ({"fan_out": torch.arange(1)}, r"fan_out .*\(1,\)"),
        ({"c": torch.ones(2)}, r"c must .*float32"),
        ({"num_ranked": 0}, r"num_ranked .*0, 4"),
        ({"num_ranked": 5}, r"num_ranked .*5, 4"),
        ({"num_ranked": 6, "top_m": 9}, r"num_ranked .*6, 5"),
    ],
)
def test_bad_draft_calls(changes, message):
    good = COLUMNS | {"logits": torch.zeros(2, 5), "num_ranked": 1, "top_m": 4}
    sample_saguaro(**good)
    with pytest.raises(ValueError, match=message):
        sample_saguaro(**(good | changes))
    if not {"fan_out", "c"} & set(changes):
        shared = {name: value for name, value in (good | changes).items() if name not in ("fan_out", "c")}
        with pytest.raises(ValueError, match=message):
            sample_shared_noise(**shared)


# ---------------------------------------------------------------------------------------------------------------------
# Target
# ---------------------------------------------------------------------------------------------------------------------


def draw_all(rows, scores, proposed, lengths):
    """Draws and agreement by the algorithm. ``rows``: a ``Rows`` of B requests; scores [B, K + 1, V]."""
    width, vocab_size = scores.shape[1:]
    tokens = draw(
        scores.reshape(-1, vocab_size),
        rows.seeds.repeat_interleave(width),
        (rows.positions[:, None] + torch.arange(width)).flatten(),
        rows.is_greedy.repeat_interleave(width),
    ).view(-1, width)
    return tokens, agree(tokens, proposed, lengths)


@settings(max_examples=120)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), sizes, st.integers(0, 4), st.sampled_from(DTYPES))
def test_target_draws_as_the_algorithm(seed, kind, vocab_size, lookahead, dtype):
    """Normalised scores and raw ones; proposals that agree for a while."""
    random = torch.Generator().manual_seed(seed)
    rows, width = Rows(4, 1, dtype, seed=seed), lookahead + 1
    raw = logits_of(kind, 4 * width, vocab_size, random).view(4, width, vocab_size)
    for scores in (raw.to(dtype), raw.log_softmax(-1).to(dtype)):
        lengths = torch.randint(0, width, (4,), generator=random)
        tokens, _ = draw_all(rows, scores, torch.zeros(4, lookahead, dtype=torch.int64), lengths)
        is_wrong = torch.rand(4, lookahead, generator=random) < 0.3
        proposed = tokens[:, :-1] + is_wrong.long()
        _, expected = draw_all(rows, scores, proposed, lengths)
        drawn = draw_and_agree(scores, rows.seeds, rows.positions, rows.is_greedy, proposed, lengths)
        assert torch.equal(drawn.token_ids, tokens)
        assert torch.equal(drawn.num_accepted, expected.num_accepted)
        assert torch.equal(drawn.bonus_tokens, expected.bonus_tokens)


@dtypes
def test_target_draws_at_a_real_vocabulary(dtype, build):  # noqa: F811
    random = torch.Generator().manual_seed(0)
    num_requests = 1 if build == "none" else 8
    for temperature in (0.3, 1.0, 1.5, 100.0):
        logits = torch.randn(num_requests, 3, 151_936, generator=random) * 3
        scores = (logits / temperature).log_softmax(-1).to(dtype)
        rows = Rows(num_requests, 1, dtype, seed=int(temperature * 10))
        proposed = torch.zeros(num_requests, 2, dtype=torch.int64)
        lengths = torch.zeros(num_requests, dtype=torch.int64)
        tokens, _ = draw_all(rows, scores, proposed, lengths)
        drawn = draw_and_agree(scores, rows.seeds, rows.positions, rows.is_greedy, proposed, lengths)
        assert torch.equal(drawn.token_ids, tokens)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(["peaked", "flat", "tied", "masked"]), sizes)
def test_target_draws_from_logits(seed, kind, vocab_size):
    """With temperatures, scores are logits."""
    random = torch.Generator().manual_seed(seed)
    rows = Rows(6, 1, torch.float32, seed=seed)
    logits = logits_of(kind, 6, vocab_size, random)[:, None]
    no_proposal = torch.zeros(6, 0, dtype=torch.int64)
    lengths = torch.zeros(6, dtype=torch.int64)
    drawn = draw_and_agree(
        logits, rows.seeds, rows.positions, rows.is_greedy, no_proposal, lengths, rows.temperatures
    )
    scores = logits.double() / torch.where(rows.is_greedy, 1.0, rows.temperatures)[:, None, None]
    tokens, _ = draw_all(rows, scores, no_proposal, lengths)
    assert torch.equal(drawn.token_ids, tokens)


def test_every_token_can_win():
    """Scores that make one chosen token the winner by a hair, wherever it stands, and then another one."""
    vocab_size, seeds, positions = 131, torch.tensor([5]), torch.tensor([9])
    noise = gumbel_noise(seeds, positions, torch.arange(vocab_size))
    no_proposal, zero = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for shift in (0.0, -80.0, 80.0, 3e4):
        for token in range(vocab_size):
            scores = (shift - noise).float()
            scores[0, token] += 1e-5 * max(1.0, abs(shift))
            drawn = draw_and_agree(
                scores[:, None], seeds, positions, torch.tensor([False]), no_proposal, zero
            )
            expected = (scores.double() + noise).argmax(-1)
            assert torch.equal(drawn.token_ids[0], expected)


@dtypes
def test_target_draws_of_strided_rows_and_two_threads(dtype):
    rows = Rows(3, 1, dtype)
    wide = torch.full((5, 6, 90), torch.nan, dtype=dtype)
    scores = wide[1:4, 2:5, 7:84]
    scores.copy_(torch.randn(3, 3, 77))
    arguments = (
        *(rows.seeds, rows.positions, rows.is_greedy, torch.zeros(3, 2, dtype=torch.int64)),
        torch.full((3,), 2),
    )
    expected = draw_and_agree(scores.contiguous(), *arguments)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = draw_and_agree(scores, *arguments)
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(2, 5)}, r"scores .*\(2, 5\)"),
        ({"scores": torch.zeros(0, 3, 5)}, r"scores .*\(0, 3, 5\)"),
        ({"scores": torch.zeros(2, 3, 5).long()}, r"scores .*int64"),
        ({"scores": torch.zeros(2, 3, 10)[..., ::2]}, r"contiguous in V"),
        ({"seeds": torch.arange(3)}, r"seeds .*\(3,\)"),
        ({"positions": torch.arange(2.0)}, r"positions .*float32"),
        ({"is_greedy": torch.zeros(2)}, r"is_greedy .*float32"),
        ({"lengths": torch.arange(2)[:1]}, r"lengths .*\(1,\)"),
        ({"proposed": torch.zeros(2, 3, dtype=torch.int64)}, r"proposed .*\(2, 2\).*\(2, 3\)"),
        ({"temperatures": torch.ones(2)}, r"temperatures .*float32"),
    ],
)
def test_bad_draws(changes, message):
    good = {
        "scores": torch.zeros(2, 3, 5), "seeds": torch.arange(2), "positions": torch.arange(2),
        "is_greedy": torch.zeros(2, dtype=torch.bool), "proposed": torch.zeros(2, 2, dtype=torch.int64),
        "lengths": torch.tensor([2, 0]),
    }  # fmt: skip
    draw_and_agree(**good)
    with pytest.raises(ValueError, match=message):
        draw_and_agree(**(good | changes))
