"""The first words on a connection between two peers: protocol number, run, name, kind of traffic, and the pass.

Each side hands the other the newest grant that it knows for the other's invite, so that whoever comes with an old text, or slept
through a renewal, shows a valid pass from then on. Who is refused because it was revoked is shown the authority's own word for it.

For transports whose connections already prove the key of the other side (tls.py by its certificate, libp2p by its own
handshake): that key's id is handed in and must be the one inside the name. The caller of a connection speaks first and
the other side answers with its own hello, or with the reason for refusing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.core.messages import PROTOCOL, Peer
from shoal.transport.identity.identity import key_id_of
from shoal.transport.identity.passes import MAX_GRANT_BYTES, MAX_PASS_BYTES, Membership, NotWelcome

MAX_HELLO_BYTES = 4096


class HandshakeRefused(ValueError):
    """This side does not talk to the other, or the other way round. `notice`: the authority's word, for whom was revoked."""

    notice = b""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    protocol: int
    run: Annotated[str, msgspec.Meta(max_length=128)]
    name: Peer
    to: Peer  # whom the speaker wants: at that address another may have started since
    kind: Literal["control", "bulk"]
    proof: Annotated[bytes, msgspec.Meta(max_length=MAX_PASS_BYTES)]
    grant: Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT_BYTES)] = b""  # of the other's invite, as I know it


class Rejection(msgspec.Struct, frozen=True, tag="No", array_like=True):
    reason: Annotated[str, msgspec.Meta(max_length=500)]
    notice: Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT_BYTES)] = b""


_decoder: msgspec.msgpack.Decoder[Hello | Rejection] = msgspec.msgpack.Decoder(Hello | Rejection)


def encode_hello(name: Peer, to: Peer, kind: Literal["control", "bulk"], membership: Membership) -> bytes:
    hello = Hello(PROTOCOL, membership.run, name, to, kind, membership.proof, membership.newer_grant(to))
    return msgspec.msgpack.encode(hello)


def encode_rejection(refusal: HandshakeRefused) -> bytes:
    return msgspec.msgpack.encode(Rejection(str(refusal)[:500], refusal.notice))


def check_hello(data: bytes | bytearray, key: str, me: Peer, membership: Membership) -> Hello:
    """The other side's hello, when it holds the key with id `key`, belongs to the run and wants `me`; else HandshakeRefused says why
    not."""
    try:
        hello = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
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
    return hello
