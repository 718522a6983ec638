"""Prefixes that ended requests leave behind in the draft's KV pool: SGLang's radix cache, driven without its scheduler.

A slot belongs to one owner: the tree, or the row that computed it. A row that starts from a prefix of the tree locks it
until the row ends; then the tree takes over the row's own slots, but for those of tokens that it holds by now.

Seam: ``RadixCache`` with ``match_prefix``, ``path_device_indices``, ``insert``, ``evict`` and the lock count.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


class Prefix(NamedTuple):
    """A locked prefix: the slots of its tokens, int64 [tokens], and the tree's own end of it."""

    slots: torch.Tensor
    node: Any


class PrefixCache:
    """Owns the slots of prefixes that nobody reads now, until the room is needed."""

    def __init__(self, req_to_token_pool, allocator) -> None:
        self._tree = RadixCache(CacheInitParams(False, req_to_token_pool, allocator, page_size=1))

    def lock(self, token_ids: Sequence[int]) -> Prefix:
        """The longest prefix of these tokens that is held, locked until ``unlock``."""
        node = self._tree.match_prefix(MatchPrefixParams(_key(token_ids))).last_device_node
        self._tree.inc_lock_ref(node)
        return Prefix(self._tree.path_device_indices(node), node)

    def unlock(self, prefix: Prefix) -> None:
        self._tree.dec_lock_ref(prefix.node)

    def insert(self, token_ids: Sequence[int], slots: torch.Tensor) -> int:
        """Take over the slots of these tokens, int64 [tokens]. Returns how many leading tokens the tree held already: their
        slots in ``slots``, where they are others than the tree's, stay the caller's."""
        return self._tree.insert(InsertParams(key=_key(token_ids), value=slots)).prefix_len

    def evict(self, num_slots: int) -> None:
        """Free so many slots that are not locked, the longest unused first, or all there are."""
        self._tree.evict(EvictParams(num_slots))

    def num_evictable(self) -> int:
        return self._tree.evictable_size()


def _key(token_ids: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", token_ids))
