"""The noise that target and draft share, for kernels: SGLang's hash of (seed, position, token id), and Gumbel noise of it.

MurmurHash3_x86_32 (Austin Appleby, public domain) of four blocks: the low and high half of the seed, the position, the
token id. With h its value, in float64: g = -log(E), E = -log(h / (2^32 - 1)) clamped to [2^-32, largest float64].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LARGEST_HASH = tl.constexpr((1 << 32) - 1)
_LEAST_EXPONENTIAL = tl.constexpr(2.0**-32)
_LARGEST_DOUBLE = tl.constexpr(torch.finfo(torch.float64).max)


@triton.jit
def _rotate_left(bits, COUNT: tl.constexpr):
    return (bits << COUNT) | (bits >> (32 - COUNT))


@triton.jit
def _absorb(state, block):
    block = _rotate_left(block * tl.full((), 0xCC9E2D51, tl.uint32), 15) * tl.full((), 0x1B873593, tl.uint32)
    return _rotate_left(state ^ block, 13) * tl.full((), 5, tl.uint32) + tl.full((), 0xE6546B64, tl.uint32)


@triton.jit
def row_state(seed, position):
    """State of the hash before it reads a token id, uint32. ``seed`` int64, ``position`` an integer."""
    state = _absorb(tl.full((), 0, tl.uint32), seed.to(tl.uint32))
    state = _absorb(state, (seed >> 32).to(tl.uint32))
    return _absorb(state, position.to(tl.uint32))


@triton.jit
def hashes(state, token_ids):
    """uint32, of row states and token ids, integers, that broadcast."""
    bits = _absorb(state, token_ids.to(tl.uint32)) ^ tl.full((), 16, tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    bits = (bits ^ (bits >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return bits ^ (bits >> 16)


@triton.jit
def gumbel(state, token_ids):
    """The noise g, float64."""
    exponential = -tl.log(hashes(state, token_ids).to(tl.float64) / _LARGEST_HASH)
    exponential = tl.minimum(tl.maximum(exponential, _LEAST_EXPONENTIAL), _LARGEST_DOUBLE)
    return -tl.log(exponential)


@triton.jit
def uniform(state, STREAM: tl.constexpr):
    """A uniform in [0, 1) in steps of 2^-32, float64: the hash of an id that no vocabulary reaches, for each stream."""
    return hashes(state, tl.full((), -1 - STREAM, tl.int32)).to(tl.float64) / (1 << 32)
