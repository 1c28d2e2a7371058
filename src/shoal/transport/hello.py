"""The first words on a connection between two peers: protocol number, run, name, kind of traffic, and the pass.

For transports whose connections already prove the key of the other side (tls.py by its certificate, libp2p by its own
handshake): that key's id is handed in and must be the one inside the name. The caller of a connection speaks first and
the other side answers with its own hello, or with the reason for refusing.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec

from shoal.core.messages import PROTOCOL, Peer
from shoal.transport.identity import key_id_of
from shoal.transport.invite import MAX_PASS_BYTES, Membership

MAX_HELLO_BYTES = 4096


class Refusal(ValueError):
    """This side does not talk to the other, or the other way round."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    protocol: int
    run: Annotated[str, msgspec.Meta(max_length=128)]
    name: Peer
    to: Peer  # whom the speaker wants: at that address another may have started since
    kind: Literal["control", "bulk"]
    proof: Annotated[bytes, msgspec.Meta(max_length=MAX_PASS_BYTES)]


class No(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reason: Annotated[str, msgspec.Meta(max_length=500)]


_decoder: msgspec.msgpack.Decoder[Hello | No] = msgspec.msgpack.Decoder(Hello | No)


def encode_hello(name: Peer, to: Peer, kind: Literal["control", "bulk"], membership: Membership) -> bytes:
    return msgspec.msgpack.encode(Hello(PROTOCOL, membership.run, name, to, kind, membership.proof))


def encode_no(reason: str) -> bytes:
    return msgspec.msgpack.encode(No(reason[:500]))


def check_hello(data: bytes | bytearray, key: str, me: Peer, membership: Membership) -> Hello:
    """The other side's hello, when it holds the key with id `key`, belongs to the run and wants `me`; else Refusal says why
    not."""
    try:
        hello = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Refusal("its hello is malformed") from None
    if isinstance(hello, No):
        raise Refusal(f"it refuses: {hello.reason}")
    if hello.protocol != PROTOCOL:
        raise Refusal(f"it speaks protocol {hello.protocol}, this peer {PROTOCOL}; install the same version of shoal")
    if hello.run != membership.run:
        raise Refusal(f"it belongs to another run ({hello.run}, not {membership.run})")
    if hello.to != me:
        raise Refusal(f"it wants {hello.to}, and here is {me}")
    try:
        claimed = key_id_of(hello.name)
        if claimed != key:
            raise ValueError(f"it claims the name of {claimed} but holds the key of {key}")
        membership.check(hello.proof, claimed, time.time())
    except ValueError as error:
        raise Refusal(str(error)) from None
    return hello
