"""The draft's prefix cache over SGLang's radix tree: who owns which slot."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_ssd.bridge.environment import use_cpu_engine

use_cpu_engine()
prefix_cache = pytest.importorskip("sglang_ssd.bridge.prefix_cache")


class Allocator:
    """What the tree asks of SGLang's slot allocator."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.freed += slots.tolist()


@pytest.fixture
def allocator():
    return Allocator()


@pytest.fixture
def cache(allocator):
    return prefix_cache.PrefixCache(None, allocator)


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_the_longest_prefix_is_found_with_its_slots(cache):
    assert cache.insert([1, 2, 3, 4], slots(10, 11, 12, 13)) == 0
    assert cache.insert([1, 2, 9], slots(20, 21, 22)) == 2, "slots 20 and 21 stay the caller's"
    assert cache.lock([1, 2, 9, 9]).slots.tolist() == [10, 11, 22]
    assert cache.lock([1, 2, 3]).slots.tolist() == [10, 11, 12]
    assert cache.lock([2]).slots.tolist() == [] == cache.lock([]).slots.tolist()


def test_what_is_locked_stays_and_the_rest_can_be_evicted(cache, allocator):
    cache.insert([1, 2, 3, 4], slots(10, 11, 12, 13))
    prefix = cache.lock([1, 2])
    assert cache.num_evictable() == 2
    cache.evict(100)
    assert sorted(allocator.freed) == [12, 13]
    cache.unlock(prefix)
    assert cache.num_evictable() == 2
    cache.evict(1)
    assert sorted(allocator.freed) == [10, 11, 12, 13] and cache.num_evictable() == 0


def test_every_slot_has_one_owner_at_any_time(cache, allocator):
    """Requests that begin, grow and end in any order: what they computed is held or given back, once."""
    rng, next_slot, running, given_back = random.Random(0), 0, [], []
    for _ in range(400):
        if len(running) < 4 and rng.random() < 0.5:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            prefix = cache.lock(tokens[:-1])
            own = list(range(next_slot, next_slot + len(tokens) - prefix.slots.numel()))
            next_slot += len(own)
            running.append((tokens, prefix, own))
        elif running:
            tokens, prefix, own = running.pop(rng.randrange(len(running)))
            row = [*prefix.slots.tolist(), *own]
            num_held = cache.insert(tokens, slots(*row))
            given_back += row[prefix.slots.numel() : num_held]
            cache.unlock(prefix)
        if rng.random() < 0.2:
            cache.evict(rng.randint(1, 8))
    for tokens, prefix, own in running:
        row = [*prefix.slots.tolist(), *own]
        given_back += row[prefix.slots.numel() : cache.insert(tokens, slots(*row))]
        cache.unlock(prefix)
    cache.evict(next_slot)
    assert cache.num_evictable() == 0
    assert sorted(allocator.freed + given_back) == list(range(next_slot))
