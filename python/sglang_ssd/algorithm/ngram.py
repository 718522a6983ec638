"""The fast backup: propose what followed the last occurrence of the request's own latest tokens.

One index a request, over prompt and output, kept up to date token by token. A dictionary maps every n-gram of
each order to the position after its most recent occurrence, so a proposal costs at most one look-up an order,
whatever the length of the history; memory is bounded by a sliding window over the last ``max_tokens`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial


class NGramIndex:
    """Longest suffix match over the last ``max_tokens`` tokens of one request.

    Suffixes of ``min_order`` to ``max_order`` tokens are compared. At most ``max_tokens * (max_order -
    min_order + 1)`` n-grams and ``2 * max_tokens`` token ids are held.
    """

    def __init__(self, max_order: int, min_order: int, max_tokens: int):
        """Raises ValueError unless 1 <= min_order <= max_order < max_tokens."""
        if not 1 <= min_order <= max_order:
            raise ValueError(f"min_order must be in 1..max_order ({max_order}), got {min_order}")
        if not max_tokens > max_order:
            raise ValueError(f"max_tokens must be above max_order ({max_order}), got {max_tokens}")
        self.max_tokens = max_tokens
        self._orders = tuple(range(max_order, min_order - 1, -1))
        self._tokens: list[int] = []  # the window, preceded by tokens that have left it
        self._dropped = 0  # position of self._tokens[0] in the whole history
        # n-gram -> position after its last occurrence that something follows
        self._next: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append token ids: the prompt at first, then what each round committed."""
        held, following, orders, longest = self._tokens, self._next, self._orders, self._orders[0]
        for token in tokens:
            # The n-grams that end here become matches only now that a token follows them: a suffix never
            # finds itself.
            end = len(held)
            latest = tuple(held[-longest:])
            for order in orders:
                if order <= end:
                    following[latest[-order:]] = self._dropped + end
            held.append(token)
            if end >= self.max_tokens:
                left = end - self.max_tokens
                oldest = tuple(held[left : left + longest])
                for order in orders:
                    if following.get(oldest[:order]) == self._dropped + left + order:
                        del following[oldest[:order]]
                if left >= self.max_tokens:
                    del held[: left + 1]
                    self._dropped += left + 1

    def propose(self, num_tokens: int) -> list[int]:
        """The ``num_tokens`` tokens after the longest match of the current suffix, the latest of equals.

        A match so recent that fewer tokens follow it is continued with the proposal itself, which repeats the
        period. Returns an empty list where no suffix of ``min_order`` tokens or more occurred before. Raises
        ValueError for a negative ``num_tokens``.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be 0 or more, got {num_tokens}")
        held = self._tokens
        for order in self._orders:
            position = self._next.get(tuple(held[-order:]))
            if position is not None:
                start = position - self._dropped
                proposal = held[start : start + num_tokens]
                period = len(held) - start
                while len(proposal) < num_tokens:
                    proposal.append(proposal[len(proposal) - period])
                return proposal
        return []


class LazyNGramIndex:
    """The index of a request whose tokens somebody else keeps, built only once a proposal is asked for: most requests never
    need one."""

    def __init__(self, max_order: int = 4, min_order: int = 2, max_tokens: int = 32_768):
        """As ``NGramIndex`` takes them."""
        self._make_index = partial(NGramIndex, max_order, min_order, max_tokens)
        self._index: NGramIndex | None = None
        self._num_indexed = 0

    def propose(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """As ``NGramIndex.propose``. ``tokens``: all of the request, which may only have grown since the last call."""
        self._index = self._index or self._make_index()
        self._index.extend(tokens[self._num_indexed :])
        self._num_indexed = len(tokens)
        return self._index.propose(num_tokens)
