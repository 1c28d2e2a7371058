"""Whom the leader evicts for what it did: evidence, not accusations.

What a peer sends to the leader and cannot be (books with an index twice) convicts it at once. What only others have seen needs two
accusers of different keys; where only one other can have seen it, that one's word counts, but whoever convicts two peers alone, or
alone accuses several, goes itself: a machine that cannot receive, or lies. A replica whose values differ from those of the others of
its stage downloads its state again, and goes at the third time. For leader.py, which evicts; for as long as its peer leads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from shoal.core.messages import Evicted, Member, Peer, Settings
from shoal.core.names import invite_of, key_of

COMPLAINTS = 3  # before a peer is evicted: one may be a damaged message
ACCUSERS = 2  # that are independent, where there can be so many
ALONE = 3  # peers that one accuses and no other does
AGE = 64  # steps
FEW = 2  # peers that one may accuse in any case; more only if they are less than a third
DIFFERS = 3  # times that a replica's values differ before it is evicted
KEPT = 256  # keys that a view remembers
DOUBLED = 8  # times that a pause doubles
WORDS = 8  # complaints of one accuser that are kept

Verdict = tuple[Peer, str]


class Dispute(msgspec.Struct, frozen=True):
    """Replicas of one stage hold different values, listed by value; `retry`: sums of a round, which is tried again before a replica
    has to download its state."""

    why: str
    replicas: dict[str, list[Peer]]
    retry: bool = False


class Misfit(msgspec.Struct, frozen=True):
    """A joiner that holds another state than its stage's members."""

    member: Member


class Conduct:
    """What is held against whom."""

    def __init__(self) -> None:
        self._accused: dict[Peer, dict[Peer, list[str]]] = {}
        self._steps = 0
        self._accuses: dict[str, set[str]] = {}  # whom each has accused, by key
        self._convicted: dict[str, set[str]] = {}  # by one accuser alone: its key, their keys
        self._differed: Counter[str] = Counter()  # of keys
        self._doubts: Counter[str] = Counter()  # of keys: in how many disagreements that nobody could settle

    def keep(self, present: Iterable[Peer]) -> None:
        """Nothing is held against who has left, nor said by it."""
        there = set(present)
        self._accused = {
            peer: {by: words for by, words in held.items() if by in there}
            for peer, held in self._accused.items()
            if peer in there
        }

    def step(self) -> None:
        """A step is committed: what was said in it is over. That one has accused many is so after AGE steps."""
        self._accused.clear()
        self._steps += 1
        if self._steps % AGE == 0:
            self._accuses.clear()

    def accuse(self, accuser: Peer, accused: Peer, reason: str, witnesses: int) -> Verdict | None:
        """Whom to evict now and why, if anybody. `witnesses`: how many others could see it."""
        if accuser == accused:
            return None
        several = self._accuses.setdefault(key_of(accuser), set())
        several.add(key_of(accused))
        if len(several) > max(FEW, witnesses // 3):
            return accuser, f"accuses {len(several)} peers, the last {accused}: {reason}"
        held = self._accused.setdefault(accused, {})
        words = held.setdefault(accuser, [])
        words.append(reason)
        del words[:-WORDS]
        if sum(map(len, held.values())) >= COMPLAINTS:
            if len({key_of(peer) for peer in held}) >= min(ACCUSERS, witnesses):
                said = f"after complaints by {' and '.join(sorted(held))}, the last: {reason}"
                return (accused, said) if len(held) > 1 else self.alone(accuser, accused, said)
        only = [peer for peer, by in self._accused.items() if set(by) == {accuser} and len(by[accuser]) >= COMPLAINTS]
        if len(only) >= ALONE:
            return accuser, f"accuses {', '.join(sorted(only))} of what no other peer sees, the last: {reason}"
        return None

    def alone(self, accuser: Peer, accused: Peer, reason: str) -> Verdict:
        """One peer's word against another's: it counts once, against one."""
        convicted = self._convicted.setdefault(key_of(accuser), set())
        convicted.add(key_of(accused))
        if len(convicted) > 1:
            return accuser, f"is the only one to accuse several peers, the last {accused}: {reason}"
        return accused, reason

    def right(self, found: Mapping[str, list[Peer]], leader: Peer) -> list[Peer]:
        """Of replicas that hold different values, by digest, those that are taken to be right: most keys; where that is a tie, which two
        replicas cannot settle, the leader's own, then who has been in fewer such ties, then who is listed first."""
        size = {value: len({key_of(peer) for peer in peers}) for value, peers in found.items()}
        most = max(size.values())
        tied = [value for value, keys in size.items() if keys == most]
        best = min(tied, key=lambda value: (leader not in found[value], self._doubted(found[value])))
        if len(tied) > 1:
            self._doubts.update(key_of(peer) for value in tied for peer in found[value])
        return found[best]

    def differs(self, peer: Peer, reason: str) -> Verdict | None:
        """It has to download its state again; a verdict if it had to too often."""
        key = key_of(peer)
        self._differed[key] += 1
        return (peer, f"{reason}, {self._differed[key]} times by now") if self._differed[key] >= DIFFERS else None

    def _doubted(self, peers: list[Peer]) -> int:
        return sum(self._doubts[key_of(peer)] for peer in peers)


class Pauses:
    """How long those who were evicted stay out. Views remember who and how often, this leader since when."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._since: dict[str, tuple[int, float]] = {}

    def on_view(self, evicted: tuple[Evicted, ...], now: float) -> None:
        before = self._since
        self._since = {
            one.key: before[one.key] if one.key in before and before[one.key][0] == one.times else (one.times, now)
            for one in evicted
        }

    def until(self, peer: Peer, standing: Iterable[Peer]) -> float:
        """When it may come back: under its key; and under any other, when more peers of its invite were evicted than are in good
        standing. Keys cost nothing, and one broken machine of a laboratory does not keep the others out."""
        invite = invite_of(peer)
        times, _ = self._since.get(invite, (0, 0.0))
        well = sum(invite_of(other) == invite for other in standing)
        return max(self._until(key_of(peer)), self._until(invite) if times > well else float("-inf"))

    def _until(self, key: str) -> float:
        if key not in self._since:
            return float("-inf")
        times, since = self._since[key]
        return since + self._settings.ban_s * 2.0 ** min(times - 1, DOUBLED)


def evicting(before: tuple[Evicted, ...], evicted: Iterable[Peer]) -> tuple[Evicted, ...]:
    """With those who are evicted now, and their invites; the newest last."""
    times = {one.key: one.times for one in before}
    for peer in evicted:
        for key in dict.fromkeys((key_of(peer), invite_of(peer))):
            times[key] = times.pop(key, 0) + 1
    return tuple(Evicted(key, count) for key, count in list(times.items())[-KEPT:])
