"""Who takes part in a forecast run and what each serves: members, joiners that download, the dead that nobody has noticed yet.

Joiners are placed and members moved by the leader's own functions (core/leader/rebalance.py), given what a leader would know. What time
all of this takes is forecaster.py's to spend.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import msgspec
import numpy as np

from shoal.core.leader.rebalance import Fleet, Move, measure, place, rebalance
from shoal.core.messages import Member, Peer, Settings
from shoal.core.planned import complete, planned_seat, planned_stage
from shoal.core.transfer.download import DONORS
from shoal.forecasting.job import Job
from shoal.forecasting.rates import Composition
from shoal.planner.prediction.seats import handed_bytes

SPARE = 0.5  # of a donor's uplink that microbatches leave to downloads
REMEMBERED = 1000.0  # seconds of moves that a decision may still ask for
HOUR_S = 3600.0


class Joiner(msgspec.Struct, frozen=True):
    """It downloads the state of its stage."""

    member: Member
    ready_s: float


class Lost(msgspec.Struct, frozen=True):
    """A member that has died: its part of its stage's rate, when it is evicted, and how far the step was that it has books of."""

    member: Member
    share: float
    noticed_s: float
    passed: float
    reported: bool = False  # it has done its part of the round: the step can be committed without it


def slot_of(peer: Peer) -> int:
    """`p7.2` is the third machine on slot 7."""
    return int(peer[1 : peer.index(".")])


