"""Exact probabilities of a function of uniforms, from the function alone."""

from __future__ import annotations

from collections.abc import Callable

import torch


def measure(is_below: Callable[[torch.Tensor], torch.Tensor], num_rows: int) -> torch.Tensor:
    """The measure of {u in [0, 1): is_below(u)} for each row, float64 ``[N]``, to 2^-30, by bisection.

    ``is_below`` maps uniforms ``[N]`` to bool ``[N]`` and is, row by row, true below some threshold only.
    """
    low, high = torch.zeros(num_rows, dtype=torch.float64), torch.ones(num_rows, dtype=torch.float64)
    for _ in range(30):
        middle = (low + high) / 2
        holds = is_below(middle)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return torch.where(high == 1.0, high, low)


def law(
    draw_index: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], num_rows: int, num_values: int
) -> torch.Tensor:
    """The law ``[N, W]`` of an index in 0..W-1 that does not fall as its uniform grows.

    ``draw_index(rows, uniforms)`` draws for the rows named, which may repeat.
    """
    rows = torch.arange(num_rows).repeat_interleave(num_values)
    values = torch.arange(num_values).repeat(num_rows)
    cdf = measure(lambda uniforms: draw_index(rows, uniforms) <= values, num_rows * num_values)
    return cdf.view(num_rows, num_values).diff(prepend=torch.zeros(num_rows, 1, dtype=torch.float64))
