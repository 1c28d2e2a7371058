"""Whom the leader evicts for what it did: evidence, not accusations.

A peer that sends the leader what cannot be (books with an index twice) is convicted at once. What only other peers can see needs two
accusers with different keys. Where only one other peer can see it, one accuser is enough; but a peer that convicts two others alone, or
accuses several alone, is evicted itself: it cannot receive, or it lies. A replica whose values differ from those of its stage's others
downloads its state again, and is evicted at the third time; at the second where it was one peer's word against another's: they cannot
go on together, and whoever stays meets a third. Of two words that of the peer with fewer such opponents counts, and whoever has two goes.
Of two that say something else of a tensor, one is wrong (audits/findings.py).
For facts.py, which asks, and rules/removal.py, which evicts; all of this is forgotten with the leader, but how often a key was evicted,
which is in the View.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from shoal.core.leader.audits.comparing import Unlike
from shoal.core.leader.audits.findings import LEAST, Finding, Findings
from shoal.core.messages import Evicted, Member, Peer, Settings, Stage
from shoal.core.names import invite_of, key_of

COMPLAINTS = 3  # before a peer is evicted: one may be a damaged message
ACCUSERS = 2  # independent ones, where there can be so many
ALONE = 3  # peers that one peer accuses and no other does
AGE = 64  # steps after which it is forgotten whom a peer has accused
FEW = 2  # peers that one peer may accuse in any case; more only if they are less than a third
DIFFERS, TIES = 3, 2  # times that a replica's values differ before it is evicted; from those of one peer alone
KEPT = 256  # keys that a view remembers
FIRST_PAUSE = 6.0  # of ban_s: ten times the 4 to 6 s that the others lose until a liar is found out, so that it costs them a tenth
GROWS, GROWN = 4.0, 3  # with each further eviction, so many times
# Evictions for which it counts that a peer is left out: each further try of it is a download for the others
LEFT_OUT = 1
OPPONENTS = 2  # peers that one differs with, each time its word against the other's, before it is evicted
WORDS = 8  # newest complaints of one accuser that are kept

Verdict = tuple[Peer, str]


class Dispute(msgspec.Struct, frozen=True):
    """Replicas of one stage hold different values, listed by value; `retry`: sums of a round, which is tried again before a replica
    has to download its state."""

    why: str
    replicas: dict[str, list[Peer]]
    retry: bool = False
    likely: str = ""  # the value that is right in a tie, where anything tells


class Misfit(msgspec.Struct, frozen=True):
    """A joiner that holds another state than its stage's members."""

    member: Member


