"""Who may take part in a run: the authority's key and the invites that it signs for people.

A run is named by the key id of its authority, which stays the same for as long as the run lasts. An invite is a secret text for one
person or machine: addresses to start from, a date, how many peers may come by it, and a key of its own that the authority has signed.
With it the holder makes the pass of its peer (passes.py), which names the peer's key: a pass proves membership to anybody and is
of no use to anybody else, so that a stranger who is shown one gains nothing. The authority renews passes and revokes them.
"""

from __future__ import annotations

import base64
import binascii
import os
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shoal.core.messages import Override, View
from shoal.transport.identity.identity import Identity, key_id, load_key, public_bytes, sign, verify
from shoal.transport.identity.passes import ArrayStruct, Grant, Key, Pass, PassList, Revoked, Signature
from shoal.transport.identity.passes import Membership as Membership

PREFIX = "shoal-"
MAX_INVITE_CHARS = 16384
MAX_CONFIG_BYTES = 4096
PEERS = 16  # that an invite admits at a time, unless it says otherwise

_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Config = Annotated[bytes, msgspec.Meta(max_length=MAX_CONFIG_BYTES)]
_Address = Annotated[str, msgspec.Meta(max_length=256)]


class Invite(ArrayStruct, frozen=True):
    """As read from its text. `addresses` are bootstrap addresses, in the directory's own form; `config` is what a newcomer
    needs to know of the run, in the composition root's own form."""

    title: _Name
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=32)]
    grant: Grant
    secret: Key
    signature: Signature = bytes(64)
    config: _Config = b""

    @property
    def run(self) -> str:
        return key_id(self.grant.authority)

    def membership(self, identity: Identity, clock: Callable[[], float] = time.time) -> Membership:
        """The identity's pass. From here on its name says by which invite it came."""
        identity.tag = self.grant.tag
        holder = Ed25519PrivateKey.from_private_bytes(self.secret)
        signature = sign(holder, "member", identity.public)
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
        holder = Ed25519PrivateKey.generate()
        issued = min(time.time() if issued is None else issued, expires)
        grant = self._granted(Grant(self.public, public_bytes(holder), max(0, int(issued)), int(expires), peers))
        secret = holder.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return self.text(Invite(title, addresses, grant, secret, config=config))

    def text(self, invite: Invite) -> str:
        """Signed, to be handed over."""
        unsigned = msgspec.msgpack.encode(msgspec.structs.replace(invite, signature=bytes(64)))
        data = msgspec.msgpack.encode(msgspec.structs.replace(invite, signature=sign(self._key, "invite", unsigned)))
        text = PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")
        read_invite(text, now=0.0)  # names, limits and addresses that no peer would accept are refused here
        return text

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


def read_invite(text: str, now: float, run: str = "") -> Invite:
    """Check an invite; `run`, when given, is the run it must be for. ValueError says what is wrong with it. With `now` 0 its date is
    not looked at: it may have been renewed since, which only the run's peers know."""
    invite = _decoded("".join(text.split()))
    unsigned = msgspec.msgpack.encode(msgspec.structs.replace(invite, signature=bytes(64)))
    if not verify(invite.grant.authority, "invite", unsigned, invite.signature):
        raise ValueError("this invite is forged or was altered: its signature is not the run authority's")
    if public_bytes(Ed25519PrivateKey.from_private_bytes(invite.secret)) != invite.grant.holder:
        raise ValueError("this invite is forged: its secret is not the one that the run's authority signed")
    if run and invite.run != run:
        raise ValueError(f"this invite is for run {invite.run} ('{invite.title}'), not for run {run}")
    try:
        invite.grant.check(now)
    except ValueError as error:
        raise ValueError(f"this invite is {error}") from None
    return invite


def _decoded(text: str) -> Invite:
    if not text.startswith(PREFIX) or len(text) > MAX_INVITE_CHARS:
        raise ValueError(f"not an invite; expected the text that `shoal invite` printed, which starts with '{PREFIX}'")
    coded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(data, type=Invite)
    except (binascii.Error, msgspec.MsgspecError, UnicodeError):
        raise ValueError("this invite is incomplete or was altered; copy the whole line") from None
