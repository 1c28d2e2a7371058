"""Who may take part in a run: the authority's key, invites for people, and the passes that peers show to one another.

A run is named by the key id of its authority. An invite is a secret text for one person or machine: addresses to start
from, a date, and a key of its own that the authority has signed. With it the holder makes the pass of its peer, which
names the peer's key: a pass proves membership to anybody and is of no use to anybody else, so that a stranger who is
shown one gains nothing. Passes end with the invite they come from.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import os
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shoal.core.messages import Override, View
from shoal.transport.identity import PUBLIC_BYTES, Identity, key_id, load_key, public_bytes, sign, verify

PREFIX = "shoal-"
MAX_INVITE_CHARS = 16384
MAX_PASS_BYTES = 1024
MAX_CONFIG_BYTES = 4096

_Key = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_BYTES, max_length=PUBLIC_BYTES)]
_Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Config = Annotated[bytes, msgspec.Meta(max_length=MAX_CONFIG_BYTES)]
_Address = Annotated[str, msgspec.Meta(max_length=256)]


class _Plain(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Grant(_Plain, frozen=True):
    """The authority lets whoever holds `holder`'s private key name members, until `expires` (seconds since 1970)."""

    authority: _Key
    holder: _Key
    expires: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    signature: _Signature = bytes(64)

    def check(self, now: float) -> None:
        unsigned = msgspec.msgpack.encode(msgspec.structs.replace(self, signature=bytes(64)))
        if not verify(self.authority, "grant", unsigned, self.signature):
            raise ValueError("forged: not signed by the run's authority")
        if now >= self.expires:
            raise ValueError(f"expired at {_date(self.expires)}; ask for a new invite")


class _Pass(_Plain, frozen=True):
    grant: Grant
    member: _Key
    signature: _Signature  # of the member's key, by the grant's holder


class Membership(msgspec.Struct, frozen=True):
    """What a transport needs to prove that its peer belongs to the run, and to check others."""

    run: str
    proof: bytes

    def check(self, proof: bytes, member: str, now: float) -> None:
        """ValueError says why `proof` does not admit the peer with key id `member` to this run."""
        check_pass(proof, self.run, member, now)


class Invite(_Plain, frozen=True):
    """As read from its text. `addresses` are bootstrap addresses, in the directory's own form; `config` is what a newcomer
    needs to know of the run, in the composition root's own form."""

    title: _Name
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=32)]
    grant: Grant
    secret: _Key
    signature: _Signature = bytes(64)
    config: _Config = b""

    @property
    def run(self) -> str:
        return key_id(self.grant.authority)

    def membership(self, identity: Identity) -> Membership:
        holder = Ed25519PrivateKey.from_private_bytes(self.secret)
        signature = sign(holder, "member", identity.public)
        return Membership(self.run, msgspec.msgpack.encode(_Pass(self.grant, identity.public, signature)))


class Authority:
    """The key that founded a run. Whoever holds it makes invites; it is not needed for anything else."""

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
        """The operator's word that `view` is agreed (core/override.py), which every peer of the run can check."""
        unsigned = Override(view=view, term=term, authority=self.public)
        return msgspec.structs.replace(
            unsigned, signature=sign(self._key, "override", msgspec.msgpack.encode(unsigned))
        )

    def invite(self, addresses: tuple[str, ...], expires: float, title: str = "", config: bytes = b"") -> str:
        """The text of a new invite, good until `expires` (seconds since 1970)."""
        holder = Ed25519PrivateKey.generate()
        grant = Grant(self.public, public_bytes(holder), int(expires))
        grant = msgspec.structs.replace(grant, signature=sign(self._key, "grant", msgspec.msgpack.encode(grant)))
        secret = holder.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        invite = Invite(title, addresses, grant, secret, config=config)
        signature = sign(self._key, "invite", msgspec.msgpack.encode(invite))
        data = msgspec.msgpack.encode(msgspec.structs.replace(invite, signature=signature))
        text = PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")
        read_invite(text, now=0.0)  # names and addresses that no peer would accept are refused here
        return text


def signed_by(override: Override, run: str) -> bool:
    """Is it the word of that run's authority?"""
    unsigned = msgspec.msgpack.encode(msgspec.structs.replace(override, signature=b""))
    return key_id(override.authority) == run and verify(override.authority, "override", unsigned, override.signature)


def read_invite(text: str, now: float, run: str = "") -> Invite:
    """Check an invite; `run`, when given, is the run it must be for. ValueError says what is wrong with it."""
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


def check_pass(proof: bytes, run: str, member: str, now: float) -> None:
    """ValueError says why `proof` does not admit the peer with key id `member` to `run`."""
    if not proof:
        raise ValueError("no pass: this peer holds no invite of the run")
    if len(proof) > MAX_PASS_BYTES:
        raise ValueError("malformed pass")
    try:
        shown = msgspec.msgpack.decode(proof, type=_Pass)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ValueError("malformed pass") from None
    if key_id(shown.grant.authority) != run:
        raise ValueError(f"its pass is of another run ({key_id(shown.grant.authority)}, not {run})")
    try:
        shown.grant.check(now)
    except ValueError as error:
        raise ValueError(f"its pass is {error}") from None
    if not verify(shown.grant.holder, "member", shown.member, shown.signature):
        raise ValueError("its pass is forged: not signed by the invite's holder")
    if key_id(shown.member) != member:
        raise ValueError("its pass belongs to another peer")


def _decoded(text: str) -> Invite:
    if not text.startswith(PREFIX) or len(text) > MAX_INVITE_CHARS:
        raise ValueError(f"not an invite; expected the text that `shoal invite` printed, which starts with '{PREFIX}'")
    coded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(data, type=Invite)
    except (binascii.Error, msgspec.MsgspecError, UnicodeError):
        raise ValueError("this invite is incomplete or was altered; copy the whole line") from None


def _date(seconds: int) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError):  # beyond the year 9999
        return f"{seconds} s after 1970"
