"""Passes: what a peer shows to prove that it takes part, how long it counts, and the authority's list of renewed and revoked ones.

A Grant is the authority's word that a holder (one invite) may name members until a date; a Pass is a grant with the holder's word for
one peer's key. Two things change after a pass was made, and both are in one PassList, signed and numbered by the authority:
grants that last longer than those in the invites (renewal), and invites and keys that are no longer welcome (revocation). Every peer
keeps the newest list that it has heard of, in the one Membership that its transport, directory and driver share; runtime/passes.py
spreads it. Lists are taken by rising version only, so that an old one told again changes nothing.

Clocks differ: a pass counts for a tenth of its lifetime longer than it says, at most an hour; revocations need no clock at all.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from shoal.core.messages import MAX_LIST_BYTES, Peer
from shoal.core.names import invite_of, key_of
from shoal.escaping import UNDECODABLE
from shoal.transport.identity.identity import PUBLIC_BYTES, key_id, key_id_of, verify

MAX_PASS_BYTES = 1024
MAX_GRANT_BYTES = 512  # one renewed grant, or one revocation, as a hello carries them
MAX_GRANTS = 1024  # renewed, in one list
MAX_REVOKED = 2048
MAX_PEERS = 1 << 16  # that one invite admits
INVITE_CHARS = 12  # of an invite's id, 60 bits: only the authority makes holders' keys, so nobody can aim at one
SHOWN = 4096  # passes of others that are remembered, the newest
SKEW_S = 3600.0  # by which two machines' clocks may differ
SKEW_SHARE = 0.1  # of a grant's lifetime, which bounds the above

Key = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_BYTES, max_length=PUBLIC_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
Seconds = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # since 1970


class ArrayStruct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that is signed: one encoding, nothing unknown in it."""


class Grant(ArrayStruct, frozen=True):
    """The authority lets whoever holds `holder`'s private key name members, `peers` of them at a time, until `expires`."""

    authority: Key
    holder: Key
    issued: Seconds
    expires: Seconds
    peers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PEERS)]
    signature: Signature = bytes(64)

    @property
    def id(self) -> str:
        """The invite's id, as names and `shoal invite --list` have it."""
        return key_id(self.holder)[:INVITE_CHARS]

    @property
    def tag(self) -> str:
        """What the names of peers end with that came by it (core/names.py)."""
        return f"{self.id}.{self.peers}"

    @property
    def lifetime_s(self) -> float:
        return float(max(0, self.expires - self.issued))

    @property
    def ends_s(self) -> float:
        """When nobody believes it any more, whose clock is right within SKEW_S."""
        return self.expires + min(SKEW_S, SKEW_SHARE * self.lifetime_s)

    def check_signature(self) -> None:
        unsigned = msgspec.msgpack.encode(msgspec.structs.replace(self, signature=bytes(64)))
        if not verify(self.authority, "grant", unsigned, self.signature):
            raise ValueError("forged: not signed by the run's authority")

    def check(self, now: float) -> None:
        self.check_signature()
        if now >= self.ends_s:
            raise ValueError(f"expired at {date(self.expires)}; ask for a new invite")


class Pass(ArrayStruct, frozen=True):
    grant: Grant
    member: Key
    signature: Signature  # of the member's key, by the grant's holder


class Revoked(ArrayStruct, frozen=True):
    """The authority's word that an invite (its id) or a key (its id) is no longer welcome. Signed by itself, so that a peer that is
    refused can be shown why, and need not believe whoever refuses it."""

    authority: Key
    what: Annotated[str, msgspec.Meta(max_length=64)]
    since: Seconds
    signature: Signature = bytes(64)

    def check_signature(self) -> None:
        unsigned = msgspec.msgpack.encode(msgspec.structs.replace(self, signature=bytes(64)))
        if not verify(self.authority, "revoked", unsigned, self.signature):
            raise ValueError("a forged revocation")

    @property
    def words(self) -> str:
        kind = "its invite" if len(self.what) == INVITE_CHARS else "its key"
        return f"{kind} {self.what} was revoked by the run's authority on {date(self.since)}"


