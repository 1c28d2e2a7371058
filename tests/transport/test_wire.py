"""The bytes of a message: what one side writes the other reads, and nothing else is taken for a message."""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as types

from shoal.core.messages import (
    AUDIT_HOPS,
    AUDIT_RECORDS,
    RANKS,
    AuditAnswer,
    AuditedHop,
    Backward,
    Booking,
    Books,
    BoundaryTensor,
    Chunk,
    Entry,
    Heartbeat,
    Lead,
    Manifest,
    Member,
    Message,
    Offer,
    Override,
    Ping,
    Proof,
    Propose,
    PublishRequest,
    Recomputed,
    RecomputedHop,
    RecomputeRequest,
    Round,
    Share,
    Signed,
    Sketch,
    Standing,
    TensorRecord,
    View,
)
from shoal.transport import wire
from shoal.transport.base import DTYPES, MAX_CONTROL_BYTES, Blob, Limits
from shoal.transport.wire import (
    PEEK_BYTES,
    Arriving,
    BlobHead,
    Frame,
    Head,
    Malformed,
    decode,
    decode_head,
    encode,
    head_bytes,
    size,
)

LIMITS = Limits(blob_bytes=1000)

blobs = st.builds(
    lambda dtype, shape: Blob(dtype, shape, bytes(DTYPES[dtype] * shape[0] * shape[1])),
    st.sampled_from(sorted(DTYPES)),
    st.tuples(st.integers(0, 8), st.integers(0, 8)),
)


def whole(message: object, *with_blobs: Blob) -> bytes:
    return b"".join(encode(message, with_blobs, LIMITS).parts)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(blobs, max_size=4), st.integers(0, 2**20 - 1))
def test_a_message_comes_out_as_it_went_in(with_blobs: list[Blob], index: int) -> None:
    message = Backward(0, 1, index, 0, 3, 2)
    data = whole(message, *with_blobs)
    got, got_blobs = decode(data, LIMITS)
    assert got == message
    assert [(b.dtype, b.shape, bytes(b.data)) for b in got_blobs] == [(b.dtype, b.shape, b.data) for b in with_blobs]
    assert encode(message, tuple(with_blobs), LIMITS).nbytes == len(data)
    assert 0 <= len(data) - size(message, tuple(with_blobs)) < 100


def test_received_blobs_can_be_written_to() -> None:
    _, (blob,) = decode(whole(Chunk(0, 1, 0, 0), Blob("uint8", (2,), b"ab")), LIMITS)
    memoryview(blob.data)[0] = 7


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    try:
        decode(data, LIMITS)
    except Malformed:
        pass


@settings(deadline=None)
@given(st.integers(0, 60), st.binary(min_size=1, max_size=3))
def test_altered_messages_are_a_message_or_malformed(at: int, piece: bytes) -> None:
    data = bytearray(whole(Backward(0, 1, 2, 0, 3, 2), Blob("float32", (2, 3), bytes(24))))
    data[at : at + len(piece)] = piece
    try:
        _, got = decode(data, LIMITS)
    except Malformed:
        return
    assert all(len(memoryview(b.data)) <= LIMITS.blob_bytes for b in got)


