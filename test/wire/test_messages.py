"""The messages: whatever is legal round-trips, whatever is not is one ``MalformedMessage``, and a round is small."""

from __future__ import annotations

import math
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.wire.messages import (
    MAX_LOOKAHEAD,
    MAX_MESSAGE_BYTES,
    MAX_OPEN_REQUESTS,
    PROTOCOL_VERSION,
    Close,
    DraftStats,
    Hello,
    MalformedMessage,
    Open,
    Ping,
    Pong,
    Proposal,
    Refuse,
    Round,
    RowKey,
    ToDraft,
    ToVerifier,
    Welcome,
    decode_to_draft,
    decode_to_verifier,
    encode,
    largest_to_draft,
    why_incompatible,
)

DECODERS = {decode_to_draft: get_args(ToDraft), decode_to_verifier: get_args(ToVerifier)}
both_directions = pytest.mark.parametrize("decode", DECODERS)


def values(hint, num_items: int | None = None) -> st.SearchStrategy:
    """Any value of a field; a list has ``num_items``."""
    limits = {}
    if get_origin(hint) is Annotated:
        hint, meta = get_args(hint)
        limits = {"min_value": meta.ge, "max_value": meta.le}
        if hint is str:
            return st.text(st.characters(exclude_categories=["C"]), max_size=20)
    if hint is int:
        return st.integers(**{"min_value": -(2**63), "max_value": 2**64 - 1} | given_only(limits))
    if hint is float:
        return st.floats(**{"allow_nan": False, **given_only(limits)})
    if hint is str:
        return st.text(max_size=20)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return st.one_of(*(values(option) for option in get_args(hint)))
    if hint is NoneType:
        return st.none()
    if get_origin(hint) is dict:
        return st.dictionaries(*(values(part) for part in get_args(hint)), max_size=4)
    if get_origin(hint) is list:
        sizes = dict(max_size=4) if num_items is None else dict(min_size=num_items, max_size=num_items)
        return st.lists(values(*get_args(hint)), **sizes)
    return messages(hint)


def given_only(limits: dict) -> dict:
    return {name: limit for name, limit in limits.items() if limit is not None}


def messages(struct: type) -> st.SearchStrategy:
    """Any instance of a message type, its parallel lists of equal lengths."""
    hints = get_type_hints(struct, include_extras=True)

    def of_size(num_rows: int) -> st.SearchStrategy:
        fields = {name: values(hint, num_rows) for name, hint in hints.items()}
        if struct is Round:
            fields["requests"] = st.lists(values(int), min_size=num_rows, max_size=num_rows, unique=True)
        return st.builds(struct, **fields)

    return st.integers(0, 4).flatmap(of_size)


def decode_or_malformed(decode, frame: bytes):
    """Any other exception fails the test."""
    try:
        return decode(frame)
    except MalformedMessage as error:
        assert "\n" not in str(error)
        return None


@pytest.mark.parametrize(
    ("decode", "struct"), [(decode, struct) for decode, structs in DECODERS.items() for struct in structs]
)
@given(data=st.data())
def test_every_message_round_trips(decode, struct, data):
    message = data.draw(messages(struct))
    received = decode(encode(message))
    assert type(received) is struct and received == message


@both_directions
@given(data=st.data())
def test_messages_of_the_other_direction_are_malformed(decode, data):
    (other,) = set(DECODERS) - {decode}
    struct = data.draw(st.sampled_from(sorted(set(DECODERS[other]) - set(DECODERS[decode]), key=str)))
    with pytest.raises(MalformedMessage):
        decode(encode(data.draw(messages(struct))))


@both_directions
@given(frame=st.binary(max_size=200))
def test_random_bytes_are_malformed_or_a_message(decode, frame):
    message = decode_or_malformed(decode, frame)
    assert message is None or isinstance(message, DECODERS[decode])


@both_directions
@given(data=st.data())
def test_truncated_and_prolonged_frames_are_malformed(decode, data):
    frame = encode(data.draw(st.sampled_from(DECODERS[decode]).flatmap(messages)))
    with pytest.raises(MalformedMessage):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(MalformedMessage):
        decode(frame + data.draw(st.binary(min_size=1, max_size=8)))


@both_directions
@given(data=st.data())
def test_flipped_bits_are_malformed_or_a_message(decode, data):
    frame = bytearray(encode(data.draw(st.sampled_from(DECODERS[decode]).flatmap(messages))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    message = decode_or_malformed(decode, bytes(frame))
    assert message is None or isinstance(message, DECODERS[decode])


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary()
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner)
)


