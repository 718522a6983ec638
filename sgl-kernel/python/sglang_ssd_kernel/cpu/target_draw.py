"""The target's draws by shared noise on a CPU, and how far a proposal agrees with them.

csrc/cpu/target_draw.cpp says how noise of the vocabulary's size is avoided. The draws are those of
``sglang_ssd.algorithm.shared_noise.draw``: what decides is computed in float64.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .library import DTYPE_CODES, kernel_for
from .noise import gumbel


class Drawn(NamedTuple):
    """token_ids: int64 [B, K + 1], the target's draws; num_accepted: int64 [B], drafts, 0..K; bonus_tokens: int64 [B],
    the token after them."""

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    bonus_tokens: torch.Tensor


def draw_and_agree(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    is_greedy: torch.Tensor,
    proposed: torch.Tensor,
    lengths: torch.Tensor,
    temperatures: torch.Tensor | None = None,
) -> Drawn:
    """``dispatch.draw_and_agree`` for tensors on a CPU."""
    check_call(scores, seeds, positions, is_greedy, proposed, lengths, temperatures)
    kernel = kernel_for(scores, "ssd_target_draw")
    if kernel is None:
        return reference(scores, seeds, positions, is_greedy, proposed, lengths, temperatures)
    batch_size, width, vocab_size = scores.shape
    drawn = Drawn(
        seeds.new_empty(batch_size, width), seeds.new_empty(batch_size), seeds.new_empty(batch_size)
    )
    tensors = (scores, temperatures, seeds, positions, is_greedy, proposed, lengths, *drawn)
    arguments = DrawArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(batch_size, width, vocab_size, *scores.stride()[:2]),
        *(DTYPE_CODES[scores.dtype], torch.get_num_threads()),
    )
    kernel(ctypes.byref(arguments))
    return drawn


def reference(scores, seeds, positions, is_greedy, proposed, lengths, temperatures=None) -> Drawn:
    """The same in torch, with the noise of a whole vocabulary for one position at a time."""
    batch_size, width, vocab_size = scores.shape
    all_ids = torch.arange(vocab_size)
    token_ids = seeds.new_empty(batch_size, width)
    for request in range(batch_size):
        for offset in range(width):
            row = scores[request, offset].double()
            if not is_greedy[request]:
                row = row if temperatures is None else row / temperatures[request]
                row = row + gumbel(seeds[request, None], positions[request, None] + offset, all_ids)[0]
            token_ids[request, offset] = row.masked_fill(row.isnan(), -torch.inf).argmax()
    agrees = (proposed == token_ids[:, :-1]) & (torch.arange(width - 1) < lengths[:, None])
    num_accepted = agrees.long().cumprod(-1).sum(-1)
    return Drawn(token_ids, num_accepted, token_ids.gather(1, num_accepted[:, None])[:, 0])


class DrawArguments(ctypes.Structure):
    """Arguments of the compiled kernel, field by field as in csrc/cpu/target_draw.cpp. Every field has 8 bytes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "temperatures", "seeds", "positions", "is_greedy")),
        *((name, ctypes.c_void_p) for name in ("proposed", "lengths", *Drawn._fields)),
        *((name, ctypes.c_int64) for name in ("batch_size", "width", "vocab_size")),
        *((name, ctypes.c_int64) for name in ("batch_stride", "row_stride", "dtype", "num_threads")),
    ]


def check_call(scores, seeds, positions, is_greedy, proposed, lengths, temperatures) -> None:
    """Raises ValueError for what ``draw_and_agree`` does not take."""
    batch_size, width, _ = check_rows("scores", scores)
    columns = {"seeds": seeds, "positions": positions, "lengths": lengths}
    for name, column in columns.items():
        check_tensor(name, column, torch.int64, (batch_size,), scores)
    check_tensor("is_greedy", is_greedy, torch.bool, (batch_size,), scores)
    if temperatures is not None:
        check_tensor("temperatures", temperatures, torch.float64, (batch_size,), scores)
    check_tensor("proposed", proposed, torch.int64, (batch_size, width - 1), scores)


def check_rows(name: str, rows: torch.Tensor) -> torch.Size:
    """B, K + 1 and V. Raises ValueError."""
    if rows.dim() != 3 or 0 in rows.shape or not rows.is_floating_point() or rows.stride(2) != 1:
        raise ValueError(
            f"{name} must be float [B, K + 1, V], contiguous in V: {rows.dtype} {tuple(rows.shape)}"
        )
    return rows.shape


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], rows: torch.Tensor
) -> None:
    """Raises ValueError unless ``tensor`` is contiguous, so typed and shaped, and on the device of ``rows``."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {shape}: {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device != rows.device:
        raise ValueError(f"{name} is on {tensor.device}, the rows {tuple(rows.shape)} on {rows.device}")
