"""Who may take part in a run: the authority's key and the invites that it signs for people.

A run is named by the key id of its authority, which stays the same for as long as the run lasts. An invite is a secret text for one
person or machine: addresses to start from, a date, how many peers may come by it, and a key of its own that the authority has signed.
With it the holder makes the pass of its peer (passes.py), which names the peer's key: a pass proves membership to anybody and is
of no use to anybody else, so that a stranger who is shown one gains nothing. The authority renews passes and revokes them.

The text is short (docs/design/2026-11-23-short-invites.md): of the holder's key it has the seed, and the authority signs the grant alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.core.messages import Override, View
from shoal.escaping import UNDECODABLE, escaped
from shoal.transport.identity import text as written
from shoal.transport.identity.identity import PUBLIC_BYTES, Identity, key_id, load_key, public_bytes, sign, verify
from shoal.transport.identity.passes import MAX_PEERS, ArrayStruct, Grant, Pass, PassList, Revoked, Seconds
from shoal.transport.identity.passes import Membership as Membership

PREFIX = "shoal1"  # the number is the text's form
_ANY_FORM = re.compile(r"shoal[-\d]")
MAX_INVITE_CHARS = 8192
MAX_CONFIG_BYTES = 4096
SEED_BYTES = 16  # of the holder's key: as hard to guess as the key itself
SIGNATURE_BYTES = 64
PEERS = 16  # that an invite admits at a time, unless it says otherwise

_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Config = Annotated[bytes, msgspec.Meta(max_length=MAX_CONFIG_BYTES)]
_KEYS_BYTES = PUBLIC_BYTES + SIGNATURE_BYTES + SEED_BYTES


class _Written(ArrayStruct, frozen=True):
    """An invite's text as values."""

    title: _Name
    addresses: Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=257)], ...], msgspec.Meta(max_length=32)]
    # Authority, its signature, seed
    keys: Annotated[bytes, msgspec.Meta(min_length=_KEYS_BYTES, max_length=_KEYS_BYTES)]
    issued: Seconds
    lifetime_s: Seconds
    peers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PEERS)]
    config: _Config


class Invite(msgspec.Struct, frozen=True):
    """As read from its text. `addresses` are bootstrap addresses, in the directory's own form; `config` is what a newcomer
    needs to know of the run, in the composition root's own form."""

    title: str
    addresses: tuple[str, ...]
    grant: Grant
    seed: bytes
    config: bytes = b""

    @property
    def run(self) -> str:
        return key_id(self.grant.authority)

    def membership(self, identity: Identity, clock: Callable[[], float] = time.time) -> Membership:
        """The identity's pass. From here on its name says by which invite it came."""
        identity.tag = self.grant.tag
        signature = sign(_holder(self.seed), "member", identity.public)
        proof = msgspec.msgpack.encode(Pass(self.grant, identity.public, signature))
        return Membership(self.run, proof, identity.name, clock)


