"""What the leader decides: who belongs, which stage each serves, when a step is averaged, committed, saved, finished.

Acts only while its peer leads; everything it must not forget is in the View (quorum.py), the rest is learned again
from the members' pulses, so a leader can die at any point. One proposal is in flight at a time, chosen by an ordered
list of rules (`decide`), each with its reason. For peer.py.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from shoal.core import ahead, recovery
from shoal.core.averaging import fenced
from shoal.core.conduct import Conduct, Pauses, Verdict, evicting
from shoal.core.ledger import Doubled, Ledger, counted_twice
from shoal.core.members import arrived, counting, inherit, moving, names, owners_of
from shoal.core.messages import (
    Booker,
    Command,
    Committed,
    Complaint,
    Dismissed,
    Index,
    Join,
    Leave,
    Member,
    Note,
    Peer,
    Pulse,
    Reduced,
    Round,
    RoundFailed,
    Send,
    Settings,
    View,
    Waits,
    WhoBooked,
    Wire,
)
from shoal.core.names import invite_of, key_of, limit_of
from shoal.core.planned import NOWHERE, complete, holder, seated
from shoal.core.progress import Progress, RoundWatch
from shoal.core.quorum import Register
from shoal.core.rebalance import Fleet, Move, measure, place, rebalance
from shoal.core.saving import Saving
from shoal.core.seat import owner_of
from shoal.core.stalls import Stalls

DISAGREEMENTS = 2  # rounds whose sums differ within a stage before the minority must download its state again
DOUBT_BEATS = 3  # a peer whose connections broke is dead, or shows life within this many beats
NEAR = 2  # steps that a joiner still has to apply when the others begin to wait for it,
NEAR_BEATS = 8  # and how long they do in all
ENTER_BEATS = 20  # that a step must still last for a joiner to serve from the middle of it: each is a new view for all
MOVES_KEPT = 256  # of those decided: old ones bar nobody any more
SAME = 5  # rounds of one step that a peer may give up because of one other
FAILURES = 8  # rounds of one step that a peer may give up
PAUSES = 4  # doublings of the pause before a round is tried again
OWNER_BEATS = 16  # for an owner to say whose gradient it got
INCARNATIONS = 2  # of one key in a view
NORMS = 1e-6  # by which the norms of equal gradients may differ: sums of the same values on unlike machines
JOINS = 256  # that are kept; whoever asks again later is heard then
STALLED = 20.0  # beats, or twice the usual step, without a commit: everybody is told why
ROUNDS_PER_TERM = 1 << 20  # round numbers are unique without asking: the leader's term, then its own count


class Coordinator:
    """The leader's mind. Call `lead` when this peer becomes leader, `decide` after every event while it is."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.view: View | None = None
        self.term = 0
        self._forget_all()

    def _forget_all(self) -> None:
        self.heard: dict[Peer, float] = {}
        self.doubted: dict[Peer, float] = {}  # since when its connections are broken, with no sign of life
        self.pulses: dict[Peer, Pulse] = {}
        self.joins: dict[
            Peer, Join
        ] = {}  # in the order in which they asked; with their seat, and what they hold of a stage
        self.leaves: dict[Peer, str] = {}
        self.conduct = Conduct()
        self.progress = Progress(self.name, self.settings)
        self.pauses = Pauses(self.settings)
        self.stalls = Stalls(self.settings)
        self.reassigning: dict[Index, str] = {}  # microbatches that need another owner, and why
        self.watch: RoundWatch | None = None  # of the round that is open
        self.failures: Counter[Peer | tuple[Peer, Peer]] = (
            Counter()
        )  # rounds of this step that a peer gave up, also by culprit
        self.again = 0  # rounds of this step that had to be tried again
        self.asked_owner: tuple[Doubled, float] | None = None  # who booked it, and since when
        self.resigns = ""  # why I had better not lead
        self.guilty: dict[Peer, str] = {}  # to be removed, and why
        self.unfit: dict[Peer, str] = {}  # joiners that must begin anew
        self.stale: dict[Peer, str] = {}  # members that must download their state again
        self.ledgers: dict[int, Ledger] = {}  # of the steps that are open: one, with delayed updates at most two
        self.round: Round | None = None
        self.rounds = 0
        self.reduced: dict[Peer, Reduced] = {}
        self.round_sent: dict[Peer, float] = {}
        self.complete_at: float | None = None
        self.served_at: float | None = None  # before a first step: since when every stage has somebody ready
        self.saving = Saving(self.name, self.settings)
        self.again_at = float("-inf")  # no round before: one has just failed
        self.stalled = ""
        self.stall = ""  # why nothing has been committed for long
        self.disagreements = 0
        self.farewell_at: float | None = None
        self.held: dict[Peer, float] = {}  # joiners -> seconds that steps have waited for them
        self.since: dict[Peer, int] = {}  # joiners: the view that made them so; what they told before is void
        self.present: dict[Peer, int] = {}  # everyone in the view -> stage
        self.serving: dict[Peer, int] = {}  # members -> stage
        self.dirty = True  # something happened that the rules look at
        self.lost_at: float | None = None  # since when a stage has nobody
        self.norms: tuple[float, ...] = ()  # squared, of each stage's last gradient
        self.recent: tuple[Move, ...] = ()  # moves decided before
        self.step_at: float | None = None  # when this step began, as far as I saw it
        self.step_s = math.inf  # how long the one before took
        self.scan = True  # this time
        self.check_at = float("-inf")  # when silence and replicas are looked at again
        self.admit_at = float("-inf")  # newcomers wait until then

    # ------------------------------------------------------------------------------------------------ being told

    def lead(self, view: View, term: int, now: float) -> list[Command]:
        """This peer now leads `term`, with `view` agreed."""
        self._forget_all()
        self.view = None  # the one I led with before says nothing of what happened since
        self.term = term
        self.on_view(view, now)
        self.heard = {member.peer: now for member in view.members + view.joining}
        return [Note("leader", f"{self.name} leads term {term} from view {view.number}, step {view.step}")]

    def on_view(self, view: View, now: float) -> list[Command]:
        """A view is agreed (this leader proposed it, or it is the one it begins with)."""
        before, self.view = self.view, view
        self.serving = members = {member.peer: member.stage for member in view.members}
        self.present = present = members | {member.peer: member.stage for member in view.joining}
        self.dirty = True
        commands: list[Command] = []
        for peer in present:
            self.heard.setdefault(peer, now)
            self.joins.pop(peer, None)
        fresh_step = before is None or (before.step, before.epoch) != (view.step, view.epoch)
        self.progress.on_view(before, view, now)
        self.pauses.on_view(view.evicted, now)
        self.conduct.keep(present)
        if fresh_step:
            self.failures.clear()
            self.again, self.again_at, self.asked_owner = 0, float("-inf"), None
            self.conduct.step()
            same = before is not None and before.epoch == view.epoch
            self.ledgers = {step: kept for step, kept in self.ledgers.items() if same and step >= view.step}
            if before is not None and before.started and self.step_at is not None:
                self.step_s = now - self.step_at
            self.step_at = None
            self.complete_at, self.served_at, self.disagreements = None, None, 0
            if view.last is not None and view.last.save:
                self.saving.begin(view)
        if self.step_at is None and view.started:
            self.step_at = now
        opened_again = before is not None and before.ahead and not view.ahead
        if before is None or (before.work, before.epoch, before.since, before.started) != (
            view.work,
            view.epoch,
            view.since,
            view.started,
        ):
            self.stalls.on_step(now, first=before is None)
        self.stalls.on_view(view)
        self.reassigning = {}
        if fresh_step or opened_again or self.round is None or fenced(self.round, view) is not None:
            self._close_round()
        for ledger in self.ledgers.values():
            for gone in [peer for peer in ledger.books if peer not in members]:
                ledger.forget(gone)
        for known in (
            self.pulses,
            self.heard,
            self.doubted,
            self.leaves,
            self.guilty,
            self.unfit,
            self.stale,
            self.held,
        ):
            for peer in [peer for peer in known if peer not in present]:
                del known[peer]
        for peer in [peer for peer in self.stale if peer not in members]:
            del self.stale[peer]
        self.since = {
            member.peer: self.since.get(member.peer, view.number)
            if before is not None and member in before.joining
            else view.number
            for member in view.joining
        }
        for pulse_of in [peer for peer in self.pulses if fresh_step and peer in present]:
            self._take_books(pulse_of, self.pulses[pulse_of])
        commands += self.saving.on_view(view)
        return commands

    def doubt(self, peer: Peer, now: float) -> None:
        """The network says that peer cannot be reached: it has DOUBT_BEATS to show life."""
        if peer in self.heard:
            self.doubted.setdefault(peer, now)

    def bar(self, peers: tuple[Peer, ...]) -> None:
        """The run's authority has revoked these."""
        for peer in peers:
            self.joins.pop(peer, None)
            if peer in self.present and peer not in self.guilty:
                self.guilty[peer] = "revoked by the run's authority"
                self.dirty = True

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: nobody's silence in that time counts."""
        self.heard = {peer: min(now, at + gap_s) for peer, at in self.heard.items()}
        self.doubted.clear()
        self.progress.forgive(gap_s, now)
        self.stalls.forgive(now)
        if self.watch is not None:
            self.watch.forgive(gap_s, now)
        if self.asked_owner is not None:
            self.asked_owner = self.asked_owner[0], min(now, self.asked_owner[1] + gap_s)

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        assert self.view is not None
        present = peer in self.present
        if present:
            self.heard[peer] = now
            self.doubted.pop(peer, None)
        if not isinstance(message, Pulse):
            self.dirty = True
        match message:
            case Join():
                if not present and (peer in self.joins or len(self.joins) < JOINS):
                    self.joins[peer] = message
            case _ if not present:
                pass
            case Pulse():
                return self._on_pulse(peer, message, now)
            case Leave():
                self.leaves.setdefault(peer, message.reason)
            case Complaint():
                self._on_complaint(peer, message)
            case Reduced() if self._in_round(message) and peer in self.round_sent:
                if not (math.isfinite(message.norm_sq) and message.norm_sq >= 0.0):
                    self.guilty[peer] = f"reports a gradient with the squared norm {message.norm_sq}"
                else:
                    self.reduced.setdefault(peer, message)
                    if self.watch is not None:
                        self.watch.on_reduced(now)
            case RoundFailed() if self._in_round(message) and peer in self.round_sent:
                return self._on_round_failed(peer, message, now)
            case Waits() if self._in_round(message) and peer in self.round_sent and self.watch is not None:
                self.watch.on_waits(peer, message, now)
            case Booker():
                self._on_booker(peer, message)
                self.stalls.on_answer(peer, message, now)
            case _:
                return self.saving.on_message(peer, message, now)
        return []

    # ------------------------------------------------------------------------------------------------- deciding

    def _ledger(self, step: int) -> Ledger:
        return self.ledgers.setdefault(step, Ledger(self.settings.stages, self.settings.microbatches))

    def _share(self, view: View) -> float:
        """How much of what is computed now is booked."""
        return self._ledger(view.work).booked / (self.settings.stages * self.settings.microbatches)

    @property
    def _booked(self) -> int:
        """In the books of all steps that are open."""
        return sum(ledger.booked for ledger in self.ledgers.values())

    def decide(self, register: Register, now: float) -> list[Command]:
        """Whatever the rules ask for now: at most one proposal, and messages."""
        view = register.agreed
        if view is None or self.view is not view or register.proposing:
            return []
        if not self.dirty and now < self.check_at:
            return []
        self.dirty, self.scan = False, now >= self.check_at
        if self.scan:
            self.check_at = now + 0.9 * self.settings.beat_s
            self.stall = self._why_stalled(view, now)
        if view.finished:
            return self._dismiss(view, now)
        commands = self._watch(view, now) if self.scan else []
        for rule in (
            self._remove,
            self._reassign,
            self._promote,
            self._take_back,
            self._recover,
            self._restage,
            self._start,
            self._commit,
            self._admit,
            self._end,
            self._go_ahead,
        ):
            successor = rule(view, now)
            if successor is not None:
                saved = max(view.saved, self.saving.published) if successor.epoch == view.epoch else view.saved
                return commands + register.propose(msgspec.structs.replace(successor, saved=saved), now)
        return commands + self._average(view, now) + self.saving.tick(view, now)

    def _remove(self, view: View, now: float) -> View | None:
        """Put out the silent, the guilty and the ones with a wrong state; their work goes to the others. Where that leaves a stage
        too thin, others move there at once: the end of the step may be far."""
        if not (self.scan or self.guilty or self.stale or self.unfit):
            return None
        gone: dict[Peer, str] = {}
        for member in view.members + view.joining:
            silence = now - self.heard.get(member.peer, now)
            if member.peer == self.name:
                continue
            if silence > self.settings.silence_s:
                gone[member.peer] = f"silent for {silence:.1f} s"
            elif now - self.doubted.get(member.peer, now) >= DOUBT_BEATS * self.settings.beat_s:
                gone[member.peer] = f"cannot be reached, silent for {silence:.1f} s"
            elif member.peer in self.guilty:
                gone[member.peer] = self.guilty[member.peer]
            elif member.peer in self.unfit:
                gone[member.peer] = self.unfit[member.peer]
        again = [member for member in view.members if member.peer in self.stale and member.peer not in gone]
        if not gone and not again:
            return None
        words = [f"{peer} {why}" for peer, why in gone.items()]
        words += [f"{member.peer} downloads its state again: {self.stale[member.peer]}" for member in again]
        left = set(gone) | {member.peer for member in again}
        members = tuple(member for member in view.members if member.peer not in left)
        joining = tuple(member for member in view.joining if member.peer not in left)
        joining += tuple(msgspec.structs.replace(member, back=True) for member in again)
        killed = sum(peer in gone for peer in view.voters)
        if gone and view.started and len({member.stage for member in members}) == self.settings.stages:
            left_s, passed = self._left_s(view.step), self._share(view)
            moves = self._moves(self._fleet(members, joining, now, left_s, passed))
            members, joining = moving(members, joining, moves)
            words += [move.reason for move in moves]
            left |= {move.peer for move in moves}
        redone = sum(len(ledger.books.get(peer, ())) for ledger in self.ledgers.values() for peer in left)
        account = msgspec.structs.replace(
            view.account, redone=view.account.redone + redone, killed=view.account.killed + killed
        )
        after = msgspec.structs.replace(
            view,
            number=view.number + 1,
            members=members,
            joining=joining,
            owners=inherit(view, members, self._ledger(view.work).open(members)),
            fenced=(*view.fenced, *(member for member in view.members if member.peer in left)),
            account=account,
            evicted=evicting(view.evicted, [peer for peer in gone if peer in self.guilty]),
            reason="; ".join(words)[:2000],
        )
        closed = self._ledger(view.step)
        if not view.ahead or (closed.complete(view.members) and not any(closed.books.get(peer) for peer in left)):
            return after
        return ahead.opened_again(after, owners_of(members, self.settings.microbatches) if members else ())

    def _reassign(self, view: View, now: float) -> View | None:
        """Microbatches that do not get on with their owner go to another."""
        if not self.reassigning or not view.owners:
            return None
        moves = {index: why for index, why in self.reassigning.items() if index < len(view.owners)}
        self.reassigning = {}
        owners, words, verdicts = self.stalls.reassign(view, moves, self.name)
        for verdict in verdicts:
            self._convict(verdict)
        if owners == view.owners:
            return None
        return msgspec.structs.replace(view, number=view.number + 1, owners=owners, reason="; ".join(words)[:2000])

    def _go_ahead(self, view: View, now: float) -> View | None:
        """With delayed updates (ahead.py) whole books are closed, and the next step is computed while the step is averaged.

        Not when peers wait for a step's end, to leave, to move, or to come back after they were put out: then this step is committed
        before the next one begins. What is computed is the same, for no step ever waits for the gradient of the one before."""
        opens = bool(self.settings.staleness) and view.started and not view.ahead and self.round is None
        if not opens or view.step + 1 >= self.settings.steps or not self._ledger(view.step).complete(view.members):
            return None
        if not view.begun and (view.fenced or self._awaited(view, now)):
            return None
        microbatches = self.settings.microbatches
        return ahead.opened(view, owners_of(view.members, microbatches), microbatches)

    def _awaited(self, view: View, now: float) -> bool:
        """Somebody has to do something that needs a moment between two steps."""
        if any(member.peer in self.leaves for member in view.members):
            return True
        if complete(self.settings, view.members):
            return False
        return bool(rebalance(self._fleet(view.members, view.joining, now, self._left_s(view.step + 1))))

    def _promote(self, view: View, now: float) -> View | None:
        """Joiners that hold their stage become members in the middle of a step: at once where no other is left, and where the end
        of the step is far. Else at its end."""
        if not view.started or not view.joining or self.round is not None:
            return None
        empty = recovery.empty(view, self.settings.stages)
        void = {(member.peer, member.stage) for member in view.fenced}
        able = tuple(
            member for member in view.joining if (member.peer, member.stage) not in void and self._ready(member, view)
        )  # whoever served that stage in this step stays out: books of before, told late, would count there again
        if self._rest_s(now) < ENTER_BEATS * self.settings.beat_s:
            able = tuple(member for member in able if member.stage in empty)
        if not able:
            return None
        words = [f"{member.peer} serves stage {member.stage}{self._alone(member, empty)}" for member in able]
        return msgspec.structs.replace(
            view,
            number=view.number + 1,
            members=view.members + arrived(able, view.number + 1),
            joining=tuple(member for member in view.joining if member not in able),
            account=counting(view.account, able),
            reason="; ".join(words)[:2000],
        )

    @staticmethod
    def _alone(member: Member, empty: list[int]) -> str:
        return ": no other replica is left" if member.stage in empty else " from the middle of the step"

    def _rest_s(self, now: float) -> float:
        """Seconds until this step's books are whole, if they fill as they have so far; as long as the last step when they are empty."""
        if self.step_at is None:
            return 0.0
        assert self.view is not None
        share, passed_s = self._share(self.view), now - self.step_at
        if share:
            return passed_s * (1.0 - share) / share
        return max(passed_s, self.step_s) if self.step_s < math.inf else passed_s

    def _take_back(self, view: View, now: float) -> View | None:
        """A peer comes back with the state of a stage that lost its last member."""
        return recovery.taken_back(view, self.settings, self.joins, self._booked)

    def _recover(self, view: View, now: float) -> View | None:
        """A stage has lost every copy of its state: all go back to the newest checkpoint, or make it from its neighbours, under
        a new epoch. Not at once: a replica that was only cut off may come back with it."""
        stages = self.settings.stages
        empty = recovery.empty(view, stages) if view.started else recovery.lost(view, stages)
        over = view.step >= self.settings.steps and self.saving.idle
        if not empty or over:
            self.lost_at = None
            return None
        if self.lost_at is None:
            self.lost_at = now
        if self.settings.lost == "wait" or now - self.lost_at < self.settings.lost_wait_s:
            return None
        self.lost_at = None
        why_not = ""
        if self.settings.lost == "neighbours":
            neighbours, why_not = recovery.neighbours(empty, stages, self.norms)
            if neighbours and view.started:
                return recovery.rebuilt(view, neighbours, self.settings.microbatches, self._booked)
        back = max(view.saved, self.saving.published)
        return recovery.gone_back(view, empty[0], back, self.settings.microbatches, why_not)

    def _restage(self, view: View, now: float) -> View | None:
        """Before a first step, a stage without anybody gets a peer of the stage that can best spare one."""
        everyone = view.members + view.joining
        if view.started or len(everyone) < max(self.settings.stages, 0 if view.epoch else self.settings.peers):
            return None
        if {member.stage for member in everyone} == set(range(self.settings.stages)) or recovery.lost(
            view, self.settings.stages
        ):
            return None
        moves = self._moves(self._fleet(everyone, (), now))
        if not moves:
            return None
        to = {move.peer: move.stage for move in moves}

        def moved(members: tuple[Member, ...]) -> tuple[Member, ...]:
            return tuple(
                msgspec.structs.replace(one, stage=to[one.peer], seat=NOWHERE) if one.peer in to else one
                for one in members
            )

        return msgspec.structs.replace(
            view,
            number=view.number + 1,
            members=moved(view.members),
            joining=moved(view.joining),
            reason="; ".join(move.reason for move in moves)[:2000],
        )

    def _admit(self, view: View, now: float) -> View | None:
        """Give every new peer a stage to prepare: at once, but one view for all who come within a beat after the last.

        A view goes to everybody: one for each of n newcomers would be n * n messages (30,000 events at 100 peers)."""
        if not self.joins or view.finished or now < self.admit_at or self.round is not None:
            return None  # a round that is open lists everyone who hears it
        self.admit_at = now + 0.9 * self.settings.beat_s
        joining, words = list(view.joining), []
        seconds, speeds = self._measured(view.members)
        for peer, asked in self.joins.items():
            there = (*view.members, *joining)
            if not self._welcome(peer, there, now):
                continue
            taken = {member.seat for member in there}
            planned = seated(self.settings, asked.seat, taken)
            stage, why = planned or place(there, self.settings.stages, seconds, speeds)
            joining.append(Member(peer=peer, stage=stage, seat=holder(self.settings, asked.seat, stage, taken)))
            words.append(f"{peer} joins stage {stage}: {why}")
        if not words:
            return None
        return msgspec.structs.replace(
            view, number=view.number + 1, joining=tuple(joining), reason="; ".join(words)[:2000]
        )

    def _welcome(self, peer: Peer, there: tuple[Member, ...], now: float) -> bool:
        """Not barred, and its invite and its key admit one more; a process that was started again may come before the old one is gone."""
        others = [member.peer for member in there]
        if now < self.pauses.until(peer, [other for other in others if other in self.serving]):
            return False
        of_invite = sum(invite_of(other) == invite_of(peer) for other in others)
        of_key = sum(key_of(other) == key_of(peer) for other in others)
        return of_invite < limit_of(peer) and of_key < INCARNATIONS

    def _start(self, view: View, now: float) -> View | None:
        """Begin the first step when enough peers hold their stage and no stage is empty."""
        if view.started or (not view.epoch and len(self.present) < self.settings.peers):
            return None
        candidates = view.members + view.joining
        ready = tuple(member for member in candidates if self._ready(member, view))
        served = {member.stage for member in ready}
        if len(served) < self.settings.stages:
            self.served_at = None
            return None
        if self.served_at is None:
            self.served_at = now
        if view.epoch:  # gone back to a checkpoint: with whoever is left, but nobody waits for ever for the slowest
            there = sum(member in ready for member in view.members)
            waited = now - self.served_at >= self.settings.hold_s
            enough = there == len(view.members) or (waited and 2 * there > len(view.members))  # without me, too
        else:
            enough = len(ready) >= self.settings.peers and self.name in names(ready)
        if not enough:
            return None
        rest = tuple(
            msgspec.structs.replace(member, back=member.back or member in view.members)
            for member in candidates
            if member not in ready
        )
        new = (
            tuple(member for member in view.joining if member in ready) if view.epoch else ()
        )  # later than the first start
        return msgspec.structs.replace(
            view,
            number=view.number + 1,
            members=arrived(ready, view.number + 1),
            joining=rest,
            owners=owners_of(ready, self.settings.microbatches),
            started=True,
            fenced=(),
            account=counting(view.account, new, issued=self.settings.microbatches),
            reason=f"{len(ready)} peers hold all {self.settings.stages} stages: step {view.step} begins",
        )

    def _commit(self, view: View, now: float) -> View | None:
        """Every replica of every stage holds the same reduced gradient: the step is committed, the next one begins."""
        if self.round is None or len(self.reduced) < sum(len(group) for group in self.round.groups):
            return None
        digests: list[str] = []
        norms: list[float] = []  # squared, of each stage's gradient
        for stage, group in enumerate(self.round.groups):
            peers = [share.peer for share in group]
            by_digest: dict[str, list[Peer]] = {}
            for peer in peers:
                by_digest.setdefault(self.reduced[peer].digest, []).append(peer)
            if len(by_digest) > 1:
                self._disagree(f"its sums differ from its stage {stage}'s others", by_digest, now)
                return None
            by_norm = self._by_norm(peers)
            if len(by_norm) > 1:
                self._disagree(f"its norm of the same sums differs from its stage {stage}'s others", by_norm, now)
                return None
            digests.append(next(iter(by_digest)))
            norms.append(self.reduced[peers[0]].norm_sq)
        self.norms = tuple(norms)
        step = view.step + 1
        over = step >= self.settings.steps
        every = self.settings.save_every
        save = (over and self.settings.save_last) or (every > 0 and step % every == 0)
        last = Committed(
            step=view.step,
            round=self.round.round,
            norm=math.sqrt(sum(norms)),
            loss=self._ledger(view.step).loss(),
            digests=tuple(digests),
            groups=self.round.groups,
            save=save,
            listeners=tuple(peer for group in self.round.listeners for peer in group),
        )
        return self._next(view, last, over, now)

    def _by_norm(self, peers: list[Peer]) -> dict[str, list[Peer]]:
        """Replicas by what they say the norm of their equal gradients is: alike where rounding explains the difference."""
        found: dict[str, list[Peer]] = {}
        for peer in peers:
            norm = self.reduced[peer].norm_sq
            same = (other for other in found if abs(float(other) - norm) <= NORMS * max(abs(norm), abs(float(other))))
            found.setdefault(next(same, repr(norm)), []).append(peer)
        return found

    def _disagree(self, why: str, found: dict[str, list[Peer]], now: float) -> None:
        """Replicas of one stage hold different sums: average again; at the second time the minority starts afresh."""
        self.disagreements += 1
        if self.disagreements >= DISAGREEMENTS:
            self._differ(why, found)
        self._close_round()
        self._pause(now)

    def _differ(self, why: str, found: dict[str, list[Peer]]) -> None:
        """Those who are not taken to be right download their state again, or go if they had to too often."""
        right = self.conduct.right(found, self.name)
        for peers in found.values():
            for peer in peers if peers is not right else ():
                if not any(peer in known for known in (self.stale, self.unfit, self.guilty)):
                    (self.stale if peer in self.serving else self.unfit)[peer] = why
                    self._convict(self.conduct.differs(peer, why))

    def _convict(self, verdict: Verdict | None) -> None:
        """Whoever leads cannot evict itself: its successor judges anew."""
        if verdict is None:
            return
        peer, why = verdict
        if peer == self.name:
            self.resigns = why
        elif peer in self.present:
            self.guilty[peer] = why
            self.dirty = True

    def _pause(self, now: float) -> None:
        """Before a round is tried again: longer with each."""
        self.again_at = now + self.settings.beat_s * 2 ** min(self.again, PAUSES)
        self.again += 1

    def _close_round(self) -> None:
        self.round, self.reduced, self.round_sent, self.watch = None, {}, {}, None

    def _next(self, view: View, last: Committed, over: bool, now: float) -> View:
        """The view that begins the step after `last`: leavers go, joiners that took part become members."""
        assert self.round is not None
        took_part = {share.peer for group in self.round.groups for share in group}
        goes_on = view.ahead  # in the middle of the next step, nobody leaves, and nobody put out of it comes in
        out = view.fenced if goes_on else ()
        void = {(member.peer, member.stage) for member in out}
        new = tuple(
            member for member in view.joining if member.peer in took_part and (member.peer, member.stage) not in void
        )
        leavers = {member.peer for member in view.members if member.peer in self.leaves and not goes_on}
        staying = view.members + arrived(new, view.number + 1)
        members = tuple(member for member in staying if member.peer not in leavers)
        if {member.stage for member in members} != {member.stage for member in staying}:
            members, leavers = staying, set()  # a stage is never emptied by a leave
        joining = tuple(member for member in view.joining if member not in new and member.peer not in self.leaves)
        words = [
            f"step {last.step} committed: loss {last.loss:.4f}, norm {last.norm:.3g}, round {last.round % ROUNDS_PER_TERM}"
        ]
        words += [f"{member.peer} serves stage {member.stage}" for member in new]
        words += [f"{peer} leaves: {self.leaves[peer]}" for peer in sorted(leavers)]
        quiet = over or goes_on or complete(self.settings, members)  # while everybody is as planned, the plan balances
        moves = () if quiet else self._moves(self._fleet(members, joining, now, self._left_s(view.step + 1)))
        members, joining = moving(members, joining, moves)
        words += [move.reason for move in moves]
        begins = not (over or goes_on)
        owners = (
            owners_of(members, self.settings.microbatches) if begins else inherit(view, members, ()) if goes_on else ()
        )
        account = counting(view.account, new, issued=self.settings.microbatches if begins else 0)
        account = msgspec.structs.replace(
            account,
            committed=account.committed + self.settings.microbatches,
            counted_twice=account.counted_twice + counted_twice(last.groups),
        )
        return View(
            number=view.number + 1,
            step=view.step + 1,
            members=members,
            joining=joining,
            owners=owners,
            started=True,
            saved=view.saved,
            finished=over and not last.save,
            epoch=view.epoch,
            last=last,
            account=account,
            reason="; ".join(words)[:2000],
            fenced=out,
            since=view.since,
            evicted=view.evicted,
        )

    def _end(self, view: View, now: float) -> View | None:
        """After the last step the run is over once its checkpoint is published or cannot be."""
        if view.finished or view.step < self.settings.steps or not self.saving.idle:
            return None
        return msgspec.structs.replace(
            view, number=view.number + 1, finished=True, reason=f"all {self.settings.steps} steps are committed"
        )

    # ------------------------------------------------------------------------------------------------- averaging

    def _average(self, view: View, now: float) -> list[Command]:
        """Ask for the round when the books are whole; repeat it to whoever has not answered."""
        if not view.started or view.step >= self.settings.steps:
            return []
        commands = self._inquire(view, now) if self.scan else []
        if self.round is None:
            return commands + self._open_round(view, now)
        if self.scan and self.watch is not None:
            self._convict(self.watch.verdict(self.reduced, self.conduct, self.name, now))
        late = [
            share.peer
            for group in self.round.groups
            for share in group
            if share.peer not in self.reduced and now - self.round_sent.get(share.peer, -1e9) > 4 * self.settings.beat_s
        ]
        self.round_sent.update(dict.fromkeys(late, now))
        return commands + [Send(peer, self.round) for peer in late]

    def _inquire(self, view: View, now: float) -> list[Command]:
        """Ask where what is missing hangs, and judge by the answers."""
        ledger = self._ledger(view.work)
        if ledger.booked >= self.settings.stages * self.settings.microbatches:
            return []
        rates = [pulse.rate for peer, pulse in self.pulses.items() if peer in self.serving and pulse.rate > 0.0]
        commands = self.stalls.ask(view, ledger, 1.0 / min(rates) if rates else 0.0, now)
        verdicts, self.reassigning = self.stalls.judge(view, ledger, self.conduct, now)
        for verdict in verdicts:
            self._convict(verdict)
        self.dirty |= bool(self.reassigning)
        return commands

    def _open_round(self, view: View, now: float) -> list[Command]:
        total, ledger = self.settings.stages * self.settings.microbatches, self._ledger(view.step)
        if ledger.booked < total or now < self.again_at:
            return []
        if not ledger.complete(view.members):
            return self._who_booked(view, ledger, now)
        if view.begun and not view.ahead:
            return []  # the next step goes on first
        if not all(self._lives(member.peer) for member in view.members):
            return []  # a round that lists the dead ends with them, and its bytes are in the way of the next
        if self.complete_at is None:
            self.complete_at = now
        ready = tuple(member for member in view.joining if self._ready(member, view))
        near = [member.peer for member in view.joining if member not in ready and self._near(member, view)]
        waited = now - self.complete_at
        if any(self.held.get(peer, 0.0) + waited < NEAR_BEATS * self.settings.beat_s for peer in near):
            return []
        for peer in near:
            self.held[peer] = self.held.get(peer, 0.0) + waited
        listeners = tuple(
            tuple(
                member.peer
                for member in view.joining
                if member.stage == stage and member not in ready and self._knows(member.peer)
            )
            for stage in range(self.settings.stages)
        )
        self.rounds += 1
        groups = ledger.groups(view.members, ready, self.settings.widths)
        self.round = Round(
            epoch=view.epoch,
            step=view.step,
            round=self.term * ROUNDS_PER_TERM + self.rounds,
            view=view.number,
            groups=groups,
            listeners=listeners,
        )
        self.reduced, self.watch = {}, RoundWatch(self.round, self.settings, now)
        peers = [share.peer for group in groups for share in group]
        self.round_sent = dict.fromkeys(peers, now)
        return [Send(peer, self.round) for peer in peers]

    def _lives(self, peer: Peer) -> bool:
        """It has told of itself since I lead, and its connections have not broken since. Otherwise it shows life within a beat or is
        removed."""
        return peer == self.name or (peer in self.pulses and peer not in self.doubted)

    def _who_booked(self, view: View, ledger: Ledger, now: float) -> list[Command]:
        """Two members say that they have booked one microbatch: its owner knows whose gradient it got. Whoever is at odds with several
        needs no owner's word; without it the one with fewer bookings goes, so that less is redone."""
        found = ledger.doubled(view.members)
        if not found:
            return []
        odds: dict[Peer, set[Peer]] = {}
        for one in found:
            odds.setdefault(one.one, set()).add(one.two)
            odds.setdefault(one.two, set()).add(one.one)
        worst = max(odds, key=lambda peer: len(odds[peer]))
        first = found[0]
        if len(odds[worst]) > 1:
            self._convict((worst, f"booked what {' and '.join(sorted(odds[worst]))} had booked"))
            return []
        if self.asked_owner is None or self.asked_owner[0] != first:
            self.asked_owner = first, now
        owner = owner_of(view, first.index) if view.work == view.step else None
        waited = now - self.asked_owner[1]
        if owner is None or waited > OWNER_BEATS * self.settings.beat_s:
            fewer = min((first.two, first.one), key=lambda peer: (peer == self.name, len(ledger.books[peer])))
            other = first.one if fewer == first.two else first.two
            self._convict((fewer, f"booked microbatch {first.index}, which {other} had booked"))
            return []
        return [Send(owner, WhoBooked(view.epoch, view.step, first.index, first.stage))] if self.scan else []

    def _on_booker(self, peer: Peer, answer: Booker) -> None:
        view, asked = self.view, self.asked_owner
        if view is None or asked is None or (answer.epoch, answer.step) != (view.epoch, view.step):
            return
        twice = asked[0]
        told = (answer.index, answer.stage, peer) == (twice.index, twice.stage, owner_of(view, twice.index))
        if told and answer.peer in (twice.one, twice.two):
            liar = twice.two if answer.peer == twice.one else twice.one
            self._convict((liar, f"booked microbatch {twice.index}, whose owner has its gradient from {answer.peer}"))

    def _on_round_failed(self, peer: Peer, failed: RoundFailed, now: float) -> list[Command]:
        assert self.view is not None and self.round is not None
        group = next((group for group in self.round.groups if any(share.peer == peer for share in group)), ())
        self._close_round()
        self._pause(now)
        self.failures[peer] += 1
        self.failures[peer, failed.culprit] += 1
        if any(share.peer == failed.culprit for share in group):
            self._convict(self.conduct.accuse(peer, failed.culprit, failed.reason, len(group) - 1))
            if self.failures[peer, failed.culprit] >= SAME and failed.culprit not in self.guilty:
                self._convict(self.conduct.alone(peer, failed.culprit, f"{peer}: {failed.reason}"))
        elif self.failures[peer] >= FAILURES:
            self._convict((peer, f"has given up {self.failures[peer]} rounds of a step, the last: {failed.reason}"))
        return [Note("round", f"round given up: {peer} says {failed.reason}")]

    def _in_round(self, message: Reduced | RoundFailed | Waits) -> bool:
        current = self.round
        return current is not None and (current.epoch, current.step, current.round) == (
            message.epoch,
            message.step,
            message.round,
        )

    # --------------------------------------------------------------------------------------------------- watching

    def _on_pulse(self, peer: Peer, pulse: Pulse, now: float) -> list[Command]:
        assert self.view is not None
        self.dirty |= peer not in self.serving or not self.view.started or self.view.finished
        self.pulses[peer] = pulse
        self.progress.on_pulse(peer, pulse, self.view, now)
        self._take_books(peer, pulse)
        return []

    def _take_books(self, peer: Peer, pulse: Pulse) -> None:
        view = self.view
        assert view is not None
        if pulse.epoch != view.epoch or self.serving.get(peer) != pulse.stage:
            return
        for step, books in ((pulse.work, pulse.books), (pulse.work - 1, pulse.closed)):
            if books and view.step <= step <= view.step + view.begun:
                ledger = self._ledger(step)
                wrong = ledger.report(peer, books)
                if wrong:
                    self._convict((peer, wrong))
                self.dirty |= ledger.booked >= self.settings.stages * self.settings.microbatches

    def _on_complaint(self, peer: Peer, complaint: Complaint) -> None:
        about, reason = complaint.about, complaint.reason
        if complaint.kind != "stale":
            self._complain(peer, about, reason, gentle=complaint.kind == "unreachable")
        elif about == peer:
            self.stale[peer] = reason

    def _complain(self, peer: Peer, about: Peer, reason: str, *, gentle: bool) -> None:
        """Of members about members. `gentle`: a link may be to blame, so a stage's last replica stays."""
        stage = self.serving.get(about)
        if stage is None or peer not in self.serving:
            return
        if gentle and sum(other == stage for other in self.serving.values()) < 2:
            return
        self._convict(self.conduct.accuse(peer, about, reason, witnesses=len(self.serving) - 1))

    def _watch(self, view: View, now: float) -> list[Command]:
        """Compare the replicas' parameters; say when a stage has nobody."""
        commands: list[Command] = []
        taken = {member.stage for member in view.members + view.joining}
        empty = sorted(set(range(self.settings.stages)) - taken)
        stalled = f"stage {empty[0]} has nobody to serve it: the run waits for peers" if view.epoch and empty else ""
        if stalled != self.stalled:
            self.stalled = stalled
            commands += [Note("stall", stalled or "every stage is served again")]
        held: dict[int, dict[str, list[Peer]]] = {}
        for member in view.members:
            pulse = self.pulses.get(member.peer)
            if pulse is not None and pulse.digest and (pulse.step, pulse.epoch) == (view.step, view.epoch):
                held.setdefault(member.stage, {}).setdefault(pulse.digest, []).append(member.peer)
        for stage, digests in held.items():
            if len(digests) > 1:
                self._differ(f"its parameters differ from its stage {stage}'s others", digests)
        for peer, why in self.progress.late(view, self.step_s, now).items():
            self._convict((peer, why))
        return commands

    def _why_stalled(self, view: View, now: float) -> str:
        """In words, when no step has been committed for long."""
        long_s = max(STALLED * self.settings.beat_s, 2 * self.step_s if self.step_s < math.inf else 0.0)
        since = self.step_at if self.step_at is not None else now
        if not view.started or view.finished or view.step >= self.settings.steps or now - since < long_s:
            return ""
        if self.round is not None:
            late = [share.peer for group in self.round.groups for share in group if share.peer not in self.reduced]
            what = f"its round {self.rounds} waits for {', '.join(late[:4])}{' and others' if len(late) > 4 else ''}"
        else:
            what = "; ".join(self._ledger(view.step).faults(view.members)[:3]) or "everything is booked"
        return f"step {view.step} is not committed for {now - since:.0f} s: {what}"[:2000]

    def _ready(self, member: Member, view: View) -> bool:
        pulse = self.pulses.get(member.peer)
        ready = (
            pulse is not None
            and pulse.ready
            and pulse.number >= self.since.get(member.peer, 0)
            and (pulse.step, pulse.epoch, pulse.stage) == (view.step, view.epoch, member.stage)
        )
        if not ready or member.peer in self.serving:
            return ready
        assert pulse is not None
        others = {
            other.digest
            for peer, other in self.pulses.items()
            if self.serving.get(peer) == member.stage and (other.step, other.epoch) == (view.step, view.epoch)
        } - {""}
        if others and pulse.digest not in others:
            if member.peer not in self.unfit and member.peer not in self.guilty:
                why = f"came with another state of stage {member.stage} than its replicas have"
                self.unfit[member.peer] = why
                self._convict(self.conduct.differs(member.peer, why))
            return False
        return True

    def _knows(self, joiner: Peer) -> bool:
        """That joiner has told that it holds the view which made it one: before, it hears nothing that is meant for it."""
        pulse = self.pulses.get(joiner)
        return pulse is not None and pulse.number >= self.since.get(joiner, 0)

    def _near(self, member: Member, view: View) -> bool:
        """That joiner holds its stage and applies what was committed meanwhile: worth waiting for, not for a download."""
        pulse = self.pulses.get(member.peer)
        return (
            pulse is not None
            and bool(pulse.digest)
            and self._knows(member.peer)
            and (pulse.epoch, pulse.stage) == (view.epoch, member.stage)
            and view.step - pulse.step <= NEAR
        )

    def _measured(self, members: tuple[Member, ...]) -> tuple[tuple[float, ...], dict[Peer, float]]:
        """Seconds per microbatch at each stage and the peers' relative speeds: from the members' rates, else as planned."""
        rates: dict[Peer, float] = {}
        for member in members:
            pulse = self.pulses.get(member.peer)
            if pulse is not None and pulse.stage == member.stage:
                rates[member.peer] = pulse.rate
        return measure(members, rates, self.settings.stages, self.settings.stage_seconds)

    def _moves(self, fleet: Fleet) -> tuple[Move, ...]:
        """Who goes to another stage now."""
        moves = rebalance(fleet)
        self.recent = (*self.recent, *moves)[-MOVES_KEPT:]
        return moves

    def _fleet(
        self,
        members: tuple[Member, ...],
        loading: tuple[Member, ...],
        now: float,
        left_s: float = math.inf,
        passed: float = 0.0,
    ) -> Fleet:
        seconds, speeds = self._measured(members)
        return Fleet(
            members=members,
            stages=self.settings.stages,
            seconds=seconds,
            speeds=speeds,
            loading=loading,
            recent=self.recent,
            now=now,
            left_s=left_s,
            passed=passed,
        )

    def _left_s(self, step: int) -> float:
        """Seconds until the run's end, from that step on, as long as steps take what the last one took."""
        return (self.settings.steps - step) * self.step_s

    def _dismiss(self, view: View, now: float) -> list[Command]:
        """A finished run: tell the others once all know, or after a while."""
        if self.farewell_at is None:
            self.farewell_at = now + 2 * self.settings.silence_s
        others = [member.peer for member in view.members + view.joining if member.peer != self.name]
        aware = all(peer in self.pulses and self.pulses[peer].number >= view.number for peer in others)
        if aware or now >= self.farewell_at:
            self.farewell_at = float("-inf")
            return [Send(peer, Dismissed(number=view.number)) for peer in others]
        return []

    @property
    def dismissed(self) -> bool:
        """Everybody has been told that the run is over."""
        return self.farewell_at == float("-inf")
