from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from black_box import law, measure
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_ssd.algorithm.saguaro import saguaro_probs, sample_sparse
from sglang_ssd.algorithm.shared_noise import Stream, draw, gumbel_noise, perturbed_top, seeded_uniforms
from sglang_ssd.algorithm.verification import Verified, accepted_histogram, agree, verify_residual

ALMOST_ONE = 1.0 - 2.0**-53
SOUND = ["sampled", "one_hot", "any_law_as_one_hot"]
MALFORMED = [
    "sum",
    "negative",
    "nan",
    "inf",
    "duplicate",
    "unknown_id",
    "all_zero",
    "missing",
    "zero_at_token",
]


class Case(NamedTuple):
    """All V^K proposals of a small model, one a row, with the law that each was proposed by."""

    p: torch.Tensor
    proposed: torch.Tensor
    lengths: torch.Tensor
    is_one_hot: torch.Tensor
    q_ids: torch.Tensor
    q_probs: torch.Tensor
    proposal_probs: torch.Tensor
    num_malformed: int

    def verify(
        self, rows: torch.Tensor, accept_uniforms: torch.Tensor, bonus_uniforms: torch.Tensor
    ) -> Verified:
        batch = [
            x[rows] for x in (self.p, self.proposed, self.lengths, self.is_one_hot, self.q_ids, self.q_probs)
        ]
        return verify_residual(*batch, accept_uniforms, bonus_uniforms)