def test_lengths_beyond_the_limit_are_refused_from_the_first_four_bytes() -> None:
    assert head_bytes((4 << 20).to_bytes(4, "big")) == 4 << 20
    for length in (0, (4 << 20) + 1, 2**32 - 1):
        with pytest.raises(Malformed, match=str(length)):
            head_bytes(length.to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (["uint8", [1001], "raw", 1001], "1001 bytes; allowed are 1000"),
        (["uint8", [2**40, 2**40], "raw", 0], "when decoded; allowed are 1000"),
        (["float32", [251], "int8/1/64", 267], "1004 bytes when decoded; allowed are 1000"),
        (["float32", [100], "int8/1/64", 100], "takes 108"),
        (["float32", [100], "int8/7/64", 108], "version 7"),
        (["int64", [100], "int8/1/64", 108], "of int64 values"),
        (["uint8", [2**41], "raw", 0], "not a message"),
        (["uint8", [-1], "raw", 1], "not a message"),
        (["float32", [3], "raw", 3], "for shape"),
        (["complex64", [1], "raw", 8], "complex64"),
        (["uint8", [1], "zip", 1], "codec 'zip'"),
        (["uint8", [1] * 9, "raw", 1], "not a message"),
        (["uint8", [1], "raw", 1, "more"], "not a message"),
    ],
)
def test_a_blob_that_is_too_large_or_does_not_add_up_is_refused_by_its_head(blob: list[object], reason: str) -> None:
    head = msgspec.msgpack.encode([["Chunk", 0, 1, 0, 0, False], [blob]])
    with pytest.raises(Malformed, match=reason):
        decode_head(head, LIMITS)


def test_only_bulk_messages_carry_blobs() -> None:
    with pytest.raises(ValueError, match="Lead with blobs"):
        whole(Lead(1, 2, 3), Blob("uint8", (1,), b"a"))
    with pytest.raises(Malformed, match="Lead with blobs"):
        decode_head(msgspec.msgpack.encode([["Lead", 1, 2, 3], [["uint8", [1], "raw", 1]]]), LIMITS)


def test_a_message_too_large_for_others_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="PublishRequest takes"):
        whole(PublishRequest(0, 1, ("x" * (1 << 20),) * 5))


def test_a_head_is_message_and_blobs_only() -> None:
    with pytest.raises(Malformed):
        decode_head(msgspec.msgpack.encode([["Lead", 1, 2, 3], [], 1]), LIMITS)
    assert decode_head(msgspec.msgpack.encode([["Lead", 1, 2, 3]]), LIMITS) == Head(Lead(1, 2, 3))


def in_pieces(frame: Frame, sizes: list[int], bulk: bool = True, limits: Limits = LIMITS) -> Arriving:
    """As a stream would: `sizes` are how many bytes come at a time, then all the rest."""
    arriving, at = Arriving(limits, bulk), 0
    for most in [*sizes, frame.nbytes]:
        data = b"".join(frame.pieces(at, most))
        while data:
            room = arriving.room(len(data))
            room[:] = data[: room.nbytes]
            arriving.advance(room.nbytes)
            data, at = data[room.nbytes :], at + room.nbytes
    return arriving


@given(
    st.lists(st.floats(width=32) | st.sampled_from([3.4e38, -3.4e38, -0.0]), max_size=40),
    st.lists(st.integers(1, 30), max_size=30),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_the_largest_absolute_value_is_known_when_the_last_piece_has_arrived(
    values: list[float], sizes: list[int], dtype: str
) -> None:
    tensor = torch.tensor(values, dtype=torch.float32).to(getattr(torch, dtype))
    blob = Blob(dtype, (len(tensor),), bytes(tensor.view(torch.uint8).numpy()))
    arriving = in_pieces(encode(BoundaryTensor(1, 2, 3, 1, False), (blob,), LIMITS), sizes)
    largest = arriving.message()[1][0].largest
    assert largest is not None
    expected = float(tensor.float().abs().max()) if values else 0.0
    assert largest == expected or (math.isnan(largest) and math.isnan(expected))


def test_only_raw_floats_have_a_largest_value() -> None:
    for blob in (Blob("int64", (2,), bytes(16)), Blob("float32", (2,), bytes(4), "bf16/1")):
        frame = encode(BoundaryTensor(1, 2, 3, 1, False), (blob,), LIMITS)
        assert in_pieces(frame, [7]).message()[1][0].largest is None


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=30), st.lists(st.binary(max_size=400), max_size=4))
def test_a_message_in_any_pieces_is_the_message(sizes: list[int], data: list[bytes]) -> None:
    blobs = tuple(Blob("uint8", (len(each),), each) for each in data)
    frame = encode(BoundaryTensor(0, 1, 2, 1, False), blobs, LIMITS)
    arrived = in_pieces(frame, sizes)
    assert arrived.whole and arrived.nbytes == frame.nbytes
    message, arrived_blobs = arrived.message()
    assert message == BoundaryTensor(0, 1, 2, 1, False)
    assert [bytes(blob.data) for blob in arrived_blobs] == data


