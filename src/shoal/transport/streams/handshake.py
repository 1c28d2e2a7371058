"""The handshake of a new stream between two peers: protocol number, run, name, kind of traffic, and the pass.

The peer that dialled sends its hello first. The other side answers with its own hello, or with the reason for refusing. Each sends
the newest grant that it knows for the other's invite, so that a peer with an old invite, or one that missed a renewal, has a valid
pass from then on. A refusal because of a revocation carries the notice that the authority signed.

For carriers that already prove the key of the other side (tls.py by its certificate, libp2p by its own handshake): they pass
that key's id, and it must be the one inside the name.
"""

from __future__ import annotations

import contextlib
import ipaddress
import struct
from collections.abc import Generator
from typing import Annotated

import msgspec

from shoal.core.messages import PROTOCOL, Peer
from shoal.escaping import UNDECODABLE
from shoal.transport.base import StreamKind
from shoal.transport.identity.identity import key_id_of
from shoal.transport.identity.passes import MAX_GRANT_BYTES, MAX_PASS_BYTES, Membership, NotWelcome
from shoal.transport.streams.carrier import ByteStream
from shoal.transport.streams.engine import Engine, Steps, WaitFor

CONNECT_S = 5.0  # for the connection, its encryption and this handshake together
MAX_HELLO_BYTES = 4096
MAX_LANES = 8  # connections of one stream

_length = struct.Struct(">H")  # before a hello


class HandshakeRefused(ValueError):
    """One side refuses the other. `notice`: what the authority signed, for a peer that was revoked."""

    notice = b""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    protocol: int
    run: Annotated[str, msgspec.Meta(max_length=128)]
    name: Peer
    to: Peer  # the receiver that the sender means: another peer may have started at that address since
    kind: StreamKind
    proof: Annotated[bytes, msgspec.Meta(max_length=MAX_PASS_BYTES)]
    grant: Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT_BYTES)] = (
        b""  # the newest known for the receiver's invite
    )
    seen: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of an answer: the address from which the connection came
    stream: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0  # the sender's number of it: a newer one replaces it
    lane: Annotated[int, msgspec.Meta(ge=0, lt=MAX_LANES)] = 0  # of the stream: further connections follow the first


class Rejection(msgspec.Struct, frozen=True, tag="No", array_like=True):
    reason: Annotated[str, msgspec.Meta(max_length=500)]
    notice: Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT_BYTES)] = b""


_decoder: msgspec.msgpack.Decoder[Hello | Rejection] = msgspec.msgpack.Decoder(Hello | Rejection)


def encode_hello(
    name: Peer, to: Peer, kind: StreamKind, membership: Membership, seen: str = "", stream: int = 0, lane: int = 0
) -> bytes:
    grant = membership.newer_grant(to)
    hello = Hello(PROTOCOL, membership.run, name, to, kind, membership.proof, grant, seen, stream, lane)
    return msgspec.msgpack.encode(hello)


def encode_rejection(refusal: HandshakeRefused) -> bytes:
    return msgspec.msgpack.encode(Rejection(str(refusal)[:500], refusal.notice))


def write(stream: ByteStream, hello: bytes) -> Steps:
    yield from stream.write(memoryview(_length.pack(len(hello)) + hello))


def read(stream: ByteStream) -> Generator[WaitFor | Engine, None, bytearray]:
    prefix = memoryview(bytearray(_length.size))
    yield from stream.read(prefix)
    (nbytes,) = _length.unpack(prefix)
    if nbytes > MAX_HELLO_BYTES:
        raise HandshakeRefused(f"a hello of {nbytes} bytes")
    hello = bytearray(nbytes)
    yield from stream.read(memoryview(hello))
    return hello


def check_hello(data: bytes | bytearray, key: str, me: Peer, membership: Membership) -> Hello:
    """The other side's hello, when it holds the key with id `key`, belongs to the run and wants `me`; else HandshakeRefused says why
    not."""
    try:
        hello = _decoder.decode(data)
    except UNDECODABLE:
        raise HandshakeRefused("its hello is malformed") from None
    if isinstance(hello, Rejection):
        membership.take_notice(hello.notice)
        raise HandshakeRefused(f"it refuses: {hello.reason}")
    if hello.protocol != PROTOCOL:
        raise HandshakeRefused(
            f"it speaks protocol {hello.protocol}, this peer {PROTOCOL}; install the same version of shoal"
        )
    if hello.run != membership.run:
        raise HandshakeRefused(f"it belongs to another run ({hello.run}, not {membership.run})")
    if hello.to != me:
        raise HandshakeRefused(f"it wants {hello.to}, and here is {me}")
    try:
        claimed = key_id_of(hello.name)
        if claimed != key:
            raise ValueError(f"it claims the name of {claimed} but holds the key of {key}")
        membership.check(hello.proof, hello.name, membership.clock())
    except ValueError as error:
        refusal = HandshakeRefused(str(error))
        refusal.notice = error.notice if isinstance(error, NotWelcome) else b""
        raise refusal from None
    membership.take_grant(hello.grant)
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(hello.seen)
        membership.seen = hello.seen
    return hello