class Crew:
    """`serving` is by slot; members that died are in `dead` and, until they are evicted, in `members`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.members: dict[Peer, Member] = {}
        self.joiners: dict[Peer, Joiner] = {}
        self.dead: dict[Peer, Lost] = {}
        self.serving: Composition = np.full(len(job.stage_of), -1)
        self.moves: tuple[Move, ...] = ()
        self.leader: Peer = ""  # a new one leads from the next step on
        self.known: tuple[tuple[float, ...], dict[Peer, float]] = ((), {})  # seconds of stages, speeds of peers
        seated = job.seats.seated
        self._seat_of = {slot: seat for seat, slot in enumerate(seated)}
        self._settings = Settings(
            stages=job.stages,
            microbatches=job.microbatches,
            steps=1,
            stage_seconds=tuple(
                max(float(job.reported_s[job.machines.kind_of[slot], stage]) for slot in job.seats.replicas(stage))
                for stage in range(job.stages)
            ),
            seats=tuple(job.stage_of[slot] for slot in seated),
        )
        self._rate = (1.0 / job.hop_s).tolist()
        self._reported = (1.0 / job.reported_s).tolist()

    def rate(self, peer: Peer, stage: int) -> float:
        """Microbatches per second."""
        return float(self._rate[self.job.machines.kind_of[slot_of(peer)]][stage])

    @property
    def there(self) -> Iterable[Member]:
        return (*self.members.values(), *(one.member for one in self.joiners.values()))

    def measure(self) -> None:
        """The leader learns rates from heartbeats; the rules use them until the next step."""
        members = tuple(self.members.values())
        kind_of = self.job.machines.kind_of
        rates = {one.peer: self._reported[kind_of[slot_of(one.peer)]][one.stage] for one in members}
        self.known = measure(members, rates, self.job.stages, self._settings.stage_seconds)

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, peer: Peer, now: float, step_s: float) -> None:
        """A new peer downloads the state of the stage that its seat or the leader's rule gives it."""
        there = tuple(self.there)
        taken = {member.seat for member in there}
        seat = self._seat_of.get(slot_of(peer), -1)
        planned = planned_stage(self._settings, seat, taken)
        stage = planned[0] if planned else place(there, self.job.stages, *self.known)[0]
        member = Member(peer, stage, seat=planned_seat(self._settings, seat, stage, taken))
        entry_s = self.job.patience.entry_s
        self.joiners[peer] = Joiner(member, now + entry_s + self.download_s(member, step_s))

    def begin(self, peer: Peer) -> None:
        """A member from the beginning, with nothing to download."""
        self.admit(peer, 0.0, math.inf)
        self.promote([peer])

    def promote(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            member = self.joiners.pop(peer).member
            self.members[peer] = member
            self.serving[slot_of(peer)] = member.stage

    def ready(self, now: float) -> list[Peer]:
        return [peer for peer in self.living_joiners() if self.joiners[peer].ready_s <= now]

    def living_joiners(self) -> list[Peer]:
        """Without members that died and that the leader has moved since."""
        return [peer for peer in self.joiners if peer not in self.dead]

    def die(self, peer: Peer, now: float, passed: float, reported: Container[int] = ()) -> None:
        """`reported`: stages that have done their part of the open round."""
        if self.joiners.pop(peer, None) is not None or peer not in self.members:
            return
        member = self.members[peer]
        noticed_s = now + self.job.patience.detection_s
        if peer == self.leader:
            noticed_s += self._succeed()
        whole = sum(
            self.rate(one.peer, one.stage)
            for one in self.members.values()
            if one.stage == member.stage and one.peer not in self.dead
        )
        share = self.rate(peer, member.stage) / whole
        self.dead[peer] = Lost(member, share, noticed_s, passed, member.stage in reported)
        self.serving[slot_of(peer)] = -1

    def _succeed(self) -> float:
        """Seconds until another member leads. It knows of no moves, and begins to wait for everybody's heartbeat."""
        election_s = self.job.patience.election_s(len(self.members) - len(self.dead))
        self.leader, self.moves = "", ()
        self.dead = {
            peer: msgspec.structs.replace(lost, noticed_s=lost.noticed_s + election_s)
            for peer, lost in self.dead.items()
        }
        return election_s

    @property
    def missed(self) -> set[int]:
        """Stages whose exchange of the open round waits for a dead member."""
        return {lost.member.stage for lost in self.dead.values() if not lost.reported}

    def begin_step(self) -> None:
        """The dead have no books of a new step."""
        self.dead = {
            peer: msgspec.structs.replace(lost, passed=0.0, reported=False) for peer, lost in self.dead.items()
        }
        self.leader = self.leader or min(
            (peer for peer in self.members if peer not in self.dead), key=slot_of, default=""
        )

    def evict(self, now: float) -> list[Lost]:
        """The dead that are noticed by now leave the view."""
        noticed = [lost for lost in self.dead.values() if lost.noticed_s <= now]
        for lost in noticed:
            peer = lost.member.peer
            del self.dead[peer]
            self.members.pop(peer, None)
            self.joiners.pop(peer, None)  # it was moved after its death
        return noticed

    # --------------------------------------------------------------------------------------------------------- moving

    def rebalance(self, now: float, left_s: float, passed: float, step_s: float) -> list[tuple[Member, float]]:
        """Members that the leader's rule moves now, each with the share of its old stage's rate that it takes away."""
        seconds, speeds = self.known
        fleet = Fleet(
            members=tuple(self.members.values()),
            stages=self.job.stages,
            seconds=seconds,
            speeds=speeds,
            loading=tuple(joiner.member for joiner in self.joiners.values()),
            recent=self.moves,
            now=now,
            left_s=left_s,
            passed=passed,
        )
        moves = rebalance(fleet)
        self.moves = (*(move for move in self.moves if move.at_s > now - REMEMBERED), *moves) if moves else self.moves
        moved = []
        for move in moves:
            member = self.members.pop(move.peer)
            others = sum(self.rate(one.peer, one.stage) for one in self.members.values() if one.stage == move.source)
            own = self.rate(move.peer, move.source)
            moved.append((member, own / (own + others)))
            if move.peer in self.dead:  # its slot may have its successor
                self.dead[move.peer] = msgspec.structs.replace(self.dead[move.peer], share=0.0)
            else:
                self.serving[slot_of(move.peer)] = -1
            loading = Member(move.peer, move.stage, back=True)
            self.joiners[move.peer] = Joiner(loading, now + self.download_s(loading, step_s))
        return moved

    @property
    def as_planned(self) -> bool:
        """Everybody is where the plan has it: then the plan balances."""
        return complete(self._settings, tuple(self.members.values()))

    def empty_stages(self) -> list[int]:
        return sorted(set(range(self.job.stages)) - set(self.serving.tolist()))

    def download_s(self, member: Member, step_s: float) -> float:
        """Of a stage's state from up to DONORS replicas, and of the gradients committed meanwhile."""
        kinds, kind_of = self.job.machines.kinds, self.job.machines.kind_of
        donors = [kind_of[slot] for slot in np.flatnonzero(self.serving == member.stage)[:DONORS].tolist()]
        down_Bps = kinds[kind_of[slot_of(member.peer)]].down_Bps or math.inf
        up_Bps = sum(SPARE * (kinds[kind].up_Bps or math.inf) for kind in donors) or math.inf
        seconds = self.job.state_bytes[member.stage] / min(down_Bps, up_Bps)
        caught_up = self.job.seats.gradient_bytes[member.stage] / down_Bps / step_s
        return seconds / max(1 - caught_up, 0.1)

    def sent_bytes(self) -> list[float]:
        """Of one step, by kind: microbatches in proportion to the replicas' rates, and even shares of averaging."""
        job, kind_of = self.job, np.array(self.job.machines.kind_of)
        slots = np.flatnonzero(self.serving >= 0)
        kinds, at = kind_of[slots], self.serving[slots]
        rates = (1.0 / job.hop_s)[kinds, at]
        counts = np.bincount(at, minlength=job.stages)
        shares = rates / np.bincount(at, rates, minlength=job.stages)[at]
        averaged = 2 * np.array(job.seats.gradient_bytes) * (1 - 1 / np.maximum(counts, 1))
        sent = shares * job.microbatches * np.array(handed_bytes(job.seats)[0])[at] + averaged[at]
        return [float(value) for value in np.bincount(kinds, sent, minlength=len(job.machines.kinds))]

    def load_s(self) -> float:
        """Until everybody holds a checkpoint's state: over their own lines, or from their own disks where those are stated."""
        kinds, kind_of = self.job.machines.kinds, self.job.machines.kind_of
        seconds = [0.0]
        for member in self.there:
            device = kinds[kind_of[slot_of(member.peer)]]
            rate_Bps = device.disk_Bps if not member.back and device.disk_Bps else device.down_Bps
            seconds.append(self.job.state_bytes[member.stage] / (rate_Bps or math.inf))
        return max(seconds)


class Bill:
    """Hours that machines were there, and bytes that they sent, by kind."""

    def __init__(self, job: Job) -> None:
        self._job = job
        kinds = len(job.machines.kinds)
        self._there, self.hours, self.sent_bytes = [0] * kinds, [0.0] * kinds, [0.0] * kinds

    def _kind(self, peer: Peer) -> int:
        return self._job.machines.kind_of[slot_of(peer)]

    @property
    def there(self) -> int:
        return sum(self._there)

    def come(self, peer: Peer) -> None:
        self._there[self._kind(peer)] += 1

    def go(self, peer: Peer) -> None:
        self._there[self._kind(peer)] -= 1

    def spend(self, seconds: float) -> None:
        for kind, count in enumerate(self._there):
            if count:
                self.hours[kind] += count * seconds / HOUR_S

    def send(self, crew: Crew) -> None:
        """One step's microbatches and averaging."""
        for kind, nbytes in enumerate(crew.sent_bytes()):
            self.sent_bytes[kind] += nbytes
