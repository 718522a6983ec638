"""The messages of the round protocol, strictly typed, encoded as msgpack.

A row is named by ``(request, generation)``: ``request`` is a number that one verifier never uses twice, ``generation``
grows when SGLang retracts the request, so a row of the pool that is reused can never be taken for its predecessor.
Rows travel as parallel lists in one message a round.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 4
#: More than anybody drafts; a draft sizes its estimators by what a verifier asks for.
MAX_LOOKAHEAD, MAX_FAN_OUT_BUDGET = 64, 1024
#: Widest law of a guess: tokens that a draft draws from in residual sampling. A verifier makes room for it in each row.
MAX_TOP_M = 1024
#: Larger than any legal message; ZeroMQ drops the connection of who sends more.
MAX_MESSAGE_BYTES = 16 << 20
#: Verifiers of one draft, and requests that one of them has open.
MAX_VERIFIERS, MAX_OPEN_REQUESTS = 64, 16_384

#: What a peer can make grow has a limit in its type: a message beyond it is malformed. Text goes to the log, so that it is
#: one line.
_ONE_LINE = r"^[^\x00-\x1f\x7f]*\Z"
Name = Annotated[str, Meta(max_length=512, pattern=_ONE_LINE)]
Line = Annotated[str, Meta(max_length=2048, pattern=_ONE_LINE)]
#: Numbers that the other side computes with: what is out of range, or not a number, is malformed.
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0.0)]
NumAccepted = Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e9)]

#: Where a proposal comes from. ``hit``: prepared before the outcome was known. ``neural`` and ``ngram``: a backup, made
#: after a miss. ``none``: nothing is proposed (no room, context limit). ``unknown``: the draft does not hold this
#: session at this length; the verifier opens it again.
Source = Literal["hit", "neural", "ngram", "none", "unknown"]
#: ``moved``: the request goes on with another draft.
CloseReason = Literal["finished", "aborted", "retracted", "moved"]
#: How sampled requests are verified. ``shared-noise``: both sides add the same noise to their logits, and a guess is
#: accepted when it equals the target's own draw. ``residual``: the paper's rule, which needs the law q of every guess.
Sampling = Literal["shared-noise", "residual"]
#: A measured value, a list by position, or a mapping by size or source.
Estimate = (
    None
    | float
    | Annotated[list[float], Meta(max_length=MAX_LOOKAHEAD + 1)]
    | Annotated[dict[Name | int, float], Meta(max_length=256)]
)
Estimates = Annotated[dict[Name, Estimate], Meta(max_length=64)]
#: How guesses are spread over the positions of a proposal.
FanOutName = Literal["uniform", "geometric", "measured"]
#: Who answers a miss. ``neural``: the draft model, while the row waits. ``ngram``: a suffix match in the request's own
#: tokens, at once. ``auto``: whichever Theorem 17 says is faster at the batch size of the round.
FallbackName = Literal["neural", "ngram", "auto"]


class RowKey(NamedTuple):
    """Names one request on the wire."""

    request: int
    generation: int


class _Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all messages: encoded as an array whose first element names the type."""


class Hello(_Message):
    """Verifier to draft, first message of a connection.

    ``lookahead`` tokens are proposed in a row, and ``fan_out_budget`` outcomes prepared per request and round; a budget of
    0 asks for ordinary (synchronous) speculative decoding. With ``adapts_lookahead`` and
    ``adapts_budget`` these are limits, within which the draft chooses what is fastest. ``context_length`` is the longest sequence the verifier can reach, in tokens.
    ``greeting`` grows each time that the verifier begins anew: the draft then frees what it holds of it and forgets what
    it learnt of its rounds. A Hello that it knows already, since its Welcome was not seen in time, changes nothing.
    """

    protocol_version: int
    vocab_size: int
    tokenizer_fingerprint: Name
    lookahead: int
    fan_out_budget: int
    context_length: int
    target_model: Name
    sampling: Sampling = "shared-noise"
    fan_out: FanOutName = "measured"
    fallback: FallbackName = "neural"
    adapts_lookahead: bool = False
    adapts_budget: bool = False
    greeting: int = 0


