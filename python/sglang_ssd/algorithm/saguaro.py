"""Saguaro sampling: a draft distribution that leaves the residual on the tokens that the cache is prepared for."""

from __future__ import annotations

import torch

from sglang_ssd.algorithm.inverse_cdf import inverse_cdf


def saguaro_probs(logits: torch.Tensor, fan_out: torch.Tensor, c: float) -> torch.Tensor:
    """sigma_{F,C} of the paper (arXiv 2603.03251) on truncated logits: C * exp(z) in the top F, exp(z) elsewhere.

    ``logits`` float ``[N, M]``, the draft's top M over its temperature, highest first; ``fan_out`` integers ``[N]``,
    the F in force at the position of each row; ``c`` in [0, 1], 1 = off. Returns float32 ``[N, M]``: the q to ship,
    the law of :func:`sample_sparse`, whose rows sum to 1 within rounding.

    A row with no weight outside its top F is not scaled (its limit for C to 0). NaN counts as -inf; a row without
    a finite logit becomes uniform, which is as exact as any q. Raises ValueError when ``c`` is not in [0, 1].
    """
    if not 0.0 <= c <= 1.0:
        raise ValueError(f"c must be in [0, 1], got {c}")
    limits = torch.finfo(torch.float32)
    finite = logits.to(torch.float64).nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    weights = finite.softmax(-1)
    is_cached = torch.arange(logits.shape[-1], device=logits.device) < fan_out[:, None]
    has_rest = weights.masked_fill(is_cached, 0.0).sum(-1, keepdim=True) > 0
    weights = torch.where(is_cached & has_rest, c * weights, weights)
    return (weights / weights.sum(-1, keepdim=True)).to(torch.float32)


def sample_sparse(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw an index of each row from exactly the float32 ``probs`` ``[N, M]`` that are shipped.

    Their law is ``probs`` over their own sum in float64, which is how :func:`.verification.verify_residual` reads q.
    ``uniforms`` ``[N]`` in [0, 1), independent of the verifier's. Returns int64 ``[N]``.
    """
    return inverse_cdf(probs, uniforms)


#: Values of C that ``--ssd-saguaro-c auto`` chooses from.
SCALES = (1.0, 0.7, 0.5, 0.3, 0.1)


class ScaleTuner:
    """Chooses C online: the one of ``scales`` under which most tokens are emitted a millisecond.

    Each scale is tried for ``trial_rounds``; then the best is kept, and after every ``keep_rounds`` of it another one
    is tried again, in turns, since acceptance and hit rate drift. One scale means that nothing is tuned.
    """

    def __init__(
        self, scales: tuple[float, ...] = SCALES, trial_rounds: int = 32, keep_rounds: int = 256
    ) -> None:
        self._scales = scales
        self._trial_rounds = trial_rounds
        self._keep_rounds = keep_rounds
        self._tokens_per_ms: list[float | None] = [None] * len(scales)
        self._current = 0
        self._last_trial = 0
        self._is_trial = True
        self._num_rounds, self._tokens, self._ms = 0, 0, 0.0

    @property
    def c(self) -> float:
        """The scale in force."""
        return self._scales[self._current]

    def observe(self, num_tokens: int, round_ms: float) -> None:
        """Take in one round that was drafted with ``c``."""
        if len(self._scales) == 1:
            return
        self._num_rounds += 1
        self._tokens += num_tokens
        self._ms += round_ms
        if self._num_rounds >= (self._trial_rounds if self._is_trial else self._keep_rounds):
            self._tokens_per_ms[self._current] = self._tokens / self._ms if self._ms > 0 else 0.0
            self._num_rounds, self._tokens, self._ms = 0, 0, 0.0
            self._choose_next()

    def _choose_next(self) -> None:
        if None in self._tokens_per_ms:
            self._current = self._tokens_per_ms.index(None)
        elif self._is_trial:
            self._current = max(range(len(self._scales)), key=lambda i: self._tokens_per_ms[i])
            self._is_trial = False
        else:
            others = [(self._last_trial + i) % len(self._scales) for i in range(1, len(self._scales) + 1)]
            self._current = self._last_trial = next(i for i in others if i != self._current)
            self._is_trial = True
