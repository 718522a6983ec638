"""The outcome of one verified round: the key of the speculation cache."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """What one row of a round became, v = (k, t*) in the paper (arXiv 2603.03251).

    ``num_accepted`` counts the accepted draft tokens, 0..K. ``bonus_token`` is the token id that the verifier
    emitted after them: its own choice at the first rejection, or after all K tokens.
    """

    num_accepted: int
    bonus_token: int