@both_directions
@settings(max_examples=50)
@given(data=st.data())
def test_any_values_under_a_known_tag_are_malformed_or_a_message(decode, data):
    tag = data.draw(st.sampled_from(DECODERS[decode])).__name__
    frame = msgspec.msgpack.encode([tag, *data.draw(st.lists(anything, max_size=8))])
    message = decode_or_malformed(decode, frame)
    assert message is None or type(message).__name__ == tag


def wrong_fields():
    """Every field of every message, replaced by a value of a type that it cannot have."""
    for decode, structs in DECODERS.items():
        for struct in structs:
            for name, hint in get_type_hints(struct).items():
                yield pytest.param(
                    decode, struct, name, hint, id=f"{decode.__name__}-{struct.__name__}.{name}"
                )


@pytest.mark.parametrize(("decode", "struct", "name", "hint"), list(wrong_fields()))
@settings(max_examples=12)
@given(data=st.data())
def test_a_field_of_the_wrong_type_is_malformed(decode, struct, name, hint, data):
    wrong = {int: ["1", 1.0, True, None, [1]], str: [1, b"a", None, ["a"]], float: ["1", None, [1.0]]}.get(
        hint,
        [7, None, "never", [None], {"x": "y"}]
        if get_origin(hint) is dict
        else [7, None, {}, "never", [None], [[["x"]]]],
    )
    if NoneType in get_args(hint):
        wrong = [value for value in wrong if value is not None]
    fields = msgspec.to_builtins(data.draw(messages(struct)))
    fields[1 + list(get_type_hints(struct)).index(name)] = data.draw(st.sampled_from(wrong))
    with pytest.raises(MalformedMessage):
        decode(msgspec.msgpack.encode(fields))


@both_directions
@given(data=st.data())
def test_extra_fields_and_unknown_tags_are_malformed(decode, data):
    fields = msgspec.to_builtins(data.draw(st.sampled_from(DECODERS[decode]).flatmap(messages)))
    with pytest.raises(MalformedMessage):
        decode(msgspec.msgpack.encode([*fields, data.draw(anything)]))
    with pytest.raises(MalformedMessage):
        decode(
            msgspec.msgpack.encode([data.draw(st.text().filter(lambda tag: tag != fields[0])), *fields[1:]])
        )
    with pytest.raises(MalformedMessage):
        decode(msgspec.msgpack.encode(dict(zip(map(str, fields), fields, strict=True))))


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_to_draft, Round(1, [1], [0, 0], [5], [0], [7])),
        (decode_to_draft, Round(1, [1, 2], [0, 0], [5, 5], [0, 0], [7])),
        (decode_to_draft, Close([1, 2], [0], "finished")),
        (decode_to_verifier, Proposal(1, [0, 1], ["hit"], [[1], [2]])),
        (decode_to_verifier, Proposal(1, [0], ["hit"], [])),
        (decode_to_verifier, Proposal(1, [0, 1], ["hit"] * 2, [[1], [2]], [b""], [b"", b""])),
        (decode_to_verifier, Proposal(1, [0, 1], ["hit"] * 2, [[1], [2]], [b"", b""], [])),
    ],
)
def test_parallel_lists_of_unequal_lengths_are_malformed(decode, message):
    with pytest.raises(MalformedMessage, match="unequal lengths"):
        decode(encode(message))


def pong(**estimates) -> Pong:
    return Pong(1, DraftStats(), estimates)


@pytest.mark.parametrize(
    ("legal", "illegal"),
    [
        (Refuse("x" * 2048), Refuse("x" * 2049)),
        (Refuse("what was said"), Refuse("what\nwas said")),
        (Refuse(""), Refuse("\x1b[2J")),
        (pong(**{f"n{i}": 1.0 for i in range(64)}), pong(**{f"n{i}": 1.0 for i in range(65)})),
        (pong(x=[1.0] * 65), pong(x=[1.0] * 66)),
        (pong(x={i: 1.0 for i in range(256)}), pong(x={i: 1.0 for i in range(257)})),
        (pong(**{"x" * 512: 1.0}), pong(**{"x" * 513: 1.0})),
        (Welcome(3, "d" * 512, 9, 9, 1, 9, "b"), Welcome(3, "d" * 513, 9, 9, 1, 9, "b")),
        (Welcome(3, "d", 9, 9, 1, 9, "b"), Welcome(3, "d", 9, 9, 0, 9, "b")),
        (Open(1, 0, [1], 0.0, 2**63 - 1), Open(1, 0, [1], 0.0, 2**63)),
        (Round(1, [1], [1], [1], [64], [1]), Round(1, [1], [1], [1], [65], [1])),
        (Open(1, 0, [1], 0.0), Open(1, 0, [1], -0.1)),
        (Open(1, 0, [1], 1.0), Open(1, 0, [1], float("nan"))),
        (Round(1, [], [], [], [], [], 1.0, 5.0), Round(1, [], [], [], [], [], 1.0, float("nan"))),
        (Hello(3, 9, "f", 1, 1, 9, "t" * 512), Hello(3, 9, "f", 1, 1, 9, "t" * 513)),
    ],
)
def test_what_a_peer_can_make_grow_has_a_limit(legal, illegal):
    decode = decode_to_draft if isinstance(legal, (Open, Round, Hello)) else decode_to_verifier
    assert decode(encode(legal)) == legal
    with pytest.raises(MalformedMessage) as caught:
        decode(encode(illegal))
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_reason_that_quotes_the_peer_can_be_sent_back():
    """A Refuse quotes what was malformed, and must be legal itself, however long or odd that was."""
    for tag in ("x" * 100_000, "\n\r\x00\x1b" * 100, "'\"" * 100, "\u2028\ud7ff" * 10_000):
        with pytest.raises(MalformedMessage) as caught:
            decode_to_draft(msgspec.msgpack.encode([tag]))
        assert decode_to_verifier(encode(Refuse(str(caught.value)))) == Refuse(str(caught.value))