class Welcome(_Message):
    """Draft to verifier: the connection stands. ``max_sessions`` is shared by all verifiers of this draft."""

    protocol_version: int
    draft_model: Name
    vocab_size: int
    context_length: int
    max_sessions: Annotated[int, Meta(ge=1)]
    kv_capacity_tokens: int
    boot_id: Name


class Refuse(_Message):
    """Either side ends the conversation; ``reason`` is one line for people."""

    reason: Line


class Open(_Message):
    """Verifier to draft: a request enters with these tokens. They do not include a bonus token that is still to come;
    that one arrives in a ``Round`` with ``num_accepted`` 0.

    ``temperature`` 0 is greedy. ``seed`` is that of the noise which both sides share, a signed 64-bit integer.
    """

    request: int
    generation: int
    token_ids: list[int]
    temperature: Temperature = 0.0
    seed: Seed = 0


class Round(_Message):
    """Verifier to draft: the outcomes of one verification, row by row.

    ``committed_lens`` counts the tokens of the request including the new bonus token. It must equal what the draft
    holds after it applies the outcome; otherwise the row is answered as ``unknown``. ``saguaro_c`` is the scale C that
    guesses of residual sampling are drawn with from now on. ``verify_ms`` is what this verification took.
    """

    ticket: int
    requests: list[int]
    generations: list[int]
    committed_lens: list[int]
    num_accepted: list[NumAccepted]
    bonus_tokens: list[int]
    saguaro_c: float = 1.0
    verify_ms: Milliseconds = 0.0

    def keys(self) -> list[RowKey]:
        return [RowKey(*pair) for pair in zip(self.requests, self.generations, strict=True)]


class Proposal(_Message):
    """Draft to verifier: proposals for some rows of a ticket. Rows that are ready first travel first.

    ``rows`` are indices into the round's rows; ``token_ids[i]`` holds up to K proposed tokens of ``rows[i]``. For rows
    that residual sampling drew, ``q_ids[i]`` and ``q_probs[i]`` are the laws they were drawn from: int32 and float32
    ``[len(token_ids[i]), M]``, little-endian. They are empty for all other rows.
    """

    ticket: int
    rows: list[int]
    sources: list[Source]
    token_ids: list[list[int]]
    q_ids: list[bytes] = []
    q_probs: list[bytes] = []


class Close(_Message):
    """Verifier to draft: these requests left; everything held for them is freed."""

    requests: list[int]
    generations: list[int]
    reason: CloseReason


class Ping(_Message):
    """Either side asks whether the other is alive. With ``open_requests`` a verifier names all that it has open: the draft
    frees the others, whose ``Close`` was lost."""

    nonce: int
    open_requests: list[int] | None = None


class Pong(_Message):
    """Answer to a ``Ping``, with the draft's counters and what it estimates of this verifier's rounds (the fields of
    ``algorithm.acceptance.Snapshot``)."""

    nonce: int
    stats: DraftStats
    estimates: Estimates = {}