def test_a_fragment_that_no_honest_peer_sends_is_refused() -> None:
    last = RANKS - 1
    assert wire.fragment(wire.fragment_head(last, wire.NUMBERS + 5, 7)) == (last, 5, 7, wire.NO_REPORT)
    for rank, nbytes in ((RANKS, 7), (0, 0), (0, wire.FRAGMENT_BYTES + 1)):
        with pytest.raises(Malformed, match=f"rank {rank} and {nbytes} bytes"):
            wire.fragment(wire.fragment_head(rank, 0, nbytes))
    arrived = in_pieces(encode(BoundaryTensor(0, 1, 2, 1, False), (Blob("uint8", (3,), b"abc"),), LIMITS), [])
    with pytest.raises(Malformed, match="after the end of its message"):
        arrived.room(1)
    with pytest.raises(Malformed, match="with blobs among control"):
        in_pieces(encode(BoundaryTensor(0, 1, 2, 1, False), (Blob("uint8", (3,), b"abc"),), LIMITS), [], bulk=False)


def test_a_message_that_is_larger_than_its_kind_needs_is_refused_before_it_is_there() -> None:
    """Only its first bytes have come: 64 of them take memory, and none is decoded."""
    books = b"\xdd" + (200_000).to_bytes(4, "big") + b"\x92\x01\xc0" * 200_000
    heads = {
        "Heartbeat": b"\x92\x96\xa9Heartbeat\x01\x01\x01\xc3" + books * 2,
        "Leave": b"\x92\x92\xa5Leave" + b"\xda\xff\xff" + b"x" * 65535,
        "Cancelled": b"\x92\xdc\x00\x06\xa9Cancelled" + bytes(70_000),
        "message": b"\x92\xc4" + bytes(70_000),
    }
    for kind, head in heads.items():
        one = Arriving(LIMITS, bulk=False)
        one.room(1 << 20)[:] = len(head).to_bytes(4, "big")
        one.advance(4)
        assert one.room(1 << 20).nbytes == PEEK_BYTES
        one.room(1 << 20)[:] = head[:PEEK_BYTES]
        with pytest.raises(Malformed, match=f"a {kind} of {len(head)} bytes"):
            one.advance(PEEK_BYTES)
        with pytest.raises(Malformed, match="bytes"):
            decode(len(head).to_bytes(4, "big") + head, LIMITS)