class Authority:
    """The key that founded a run. Whoever holds it makes, renews and revokes invites, and overrides the quorum; it is not needed for
    anything else. It cannot be replaced: its id is the run's name."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = public_bytes(key)
        self.run = key_id(self.public)

    @classmethod
    def new(cls) -> Authority:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Authority:
        """The key kept in `path`; a new one is made and kept there when there is no such file."""
        return cls(load_key(path))

    def override(self, view: View, term: int) -> Override:
        """The operator's word that `view` is agreed (core/consensus/override.py), which every peer of the run can check."""
        unsigned = Override(view=view, term=term, authority=self.public)
        return msgspec.structs.replace(
            unsigned, signature=sign(self._key, "override", msgspec.msgpack.encode(unsigned))
        )

    def invite(
        self,
        addresses: tuple[str, ...],
        expires: float,
        title: str = "",
        config: bytes = b"",
        peers: int = PEERS,
        issued: float | None = None,
    ) -> str:
        """The text of a new invite, good until `expires` (seconds since 1970) and for so many peers at a time."""
        seed = os.urandom(SEED_BYTES)
        issued = min(time.time() if issued is None else issued, expires)
        grant = Grant(self.public, public_bytes(_holder(seed)), max(0, int(issued)), int(expires), peers)
        return as_text(Invite(title, addresses, self._granted(grant), seed, config))

    def renewed(self, grant: Grant, issued: float, expires: float) -> Grant:
        """The same for longer."""
        return self._granted(msgspec.structs.replace(grant, issued=int(issued), expires=int(expires)))

    def revoked(self, what: str, since: float) -> Revoked:
        """`what`: the id of an invite or of a key."""
        entry = Revoked(self.public, what, int(since))
        return msgspec.structs.replace(entry, signature=sign(self._key, "revoked", msgspec.msgpack.encode(entry)))

    def pass_list(self, version: int, grants: tuple[Grant, ...], revoked: tuple[Revoked, ...]) -> bytes:
        """ValueError: more than a list may have."""
        unsigned = PassList(self.public, version, grants, revoked)
        signature = sign(self._key, "passes", msgspec.msgpack.encode(unsigned))
        data = msgspec.msgpack.encode(msgspec.structs.replace(unsigned, signature=signature))
        Membership(self.run, b"").take_list(data)  # what no peer would take is refused here
        return data

    def _granted(self, grant: Grant) -> Grant:
        unsigned = msgspec.msgpack.encode(msgspec.structs.replace(grant, signature=bytes(64)))
        return msgspec.structs.replace(grant, signature=sign(self._key, "grant", unsigned))


def signed_by(override: Override, run: str) -> bool:
    """Is it the word of that run's authority?"""
    unsigned = msgspec.msgpack.encode(msgspec.structs.replace(override, signature=b""))
    return key_id(override.authority) == run and verify(override.authority, "override", unsigned, override.signature)


def as_text(invite: Invite) -> str:
    """To be handed over. ValueError: names, limits or addresses that no peer would accept."""
    grant = invite.grant
    keys = grant.authority + grant.signature + invite.seed
    addresses = written.packed(invite.addresses)
    lifetime_s = grant.expires - grant.issued
    values = _Written(invite.title, addresses, keys, grant.issued, lifetime_s, grant.peers, invite.config)
    text = PREFIX + written.encoded(msgspec.msgpack.encode(values))
    read_invite(text, now=0.0)
    return text


def read_invite(text: str, now: float, run: str = "") -> Invite:
    """Check an invite; `run`, when given, is the run it must be for. ValueError says what is wrong with it. With `now` 0 its date is
    not looked at: it may have been renewed since, which only the run's peers know."""
    invite = _decoded("".join(text.split()))
    try:
        invite.grant.check(now)
    except ValueError as error:
        raise ValueError(f"this invite is {error}") from None
    if run and invite.run != run:
        raise ValueError(f"this invite is for run {invite.run} ('{escaped(invite.title)}'), not for run {run}")
    return invite


def _decoded(text: str) -> Invite:
    if not _ANY_FORM.match(text) or len(text) > MAX_INVITE_CHARS:
        raise ValueError(f"not an invite; expected the text that `shoal invite` printed, which starts with '{PREFIX}'")
    if not text.startswith(PREFIX):
        raise ValueError(
            "this invite was made by another version of Shoal, which writes them differently; ask for a new one, made by the version"
            " that is installed here"
        )
    try:
        values = _WRITTEN.decode(written.decoded(text.removeprefix(PREFIX)))
        addresses = written.unpacked(values.addresses)
    except (ValueError, *UNDECODABLE):
        raise ValueError("this invite is incomplete or was altered; copy the whole line") from None
    keys = values.keys
    authority, signature, seed = keys[:PUBLIC_BYTES], keys[PUBLIC_BYTES:-SEED_BYTES], keys[-SEED_BYTES:]
    expires = values.issued + values.lifetime_s
    grant = Grant(authority, public_bytes(_holder(seed)), values.issued, expires, values.peers, signature)
    return Invite(values.title, addresses, grant, seed, values.config)


def _holder(seed: bytes) -> Ed25519PrivateKey:
    """The key that names members by this invite."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"shoal: the holder of an invite" + seed).digest())


_WRITTEN = msgspec.msgpack.Decoder(_Written)