class DraftStats(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Counters of one draft process since it started. Times are sums in milliseconds. ``fallback_threshold`` is the batch
    size b* of Theorem 17 from which on n-gram backups are faster; None while unknown or never. ``lookahead`` and
    ``fan_out_budget`` are those in force, the largest over verifiers. ``kv_tokens_recomputed``: forwarded again although
    their KV had been there; 0 unless something is wrong. ``connections_refused``: of peers without the right keys or
    protocol, and of those that sent too large a frame. ``idle_leaks``: times that something was held without a session."""

    num_sessions: int = 0
    num_branch_rows: int = 0
    free_kv_slots: int = 0
    total_kv_slots: int = 0
    free_rows: int = 0
    total_rows: int = 0
    rounds: int = 0
    hits: int = 0
    early_outcomes: int = 0
    short_answers: int = 0
    forwards: int = 0
    fork_forwards: int = 0
    backup_forwards: int = 0
    prefill_forwards: int = 0
    forwards_ended_early: int = 0
    branches_drafted: int = 0
    branches_denied: int = 0
    opens_denied: int = 0
    rows_unknown: int = 0
    messages_malformed: int = 0
    replies_dropped: int = 0
    fork_ms: float = 0.0
    backup_ms: float = 0.0
    prefill_ms: float = 0.0
    acceptance: float = 0.0
    power_law_r: float = 0.0
    ngram_answers: int = 0
    prompt_tokens_cached: int = 0
    fallback_threshold: float | None = None
    lookahead: int = 0
    fan_out_budget: int = 0
    tokens_forwarded: int = 0
    kv_tokens_recomputed: int = 0
    connections_refused: int = 0
    idle_leaks: int = 0


ToDraft = Hello | Open | Round | Close | Ping | Pong | Refuse
ToVerifier = Welcome | Refuse | Proposal | Ping | Pong


class MalformedMessage(ValueError):
    """A frame that is no message of this protocol. Holds one line that says why."""


_encoder = msgspec.msgpack.Encoder()
_to_draft = msgspec.msgpack.Decoder(ToDraft)
_to_verifier = msgspec.msgpack.Decoder(ToVerifier)


def encode(message: _Message) -> bytes:
    """Encode any message of this module."""
    return _encoder.encode(message)


def decode_to_draft(frame: bytes) -> ToDraft:
    """Decode what a verifier sent. Raises ``MalformedMessage``."""
    message = _decode(_to_draft, frame)
    if isinstance(message, Round):
        _check_parallel("Round", message.requests, message.generations, message.committed_lens,
                        message.num_accepted, message.bonus_tokens)  # fmt: skip
        if len(set(message.requests)) < len(message.requests):
            raise MalformedMessage("Round: a request stands in two rows")
    elif isinstance(message, Close):
        _check_parallel("Close", message.requests, message.generations)
    return message


def decode_to_verifier(frame: bytes) -> ToVerifier:
    """Decode what a draft sent. Raises ``MalformedMessage``."""
    message = _decode(_to_verifier, frame)
    if isinstance(message, Proposal):
        _check_parallel("Proposal", message.rows, message.sources, message.token_ids)
        if message.q_ids or message.q_probs:
            _check_parallel("Proposal", message.rows, message.q_ids, message.q_probs)
    return message


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes):
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The error quotes what it does not like, which may be long.
        raise MalformedMessage(
            f"{len(frame)} bytes are no message of protocol {PROTOCOL_VERSION}: {str(error)[:300]!r}"
        ) from None


def _check_parallel(name: str, *columns: list) -> None:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise MalformedMessage(f"{name}: parallel lists of unequal lengths {lengths}")


def why_incompatible(hello: Hello, welcome: Welcome, tokenizer_fingerprint: str) -> str | None:
    """Say in one line why this verifier and this draft cannot work together, or None if they can.

    ``tokenizer_fingerprint`` is the draft's own. Equal tokenizers may stand in vocabularies that are padded to different
    sizes; where a side has no tokenizer (an empty fingerprint), the sizes must be equal.
    """
    if hello.protocol_version != welcome.protocol_version:
        return f"protocol version {hello.protocol_version} of the verifier, {welcome.protocol_version} of the draft"
    fingerprints = {hello.tokenizer_fingerprint, tokenizer_fingerprint}
    if "" in fingerprints and hello.vocab_size != welcome.vocab_size:
        return (
            f"vocabulary of {hello.vocab_size} tokens in target {hello.target_model}, "
            f"{welcome.vocab_size} in draft {welcome.draft_model}"
        )
    if len(fingerprints - {""}) > 1:
        return f"the tokenizers of target {hello.target_model} and draft {welcome.draft_model} differ"
    if hello.vocab_size < 1:
        return f"vocabulary of {hello.vocab_size} tokens in target {hello.target_model}"
    if not 1 <= hello.lookahead <= MAX_LOOKAHEAD:
        return f"lookahead (--speculative-num-steps) {hello.lookahead} is not in 1..{MAX_LOOKAHEAD}"
    if not 0 <= hello.fan_out_budget <= MAX_FAN_OUT_BUDGET:
        return f"fan-out budget {hello.fan_out_budget} is not in 0..{MAX_FAN_OUT_BUDGET}"
    return None


def largest_to_draft(context_length: int) -> int:
    """Bytes of the largest message that a draft with this context has use for: its prompt, at most 5 bytes a token, or a
    round of as many rows as a verifier may have open."""
    return min(MAX_MESSAGE_BYTES, (1 << 20) + 5 * context_length)