NAME_CHARS = 128  # of the longest name that a Peer may be; real ones have 67
NAMES = tuple(f"{number:0{NAME_CHARS}d}" for number in range(1000))
VIEW = View(
    1 << 40,
    1 << 40,
    tuple(Member(name[-67:], index % 50, since=1 << 30) for index, name in enumerate(NAMES)),
    owners=(999,) * 100_000,
)
SIGNED = tuple(Signed(name, b"k" * 32, b"s" * 64) for name in NAMES)
PROOF = Proof(NAMES[0], SIGNED)
BOOKS = tuple(Booking(40_000 + index, 3.14159) for index in range(34_000))  # of one replica, with losses
# What honest peers of a run of 1,000 peers and 100,000 microbatches send at most, where the types do not say.
SKETCH = Sketch((1.5, -2.5, 3.5, -4.5), 9.5)
HONEST = {
    "Propose": Propose(Entry(1, VIEW, tuple(name[-67:] for name in NAMES)), 1, PROOF),
    "Standing": Standing(1, VIEW, NAMES),
    "Override": Override(VIEW, 1, bytes(32), bytes(64)),
    "Lead": Lead(1 << 32, 1 << 40, 1 << 32, "f" * 40, PROOF, SIGNED, "\U0001f600" * 2000),
    "Heartbeat": Heartbeat(1 << 32, 1 << 40, 1 << 40, True, BOOKS),
    "Books": Books(0, 1, 1, 1, tuple(range(2**17, 2**17 + 200_000))),
    "Round": Round(
        0, 1, 1, 1, tuple((Share(name, tuple(range(at, 100_000, 1000))),) for at, name in enumerate(NAMES)), (NAMES,)
    ),
    "Offer": Offer(0, 1, 0, Manifest(("f" * 64,) * 14_000, (1 << 22,) * 14_000)),
    "PublishRequest": PublishRequest(0, 1, ("x" * 70_000,) * 50),
    # As much as one message holds
    "AuditAnswer": AuditAnswer(
        0, 1, 1, (TensorRecord(99_999, 999, True, "f" * 32, NAMES[0], SKETCH),) * AUDIT_RECORDS, 63, 64
    ),
    "RecomputeRequest": RecomputeRequest(
        0, 1, 1, NAMES[0], "f" * 32, 1, (AuditedHop(99_999, NAMES[0], NAMES[1]),) * AUDIT_HOPS
    ),
    "Recomputed": Recomputed(
        0, 1, 1, NAMES[0], (RecomputedHop(99_999, *("f" * 32,) * 3, SKETCH, SKETCH, 1.5),) * AUDIT_HOPS, (SKETCH,) * 16
    ),
}


def largest(kind: type) -> object:
    """As far as its types allow: a tuple that they do not bound has to be in HONEST."""
    if kind.__name__ in HONEST:
        return HONEST[kind.__name__]
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return kind(**{field.name: _largest(field.type, kind.__name__) for field in info.fields})


def _largest(info: types.Type, kind: str) -> object:
    match info:
        case types.UnionType(types=options):
            return _largest(next(one for one in options if not isinstance(one, types.NoneType)), kind)
        case types.IntType(le=most, lt=beyond):
            return most if most is not None else beyond - 1 if beyond is not None else 2**53
        case types.FloatType():
            return 1e-300
        case types.BoolType():
            return True
        case types.StrType(max_length=most):
            return ("x" if most == 2**20 else "\U0001f600") * (most or 2000)  # a record of files and hashes is plain
        case types.BytesType(max_length=most):
            return bytes(most or 0)
        case types.LiteralType(values=values):
            return max(map(str, values), key=len)
        case types.VarTupleType(item_type=item, max_length=most):
            assert most is not None, f"{kind}: what is the most that an honest peer sends? Say so in HONEST"
            if isinstance(item, types.StrType):
                return tuple(name[:128] for name in (NAMES * 2)[:most])
            return (_largest(item, kind),) * most
        case types.TupleType(item_types=items):
            return tuple(_largest(item, kind) for item in items)
        case types.StructType(cls=cls):
            return largest(cls)
    raise AssertionError(info)


@pytest.mark.parametrize("kind", get_args(Message), ids=lambda kind: kind.__name__)
def test_the_largest_that_honest_peers_send_fits_its_kind(kind: type) -> None:
    message = largest(kind)
    data = whole(message)
    assert decode(data, LIMITS)[0] == message
    if wire.most_bytes(kind.__name__, bulk=False) < MAX_CONTROL_BYTES:
        assert len(data) <= wire.most_bytes(kind.__name__, bulk=False) < 4 << 20
        assert wire.most_bytes(kind.__name__, bulk=False) <= max(4 * len(data), wire.ORDINARY_BYTES), (
            "more than it needs"
        )


def test_a_load_is_no_larger_than_any_that_is_asked_for() -> None:
    limits = Limits(blob_bytes=1 << 30)
    head = msgspec.msgpack.encode(Head(Ping(1), (BlobHead("uint8", (2**27,), "raw", 2**27),)))
    with pytest.raises(Malformed, match="Ping with a blob"):
        decode_head(head, limits)
