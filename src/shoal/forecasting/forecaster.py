"""Plays a long run without its messages: one history of machines that come and go, from a seed.

Between two events the step that is trained advances at the rate of those who serve (models/). A death costs what it costs a real run,
as the model plays it or is fitted to plays. Where it is neither: its part of all requests waits until it is evicted, its books of the
step are computed again by its stage's others, beside the step's work where they have time left. Its stage's exchange of a round that was
open begins again, those of other stages go on; the last replica of a stage sends everybody back to the newest checkpoint.
Who joins, where, and who moves is crew.py's. Not in it: lost messages, slow or hostile peers, full stores.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from shoal import units
from shoal.core.leader.rules.admission import ENTER_BEATS
from shoal.core.messages import Peer
from shoal.forecasting.arrivals import Arrivals, Bill
from shoal.forecasting.churn import Presence
from shoal.forecasting.crew import Crew, Lost, no_majority, slot_of
from shoal.forecasting.job import Job
from shoal.forecasting.models.step_time import APPLIED, StepModel, StepTime, trip_s
from shoal.forecasting.progress import NEVER, ROUNDING, Exchanges, Phase, Progress

AT_ONCE_MOST = 1000  # events at one moment, beside those of machines that come and go: a step has a handful


class Parts(msgspec.Struct, frozen=True):
    """Where the run's seconds went."""

    compute: float = 0.0  # the busiest stage's
    network: float = 0.0  # microbatches that wait for lines and delays
    averaging: float = 0.0
    waiting: float = 0.0  # for agreement, and for the dead to be evicted
    redone: float = 0.0  # work that was lost: books of the dead, rounds, steps since the checkpoint
    joining: float = 0.0  # until the first step begins, and until everybody has loaded a checkpoint
    stalled: float = 0.0  # a stage has nobody, or no majority is left


