"""The draft's token, fork candidates and law from its logits, on a CPU, in one pass over the vocabulary.

csrc/cpu/draft_sampler.cpp says how. Everywhere NaN counts as -inf and ties go to the lowest token id; the noise and q are
computed in float64, as in ``sglang_ssd.algorithm.shared_noise`` and ``.saguaro``.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .library import DTYPE_CODES, kernel_for
from .noise import draft_uniforms, gumbel


class Drafted(NamedTuple):
    """What was drawn for each row.

    token_ids:  int64 [rows], the token to propose.
    ranked_ids: int64 [rows, num_ranked], fork candidates, best first: by perturbed score under shared noise (so that the
                first is the token), by logit in greedy rows and under Saguaro.
    scores:     float64 [rows, num_ranked], what they are ranked by: logit over temperature, plus noise where it is
                shared. Greedy rows have the logits.
    top_ids:    int64 [rows, top_m], tokens of the largest logits, largest first.
    top_logits: float32 [rows, top_m].
    q:          float32 [rows, top_m], the law of the token over ``top_ids``, exactly as it was drawn from; greedy rows
                have 1 at the first. None under shared noise.
    """

    token_ids: torch.Tensor
    ranked_ids: torch.Tensor
    scores: torch.Tensor
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    q: torch.Tensor | None


def reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    fan_out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    *,
    num_ranked: int,
    top_m: int,
) -> Drafted:
    """``sample`` in torch."""
    top_ids, top_logits = _top(logits, min(top_m, logits.shape[1]))
    scores = top_logits.double() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    if fan_out is None:
        scores = scores + gumbel(seeds, positions, top_ids) * ~is_greedy[:, None]
        ids, order = top_ids.sort()  # by id first, so that the stable sort breaks ties by it
        ranked = scores.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ranked_ids, scores = ids.gather(1, ranked.indices)[:, :num_ranked], ranked.values[:, :num_ranked]
        return Drafted(ranked_ids[:, 0], ranked_ids, scores, top_ids, top_logits, None)
    q = _saguaro_law(scores, fan_out, c)
    q = torch.where(is_greedy[:, None], torch.eye(q.shape[1])[0], q)
    return Drafted(
        top_ids.gather(1, reference_draw(q, seeds, positions))[:, 0],
        top_ids[:, :num_ranked],
        scores[:, :num_ranked],
        top_ids,
        top_logits,
        q,
    )


def reference_draw(q: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What is drawn from the float32 ``q`` [rows, M] that is emitted: its place in it, int64 [rows, 1]."""
    running = q.double().cumsum(-1)
    return torch.searchsorted(
        running, draft_uniforms(seeds, positions)[:, None] * running[:, -1:], right=True
    )


def _top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and float32 values of the largest logits, largest first; ties by the lowest id, which topk does not promise."""
    clean = logits.float().masked_fill(logits.isnan(), -torch.inf)
    least = clean.topk(count).values[:, -1:]
    above, tied = clean > least, clean == least
    is_kept = above | (tied & (tied.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    ids = is_kept.nonzero()[:, 1].view(-1, count)
    values, order = clean.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), values


def _saguaro_law(scores: torch.Tensor, fan_out: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float32).max
    weights = scores.clamp(-limit, limit).softmax(-1)
    is_cached = torch.arange(scores.shape[1]) < fan_out[:, None]
    has_rest = weights.masked_fill(is_cached, 0.0).sum(-1, keepdim=True) > 0
    weights = torch.where(is_cached & has_rest, c[:, None] * weights, weights)
    return (weights / weights.sum(-1, keepdim=True)).float()


class DraftArguments(ctypes.Structure):
    """Arguments of the compiled kernel, field by field as in csrc/cpu/draft_sampler.cpp. Every field has 8 bytes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperatures", "seeds", "positions", "is_greedy")),
        *((name, ctypes.c_void_p) for name in ("fan_out", "c")),
        *((name, ctypes.c_void_p) for name in Drafted._fields),
        *((name, ctypes.c_int64) for name in ("rows", "row_stride", "vocab_size", "num_ranked", "top_m")),
        *((name, ctypes.c_int64) for name in ("dtype", "num_threads")),
    ]


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    fan_out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    *,
    num_ranked: int,
    top_m: int,
) -> Drafted:
    """Both samplers of ``dispatch``, for tensors on a CPU: Saguaro if ``fan_out`` and ``c`` are given."""
    columns = (temperatures, seeds, positions, is_greedy, fan_out, c)
    top_m = check_call(logits, *columns, num_ranked, top_m)
    kernel = kernel_for(logits, "ssd_draft_sampler")
    if kernel is None:
        return reference(logits, *columns, num_ranked=num_ranked, top_m=top_m)
    num_rows, vocab_size = logits.shape
    drafted = Drafted(
        token_ids=seeds.new_empty(num_rows),
        ranked_ids=seeds.new_empty(num_rows, num_ranked),
        scores=temperatures.new_empty(num_rows, num_ranked),
        top_ids=seeds.new_empty(num_rows, top_m),
        top_logits=temperatures.new_empty(num_rows, top_m, dtype=torch.float32),
        q=None if fan_out is None else temperatures.new_empty(num_rows, top_m, dtype=torch.float32),
    )
    arguments = DraftArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in (logits, *columns, *drafted)),
        *(num_rows, logits.stride(0), vocab_size, num_ranked, top_m),
        *(DTYPE_CODES[logits.dtype], torch.get_num_threads()),
    )
    kernel(ctypes.byref(arguments))
    return drafted


def check_call(
    logits, temperatures, seeds, positions, is_greedy, fan_out, c, num_ranked: int, top_m: int
) -> int:
    """``top_m`` cut to the vocabulary; raises ValueError for what does not fit."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if logits.dim() != 2 or 0 in logits.shape or logits.dtype not in dtypes or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float [rows, V], contiguous in V: {tuple(logits.shape)} {logits.dtype}"
        )
    columns = {
        "temperatures": (temperatures, torch.float64), "seeds": (seeds, torch.int64),
        "positions": (positions, torch.int64), "is_greedy": (is_greedy, torch.bool),
    }  # fmt: skip
    if fan_out is not None:
        columns |= {"fan_out": (fan_out, torch.int64), "c": (c, torch.float64)}
    for name, (column, dtype) in columns.items():
        if column.shape != logits.shape[:1] or column.dtype != dtype or not column.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} ({logits.shape[0]},): {column.dtype} {tuple(column.shape)}"
            )
        if column.device != logits.device:
            raise ValueError(f"{name} is on {column.device}, logits {tuple(logits.shape)} on {logits.device}")
    top_m = min(top_m, logits.shape[1])
    if not 1 <= num_ranked <= top_m:
        raise ValueError(f"1 <= num_ranked <= top_m: {num_ranked}, {top_m}, logits {tuple(logits.shape)}")
    return top_m
