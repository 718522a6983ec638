"""The target's distribution p of one token after everything that a request asked for, counted position by position.

The order is that of SGLang's plain sampling: additive penalties, repetition penalty, (grammar mask, by the caller),
logit bias, (custom processors, by the caller), temperature, then top-k, top-p and min-p of the tempered law. Penalties
count output tokens only, as SGLang does; inside a verified run they count the run's own tokens up to each position.

Where probabilities tie at a cut, all tied tokens stay: the law then depends on the logits alone and not on a sort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from sglang_ssd.algorithm.host_values import constant, from_host

#: Candidates looked at before a whole vocabulary is sorted for top-p. Covers all but very flat laws.
_NUM_SORTED_FIRST = 1024


class SamplingLaw(NamedTuple):
    """What one request asked for. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 leave the law whole.

    ``seed`` names the request's noise, a signed 64-bit integer. ``logit_bias`` pairs token ids with what is added to
    their logits; ``stop_token_ids`` are those that ``min_new_tokens`` forbids.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def as_greedy(self) -> SamplingLaw:
        """The same request at temperature 0."""
        return self._replace(temperature=0.0)

    @property
    def is_truncated(self) -> bool:
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def counts_tokens(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def reads_output(self) -> bool:
        """Whether the law of the next token depends on what was emitted so far."""
        return self.counts_tokens or self.min_new_tokens > 0


def penalise_run(
    logits: torch.Tensor, law: SamplingLaw, output_ids: Sequence[int], run: Sequence[int]
) -> None:
    """Apply penalties and ``min_new_tokens`` in place to the rows of one request.

    logits: float [W, V], row j is the law after ``output_ids`` and the first j tokens of ``run``; rows beyond
    ``len(run)`` are left alone, nothing of them is ever used.
    """
    if not law.reads_output:
        return
    counts = Counter(output_ids) if law.counts_tokens else Counter()
    for j in range(min(len(run), logits.shape[0] - 1) + 1):
        if j:
            counts[run[j - 1]] += 1
        if law.counts_tokens and counts:
            _penalise(logits[j], law, counts)
        if len(output_ids) + j < law.min_new_tokens and law.stop_token_ids:
            logits[j, from_host(law.stop_token_ids, torch.int64, logits.device)] = -torch.inf


def _penalise(row: torch.Tensor, law: SamplingLaw, counts: Counter[int]) -> None:
    ids = from_host(list(counts), torch.int64, row.device)
    times = from_host(list(counts.values()), row.dtype, row.device)
    scores = row[ids] - law.frequency_penalty * times - law.presence_penalty
    if law.repetition_penalty != 1.0:
        scores = torch.where(scores < 0, scores * law.repetition_penalty, scores / law.repetition_penalty)
    row[ids] = scores


def add_bias(logits: torch.Tensor, law: SamplingLaw) -> None:
    """Add the request's logit bias in place. logits: float [W, V]."""
    if law.logit_bias:
        ids, values = zip(*law.logit_bias, strict=True)
        index = from_host(ids, torch.int64, logits.device)
        logits[:, index] += from_host(values, logits.dtype, logits.device)


def log_probs(logits: torch.Tensor, laws: Sequence[SamplingLaw]) -> torch.Tensor:
    """Scores whose perturbed argmax is the draw: float32 [N, V]. ``laws`` [N], one a row of ``logits`` float [N, V].

    Sampled rows: log of the tempered and truncated law, -inf for what it excludes (not renormalised, which no argmax
    sees). Greedy rows: the logits themselves. NaN counts as impossible.
    """
    sampled = [i for i, law in enumerate(laws) if not law.is_greedy]
    if not sampled:
        return logits.float()
    scores = _tempered(logits, laws)
    if len(sampled) == len(laws):
        return _law_of_tempered(scores, laws).log_()
    chosen = constant(tuple(sampled), torch.int64, logits.device)
    scores[chosen] = _law_of_tempered(scores[chosen], [laws[i] for i in sampled]).log_()
    return scores


def probabilities(logits: torch.Tensor, laws: Sequence[SamplingLaw]) -> torch.Tensor:
    """Tempered and truncated probabilities, float32 [N, V], of sampled rows; what is cut is 0, the rest not rescaled.

    A row without any finite logit has no law; it comes out as zeros.
    """
    return _law_of_tempered(_tempered(logits, laws), laws)


def _tempered(logits: torch.Tensor, laws: Sequence[SamplingLaw]) -> torch.Tensor:
    """Logits over temperature, greedy rows over 1, as a copy: float32 [N, V]. NaN is -inf, +inf the largest number."""
    # In place: at a few rows, fresh memory of the vocabulary's size costs more than what is computed in it.
    tempered = logits.float() / _column((law.temperature or 1.0 for law in laws), logits)
    return tempered.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)


def _law_of_tempered(tempered: torch.Tensor, laws: Sequence[SamplingLaw]) -> torch.Tensor:
    return truncate(torch.softmax(tempered, dim=-1).nan_to_num_(nan=0.0), laws)


def truncate(probs: torch.Tensor, laws: Sequence[SamplingLaw]) -> torch.Tensor:
    """Cut ``probs`` float32 [N, V] by top-k, top-p and min-p of each row's law, in place."""
    truncated = [i for i, law in enumerate(laws) if law.is_truncated]
    if truncated:
        rows = constant(tuple(truncated), torch.int64, probs.device)
        part = probs[rows]
        floor = _cut(part, [laws[i] for i in truncated])
        probs[rows] = part.masked_fill(part < floor, 0.0)
    return probs


def _cut(probs: torch.Tensor, laws: Sequence[SamplingLaw]) -> torch.Tensor:
    """The smallest probability that stays, float32 [N, 1]: jointly by top-k, top-p and min-p, as SGLang combines them."""
    vocab_size = probs.shape[-1]
    num_sorted = min(vocab_size, max(_NUM_SORTED_FIRST, *(law.top_k for law in laws)))
    top_ps = _column((law.top_p for law in laws), probs)
    top_ks = _column((law.top_k or vocab_size for law in laws), probs)
    while True:
        ranked = probs.topk(num_sorted, dim=-1).values
        # A token stays while the mass before it has not passed top_p.
        stays = (ranked.cumsum(-1) - ranked <= top_ps) & (
            torch.arange(num_sorted, device=probs.device) < top_ks
        )
        num_kept = stays.sum(-1, keepdim=True)
        is_cut_inside = (num_kept < num_sorted) | (top_ps >= 1.0)
        if num_sorted == vocab_size or bool(is_cut_inside.all()):
            break
        num_sorted = vocab_size
    smallest = ranked.gather(-1, (num_kept - 1).clamp(min=0))
    is_whole = (top_ps >= 1.0) & (top_ks >= vocab_size)
    floor = torch.where(is_whole, torch.zeros_like(smallest), smallest)
    return torch.maximum(floor, ranked[:, :1] * _column((law.min_p for law in laws), probs))


def _column(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    return constant(tuple(values), torch.float32, like.device).view(-1, 1)