class Conduct:
    """Complaints and differences, by the peers that they are about."""

    def __init__(self) -> None:
        self._accused: dict[Peer, dict[Peer, list[str]]] = {}
        self._steps = 0
        self._accuses: dict[str, set[str]] = {}  # whom each has accused, by key
        self._convicted: dict[str, set[str]] = {}  # by one accuser alone: its key, their keys
        self._differed: Counter[str] = Counter()  # of keys
        self._given_up: Counter[str] = Counter()  # rounds, by key
        self._opponents: dict[str, set[str]] = {}  # of each key: the keys of disputes with it that nobody could settle
        self._findings = Findings()
        self.differed_now: set[str] = set()  # keys of those that differed in this step: it is averaged without them

    def keep(self, present: Iterable[Peer], convicted: Iterable[str] = ()) -> None:
        """Forget complaints about and by peers that have left the view. Whoever vanished without being convicted (keys) was accused by
        right."""
        remaining = set(present)
        keys = {key_of(peer) for peer in remaining} | set(convicted)
        self._accuses = {accuser: accused & keys for accuser, accused in self._accuses.items()}
        self._accused = {
            peer: {by: words for by, words in held.items() if by in remaining}
            for peer, held in self._accused.items()
            if peer in remaining
        }
        self._findings.keep({key_of(peer) for peer in remaining})

    def step(self) -> None:
        """A step is committed: its complaints are forgotten. Whom a peer has accused is forgotten after AGE steps."""
        self._accused.clear()
        self.differed_now.clear()
        self._steps += 1
        if self._steps % AGE == 0:
            self._accuses.clear()
            self._given_up.clear()
            self._findings.forget()

    def accuse(self, accuser: Peer, accused: Peer, reason: str, witnesses: int) -> Verdict | None:
        """Whom to evict now and why, if anybody. `witnesses`: how many peers could see what `accused` did."""
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

    def unlike(
        self, pairs: Iterable[Unlike], agree: Iterable[tuple[Peer, Peer]], serving: Mapping[Peer, Stage]
    ) -> list[Verdict]:
        """Each time one of two is wrong; others `agree`. Parameters that differ are another matter. Against a stage's only replica the
        other has its word alone: nobody else could say what that one holds."""
        said, against = self._counted(pairs, serving)
        agreeing = [(key_of(one), key_of(other)) for one, other in agree]
        self._findings.add([Finding(key_of(by), key_of(of)) for by, of, _ in said], agreeing)
        why = "says other things of tensors than those who have sent or received them"
        verdicts = [self.alone(one, other, f"{why}, says {one}") for (one, other), n in against.items() if n >= LEAST]
        peers = {key_of(peer): peer for peer in serving}
        for key, accuser in self._findings.convicted() if said else ():
            what = next((what for by, of, what in said if key in (key_of(by), key_of(of))), "as before")
            if key in peers and accuser:
                verdicts.append(self.alone(peers[accuser], peers[key], f"{why}: {what}, says {peers[accuser]}"))
            elif key in peers:
                verdicts.append((peers[key], f"{why}: {what}"))
        return verdicts

    def _counted(
        self, pairs: Iterable[Unlike], serving: Mapping[Peer, Stage]
    ) -> tuple[list[Unlike], Counter[tuple[Peer, Peer]]]:
        """Of two members whose parameters do not differ; and how often a stage's only replica contradicts whom."""
        replicas, said, against = Counter(serving.values()), list[Unlike](), Counter[tuple[Peer, Peer]]()
        for by, of, what in pairs:
            both = {key_of(by), key_of(of)}
            if not serving.keys() >= {by, of} or len(both) < 2 or both & self.differed_now:
                continue
            alone = [peer for peer in (by, of) if replicas[serving[peer]] == 1]
            if not alone:
                said.append((by, of, what))
            elif len(alone) == 1:
                against[alone[0], of if by == alone[0] else by] += 1
        return said, against

    def gives_up(self, peer: Peer) -> int:
        """It gave up a round and says that nobody is to blame; how often by now."""
        self._given_up[key_of(peer)] += 1
        return self._given_up[key_of(peer)]

    def alone(self, accuser: Peer, accused: Peer, reason: str) -> Verdict:
        """Convict on one peer's word: against a second peer it convicts the accuser, and where that has been in more disputes."""
        convicted = self._convicted.setdefault(key_of(accuser), set())
        convicted.add(key_of(accused))
        if len(convicted) > 1:
            return accuser, f"is the only one to accuse several peers, the last {accused}: {reason}"
        worse = self._doubted([accuser]) - self._doubted([accused])
        self._dispute({key_of(accuser), key_of(accused)})
        if worse > 0:
            return accuser, f"is the only one to accuse {accused}, and has differed with more peers before: {reason}"
        return accused, reason

    def right(self, replicas: Mapping[str, list[Peer]], leader: Peer, likely: str = "") -> list[Peer]:
        """Of replicas with different values, listed by value, those taken to be right: the most keys. In a tie: the `likely` ones, then
        the leader's own, then those that have been in fewer disputes, then those listed first."""
        size = {value: len({key_of(peer) for peer in peers}) for value, peers in replicas.items()}
        most = max(size.values())
        tied = [value for value, keys in size.items() if keys == most]
        best = min(tied, key=lambda one: (one != likely, leader not in replicas[one], self._doubted(replicas[one])))
        for value in tied if len(tied) > 1 else ():
            others = {key_of(peer) for other in tied if other != value for peer in replicas[other]}
            for peer in replicas[value]:
                self._opponents.setdefault(key_of(peer), set()).update(others)
        return replicas[best]

    def differs(self, peer: Peer, reason: str, tie: bool = False) -> Verdict | None:
        """Count that it must download its state again; a verdict if that is too often, or it has differed with several, one by one."""
        key = key_of(peer)
        self.differed_now.add(key)
        self._differed[key] += 1
        if len(self._opponents.get(key, ())) >= OPPONENTS:
            return peer, f"{reason}, as it has from {len(self._opponents[key])} peers one by one"
        most = TIES if tie else DIFFERS
        return (peer, f"{reason}, {self._differed[key]} times by now") if self._differed[key] >= most else None

    def has_differed(self, replicas: Mapping[str, list[Peer]]) -> bool:
        """One of these has had to download its state again, or has been in a dispute: no damaged message explains that, too."""
        keys = {key_of(peer) for peers in replicas.values() for peer in peers}
        return any(self._differed[key] or self._opponents.get(key) for key in keys)

    def undecided(self, peer: Peer) -> bool:
        """It has differed with one other peer alone, which may be the one that lies."""
        return len(self._opponents.get(key_of(peer), ())) < OPPONENTS and self._differed[key_of(peer)] < DIFFERS

    def odd_one(self, joiner: Peer, alone: Peer) -> Verdict | None:
        """A joiner holds another state than its stage's only member: whom to evict, if it is the member, which has differed with another
        before, and the joiner with nobody else."""
        self._dispute({key_of(joiner), key_of(alone)})
        if len(self._opponents[key_of(alone)]) < OPPONENTS or len(self._opponents[key_of(joiner)]) > 1:
            return None
        return (
            alone,
            f"says that it holds another state than each of {len(self._opponents[key_of(alone)])} peers that came to its stage",
        )

    def _dispute(self, keys: set[str]) -> None:
        """One word against the other, of two keys."""
        for key in sorted(keys):
            self._opponents.setdefault(key, set()).update(keys - {key})

    def _doubted(self, peers: list[Peer]) -> int:
        return sum(len(self._opponents.get(key_of(peer), ())) for peer in peers)


