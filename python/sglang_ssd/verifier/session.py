"""One request on the verifier's side: its name on the wire, its tokens and what the draft holds of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_ssd.algorithm.ngram import LazyNGramIndex
from sglang_ssd.algorithm.target_law import SamplingLaw
from sglang_ssd.wire.messages import RowKey, Source


class ProposedRow(NamedTuple):
    """What one row verifies: up to K tokens, where they come from, and for tokens that residual sampling drew, their
    laws: int32 and float32 ``[len(token_ids), M]``, as bytes."""

    source: Source
    token_ids: list[int]
    q_ids: bytes = b""
    q_probs: bytes = b""


NOTHING_PROPOSED = ProposedRow("none", [])


class RoundRecord(NamedTuple):
    """One verification of one row, for ``meta_info``. ``accept_length`` counts emitted tokens, the bonus included."""

    source: Source
    num_proposed: int
    accept_length: int


@dataclass(eq=False, slots=True)
class VerifierSession:
    """``tokens`` are the committed ones and the pending bonus token, ``law`` is what the request asked for,
    ``draft_temperature`` that of the draft's guesses. ``is_held``: the draft was told of them.

    ``ticket`` names the round whose proposal is awaited, ``proposed`` is that proposal once it is here.
    ``request`` is SGLang's own object, read for its finish and retract state only.
    """

    key: RowKey
    request: Any
    tokens: list[int]
    law: SamplingLaw = SamplingLaw()
    draft_temperature: float = 0.0
    is_held: bool = False
    is_closed: bool = False
    num_rounds: int = 0
    ticket: int | None = None
    proposed: ProposedRow | None = None
    new_records: list[RoundRecord] = field(default_factory=list)
    _ngrams: LazyNGramIndex = field(default_factory=LazyNGramIndex)

    @property
    def is_current(self) -> bool:
        """Whether the request still runs as this session. SGLang drops what a forward emits for a request that ended, or
        was retracted, while the forward was under way."""
        request = self.request
        is_gone = self.is_closed or request.finished() or request.is_retracted
        return not is_gone and request.retraction_count == self.key.generation

    def propose_ngram(self, num_tokens: int) -> ProposedRow:
        """What followed the latest tokens when they last occurred in this request: for a request without a draft."""
        token_ids = self._ngrams.propose(self.tokens, num_tokens)
        return ProposedRow("ngram", token_ids) if token_ids else NOTHING_PROPOSED