def test_the_largest_legal_messages_fit_their_limit():
    prompt = Open(10**9, 9, [2**31] * 32_768, 0.7, -(2**63))
    rows = list(range(2**31, 2**31 + MAX_OPEN_REQUESTS))
    for message, context_length in (
        (prompt, 32_768),
        (Round(10**9, rows, rows, rows, [64] * len(rows), rows, 0.3, 1e3), 1),
    ):
        assert len(encode(message)) <= largest_to_draft(context_length)
    assert largest_to_draft(10**9) == MAX_MESSAGE_BYTES


def test_a_request_that_stands_in_two_rows_is_malformed():
    with pytest.raises(MalformedMessage, match="two rows"):
        decode_to_draft(encode(Round(1, [1, 2, 1], [0, 0, 1], [5, 5, 6], [0, 0, 0], [7, 7, 7])))


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (Open(1, 0, [1], temperature=-0.5), "temperature"),
        (Open(1, 0, [1], temperature=math.nan), "temperature"),
        (Open(1, 0, [1], seed=2**63), "seed"),
        (Round(1, [1], [0], [4], [-1], [7]), "num_accepted"),
        (Round(1, [1], [0], [4], [MAX_LOOKAHEAD + 1], [7]), "num_accepted"),
        (Round(1, [], [], [], [], [], verify_ms=math.nan), "verify_ms"),
        (Round(1, [], [], [], [], [], verify_ms=math.inf), "verify_ms"),
        (Round(1, [], [], [], [], [], verify_ms=-1.0), "verify_ms"),
    ],
)
def test_numbers_that_nobody_can_compute_with_are_malformed(message, where):
    """They would end up in a tensor or in a running mean."""
    with pytest.raises(MalformedMessage, match=rf"\$\[{message.__struct_fields__.index(where) + 1}\]"):
        decode_to_draft(encode(message))


ARRAY_OF_4G = b"\xdd\xff\xff\xff\xff"
STRING_OF_4G = b"\xdb\xff\xff\xff\xff"
MAP_OF_4G = b"\xdf\xff\xff\xff\xff"
DEEP = MAX_MESSAGE_BYTES - 64