class Pauses:
    """How long evicted peers may not join. The View remembers how often each was evicted, this leader since when."""

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
        """When that peer may join again. Another key of the same invite waits, too, when more peers of the invite were evicted than are
        in good standing: keys cost nothing, but one broken machine of a laboratory must not keep the others out."""
        invite = invite_of(peer)
        times, _ = self._since.get(invite, (0, 0.0))
        well = sum(invite_of(other) == invite for other in standing)
        return max(self._until(key_of(peer)), self._until(invite) if times > well else float("-inf"))

    def _until(self, key: str) -> float:
        if key not in self._since:
            return float("-inf")
        times, since = self._since[key]
        return since + _pause_s(times, self._settings)


def pause_s(evicted: Iterable[Evicted], peer: Peer, settings: Settings) -> float:
    """For how many seconds that peer's key may not join after its newest eviction; 0: it was never evicted."""
    return next((_pause_s(one.times, settings) for one in evicted if one.key == key_of(peer)), 0.0)


def _pause_s(times: int, settings: Settings) -> float:
    return FIRST_PAUSE * settings.ban_s * GROWS ** min(times - 1, GROWN)


def evicting(
    before: tuple[Evicted, ...], evicted: Iterable[Peer], left_out: Iterable[Peer] = ()
) -> tuple[Evicted, ...]:
    """The view's list with the peers that are evicted now, and their invites; the newest last. `left_out`: peers that did no wrong; their
    invites are not barred."""
    times = {one.key: one.times for one in before}
    for peer in left_out:
        times[key_of(peer)] = times.pop(key_of(peer), 0) + LEFT_OUT
    for peer in evicted:
        for key in dict.fromkeys((key_of(peer), invite_of(peer))):
            times[key] = times.pop(key, 0) + 1
    return tuple(Evicted(key, count) for key, count in list(times.items())[-KEPT:])