class PassList(ArrayStruct, frozen=True):
    """`version` only grows. `grants`: renewed ones, at most one for each holder."""

    authority: Key
    version: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)] = ()
    revoked: Annotated[tuple[Revoked, ...], msgspec.Meta(max_length=MAX_REVOKED)] = ()
    signature: Signature = bytes(64)


# Decoders are made at import: msgspec 0.22 crashes when two threads decode a type for the first time.
_GRANTS = msgspec.msgpack.Decoder(Grant)
_PASSES = msgspec.msgpack.Decoder(Pass)
_REVOKED = msgspec.msgpack.Decoder(Revoked)
_LISTS = msgspec.msgpack.Decoder(PassList)


class NotWelcome(ValueError):
    """The pass is genuine, and revoked. `notice` proves it to its holder."""

    def __init__(self, revoked: Revoked) -> None:
        super().__init__(revoked.words)
        self.notice = msgspec.msgpack.encode(revoked)


class PassStatus(msgspec.Struct, frozen=True):
    """What is known of everybody's passes: the newest list, as tables."""

    version: int = 0
    data: bytes = b""
    grants: dict[str, Grant] = {}
    revoked: dict[str, Revoked] = {}

    def find(self, peer: Peer) -> Revoked | None:
        if not self.revoked:  # asked for every message
            return None
        return self.revoked.get(invite_of(peer)) or self.revoked.get(key_of(peer))