@both_directions
@pytest.mark.parametrize(
    "head", [b"", *(encode(message)[:-1] for message in (Refuse(""), Ping(1), Open(1, 0, [])))]
)
@pytest.mark.parametrize(
    "tail",
    [
        b"\x91" * DEEP,
        b"\x81" * DEEP,
        b"\x81\xa1a" * (DEEP // 3),
        ARRAY_OF_4G,
        ARRAY_OF_4G * (DEEP // 5),
        STRING_OF_4G,
        MAP_OF_4G,
        b"\xc9\xff\xff\xff\xff\x05",
    ],
    ids=["arrays", "maps", "maps-of-maps", "4G-array", "4G-arrays", "4G-string", "4G-map", "4G-ext"],
)
def test_deep_nesting_and_lying_lengths_are_malformed(decode, head, tail):
    with pytest.raises(MalformedMessage):
        decode(head + tail)


def test_keys_name_requests_and_generations():
    assert Round(1, [4, 9], [0, 2], [5, 6], [0, 1], [7, 8]).keys() == [RowKey(4, 0), RowKey(9, 2)]


def test_a_round_of_64_rows_and_its_answer_are_small():
    """The largest ids that occur: a vocabulary of 256 Ki tokens, contexts of 1 Mi tokens, a billion requests."""
    rows, lookahead, vocab_size, length, request = 64, 7, 1 << 18, 1 << 20, 10**9
    question = Round(
        10**9,
        list(range(request, request + rows)),
        [1] * rows,
        [length - row for row in range(rows)],
        [lookahead] * rows,
        [vocab_size - 1 - row for row in range(rows)],
    )
    answer = Proposal(10**9, list(range(rows)), ["neural"] * rows, [[vocab_size - 1] * lookahead] * rows)
    question_bytes, answer_bytes = len(encode(question)), len(encode(answer))
    print(
        f"Round of {rows} rows: {question_bytes} bytes; Proposal of {rows} rows, K={lookahead}: {answer_bytes} bytes"
    )
    assert decode_to_draft(encode(question)) == question and decode_to_verifier(encode(answer)) == answer
    assert question_bytes < 4096
    assert answer_bytes < 4096


def test_a_round_with_laws_is_below_100_kilobytes():
    """16 rows, K=7, laws of 64 tokens: what residual sampling adds to a round."""
    rows, lookahead, top_m = 16, 7, 64
    keys = [list(range(rows)), [0] * rows, [1 << 20] * rows, [lookahead] * rows, [1 << 17] * rows]
    question = Round(10**9, *keys, saguaro_c=0.3)
    shared_noise = Proposal(10**9, list(range(rows)), ["hit"] * rows, [[1 << 17] * lookahead] * rows)
    law = bytes(4 * lookahead * top_m)
    residual = msgspec.structs.replace(shared_noise, q_ids=[law] * rows, q_probs=[law] * rows)
    sizes = {
        name: len(encode(question)) + len(encode(answer))
        for name, answer in (("shared noise", shared_noise), ("residual", residual))
    }
    print(f"bytes of a round of {rows} rows, K={lookahead}: {sizes}")
    assert sizes["shared noise"] < 4_000 and sizes["residual"] < 100_000


# -- why_incompatible ------------------------------------------------------------------------------------------------


def hello(**changes) -> Hello:
    facts = dict(
        protocol_version=PROTOCOL_VERSION,
        vocab_size=1000,
        tokenizer_fingerprint="same",
        lookahead=3,
        fan_out_budget=8,
        context_length=512,
        target_model="the-target",
    )
    return Hello(**(facts | changes))


WELCOME = Welcome(PROTOCOL_VERSION, "the-draft", 1000, 512, 8, 4096, "boot")


@pytest.mark.parametrize(
    ("changes", "fingerprint", "words"),
    [
        (
            dict(protocol_version=PROTOCOL_VERSION + 1),
            "same",
            [str(PROTOCOL_VERSION), str(PROTOCOL_VERSION + 1)],
        ),
        (dict(tokenizer_fingerprint="other"), "same", ["tokenizers", "the-target", "the-draft"]),
        (dict(tokenizer_fingerprint="", vocab_size=999), "same", ["999", "1000", "the-target", "the-draft"]),
        (dict(vocab_size=1001), "", ["1001", "1000", "the-target", "the-draft"]),
        (dict(tokenizer_fingerprint="", vocab_size=999), "", ["999", "1000"]),
        (dict(lookahead=0), "same", ["--speculative-num-steps", "0"]),
        (dict(lookahead=-3), "same", ["--speculative-num-steps", "-3"]),
        (dict(fan_out_budget=-1), "same", ["fan-out budget", "-1"]),
        (dict(vocab_size=0), "same", ["vocabulary", "0", "the-target"]),
    ],
)
def test_why_incompatible_names_what_does_not_fit(changes, fingerprint, words):
    reason = why_incompatible(hello(**changes), WELCOME, fingerprint)
    assert reason and "\n" not in reason
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    ("changes", "fingerprint"),
    [
        ({}, "same"),
        (dict(vocab_size=1024), "same"),
        (dict(vocab_size=900), "same"),
        (dict(tokenizer_fingerprint=""), "same"),
        (dict(tokenizer_fingerprint=""), ""),
        ({}, ""),
        (dict(fan_out_budget=0, lookahead=1), "same"),
        (dict(context_length=1 << 20), "same"),
    ],
    ids=[
        "equal",
        "padded-to-more",
        "padded-to-fewer",
        "no-tokenizer-of-the-target",
        "no-tokenizers",
        "no-tokenizer-of-the-draft",
        "synchronous",
        "longer-context",
    ],
)
def test_compatible(changes, fingerprint):
    assert why_incompatible(hello(**changes), WELCOME, fingerprint) is None


def test_stats_travel_whole():
    stats = DraftStats(**{name: index + 1 for index, name in enumerate(DraftStats.__struct_fields__)})
    assert decode_to_verifier(encode(Pong(7, stats))) == Pong(7, stats)
