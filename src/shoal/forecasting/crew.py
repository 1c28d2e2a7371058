"""Who takes part in a forecast run and what each serves: members, joiners that download, the dead that nobody has noticed yet.

Joiners are placed and members moved by the leader's own functions (core/leader/rebalance.py), given what a leader would know. What time
all of this takes is forecaster.py's to spend.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import msgspec
import numpy as np

from shoal import units
from shoal.core.consensus.certificates import quorum
from shoal.core.latency import Usual
from shoal.core.leader.rebalance import MOVE_S, Fleet, Move, measure, place, rebalance
from shoal.core.leader.rules.lines import believed
from shoal.core.messages import Member, Peer, Settings
from shoal.core.names import invite_of
from shoal.core.planned import complete, planned_seat, planned_stage
from shoal.core.transfer.download import DONORS
from shoal.forecasting.egress import Egress
from shoal.forecasting.job import Job
from shoal.forecasting.models.step_time import Composition
from shoal.planner.prediction.seats import line_rate

# Of a donor's uplink that downloads have: what a step leaves, so much at most. A full one's turns (PASSED, core/messages.py) are the second
SPARE, LEAST_SPARE = 0.5, 0.1
# Messages one after another: the last one of the dead, or that its connections broke; Propose, Accept of the view without it
EVICTION_DELAYS = 3
ELECTION_DELAYS = 3  # a trial and the votes, there and back; the new leader doubts the dead one at once
# The view that names the newcomer, its requests, the last chunk, and the heartbeat that says that it has all: half a beat later
LOADED_DELAYS = 4
REMEMBERED = 1000.0  # seconds of moves that a decision may still ask for


class Joiner(msgspec.Struct, frozen=True):
    """It downloads the state of its stage from the machines on the slots of `donors`."""

    member: Member
    ready_s: float
    began_s: float
    donors: tuple[int, ...] = ()

    def done(self, now: float) -> float:
        """The share of its download that it has."""
        return min(1.0, (now - self.began_s) / max(self.ready_s - self.began_s, 1e-9)) if now > self.began_s else 0.0


class Lost(msgspec.Struct, frozen=True):
    """A member that has died: its part of its stage's rate, when it is evicted, and how far the step was that it has books of."""

    member: Member
    share: float
    noticed_s: float
    passed: float
    died_s: float
    reported: bool = False  # it has done its part of the round: the step can be committed without it


def no_majority(lives: int, voters: int, at_s: float) -> str:
    """Why a run stops for good, in words."""
    after = units.duration(at_s)
    if not lives:
        return f"nobody lives after {after}: `shoal run --resume` begins again from the checkpoint"
    return f"{lives} of {voters} members live after {after}, no majority: `shoal recover` lets them go on"


def slot_of(peer: Peer) -> int:
    """`p7.2` is the third machine on slot 7."""
    return int(peer[1 : peer.index(".")])