class Membership:
    """What a transport needs to prove that its peer belongs to the run, and to check others. Used from several threads: what is
    known is replaced whole. `clock` tells wall-clock seconds; `on_change` is called, in any thread, when something was learned."""

    def __init__(
        self,
        run: str,
        proof: bytes,
        name: Peer = "",
        clock: Callable[[], float] = time.time,
        standing: PassStatus = PassStatus(),
    ) -> None:
        self.run, self.name, self.clock = run, name, clock
        self.on_change: Callable[[], None] = lambda: None
        self.shown: dict[str, bytes] = {}  # passes that were checked, by key
        self.seen = ""  # the address from which this peer's last connection arrived, as the other side said
        self._lock = threading.Lock()
        self._standing = standing
        self._proof = proof
        try:
            self._pass: Pass | None = _PASSES.decode(proof)
        except UNDECODABLE:
            self._pass = None

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def proof(self) -> bytes:
        """The pass to show: with the newest grant."""
        return self._proof

    @property
    def grant(self) -> Grant | None:
        """That my own pass stems from; None of a stranger."""
        return self._pass.grant if self._pass is not None else None

    @property
    def standing(self) -> PassStatus:
        return self._standing

    def check(self, proof: bytes, peer: Peer, now: float) -> None:
        """ValueError says why `proof` does not admit `peer`, whose key has been proven, to this run. NotWelcome: it is revoked."""
        self.check_pass(proof, peer, now)
        if (revoked := self._standing.find(peer)) is not None:
            raise NotWelcome(revoked)

    def check_pass(self, proof: bytes, peer: Peer, now: float) -> None:
        """The same without a look at the revoked."""
        grant = genuine(proof, self.run, peer)
        self._remember(peer, proof)
        newest = self._standing.grants.get(grant.id, grant)
        if now >= max(grant.ends_s, newest.ends_s):
            raise ValueError(f"its pass is expired at {date(max(grant.expires, newest.expires))}; ask for a new invite")

    def _remember(self, peer: Peer, proof: bytes) -> None:
        key = key_of(peer)
        if self.shown.get(key) != proof:
            with self._lock:
                kept = [each for each in self.shown.items() if each[0] != key]
                self.shown = dict([*kept[-SHOWN + 1 :], (key, proof)])

    def revoked(self, peer: Peer) -> Revoked | None:
        """That peer's invite or key is not welcome any more."""
        return self._standing.find(peer)

    def newer_grant(self, peer: Peer) -> bytes:
        """The renewed grant of that peer's invite, to be handed over; b'': none is known."""
        grant = self._standing.grants.get(invite_of(peer))
        return msgspec.msgpack.encode(grant) if grant is not None else b""

    # ------------------------------------------------------------------------------------------------- being told

    def take_list(self, data: bytes) -> bool:
        """Was it newer than the one held? ValueError says what is wrong with it."""
        if len(data) > MAX_LIST_BYTES:
            raise ValueError(f"a list of passes of {len(data)} bytes; at most {MAX_LIST_BYTES}")
        try:
            pass_list = _LISTS.decode(data)
        except UNDECODABLE:
            raise ValueError("not a list of passes") from None
        if pass_list.version <= self._standing.version:
            return False
        unsigned = msgspec.msgpack.encode(msgspec.structs.replace(pass_list, signature=bytes(64)))
        if key_id(pass_list.authority) != self.run or not verify(
            pass_list.authority, "passes", unsigned, pass_list.signature
        ):
            raise ValueError("a forged list of passes: not signed by the run's authority")
        grants = {grant.id: grant for grant in pass_list.grants}
        revoked = {entry.what: entry for entry in pass_list.revoked}
        with self._lock:
            if pass_list.version <= self._standing.version:
                return False
            self._standing = PassStatus(pass_list.version, data, grants, revoked)
            if self.grant is not None and (mine := grants.get(self.grant.id)) is not None:
                self._adopt(mine)
        self.on_change()
        return True

    def take_grant(self, data: bytes) -> bool:
        """Somebody hands me a grant that may be a renewal of my own. Whatever else it is counts for nothing."""
        try:
            grant = _GRANTS.decode(data)
            if not self._renews_mine(grant):
                return False
            grant.check_signature()
        except (ValueError, *UNDECODABLE):
            return False
        with self._lock:
            if not self._adopt(grant):
                return False
        self.on_change()
        return True

    def take_notice(self, data: bytes) -> bool:
        """Somebody who refuses me shows the authority's word that I am not welcome. Is it?"""
        try:
            entry = _REVOKED.decode(data)
            if key_id(entry.authority) != self.run or entry.what not in (invite_of(self.name), key_of(self.name)):
                return False
            entry.check_signature()
        except (ValueError, *UNDECODABLE):
            return False
        with self._lock:
            known = self._standing
            self._standing = msgspec.structs.replace(known, revoked={**known.revoked, entry.what: entry})
        self.on_change()
        return True

    def _adopt(self, grant: Grant) -> bool:
        """From now on my pass shows this grant, if it is a later one for the same holder."""
        if self._pass is None or not self._renews_mine(grant):
            return False
        self._pass = msgspec.structs.replace(self._pass, grant=grant)
        self._proof = msgspec.msgpack.encode(self._pass)
        return True

    def _renews_mine(self, grant: Grant) -> bool:
        mine = self.grant
        if mine is None or grant.expires <= mine.expires:
            return False
        return (grant.authority, grant.holder, grant.peers) == (mine.authority, mine.holder, mine.peers)


def genuine(proof: bytes, run: str, peer: Peer) -> Grant:
    """The grant of a pass that is genuine and the named peer's; whether it is over is another question. ValueError."""
    if not proof:
        raise ValueError("no pass: this peer holds no invite of the run")
    if len(proof) > MAX_PASS_BYTES:
        raise ValueError("malformed pass")
    try:
        shown = _PASSES.decode(proof)
    except UNDECODABLE:
        raise ValueError("malformed pass") from None
    if key_id(shown.grant.authority) != run:
        raise ValueError(f"its pass is of another run ({key_id(shown.grant.authority)}, not {run})")
    try:
        shown.grant.check_signature()
    except ValueError as error:
        raise ValueError(f"its pass is {error}") from None
    if not verify(shown.grant.holder, "member", shown.member, shown.signature):
        raise ValueError("its pass is forged: not signed by the invite's holder")
    if key_id(shown.member) != key_id_of(peer):
        raise ValueError("its pass belongs to another peer")
    if not peer.endswith(f".{shown.grant.tag}"):
        raise ValueError(
            f"its name does not say by which invite it came: '{shown.grant.tag}' is at the end of its pass"
        )
    return shown.grant


def date(seconds: int) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError):  # beyond the year 9999
        return f"{seconds} s after 1970"
