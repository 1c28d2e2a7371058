"""Signed records of the peers of a run, and the table of those that a directory holds.

A record is signed by the peer it describes, and expires. Any sender may send any number, so the cheap checks come first (size, form,
run, name, expiry, whether a newer record of that peer is held), signatures have a budget per sender and in total, and nothing is
verified twice. The table holds a few names per key, the newest, and when it is full the invite with the most records gets no more.
Revocations are looked up each time, so they take effect at once. For directory.py and dht.py, in their thread. Decides only: the
caller passes the time.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated, Generic, TypeVar

import msgspec

from shoal.core.messages import Peer
from shoal.core.names import invite_of
from shoal.escaping import UNDECODABLE
from shoal.transport.addresses import hosts, usable_elsewhere
from shoal.transport.budget import Allowance, Budget, Budgets
from shoal.transport.identity.identity import Identity, key_id, key_id_of, verify
from shoal.transport.identity.invite import Membership
from shoal.transport.identity.passes import NotWelcome

TTL_S = 90.0  # several announcements may be lost before a living peer is forgotten
MAX_SEALED_BYTES = 4096
MAX_ADDRESSES = 16  # of one peer
RELAY = "/relay/"  # begins the name of a relay, /relay/HOST/PORT/KEY
MAX_RECORDS = 2048  # a View has 1,000 peers; an ordinary record has 450 bytes
MAX_RECORDS_BYTES = 2 << 20  # half of what hivemind puts into a message
KEY_RECORDS = 4  # names of one key: each start of a peer is another
KEY_NEWS = Allowance(per_s=0.5, at_once=8.0)  # records of one key: it announces itself every 20 s
PASS_S = 60.0  # a pass that was checked counts for so long, and that much beyond its end
CACHED = 4 * MAX_RECORDS  # records and passes remembered, believed and refused ones each
FORGED = 4.0  # verifications more that a forged record counts for

# In verifications of a signature, 67 us each and in part beside other threads; a record of a new peer takes three. From one address
# as many at once as 400 new peers behind one router need, and in all 3 % of a core.
PER_ADDRESS = Allowance(per_s=200.0, at_once=2000.0)
ALL_ADDRESSES = Allowance(per_s=500.0, at_once=4000.0)

T = TypeVar("T")


class PeerRecord(msgspec.Struct, frozen=True, array_like=True):
    """One peer of one run. `addresses` are further routes to it: hosts with the same ports, relays (relay.py), and libp2p multiaddrs."""

    run: Annotated[str, msgspec.Meta(max_length=128)]
    peer: Peer
    host: Annotated[str, msgspec.Meta(max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    directory_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    expires_s: float = 0.0  # wall-clock seconds since 1970
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=500)], ...], msgspec.Meta(max_length=MAX_ADDRESSES)
    ] = ()
    region: Annotated[str, msgspec.Meta(max_length=64)] = ""  # as its operator named it; '' is not known

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *(each for each in self.addresses if not each.startswith("/")))

    @property
    def multiaddrs(self) -> tuple[str, ...]:
        return tuple(each for each in self.addresses if each.startswith("/") and not each.startswith(RELAY))

    @property
    def relays(self) -> tuple[str, ...]:
        return tuple(each for each in self.addresses if each.startswith(RELAY))

    @property
    def entries(self) -> tuple[str, ...]:
        """Bootstrap addresses by which a newcomer finds the run through this peer; none of a peer that waits at relays."""
        if self.relays:
            return ()
        if self.directory_port:
            return tuple(f"{host}:{self.directory_port}" for host in self.hosts if usable_elsewhere(host))
        return tuple(
            each for each in self.multiaddrs if "/p2p-circuit" not in each and any(map(usable_elsewhere, hosts([each])))
        )


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """A record as it travels: its bytes, the key it is signed with, and the pass that admits that key to the run."""

    body: bytes
    public: bytes
    signature: bytes
    proof: bytes


# Decoders are made at import: msgspec 0.22 crashes when two threads decode a type for the first time.
_SEALED = msgspec.msgpack.Decoder(Sealed)
_RECORDS = msgspec.msgpack.Decoder(PeerRecord)


class BudgetSpent(ValueError):
    """More records are sent than are verified: this one may be valid, and may be sent again."""


def seal(identity: Identity, membership: Membership, record: PeerRecord) -> bytes:
    body = msgspec.msgpack.encode(record)
    signature = identity.sign("record", body)
    return msgspec.msgpack.encode(Sealed(body, identity.public, signature, membership.proof))


def opened(data: bytes, run: str, now: float) -> tuple[PeerRecord, Sealed]:
    """The record, and all of it checked but its signatures. ValueError says what is wrong."""
    if len(data) > MAX_SEALED_BYTES:
        raise ValueError(f"a record of {len(data)} bytes; at most {MAX_SEALED_BYTES}")
    try:
        sealed = _SEALED.decode(data)
        record = _RECORDS.decode(sealed.body)
    except UNDECODABLE as error:
        raise ValueError(f"not a record: {error}") from None
    if record.run != run:
        raise ValueError(f"{record.peer} takes part in another run")
    if not now < record.expires_s <= now + 10 * TTL_S:
        raise ValueError(f"{record.peer}: the record has expired, or a clock is wrong by minutes")
    if key_id_of(record.peer) != key_id(sealed.public):
        raise ValueError(f"{record.peer}: signed with another peer's key")
    return record, sealed


def unseal(data: bytes, membership: Membership, now: float) -> PeerRecord:
    """The record, checked: its size, signature, run, expiry, and that its peer belongs to the run. ValueError says what is wrong."""
    record, sealed = opened(data, membership.run, now)
    _check_welcome(record.peer, membership)
    membership.check_pass(sealed.proof, record.peer, now)
    if not verify(sealed.public, "record", sealed.body, sealed.signature):
        raise ValueError(f"{record.peer}: the signature is wrong")
    return record


class Held(msgspec.Struct, frozen=True):
    record: PeerRecord
    data: bytes
    key: str
    invite: str  # by which its peer came; '': it is this peer's own


class Records:
    """`learn` is called with every record that is accepted, `forget` with every peer whose record made room for another's."""

    def __init__(
        self,
        membership: Membership,
        learn: Callable[[PeerRecord], None],
        forget: Callable[[Peer], None] = lambda _: None,
        from_one: Allowance = PER_ADDRESS,
        from_all: Allowance = ALL_ADDRESSES,
    ) -> None:
        self._membership, self._learn, self._forget = membership, learn, forget
        self.held: dict[Peer, Held] = {}
        self._keys: Counter[str] = Counter()  # of those held
        self._own: Peer = ""
        self._nbytes = 0
        self._sources = Budgets(from_one, from_all)
        self._believed: Recent[PeerRecord] = Recent(CACHED)  # by hash
        self._refused: Recent[str] = Recent(CACHED)
        self._passes: Recent[float] = Recent(CACHED)  # by hash of pass, key and invite: until when it counts unchecked
        self._version = 0  # of the authority's list, as of which those were refused
        self._news: Recent[Budget] = Recent(CACHED)  # by key
        self.verified = 0  # signatures, for tests and benchmarks

    def own(self, record: PeerRecord, data: bytes) -> None:
        """This peer's: it is believed without a word."""
        self._own = record.peer
        self._believed.put(hashlib.sha256(data).digest(), record)
        self._put(Held(record, data, key_id_of(record.peer), ""))

    def add(
        self,
        data: bytes,
        source: str,
        now: float,
        label: tuple[Peer, float] | None = None,
        budgets: Budgets | None = None,
    ) -> PeerRecord:
        """Verify and hold a record that `source` sent. Its signatures count against the source's budget, among `budgets` if given.

        `label`: the peer and expiry that the sender states; then the record is checked as of the time it was made, not as of now.
        ValueError says what is wrong, NotWelcome that only a revocation speaks against it, BudgetSpent that it was not verified."""
        if len(data) > MAX_SEALED_BYTES:
            raise ValueError(f"a record of {len(data)} bytes; at most {MAX_SEALED_BYTES}")
        digest = hashlib.sha256(data).digest()
        self._look_at_list()
        known = self._believed.get(digest)
        if known is not None:
            if label not in (None, (known.peer, known.expires_s)):
                raise ValueError(f"{known.peer}: the record is labelled as another")
        if known is None:
            reason = self._refused.get(digest)
            if reason is not None:
                raise ValueError(reason)
            known = self._verified(data, now, label, lambda count: (budgets or self._sources).take(source, now, count))
            self._believed.put(digest, known)
            _check_welcome(known.peer, self._membership)
            self._keep(known, data, now)
            return known
        _check_welcome(known.peer, self._membership)
        if known.peer not in self.held and known.expires_s > now:  # it made room once; there may be some again
            self._keep(known, data, now)
        return known

    def holds(self, key: str) -> bool:
        return key in self._keys

    def fresh(self, now: float) -> list[PeerRecord]:
        """Those that have not expired, of peers that are not revoked; the others are forgotten."""
        for peer in [peer for peer, held in self.held.items() if held.record.expires_s <= now]:
            self._drop(peer)
        for peer in [peer for peer in self.held if self._membership.revoked(peer)]:
            self._drop(peer, notify=True)
        return [held.record for held in self.held.values()]

    # ------------------------------------------------------------------------------------------------------- private

    def _verified(
        self, data: bytes, now: float, label: tuple[Peer, float] | None, pay: Callable[[float], bool]
    ) -> PeerRecord:
        made_s = now if label is None else label[1] - TTL_S
        record, sealed = opened(data, self._membership.run, made_s)
        if label not in (None, (record.peer, record.expires_s)):
            raise ValueError(f"{record.peer}: the record is labelled as another")
        if record.expires_s > now + 10 * TTL_S:
            raise ValueError(f"{record.peer}: the record lasts too long")
        held = self.held.get(record.peer)
        if held is not None and held.record.expires_s >= record.expires_s:
            raise ValueError(f"{record.peer}: a newer record is held")
        key = key_id_of(record.peer)
        news = self._news.get(key)
        if news is not None and not news.has(now):
            raise BudgetSpent(f"{record.peer}: too many records of its key")
        admitted = hashlib.sha256(sealed.proof + f"|{_without_incarnation(record.peer)}".encode()).digest()
        checked = self._passes.get(admitted)
        known = checked is not None and made_s <= checked
        cost = 1.0 if known else 3.0
        if not pay(cost):
            raise BudgetSpent("more records are sent than are verified")
        self.verified += int(cost)
        try:
            if not known:
                self._membership.check_pass(sealed.proof, record.peer, made_s)
                self._passes.put(admitted, made_s + PASS_S)
            if not verify(sealed.public, "record", sealed.body, sealed.signature):
                raise ValueError(f"{record.peer}: the signature is wrong")
        except ValueError as error:
            pay(FORGED)
            self._refused.put(hashlib.sha256(data).digest(), str(error))
            raise
        return record

    def _look_at_list(self) -> None:
        """A newer one may renew what was over."""
        if self._version != self._membership.standing.version:
            self._version = self._membership.standing.version
            self._refused = Recent(CACHED)

    def _keep(self, record: PeerRecord, data: bytes, now: float) -> None:
        """As far as there is room for it. BudgetSpent: there is none."""
        if record.expires_s <= now or record.peer == self._own:
            return
        key = key_id_of(record.peer)
        news = self._news.get(key)
        if news is None:
            news = Budget(KEY_NEWS)
            self._news.put(key, news)
        if not news.take(now):
            raise BudgetSpent(f"{record.peer}: too many records of its key")
        held = Held(record, data, key, invite_of(record.peer))
        if record.peer not in self.held:
            mine = sorted(
                (other.record.expires_s, peer)
                for peer, other in self.held.items()
                if other.key == key and peer != self._own
            )
            if len(mine) >= KEY_RECORDS:
                self._drop(mine[0][1], notify=True)
            self._make_room(held, now)
        self._put(held)
        self._learn(record)

    def _make_room(self, held: Held, now: float) -> None:
        if self._has_room(held):
            return
        self.fresh(now)
        while not self._has_room(held):
            sizes: Counter[str] = Counter()
            for one in self.held.values():
                sizes[one.invite] += len(one.data)
            sizes[held.invite] += len(held.data)
            sizes.pop("", None)
            largest = max(sizes, key=lambda invite: (sizes[invite], invite))
            if largest == held.invite:
                raise BudgetSpent(
                    f"{held.record.peer}: {len(self.held)} records are held, most of them by the same invite"
                )
            ends = min((one.record.expires_s, peer) for peer, one in self.held.items() if one.invite == largest)
            self._drop(ends[1], notify=True)

    def _has_room(self, held: Held) -> bool:
        return len(self.held) < MAX_RECORDS and self._nbytes + len(held.data) <= MAX_RECORDS_BYTES

    def _put(self, held: Held) -> None:
        self._drop(held.record.peer)
        self.held[held.record.peer] = held
        self._keys[held.key] += 1
        self._nbytes += len(held.data)

    def _drop(self, peer: Peer, notify: bool = False) -> None:
        held = self.held.pop(peer, None)
        if held is not None:
            self._nbytes -= len(held.data)
            self._keys[held.key] -= 1
            if not self._keys[held.key]:
                del self._keys[held.key]
            if notify:
                self._forget(peer)


class Recent(Generic[T]):
    """A table of so many entries, without those that were used longest ago."""

    def __init__(self, most: int) -> None:
        self._max_admitted = most
        self._entries: OrderedDict[bytes | str, T] = OrderedDict()

    def get(self, key: bytes | str) -> T | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: bytes | str, value: T) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_admitted:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)


def _check_welcome(peer: Peer, membership: Membership) -> None:
    if (revoked := membership.revoked(peer)) is not None:
        raise NotWelcome(revoked)


def _without_incarnation(peer: Peer) -> str:
    """All that a pass is compared with."""
    fields = peer.split(".")
    return ".".join((fields[0], *fields[2:]))