class Crew:
    """`serving` is by slot; members that died are in `dead` and, until they are evicted, in `members`."""

    def __init__(self, job: Job, founder: int = 0) -> None:
        """`founder`: the slot of the machine that founds the run."""
        self.job = job
        self.members: dict[Peer, Member] = {}
        self.joiners: dict[Peer, Joiner] = {}
        self.dead: dict[Peer, Lost] = {}
        self.serving: Composition = np.full(len(job.stage_of), -1)
        self.moves: tuple[Move, ...] = ()
        self._loads = Usual(MOVE_S)  # as a leader measures it
        self.leader: Peer = ""  # a new one leads from the next step on
        # Seconds of stages, speeds of peers, tensors per second on their lines
        self.known: tuple[tuple[float, ...], dict[Peer, float], dict[Peer, float]] = ((), {}, {})
        seated = job.seats.seated
        self._seat_of = {slot: seat for seat, slot in enumerate(seated)}
        self._settings = Settings(
            stages=job.stages,
            microbatches=job.microbatches,
            steps=1,
            stage_seconds=tuple(
                max(float(job.hop_s[job.machines.kind_of[slot], stage]) for slot in job.seats.replicas(stage))
                for stage in range(job.stages)
            ),
            seats=tuple(job.stage_of[slot] for slot in seated),
        )
        self.egress = Egress(job)
        self._founder = invite_of(f"p{founder}.1")
        self._rate = (1.0 / job.hop_s).tolist()

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
        rates = {one.peer: self._rate[kind_of[slot_of(one.peer)]][one.stage] for one in members}
        seconds, speeds = measure(members, rates, self.job.stages, self._settings.stage_seconds)
        everybody = [one.peer for one in self.there]
        line_rates = believed([line_rate(self.job.machines.kinds[kind_of[slot_of(peer)]]) for peer in everybody])
        tensor_kB = self.job.seats.boundary_bytes / 1000
        lines = {peer: rate / tensor_kB for peer, rate in zip(everybody, line_rates, strict=True)} if tensor_kB else {}
        self.known = seconds, speeds, lines

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, peer: Peer, now: float, step_s: float) -> None:
        """A new peer downloads the state of the stage that its seat or the leader's rule gives it."""
        there = tuple(self.there)
        taken = {member.seat for member in there}
        seat = self._seat_of.get(slot_of(peer), -1)
        planned = planned_stage(self._settings, seat, taken)
        stage = planned[0] if planned else place(there, self.job.stages, *self.known)[0]
        member = Member(peer, stage, seat=planned_seat(self._settings, seat, stage, taken))
        self._download(member, now + self.job.patience.entry_s, step_s)

    def begin(self, peer: Peer) -> None:
        """A member from the beginning, with nothing to download."""
        self.admit(peer, 0.0, math.inf)
        self.promote([peer])

    def promote(self, peers: Iterable[Peer], now: float = math.inf) -> None:
        for peer in peers:
            joiner = self.joiners.pop(peer)
            self._downloaded(joiner, now)
            if joiner.donors and now < math.inf:
                self._loads.add(joiner.ready_s - joiner.began_s)
            self.members[peer] = member = joiner.member
            self.serving[slot_of(peer)] = member.stage

    def ready(self, now: float) -> list[Peer]:
        return [peer for peer in self.living_joiners() if self.joiners[peer].ready_s <= now]

    def living_joiners(self) -> list[Peer]:
        """Without members that died and that the leader has moved since."""
        return [peer for peer in self.joiners if peer not in self.dead]

    def joining(self) -> tuple[int, ...]:
        """How many download the state of each stage, and get the sums of its rounds meanwhile."""
        stages = [self.joiners[peer].member.stage for peer in self.living_joiners()]
        return tuple(map(stages.count, range(self.job.stages)))

    def die(self, peer: Peer, now: float, passed: float, reported: Container[int] = ()) -> None:
        """`reported`: stages that have done their part of the open round."""
        if (joiner := self.joiners.pop(peer, None)) is not None:
            self._downloaded(joiner, now)
        if joiner is not None or peer not in self.members:
            return
        member = self.members[peer]
        noticed_s = now + self.job.patience.detection_s + EVICTION_DELAYS * self.job.delay_s
        if peer == self.leader:
            noticed_s += self._succeed()
        whole = sum(
            self.rate(one.peer, one.stage)
            for one in self.members.values()
            if one.stage == member.stage and one.peer not in self.dead
        )
        share = self.rate(peer, member.stage) / whole
        self.dead[peer] = Lost(member, share, noticed_s, passed, now, member.stage in reported)
        self.serving[slot_of(peer)] = -1

    def _succeed(self) -> float:
        """Seconds until another member leads. It knows of no moves, and begins to wait for everybody's heartbeat."""
        election_s = (
            self.job.patience.election_s(len(self.members) - len(self.dead)) + ELECTION_DELAYS * self.job.delay_s
        )
        self.leader, self.moves, self._loads = "", (), Usual(MOVE_S)
        self.dead = {
            peer: msgspec.structs.replace(lost, noticed_s=lost.noticed_s + election_s)
            for peer, lost in self.dead.items()
        }
        return election_s

    @property
    def voters(self) -> list[Peer]:
        """As View.voters."""
        return [*self.members, *(peer for peer, joiner in self.joiners.items() if joiner.member.back)]

    @property
    def lives(self) -> int:
        """How many voters do."""
        return sum(peer not in self.dead for peer in self.voters)

    @property
    def agrees(self) -> bool:
        """The living can agree on a view without the dead."""
        return not self.dead or quorum(
            self.voters, (peer for peer in self.voters if peer not in self.dead), self._founder
        )

    @property
    def asked(self) -> Composition:
        """Who is asked for hops: those who serve, and the dead until they are evicted, but for slots that have a new machine."""
        asked = self.serving.copy()
        for peer, lost in self.dead.items():
            if lost.share and asked[slot_of(peer)] < 0:
                asked[slot_of(peer)] = lost.member.stage
        return asked

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
        seconds, speeds, lines = self.known
        fleet = Fleet(
            members=tuple(self.members.values()),
            stages=self.job.stages,
            seconds=seconds,
            speeds=speeds,
            lines=lines,
            loading=tuple(joiner.member for joiner in self.joiners.values()),
            recent=self.moves,
            now=now,
            move_s=self._loads.value,
            step_s=step_s if step_s < math.inf else 0.0,
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
            self._download(loading, now, step_s)
        return moved

    @property
    def as_planned(self) -> bool:
        """Everybody is where the plan has it: then the plan balances."""
        return complete(self._settings, tuple(self.members.values()))

    def empty_stages(self) -> list[int]:
        return sorted(set(range(self.job.stages)) - set(self.serving.tolist()))

    def _download(self, member: Member, now: float, step_s: float) -> None:
        """Of a stage's state from up to DONORS replicas, a chunk from each at least, and of the gradients committed meanwhile."""
        kinds, kind_of = self.job.machines.kinds, self.job.machines.kind_of
        donors = np.flatnonzero(self.serving == member.stage)[: min(DONORS, self.job.state_chunks)].tolist()
        down_Bps = kinds[kind_of[slot_of(member.peer)]].down_Bps or math.inf
        seconds = self.job.state_bytes[member.stage] / min(down_Bps, self._spare_Bps(donors, step_s))
        caught_up = self.job.seats.gradient_bytes[member.stage] / down_Bps / step_s
        ready_s = now + seconds / max(1 - caught_up, 0.1)
        if donors:
            ready_s += LOADED_DELAYS * self.job.delay_s + self.job.patience.heartbeat_s / 2
        self.joiners[member.peer] = Joiner(member, ready_s, now, tuple(donors))

    def _spare_Bps(self, donors: list[int], step_s: float) -> float:
        """What the uplinks of these slots have for a download, all together."""
        if not donors:
            return math.inf
        kinds, kind_of = self.job.machines.kinds, self.job.machines.kind_of
        up_Bps = np.array([kinds[kind_of[slot]].up_Bps or math.inf for slot in donors])
        busy = self.egress.of_step(self.serving)[donors] / step_s / up_Bps
        return float((np.clip(1.0 - busy, LEAST_SPARE, SPARE) * up_Bps).sum())

    def _downloaded(self, joiner: Joiner, now: float) -> None:
        self.egress.download(joiner.donors, joiner.done(now) * self.job.state_bytes[joiner.member.stage])

    def end(self, now: float) -> None:
        """The forecast's: what is downloaded was sent."""
        for joiner in self.joiners.values():
            self._downloaded(joiner, now)

    def load_s(self) -> float:
        """Until everybody holds a checkpoint's state: over their own lines, or from their own disks where those are stated."""
        kinds, kind_of = self.job.machines.kinds, self.job.machines.kind_of
        seconds = [0.0]
        for member in self.there:
            device = kinds[kind_of[slot_of(member.peer)]]
            rate_Bps = device.disk_Bps if not member.back and device.disk_Bps else device.down_Bps
            seconds.append(self.job.state_bytes[member.stage] / (rate_Bps or math.inf))
        return max(seconds)