def random_law(generator: torch.Generator, *shape: int, num_zeros: int = 0) -> torch.Tensor:
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64) ** 2 + 1e-3
    zeros = torch.rand(*shape, generator=generator).topk(num_zeros).indices
    weights.scatter_(-1, zeros, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def sampled_law(probs: torch.Tensor) -> torch.Tensor:
    return law(lambda rows, uniforms: sample_sparse(probs[rows], uniforms), *probs.shape)


def build_case(
    generator: torch.Generator, kind: str, vocab_size: int, lookahead: int, top_m: int, c: float, length: int
) -> Case:
    num_rows = vocab_size**lookahead
    digits = torch.arange(num_rows)[:, None] // vocab_size ** torch.arange(lookahead - 1, -1, -1)
    proposed = digits % vocab_size
    p_by_prefix = [
        random_law(
            generator, vocab_size**depth, vocab_size, num_zeros=int(torch.randint(2, (), generator=generator))
        )
        for depth in range(lookahead + 1)
    ]
    prefixes = [torch.zeros(num_rows, dtype=torch.int64), *digits.T]
    p = torch.stack([table[prefix] for table, prefix in zip(p_by_prefix, prefixes)], dim=1)

    q_ids = torch.zeros(num_rows, lookahead, top_m, dtype=torch.int64)
    q_probs = torch.zeros(num_rows, lookahead, top_m)
    proposal_probs = torch.ones(num_rows, dtype=torch.float64)
    is_malformed = torch.rand(lookahead, generator=generator) < (0.7 if kind in MALFORMED else 0.0)
    for depth in range(length):
        size = vocab_size**depth
        top = torch.randn(size, vocab_size, generator=generator).topk(top_m)
        fan_out = torch.randint(3, (size,), generator=generator)
        # The law of q is relative to its sum, which need not be 1 exactly.
        ids, probs = top.indices, saguaro_probs(top.values, fan_out, c) * 1.0007
        if kind == "one_hot":
            tokens = torch.randint(vocab_size, (size,), generator=generator)
            proposal = torch.eye(vocab_size, dtype=torch.float64)[tokens]
        elif kind == "any_law_as_one_hot":
            proposal = random_law(generator, size, vocab_size)
        elif is_malformed[depth]:
            probs = top.values.softmax(-1)
            probs, ids, proposal = malformed(kind, probs, ids, random_law(generator, size, vocab_size))
        else:
            proposal = torch.zeros(size, vocab_size, dtype=torch.float64).scatter(-1, ids, sampled_law(probs))
        q_ids[:, depth], q_probs[:, depth] = ids[prefixes[depth]], probs[prefixes[depth]]
        proposal_probs *= proposal[prefixes[depth], proposed[:, depth]]
    # What is not proposed holds anything; count each proposal once.
    proposed[:, length:] = -1
    proposal_probs[torch.arange(num_rows) % vocab_size ** (lookahead - length) != 0] = 0.0
    return Case(
        p=p,
        proposed=proposed,
        lengths=torch.full((num_rows,), length),
        is_one_hot=torch.full((num_rows,), kind in ("one_hot", "any_law_as_one_hot")),
        q_ids=q_ids,
        q_probs=q_probs,
        proposal_probs=proposal_probs,
        num_malformed=int(is_malformed[:length].sum()),
    )


def malformed(
    kind: str, probs: torch.Tensor, ids: torch.Tensor, proposal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A q that says nothing about ``proposal``, the law that tokens really come from."""
    probs, ids = probs.clone(), ids.clone()
    match kind:
        case "sum":
            probs *= 0.7
        case "negative":
            probs[:, 0] -= 2.0
            probs[:, -1] += 2.0
        case "nan":
            probs[:, -1] = math.nan
        case "inf":
            probs[:, -1] = math.inf
        case "duplicate":
            ids[:, 1] = ids[:, 0]
            probs[:, :2] = 0.5 * (1 - probs[:, 2:].sum(-1, keepdim=True))
        case "unknown_id":
            ids[:, 0] = proposal.shape[1] + 5
        case "all_zero":
            probs[:] = 0.0
        case "missing" | "zero_at_token":
            # A distribution, but only tokens to which it gives nothing are proposed.
            never = ids[:, :1].clone()
            if kind == "zero_at_token":
                probs[:, 0] = 0.0
                probs[:, 1:] = 1 / (ids.shape[1] - 1)
            else:
                ids[:, 0] = (never[:, 0] + 1) % proposal.shape[1]
                probs[:] = 0.0
                probs[:, 0] = 1.0
            proposal = torch.zeros_like(proposal).scatter(-1, never, 1.0)
    return probs, ids, proposal


def uniforms_until(case: Case, depth: int, last: torch.Tensor) -> torch.Tensor:
    """Accept whatever can be accepted before ``depth`` and use ``last`` there."""
    uniforms = torch.zeros(len(last), case.proposed.shape[1], dtype=torch.float64)
    if depth < uniforms.shape[1]:
        uniforms[:, depth] = last
    return uniforms


def accept_probs(case: Case, depth: int) -> torch.Tensor:
    """The probability ``[N]`` that each proposal is accepted at ``depth``, once everything before is."""
    rows = torch.arange(len(case.p))

    def accepts(uniforms: torch.Tensor) -> torch.Tensor:
        verified = case.verify(rows, uniforms_until(case, depth, uniforms), torch.zeros(len(rows)))
        return verified.num_accepted > depth

    return measure(accepts, len(rows))


def bonus_law(case: Case, depth: int) -> torch.Tensor:
    """The law ``[N, V]`` of the bonus token of each proposal that stops at ``depth``."""

    def draw_bonus(rows: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        rejecting = torch.full_like(uniforms, ALMOST_ONE)
        return case.verify(rows, uniforms_until(case, depth, rejecting), uniforms).bonus_tokens

    return law(draw_bonus, len(case.p), case.p.shape[-1])


def emitted_law(case: Case) -> torch.Tensor:
    """The law of the first K + 1 tokens, ``[V^(K + 1)]``: the emitted run, then draws from p, over all uniforms."""
    num_rows, lookahead = case.proposed.shape
    vocab_size = case.p.shape[-1]
    total = torch.zeros(vocab_size ** (lookahead + 1), dtype=torch.float64)
    reached = case.proposal_probs
    prefix = torch.zeros(num_rows, dtype=torch.int64)
    for depth in range(lookahead + 1):
        accept = accept_probs(case, depth) if depth < lookahead else torch.zeros_like(reached)
        stopped = (reached * (1 - accept))[:, None] * bonus_law(case, depth)
        sequences = prefix[:, None] * vocab_size + torch.arange(vocab_size)
        for later in range(depth + 1, lookahead + 1):
            # Later rounds: p at the prefix emitted so far, found on any row that proposes it.
            first_row = sequences * vocab_size ** (lookahead - later)
            stopped = stopped[..., None] * case.p[:, later].double()[first_row]
            sequences = sequences[..., None] * vocab_size + torch.arange(vocab_size)
        total.index_add_(0, sequences.flatten(), stopped.flatten())
        if depth < lookahead:
            reached = reached * accept
            prefix = prefix * vocab_size + case.proposed[:, depth].clamp(min=0)
    return total


def target_law(case: Case) -> torch.Tensor:
    lookahead = case.proposed.shape[1]
    vocab_size = case.p.shape[-1]
    joint = torch.ones(1, dtype=torch.float64)
    for depth in range(lookahead + 1):
        by_prefix = case.p[:: vocab_size ** (lookahead - depth), depth].double()
        joint = (joint[:, None] * by_prefix).flatten()
    return joint


@pytest.mark.parametrize("kind", SOUND + MALFORMED)
@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.5, 0.05, 0.0]),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_emitted_law_is_the_target_law(
    kind: str, generator_seed: int, vocab_size: int, lookahead: int, top_m: int, c: float, length: int, dtype
) -> None:
    if lookahead == 3:
        vocab_size = min(vocab_size, 3)
    top_m = min(top_m, vocab_size)
    if kind in ("negative", "duplicate", "zero_at_token"):
        top_m = max(top_m, 2)
    generator = torch.Generator().manual_seed(generator_seed)
    case = build_case(generator, kind, vocab_size, lookahead, top_m, c, min(length, lookahead))
    case = case._replace(p=case.p.to(dtype))
    assert case.proposal_probs.sum().item() == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(emitted_law(case), target_law(case), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", SOUND + MALFORMED)
def test_a_malformed_q_is_counted(kind: str) -> None:
    case = build_case(torch.Generator().manual_seed(3), kind, 4, 3, 3, 1.0, 3)
    assert (case.num_malformed > 0) == (kind in MALFORMED)
    drawn = torch.where(case.proposal_probs > 0)[0]
    verified = case.verify(drawn, torch.zeros(len(drawn), 3), torch.zeros(len(drawn)))
    assert verified.num_malformed.tolist() == [case.num_malformed] * len(drawn)


def verify_one(p: list[list[float]], proposed: list[int], **changes) -> Verified:
    """One row whose q is uniform over ids 0 and 1, accepted where possible, with the bonus uniform .5."""
    lookahead = len(proposed)
    arguments = {
        "lengths": torch.tensor([lookahead]),
        "is_one_hot": torch.tensor([False]),
        "q_ids": torch.tensor([0, 1]).expand(1, lookahead, 2),
        "q_probs": torch.full((1, lookahead, 2), 0.5),
        "accept_uniforms": torch.zeros(1, lookahead),
        "bonus_uniforms": torch.tensor([0.5]),
    }
    return verify_residual(p=torch.tensor([p]), proposed=torch.tensor([proposed]), **(arguments | changes))


def test_acceptance_is_strict() -> None:
    p = [[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]
    below, at = torch.tensor([[0.5 - 2**-24]]), torch.tensor([[0.5]])
    assert verify_one(p, [0], accept_uniforms=below).num_accepted.tolist() == [1]
    assert verify_one(p, [0], accept_uniforms=at).num_accepted.tolist() == [0]
    assert verify_one([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]], [0]).num_accepted.tolist() == [0]


def test_bonus_comes_from_the_residual_then_from_p() -> None:
    p = [[0.25, 0.25, 0.5], [0.0, 1.0, 0.0]]
    rejected = verify_one(p, [1], accept_uniforms=torch.tensor([[0.9]]))
    assert (rejected.num_accepted.item(), rejected.bonus_tokens.item()) == (0, 2)
    accepted = verify_one(p, [1])
    assert (accepted.num_accepted.item(), accepted.bonus_tokens.item()) == (1, 1)


def test_a_one_hot_row_never_emits_the_rejected_token_as_bonus() -> None:
    p = [[0.2, 0.7, 0.1], [1.0, 0.0, 0.0]]
    for uniform in torch.linspace(0, ALMOST_ONE, 21, dtype=torch.float64):
        verified = verify_one(
            p,
            [1],
            is_one_hot=torch.tensor([True]),
            accept_uniforms=torch.tensor([[0.7]]),
            bonus_uniforms=uniform[None],
        )
        assert verified.num_accepted.item() == 0 and verified.bonus_tokens.item() != 1


@pytest.mark.parametrize("q_probs", [[0.5, 0.1], [0.5, math.nan], [0.9, -0.1]])
def test_a_token_with_a_malformed_q_is_accepted_with_its_p(q_probs: list[float]) -> None:
    p = [[0.3, 0.7, 0.0], [0.0, 0.0, 1.0]]
    changes = {"q_probs": torch.tensor([[q_probs]])}
    below, above = torch.tensor([[0.29]]), torch.tensor([[0.31]])
    assert verify_one(p, [0], accept_uniforms=below, **changes).num_accepted.tolist() == [1]
    rejected = verify_one(p, [0], accept_uniforms=above, **changes)
    assert (rejected.num_accepted.item(), rejected.bonus_tokens.item()) == (0, 1)


def test_what_is_not_used_does_not_matter() -> None:
    """q of one-hot rows, q and tokens of padding, and probability-0 entries may hold anything."""
    p = [[0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]
    clean = verify_one(p, [1, 0], lengths=torch.tensor([1]))
    q_probs = torch.tensor([[[0.5, 0.5, 0.0], [math.nan, -1.0, 7.0]]])
    q_ids = torch.tensor([[[0, 1, -4], [900, 1, 1]]])
    dirty = verify_one(p, [1, 99], lengths=torch.tensor([1]), q_ids=q_ids, q_probs=q_probs)
    assert dirty == clean and dirty.num_malformed.item() == 0
    one_hot = verify_one(p, [1, 2], is_one_hot=torch.tensor([True]), q_ids=q_ids, q_probs=q_probs)
    assert one_hot == Verified(torch.tensor([2]), torch.tensor([1]), torch.tensor([0]))


@pytest.mark.parametrize("token", [-1, 3, 10**6])
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_a_proposal_that_is_no_token_is_rejected(token: int, is_one_hot: bool) -> None:
    p = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    verified = verify_one(p, [token], is_one_hot=torch.tensor([is_one_hot]))
    assert verified == Verified(torch.tensor([0]), torch.tensor([2]), torch.tensor([1]))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, -0.5])
def test_p_that_is_no_probability_counts_as_zero(broken: float) -> None:
    p = [[broken, 0.4, 0.6], [broken, 0.0, 1.0]]
    assert verify_one(p, [0]).num_accepted.tolist() == [0]
    for uniform in (0.0, 0.5, ALMOST_ONE):
        bonus_uniforms = torch.tensor([uniform], dtype=torch.float64)
        assert verify_one(p, [0], bonus_uniforms=bonus_uniforms).bonus_tokens.item() in (1, 2)
        assert verify_one(p, [1], bonus_uniforms=bonus_uniforms).bonus_tokens.item() == 2
    assert verify_one([[broken] * 3, [broken] * 3], [1]).bonus_tokens.tolist() == [0]


def test_a_rejection_by_rounding_draws_from_p() -> None:
    p = [[0.0, 0.5, 0.5 - 1e-6], [1.0, 0.0, 0.0]]
    almost_one = torch.tensor([[ALMOST_ONE]], dtype=torch.float64)
    verified = verify_one(p, [2], q_ids=torch.tensor([[[1, 2]]]), accept_uniforms=almost_one)
    assert verified.num_accepted.item() == 0 and verified.bonus_tokens.item() in (1, 2)


def test_no_lookahead_is_plain_decoding() -> None:
    p = torch.tensor([[[0.2, 0.8]], [[1.0, 0.0]]])
    nothing = torch.zeros(2, 0)
    verified = verify_residual(
        p,
        nothing.long(),
        torch.tensor([0, 0]),
        torch.tensor([False, True]),
        torch.zeros(2, 0, 4, dtype=torch.int64),
        torch.zeros(2, 0, 4),
        nothing,
        torch.tensor([0.5, 0.5]),
    )
    assert verified.num_accepted.tolist() == [0, 0] and verified.bonus_tokens.tolist() == [1, 0]
    assert agree(torch.tensor([[3], [4]]), nothing.long(), torch.tensor([0, 0])).bonus_tokens.tolist() == [
        3,
        4,
    ]


def test_rows_do_not_depend_on_their_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    cases = [
        build_case(generator, kind, 3, 2, 2, 0.5, length)
        for kind in SOUND + MALFORMED[:4]
        for length in (1, 2)
    ]
    batch = Case(*(torch.cat(parts) for parts in list(zip(*cases))[:7]), num_malformed=0)
    num_rows = len(batch.p)
    uniforms = torch.rand(num_rows, 3, generator=generator)
    together = batch.verify(torch.arange(num_rows), uniforms[:, :2], uniforms[:, 2])
    order = torch.randperm(num_rows, generator=generator)
    for rows in (order, order[:1], order[5:9]):
        some = batch.verify(rows, uniforms[rows, :2], uniforms[rows, 2])
        assert all(torch.equal(a, b[rows]) for a, b in zip(some, together))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_agreement_emits_the_run_of_plain_decoding(generator_seed: int, lookahead: int, greedy: bool) -> None:
    """Whatever is proposed, the emitted tokens are those of drawing one by one with the same noise."""
    vocab_size = 3
    generator = torch.Generator().manual_seed(generator_seed)
    tables = [random_law(generator, vocab_size**depth, vocab_size).log() for depth in range(lookahead + 1)]
    seed, is_greedy = torch.tensor([generator_seed]), torch.tensor([greedy])
    proposed = torch.randint(vocab_size, (1, lookahead), generator=generator)
    length = int(torch.randint(lookahead + 1, (), generator=generator))

    def draw_at(depth: int, prefix: int) -> int:
        return draw(tables[depth][prefix, None], seed, torch.tensor([depth]), is_greedy).item()

    plain, drawn, plain_prefix, prefix = [], [], 0, 0
    for depth in range(lookahead + 1):
        plain.append(draw_at(depth, plain_prefix))
        drawn.append(draw_at(depth, prefix))
        plain_prefix = plain_prefix * vocab_size + plain[-1]
        if depth < lookahead:
            prefix = prefix * vocab_size + proposed[0, depth].item()
    verified = agree(torch.tensor([drawn]), proposed, torch.tensor([length]))
    num_accepted = verified.num_accepted.item()
    emitted = [*proposed[0, :num_accepted].tolist(), verified.bonus_tokens.item()]
    assert emitted == plain[: num_accepted + 1]
    assert num_accepted == length or proposed[0, num_accepted].item() != plain[num_accepted]
    assert verified.num_malformed.item() == 0


def test_histogram() -> None:
    assert accepted_histogram(torch.tensor([0, 2, 2, 3]), 4).tolist() == [1, 0, 2, 1, 0]


NUM_DRAWS = 400_000
CROSSED_P = torch.tensor([0.10, 0.60, 0.30], dtype=torch.float64)
CROSSED_Q = torch.tensor([0.50, 0.25, 0.25])


def p_value(tokens: torch.Tensor) -> float:
    return chisquare(torch.bincount(tokens, minlength=3).numpy(), (CROSSED_P * len(tokens)).numpy()).pvalue


def emit_with_residual_rule(
    draft_tokens: torch.Tensor, accept: torch.Tensor, bonus: torch.Tensor
) -> Verified:
    num_rows = len(draft_tokens)
    return verify_residual(
        CROSSED_P.expand(num_rows, 2, 3),
        draft_tokens[:, None],
        torch.ones(num_rows, dtype=torch.int64),
        torch.zeros(num_rows, dtype=torch.bool),
        torch.arange(3).expand(num_rows, 1, 3),
        CROSSED_Q.expand(num_rows, 1, 3),
        accept[:, None],
        bonus,
    )


def first_token(verified: Verified, draft_tokens: torch.Tensor) -> torch.Tensor:
    return torch.where(verified.num_accepted > 0, draft_tokens, verified.bonus_tokens)


@pytest.mark.parametrize("crossed", ["none", "accept", "bonus"])
def test_residual_rule_needs_streams_of_its_own(crossed: str) -> None:
    seeds, positions = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 9)
    draft, accept, bonus = (seeded_uniforms(seeds, positions, stream) for stream in Stream)
    draft_tokens = sample_sparse(CROSSED_Q.expand(NUM_DRAWS, 3), draft)
    verified = emit_with_residual_rule(
        draft_tokens, draft if crossed == "accept" else accept, draft if crossed == "bonus" else bonus
    )
    p = p_value(first_token(verified, draft_tokens))
    assert p > 0.001 if crossed == "none" else p < 1e-9


@pytest.mark.parametrize("crossed", [False, True])
def test_residual_rule_on_shared_noise_is_biased(crossed: bool) -> None:
    """The public bug: the residual draw uses the noise that the draft drew with; .10/.60/.30 becomes .10/.63/.27."""
    seeds, positions = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 9)
    is_greedy = torch.zeros(NUM_DRAWS, dtype=torch.bool)
    logits = CROSSED_Q.log().expand(NUM_DRAWS, 3)
    ranked = perturbed_top(logits, torch.ones(NUM_DRAWS), seeds, positions, is_greedy, num_ranked=1, top_m=3)
    draft_tokens = ranked.token_ids[:, 0]
    accept = seeded_uniforms(seeds, positions, Stream.ACCEPT)
    verified = emit_with_residual_rule(draft_tokens, accept, torch.zeros(NUM_DRAWS))

    residual = (CROSSED_P - CROSSED_Q).clamp(min=0)
    bonus_noise = gumbel_noise(seeds if crossed else seeds + 2**40, positions, torch.arange(3))
    verified = verified._replace(bonus_tokens=(residual.log() + bonus_noise).argmax(-1))
    tokens = first_token(verified, draft_tokens)
    if crossed:
        assert p_value(tokens) < 1e-9
        shares = torch.bincount(tokens, minlength=3) / NUM_DRAWS
        torch.testing.assert_close(shares, torch.tensor([0.10, 0.63, 0.27]), rtol=0, atol=0.004)
    else:
        assert p_value(tokens) > 0.001


def test_shared_noise_is_exact_on_the_same_proposals() -> None:
    seeds, positions = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 9)
    is_greedy = torch.zeros(NUM_DRAWS, dtype=torch.bool)
    ranked = perturbed_top(
        CROSSED_Q.log().expand(NUM_DRAWS, 3),
        torch.ones(NUM_DRAWS),
        seeds,
        positions,
        is_greedy,
        num_ranked=1,
        top_m=3,
    )
    draft_tokens = ranked.token_ids
    drawn = draw(CROSSED_P.log().expand(NUM_DRAWS, 3), seeds, positions, is_greedy)
    verified = agree(drawn[:, None].expand(-1, 2), draft_tokens, torch.ones(NUM_DRAWS, dtype=torch.int64))
    assert p_value(first_token(verified, draft_tokens[:, 0])) > 0.001