class History(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's simulated run. `digest` is the same whenever inputs, seed and program are."""

    seed: int
    seconds: float
    steps: int
    tokens: int
    parts: Parts
    deaths: int = 0
    joins: int = 0
    moves: int = 0
    lost_stages: int = 0
    undone_steps: int = 0
    peer_hours: tuple[float, ...] = ()  # that machines were there, by kind
    sent_bytes: tuple[float, ...] = ()  # by kind
    stuck: str = ""  # why nothing is committed any more
    digest: str = ""


# Of agreeing: the view that begins a step, heartbeats and Round come before the sums, Reduced, Propose and Accept after them
OPENING = 3 / 6
LATEST = 0.95  # of a step: whoever enters it then
REDO_DELAYS = (
    4  # from an eviction to the first hop that is computed again: the view, a request, that for its tensor, the tensor
)


class Tally(msgspec.Struct):
    deaths: int = 0
    joins: int = 0
    moves: int = 0
    lost_stages: int = 0
    undone_steps: int = 0


class Run:
    """One history. `until` plays it; every call of it is one event."""

    def __init__(
        self, job: Job, model: StepModel, presences: Sequence[Presence], start_s: float, begun: bool = False
    ) -> None:
        """`begun`: peers and lines are known from steps before."""
        self.job, self.model = job, model
        # A peer of the founder's machine has the casting vote: with few members it decides who can go on
        self.crew = Crew(job, next((one.slot for one in presences if one.joins), 0))
        self.now = 0.0
        exchanges = Exchanges(job.stages, APPLIED * job.round_s)
        self.progress = Progress(exchanges, begun=begun, redo=[0.0] * job.stages)
        self.parts = dict.fromkeys(Parts.__struct_fields__, 0.0)
        self.tally = Tally()
        self.stuck = ""
        self.bill = Bill(job)
        self._since_saved = dict(self.parts)  # parts when the newest checkpoint was made
        self._hash = hashlib.sha256()
        self._arrivals = Arrivals(presences, start_s, len(job.stage_of))
        self._time: StepTime | None = None  # None: a stage has nobody
        # With the dead that are not evicted yet: until then the others get their part of the requests, and no more
        self._asked: StepTime | None = None
        self._trip_s = trip_s(job)

    def play(
        self, horizon_s: float, progress: Callable[[float], None] = lambda now: None, steps: float = NEVER
    ) -> None:
        """Until the horizon, or until so many steps are done."""
        self._handle()
        idle = 0
        while self.now < horizon_s and self.progress.step < steps:
            until = min(self._next_s(), horizon_s)
            idle = idle + 1 if until <= self.now else 0
            assert idle < AT_ONCE_MOST, f"{idle} events and no time passes at {self.now!r} s: {self.progress}"
            self._advance(max(until - self.now, 0.0))
            self.now = until
            progress(until)
            self._handle()

    def end(self) -> None:
        """The horizon is reached: what was sent of a step and of downloads that are not done counts."""
        self.crew.egress.microbatches(self.crew.serving, max(self.progress.passed, 0.0))
        self.crew.end(self.now)

    def digest(self) -> str:
        return self._hash.hexdigest()[:16]

    # --------------------------------------------------------------------------------------------------------- time

    def _next_s(self) -> float:
        crew = self.crew
        moments = [self._arrivals.next_s(), self.now + self._left_s()]
        if not self.stuck:
            moments += [lost.noticed_s for lost in crew.dead.values()]
            moments += [joiner.ready_s for joiner in crew.joiners.values() if joiner.ready_s > self.now]
        return max(min(moments), self.now)

    def _open(self) -> float:
        """The part of all requests that does not wait for a dead peer. With one stage, owners serve themselves."""
        if self.job.stages == 1:
            return 1.0
        return math.prod(1 - lost.share for lost in self.crew.dead.values())

    def _left_s(self) -> float:
        """Of the phase, if nothing happens meanwhile."""
        progress, time = self.progress, self._asked
        if self.stuck:
            return NEVER
        if progress.phase is Phase.AVERAGING:
            each = zip(self._redo_s(), self.progress.exchanges.left_s, strict=True)
            return NEVER if self.crew.missed else max(redo_s + left_s for redo_s, left_s in each)
        if progress.phase is not Phase.COMPUTING:
            return NEVER if self._missed else progress.left_s
        if time is None:
            return NEVER
        if progress.passed < 1:
            opened = self._open()
            return (1 - progress.passed) * time.microbatches_s / opened if opened > ROUNDING else NEVER
        if self.crew.dead:
            return NEVER  # books of theirs are missing
        return max(progress.redo_s - self.now, *self._redo_s())

    def _redo_s(self) -> list[float]:
        """Until each stage has computed again what was lost; NEVER where a stage has nobody."""
        progress = self.progress
        least_s, wait_s = progress.redo_s - self.now, max(progress.redo_from_s - self.now, 0.0)
        rates = self._time.stage_rates if self._time is not None else (0.0,) * len(progress.redo)
        return [
            max(least_s, wait_s + lost / rate if rate else NEVER) if lost > ROUNDING else 0.0
            for lost, rate in zip(progress.redo, rates, strict=True)
        ]

    @property
    def _missed(self) -> bool:
        """The round that opens waits for a dead member."""
        return self.progress.phase is Phase.OPENING and bool(self.crew.missed)

    def _advance(self, seconds: float) -> None:
        progress, time, parts = self.progress, self._time, self.parts
        self.bill.spend(seconds)
        if progress.phase is Phase.AVERAGING and not self.stuck:
            self._average(seconds)
        elif self.stuck or progress.phase is Phase.LOST or (progress.phase is not Phase.GATHERING and time is None):
            parts["stalled"] += seconds
        elif progress.phase is Phase.GATHERING:
            parts["joining" if self.bill.there >= self.job.stages else "stalled"] += seconds
        elif progress.phase is Phase.COMPUTING:
            assert time is not None and self._asked is not None
            self._compute(seconds, time, self._asked)
        else:
            parts["waiting"] += seconds
        if progress.left_s < NEVER and not self._missed:
            progress.left_s -= seconds

    def _average(self, seconds: float) -> None:
        """A stage that waits for a dead replica stands still; one that has lost books computes them again first."""
        progress, missed, redo_s = self.progress, self.crew.missed, self._redo_s()
        what = "averaging" if self._time is not None else "stalled"
        self.parts["waiting" if missed else "redone" if max(redo_s) > 0 else what] += seconds
        for stage in (stage for stage in range(self.job.stages) if stage not in missed):
            left_s = redo_s[stage]
            progress.redo[stage] *= 0.0 if left_s <= seconds + ROUNDING else 1.0 - seconds / left_s
            self.progress.exchanges.advance(stage, max(seconds - left_s, 0.0))

    def _compute(self, seconds: float, time: StepTime, asked: StepTime) -> None:
        progress, parts, opened = self.progress, self.parts, self._open()
        if progress.passed < 1:
            share = min(1.0, asked.compute_s / asked.microbatches_s)
            parts["compute"] += opened * share * seconds
            parts["network"] += opened * (1 - share) * seconds
            parts["waiting"] += (1 - opened) * seconds
            gained = opened * seconds / asked.microbatches_s
            progress.passed = 1.0 if progress.passed + gained > 1 - ROUNDING else progress.passed + gained
        else:
            gained = 0.0
            parts["waiting" if self.crew.dead else "redone"] += seconds
        again = min(max(self.now + seconds - progress.redo_from_s, 0.0) / seconds, 1.0) if seconds else 0.0
        for stage, rate in enumerate(time.stage_rates):
            spare = again * max(rate * seconds - gained * self.job.microbatches, 0.0)
            progress.redo[stage] = max(progress.redo[stage] - spare, 0.0) if progress.redo[stage] > ROUNDING else 0.0

    # -------------------------------------------------------------------------------------------------------- events

    def _handle(self) -> None:
        """Everything that is due now."""
        for change, peer in self._arrivals.due(self.now):
            self._presence(change, peer)
        if self.stuck:
            return
        self._evict()
        self._enter()
        self._end_phase()

    def _note(self, what: str, *values: object) -> None:
        self._hash.update(f"{self.now!r} {what} {values!r}\n".encode())

    def _presence(self, change: str, peer: Peer) -> None:
        crew = self.crew
        self._note(change, peer)
        if change == "there":
            self.bill.come(peer)
        elif change == "asks":
            self.tally.joins += 1
            crew.admit(peer, self.now + self._round_s(), self.progress.step_s)
        else:
            self.tally.deaths += 1
            self.bill.go(peer)
            crew.die(peer, self.now, max(self.progress.passed, 0.0), () if peer == crew.leader else self._reported())
            self._look()

    def _round_s(self) -> float:
        """Until the open round ends: nobody is admitted meanwhile."""
        progress = self.progress
        if progress.phase is Phase.AVERAGING:
            left_s = self._left_s()  # one that waits for the dead is closed soon
            return left_s + progress.closing_s if left_s < NEVER else 0.0
        return progress.left_s if progress.phase is Phase.AGREEING else 0.0

    def _evict(self) -> None:
        crew, progress = self.crew, self.progress
        if progress.phase is not Phase.GATHERING and not crew.agrees:
            self.stuck = no_majority(crew.lives, len(crew.voters), self.now)
            self._note("stuck", len(crew.voters))
            return
        lost = crew.evict(self.now)
        if not lost:
            return
        self._note("evicted", *(one.member.peer for one in lost))
        self._look()
        if progress.phase in (Phase.GATHERING, Phase.LOST):
            return
        if crew.empty_stages():
            progress.phase, progress.left_s = Phase.LOST, self.job.patience.lost_stage_wait_s
            self.tally.lost_stages += 1
            return
        if progress.phase is Phase.OPENING:
            progress.phase, progress.passed, progress.left_s = Phase.COMPUTING, 1.0, NEVER
        if progress.phase in (Phase.COMPUTING, Phase.AVERAGING):
            for one in lost:
                if not self._played(one):
                    self._redo(one.member.stage, one.share * one.passed)
                    self._take_over(one.passed, len(crew.members) + 1)
            self._move(max(progress.passed, 0.0))

    def _played(self, one: Lost) -> bool:
        """What its death costs the step, where the model plays it: so long are books on their way at least."""
        progress, slot = self.progress, slot_of(one.member.peer)
        serving = self.crew.serving.copy()
        if serving[slot] >= 0 or not one.share:
            return False
        serving[slot] = one.member.stage
        died_s, now_s = max(one.died_s - progress.began_s, 0.0), self.now - progress.began_s
        ends_s = self.model.with_death(serving, slot, died_s, now_s, first=not progress.begun)
        if ends_s is None:
            return False
        left_s = ends_s - now_s
        if self._time is not None and progress.phase is Phase.COMPUTING and progress.passed < 1:
            # As a part of a step with those who are left, which whoever comes meanwhile makes shorter
            progress.passed = min(1 - left_s / self._time.microbatches_s, 1.0)
            return True
        self._exchange([one.member.stage])
        progress.redo[one.member.stage] = max(progress.redo[one.member.stage], 2 * ROUNDING)
        progress.redo_s = max(progress.redo_s, self.now + left_s)
        return True

    def _exchange(self, stages: Iterable[int]) -> None:
        """Of the round that is open those of these stages begin, or begin again."""
        crew, time = self.crew, self._time
        if self.progress.phase is Phase.AVERAGING and time is not None:
            self.progress.exchanges.begin(stages, time, self.model.with_joiners(crew.serving, crew.joining()))

    def _take_over(self, passed: float, members: int) -> None:
        """Microbatches that a dead peer owned and had not done go to others, who ask everybody for books. They begin anew but for what is
        booked, from the last stage down: of those that it drove last, in the second half of their trip."""
        progress, job = self.progress, self.job
        if passed < 1:
            progress.passed = min(progress.passed, 1 - (1 - passed) / members)
            trips = max(job.microbatches / members / job.seats.most_inflight, 1.0)  # one after the other
            left = min(2 * trips * (1 - passed), 1.0) if job.stages > 1 else 1.0
            progress.redo_s = max(progress.redo_s, self.now + 2 * job.delay_s + left * self._trip_s)

    def _reported(self) -> list[int]:
        """Stages that have done their part of the open round."""
        if self.progress.phase is Phase.AGREEING:
            return list(range(self.job.stages))
        return self.progress.exchanges.reported() if self.progress.phase is Phase.AVERAGING else []

    def _redo(self, stage: int, share: float) -> None:
        """That share of the step's microbatches. Books are asked for, then a replica that has the input is."""
        job, progress = self.job, self.progress
        again = float(job.again[stage])
        progress.redo[stage] += share * job.microbatches * again
        self._exchange([stage])
        if share:
            progress.redo_from_s = self.now + REDO_DELAYS * job.delay_s
            progress.redo_s = max(progress.redo_s, progress.redo_from_s + again * float(job.hop_s[:, stage].mean()))

    def _enter(self) -> None:
        """Joiners that hold their state serve from now on, where the rest of the step is long; else from the next step."""
        crew, progress = self.crew, self.progress
        if progress.phase is Phase.COMPUTING and progress.passed < 1:
            rest_s = (1 - progress.passed) * self._time.microbatches_s if self._time else NEVER
            if rest_s >= ENTER_BEATS * self.job.patience.heartbeat_s:
                self._promote()
        elif progress.phase is Phase.GATHERING and progress.left_s == NEVER:
            self._gather()
        elif progress.phase is Phase.LOST and not crew.empty_stages():
            progress.phase, progress.left_s = Phase.COMPUTING, NEVER

    def _promote(self) -> None:
        ready, before = self.crew.ready(self.now), self._asked
        if not ready:
            return
        self.crew.promote(ready, self.now)
        self._look()
        if self.progress.phase is Phase.COMPUTING and before is not None and self._asked is not None:
            self._in_the_middle([slot_of(peer) for peer in ready], before, self._asked)

    def _in_the_middle(self, slots: Sequence[int], before: StepTime, after: StepTime) -> None:
        """They get hops whose requests have not been made. The step ends by as much earlier as the model plays it."""
        progress = self.progress
        at_s = min(self.now - progress.began_s, LATEST * before.microbatches_s)
        ends_s = self.model.with_entry(self.crew.serving, slots, at_s)
        if ends_s is not None:
            rest = (1 - progress.passed) * min((ends_s - at_s) / (before.microbatches_s - at_s), 1.0)
            progress.passed = 1 - rest * before.microbatches_s / after.microbatches_s

    def _gather(self) -> None:
        """Everybody who is there takes part, and loads what it serves, once every stage can have somebody."""
        crew, progress = self.crew, self.progress
        if len(crew.members) + len(crew.joiners) < self.job.stages:
            return
        crew.promote(crew.living_joiners(), self.now)
        for _ in range(len(crew.members)):  # a move each at least
            if not crew.empty_stages() or not crew.rebalance(self.now, NEVER, 0.0, NEVER):
                break
            crew.promote(crew.living_joiners(), self.now)
        if not crew.empty_stages():
            progress.left_s = crew.load_s() if progress.saved else 0.0

    def _end_phase(self) -> None:
        progress = self.progress
        left_s = self._left_s()
        if left_s > ROUNDING and self.now + left_s > self.now:  # after months a clock's rounding is more than ours
            return
        if progress.phase is Phase.COMPUTING and progress.passed < 1:
            progress.passed = 1.0
            self._end_phase()  # what is computed again may not be done
        elif progress.phase is Phase.GATHERING:
            self._begin_step()
        elif progress.phase is Phase.LOST:
            self._go_back()
        elif progress.phase is Phase.COMPUTING:
            assert self._time is not None, "without a stage nothing is computed"
            progress.phase, progress.left_s = Phase.OPENING, OPENING * self._time.agreeing_s
        elif progress.phase is Phase.OPENING:
            assert self._time is not None, "a stage's last replica is missed"
            closing_s = (1 - OPENING) * self._time.agreeing_s
            progress.phase, progress.left_s, progress.closing_s = Phase.AVERAGING, NEVER, closing_s
            self._exchange(range(self.job.stages))
        elif progress.phase is Phase.AVERAGING:
            # A replica that died after its part of the round is not waited for, even a stage's last
            progress.phase, progress.left_s = Phase.AGREEING, progress.closing_s
        else:
            self._commit()

    def _commit(self) -> None:
        progress, job = self.progress, self.job
        progress.step, progress.begun = progress.step + 1, True
        self.crew.egress.microbatches(self.crew.serving, 1.0)
        self.crew.egress.averaging(self.crew.serving, (joiner.member.stage for joiner in self.crew.joiners.values()))
        self._note("commit", progress.step, len(self.crew.members))
        if job.save_every and progress.step % job.save_every == 0:
            progress.saved, self._since_saved = progress.step, dict(self.parts)
        self._promote()
        self.crew.measure()  # a newcomer has said what it computes, too
        if not self.crew.as_planned:
            self._move(0.0)
        progress.step_s = self.now - progress.began_s  # the leader decides by the step before
        self._begin_step()

    def _begin_step(self) -> None:
        progress = self.progress
        progress.phase, progress.passed, progress.left_s, progress.began_s = Phase.COMPUTING, 0.0, NEVER, self.now
        progress.redo, progress.redo_from_s = [0.0] * self.job.stages, 0.0
        self.crew.begin_step()
        if not self.crew.known[1]:
            self.crew.measure()
        self._look()

    def _move(self, passed: float) -> None:
        progress = self.progress
        left_s = (self.job.steps - progress.step) * progress.step_s
        for member, share in (moved := self.crew.rebalance(self.now, left_s, passed, progress.step_s)):
            self._note("move", member.peer, member.stage)
            self.tally.moves += 1
            self._redo(member.stage, share * passed)
        if moved:
            self._look()

    def _go_back(self) -> None:
        """To the newest checkpoint: what was done since is undone, and its time was for nothing."""
        progress, parts = self.progress, self.parts
        self.tally.undone_steps += progress.step - progress.saved
        for part in ("compute", "network", "averaging"):
            parts["redone"] += parts[part] - self._since_saved[part]
            parts[part] = self._since_saved[part]
        self._note("back", progress.step, progress.saved)
        self.crew.egress.microbatches(self.crew.serving, max(progress.passed, 0.0))
        progress.step, progress.passed, progress.phase, progress.left_s = progress.saved, 0.0, Phase.GATHERING, NEVER
        self._gather()

    def _look(self) -> None:
        """Those who serve have changed, or those who are asked."""
        crew, of = self.crew, self.model if self.progress.begun else self.model.first
        self._time = of(crew.serving)
        self._asked = self._time if self._time is None or not crew.dead else of(crew.asked)


def forecast(
    job: Job,
    model: StepModel,
    presences: Sequence[Presence],
    start_s: float,
    horizon_s: float,
    seed: int,
    progress: Callable[[float], None] = lambda now: None,
) -> History:
    """One seed's run until the horizon. Machines on slots that the plan leaves out take no part."""
    run = Run(job, model, [one for one in presences if job.stage_of[one.slot] >= 0], start_s)
    run.play(horizon_s, progress)
    run.end()
    parts = Parts(**run.parts)
    stuck = run.stuck or (_why_stuck(parts, run) if not run.progress.step else "")
    return History(
        seed=seed,
        seconds=horizon_s,
        steps=run.progress.step,
        tokens=run.progress.step * job.microbatches * job.tokens,
        parts=parts,
        **msgspec.structs.asdict(run.tally),
        peer_hours=tuple(run.bill.hours),
        sent_bytes=tuple(map(float, run.crew.egress.nbytes)),
        stuck=stuck,
        digest=run.digest(),
    )


def _why_stuck(parts: Parts, run: Run) -> str:
    """Why no step is left at the end, in words."""
    if run.tally.lost_stages:
        return (
            f"{run.tally.lost_stages} times a stage lost its last replica and everybody went back, {run.tally.undone_steps} steps in all;"
            " more replicas, fewer stages or checkpoints closer together (checkpoint.every) would help"
        )
    if parts.stalled > 0.5 * run.now:
        return (
            f"{run.crew.empty_stages() or 'a stage'} had nobody: there were fewer machines than {run.job.stages} stages"
        )
    if not run.tally.joins:
        return f"no machine had started after {units.duration(run.now)}; wanted a longer horizon than start_s"
    return f"no step was done in {units.duration(run.now)}: deaths undo more than is computed between two of them"
