"""What the leader decides: who belongs, which stage each serves, when a step is averaged, committed, saved, finished.

Acts only while its peer leads; everything it must not forget is in the View (register.py), the rest is learned again
from the members' pulses, so a leader can die at any point. One proposal is in flight at a time, chosen by an ordered
list of rules (`_rules`), each with its reason. For peer.py.
"""

from __future__ import annotations

import math

import msgspec

from shoal.core.consensus.register import Register
from shoal.core.leader import overlap, recovery
from shoal.core.leader.averaging import OpenRound
from shoal.core.leader.evictions import evicting
from shoal.core.leader.facts import Facts
from shoal.core.leader.ledger import Ledger, counted_twice
from shoal.core.leader.membership import arrived, counting, inherit, moving, names, owners_of
from shoal.core.leader.rebalance import Fleet, Move, measure, place, rebalance
from shoal.core.messages import (
    Command,
    Committed,
    Dismissed,
    Member,
    Note,
    Peer,
    Round,
    Send,
    Settings,
    View,
    WhoBooked,
    Wire,
)
from shoal.core.names import invite_of, key_of, limit_of
from shoal.core.planned import NOWHERE, complete, holder, seated
from shoal.core.replica_state import owner_of

DISAGREEMENTS = 2  # rounds whose sums differ within a stage before the minority must download its state again
DOUBT_BEATS = 3  # a peer whose connections broke is dead, or shows life within this many beats
NEAR_BEATS = 8  # that steps wait for a joiner that is near, in all
ENTER_BEATS = 20  # that a step must still last for a joiner to serve from the middle of it: each is a new view for all
OWNER_BEATS = 16  # for an owner to say whose gradient it got
INCARNATIONS = 2  # of one key in a view
NORMS = 1e-6  # by which the norms of equal gradients may differ: sums of the same values on unlike machines
STALLED = 20.0  # beats, or twice the usual step, without a commit: everybody is told why
ROUNDS_PER_TERM = 1 << 20  # round numbers are unique without asking: the leader's term, then its own count


class Coordinator:
    """The leader's mind. Call `lead` when this peer becomes leader, `decide` after every event while it is."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self._begin(0)

    def _begin(self, term: int) -> None:
        self.term = term
        self.facts = Facts(self.name, self.settings)
        self.check_at = float("-inf")  # when silence and replicas are looked at again
        self.stall = ""  # why nothing has been committed for long
        self.unserved = ""  # which stage nobody serves, in words
        self.farewell_at: float | None = None

    # ---------------------------------------------------------------------------------------------------- hearing

    def lead(self, view: View, term: int, now: float) -> list[Command]:
        """This peer now leads `term`, with `view` agreed."""
        self._begin(term)
        self.facts.lead(view, now)
        return [Note("leader", f"{self.name} leads term {term} from view {view.number}, step {view.step}")]

    def on_view(self, view: View, now: float) -> None:
        """A view is agreed: one that this leader proposed."""
        self.facts.on_view(view, now)

    def doubt(self, peer: Peer, now: float) -> None:
        """The network says that peer cannot be reached: it has DOUBT_BEATS to show life."""
        self.facts.doubt(peer, now)

    def bar(self, peers: tuple[Peer, ...]) -> None:
        """The run's authority has revoked these."""
        self.facts.bar(peers)

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: nobody's silence in that time counts."""
        self.facts.forgive(gap_s, now)

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        return self.facts.on_message(peer, message, now)

    # ------------------------------------------------------------------------------------------------- deciding

    def decide(self, register: Register, now: float) -> list[Command]:
        """Whatever the rules ask for now: at most one proposal, and messages."""
        view = register.agreed
        if view is None or self.facts.view is not view or register.proposing:
            return []
        if not self.facts.changed and now < self.check_at:
            return []
        self.facts.changed, self.facts.scan = False, now >= self.check_at
        if self.facts.scan:
            self.check_at = now + 0.9 * self.settings.beat_s
            self.stall = self._why_stalled(view, now)
        if view.finished:
            return self._dismiss(view, now)
        commands = self._watch(view, now) if self.facts.scan else []
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
                saved = max(view.saved, self.facts.saving.published) if successor.epoch == view.epoch else view.saved
                return commands + register.propose(msgspec.structs.replace(successor, saved=saved), now)
        return commands + self._average(view, now) + self.facts.saving.tick(view, now)

    def _remove(self, view: View, now: float) -> View | None:
        """Put out the silent, the guilty and the ones with a wrong state; their work goes to the others. Where that leaves a stage
        too thin, others move there at once: the end of the step may be far."""
        if not (
            self.facts.scan or self.facts.evidence.guilty or self.facts.evidence.stale or self.facts.evidence.unfit
        ):
            return None
        gone: dict[Peer, str] = {}
        for member in view.members + view.joining:
            silence = now - self.facts.heard.get(member.peer, now)
            if member.peer == self.name:
                continue
            if silence > self.settings.silence_s:
                gone[member.peer] = f"silent for {silence:.1f} s"
            elif now - self.facts.doubted.get(member.peer, now) >= DOUBT_BEATS * self.settings.beat_s:
                gone[member.peer] = f"cannot be reached, silent for {silence:.1f} s"
            elif member.peer in self.facts.evidence.guilty:
                gone[member.peer] = self.facts.evidence.guilty[member.peer]
            elif member.peer in self.facts.evidence.unfit:
                gone[member.peer] = self.facts.evidence.unfit[member.peer]
        again = [
            member for member in view.members if member.peer in self.facts.evidence.stale and member.peer not in gone
        ]
        if not gone and not again:
            return None
        words = [f"{peer} {why}" for peer, why in gone.items()]
        words += [
            f"{member.peer} downloads its state again: {self.facts.evidence.stale[member.peer]}" for member in again
        ]
        left = set(gone) | {member.peer for member in again}
        members = tuple(member for member in view.members if member.peer not in left)
        joining = tuple(member for member in view.joining if member.peer not in left)
        joining += tuple(msgspec.structs.replace(member, back=True) for member in again)
        killed = sum(peer in gone for peer in view.voters)
        if gone and view.started and len({member.stage for member in members}) == self.settings.stages:
            left_s, passed = self._left_s(view.step), self.facts.share(view)
            moves = self._decided(self._fleet(members, joining, now, left_s, passed))
            members, joining = moving(members, joining, moves)
            words += [move.reason for move in moves]
            left |= {move.peer for move in moves}
        redone = sum(len(ledger.books.get(peer, ())) for ledger in self.facts.ledgers.values() for peer in left)
        account = msgspec.structs.replace(
            view.account, redone=view.account.redone + redone, killed=view.account.killed + killed
        )
        after = msgspec.structs.replace(
            view,
            number=view.number + 1,
            members=members,
            joining=joining,
            owners=inherit(view, members, self.facts.ledger(view.work).open(members)),
            fenced=(*view.fenced, *(member for member in view.members if member.peer in left)),
            account=account,
            evicted=evicting(view.evicted, [peer for peer in gone if peer in self.facts.evidence.guilty]),
            reason="; ".join(words)[:2000],
        )
        closed = self.facts.ledger(view.step)
        if not view.ahead or (closed.complete(view.members) and not any(closed.books.get(peer) for peer in left)):
            return after
        return overlap.opened_again(after, owners_of(members, self.settings.microbatches) if members else ())

    def _reassign(self, view: View, now: float) -> View | None:
        """Microbatches that do not get on with their owner go to another."""
        if not self.facts.evidence.reassigning or not view.owners:
            return None
        moves = {index: why for index, why in self.facts.evidence.reassigning.items() if index < len(view.owners)}
        self.facts.evidence.reassigning = {}
        owners, words, verdicts = self.facts.evidence.stalls.reassign(view, moves, self.name)
        for verdict in verdicts:
            self.facts.convict(verdict)
        if owners == view.owners:
            return None
        return msgspec.structs.replace(view, number=view.number + 1, owners=owners, reason="; ".join(words)[:2000])

    def _go_ahead(self, view: View, now: float) -> View | None:
        """With delayed updates (overlap.py) whole books are closed, and the next step is computed while the step is averaged.

        Not when peers wait for a step's end, to leave, to move, or to come back after they were put out: then this step is committed
        before the next one begins. What is computed is the same, for no step ever waits for the gradient of the one before."""
        opens = bool(self.settings.staleness) and view.started and not view.ahead and self.facts.rounds.open is None
        if not opens or view.step + 1 >= self.settings.steps or not self.facts.ledger(view.step).complete(view.members):
            return None
        if not view.begun and (view.fenced or self._awaited(view, now)):
            return None
        microbatches = self.settings.microbatches
        return overlap.opened(view, owners_of(view.members, microbatches), microbatches)

    def _awaited(self, view: View, now: float) -> bool:
        """Somebody has to do something that needs a moment between two steps."""
        if any(member.peer in self.facts.requests.leaves for member in view.members):
            return True
        if complete(self.settings, view.members):
            return False
        return bool(rebalance(self._fleet(view.members, view.joining, now, self._left_s(view.step + 1))))

    def _promote(self, view: View, now: float) -> View | None:
        """Joiners that hold their stage become members in the middle of a step: at once where no other is left, and where the end
        of the step is far. Else at its end."""
        if not view.started or not view.joining or self.facts.rounds.open is not None:
            return None
        empty = recovery.empty(view, self.settings.stages)
        void = {(member.peer, member.stage) for member in view.fenced}
        able = tuple(
            member for member in view.joining if (member.peer, member.stage) not in void and self._ready(member, view)
        )  # whoever served that stage in this step stays out: books of before, told late, would count there again
        if self.facts.history.rest_s(self.facts.share(view), now) < ENTER_BEATS * self.settings.beat_s:
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

    def _take_back(self, view: View, now: float) -> View | None:
        """A peer comes back with the state of a stage that lost its last member."""
        return recovery.taken_back(view, self.settings, self.facts.requests.joins, self.facts.booked)

    def _recover(self, view: View, now: float) -> View | None:
        """A stage has lost every copy of its state: all go back to the newest checkpoint, or make it from its neighbours, under
        a new epoch. Not at once: a replica that was only cut off may come back with it."""
        stages = self.settings.stages
        empty = recovery.empty(view, stages) if view.started else recovery.lost(view, stages)
        over = view.step >= self.settings.steps and self.facts.saving.idle
        if not empty or over:
            self.facts.history.lost_at = None
            return None
        if self.facts.history.lost_at is None:
            self.facts.history.lost_at = now
        if self.settings.lost == "wait" or now - self.facts.history.lost_at < self.settings.lost_wait_s:
            return None
        self.facts.history.lost_at = None
        why_not = ""
        if self.settings.lost == "neighbours":
            neighbours, why_not = recovery.neighbours(empty, stages, self.facts.history.norms)
            if neighbours and view.started:
                return recovery.rebuilt(view, neighbours, self.settings.microbatches, self.facts.booked)
        back = max(view.saved, self.facts.saving.published)
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
        moves = self._decided(self._fleet(everyone, (), now))
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
        if (
            not self.facts.requests.joins
            or view.finished
            or now < self.facts.history.admit_at
            or self.facts.rounds.open is not None
        ):
            return None  # a round that is open lists everyone who hears it
        self.facts.history.admit_at = now + 0.9 * self.settings.beat_s
        joining, words = list(view.joining), []
        seconds, speeds = self._measured(view.members)
        for peer, asked in self.facts.requests.joins.items():
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
        if now < self.facts.requests.pauses.until(peer, [other for other in others if other in self.facts.serving]):
            return False
        of_invite = sum(invite_of(other) == invite_of(peer) for other in others)
        of_key = sum(key_of(other) == key_of(peer) for other in others)
        return of_invite < limit_of(peer) and of_key < INCARNATIONS

    def _start(self, view: View, now: float) -> View | None:
        """Begin the first step when enough peers hold their stage and no stage is empty."""
        if view.started or (not view.epoch and len(self.facts.present) < self.settings.peers):
            return None
        candidates = view.members + view.joining
        ready = tuple(member for member in candidates if self._ready(member, view))
        served = {member.stage for member in ready}
        if len(served) < self.settings.stages:
            self.facts.history.served_at = None
            return None
        if self.facts.history.served_at is None:
            self.facts.history.served_at = now
        if view.epoch:  # gone back to a checkpoint: with whoever is left, but nobody waits for ever for the slowest
            there = sum(member in ready for member in view.members)
            waited = now - self.facts.history.served_at >= self.settings.hold_s
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
        current = self.facts.rounds.open
        if current is None or not current.complete:
            return None
        digests: list[str] = []
        norms: list[float] = []  # squared, of each stage's gradient
        for stage, group in enumerate(current.message.groups):
            peers = [share.peer for share in group]
            by_digest: dict[str, list[Peer]] = {}
            for peer in peers:
                by_digest.setdefault(current.reduced[peer].digest, []).append(peer)
            if len(by_digest) > 1:
                self._disagree(f"its sums differ from its stage {stage}'s others", by_digest, now)
                return None
            by_norm = by_norm_of(current, peers)
            if len(by_norm) > 1:
                self._disagree(f"its norm of the same sums differs from its stage {stage}'s others", by_norm, now)
                return None
            digests.append(next(iter(by_digest)))
            norms.append(current.reduced[peers[0]].norm_sq)
        self.facts.history.norms = tuple(norms)
        step = view.step + 1
        over = step >= self.settings.steps
        every = self.settings.save_every
        save = (over and self.settings.save_last) or (every > 0 and step % every == 0)
        last = Committed(
            step=view.step,
            round=current.message.round,
            norm=math.sqrt(sum(norms)),
            loss=self.facts.ledger(view.step).loss(),
            digests=tuple(digests),
            groups=current.message.groups,
            save=save,
            listeners=tuple(peer for group in current.message.listeners for peer in group),
        )
        return self._next(view, last, over, now)

    def _disagree(self, why: str, replicas: dict[str, list[Peer]], now: float) -> None:
        """Replicas of one stage hold different sums: average again; at the second time the minority starts afresh."""
        self.facts.rounds.disagreements += 1
        if self.facts.rounds.disagreements >= DISAGREEMENTS:
            self.facts.on_differing(why, replicas)
        self.facts.rounds.retry(self.settings, now)

    def _next(self, view: View, last: Committed, over: bool, now: float) -> View:
        """The view that begins the step after `last`: leavers go, joiners that took part become members."""
        took_part = {share.peer for group in last.groups for share in group}
        goes_on = view.ahead  # in the middle of the next step, nobody leaves, and nobody put out of it comes in
        out = view.fenced if goes_on else ()
        void = {(member.peer, member.stage) for member in out}
        new = tuple(
            member for member in view.joining if member.peer in took_part and (member.peer, member.stage) not in void
        )
        leavers = {member.peer for member in view.members if member.peer in self.facts.requests.leaves and not goes_on}
        staying = view.members + arrived(new, view.number + 1)
        members = tuple(member for member in staying if member.peer not in leavers)
        if {member.stage for member in members} != {member.stage for member in staying}:
            members, leavers = staying, set()  # a stage is never emptied by a leave
        joining = tuple(
            member for member in view.joining if member not in new and member.peer not in self.facts.requests.leaves
        )
        words = [
            f"step {last.step} committed: loss {last.loss:.4f}, norm {last.norm:.3g}, round {last.round % ROUNDS_PER_TERM}"
        ]
        words += [f"{member.peer} serves stage {member.stage}" for member in new]
        words += [f"{peer} leaves: {self.facts.requests.leaves[peer]}" for peer in sorted(leavers)]
        quiet = over or goes_on or complete(self.settings, members)  # while everybody is as planned, the plan balances
        moves = () if quiet else self._decided(self._fleet(members, joining, now, self._left_s(view.step + 1)))
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
        if view.finished or view.step < self.settings.steps or not self.facts.saving.idle:
            return None
        return msgspec.structs.replace(
            view, number=view.number + 1, finished=True, reason=f"all {self.settings.steps} steps are committed"
        )

    # ------------------------------------------------------------------------------------------------- averaging

    def _average(self, view: View, now: float) -> list[Command]:
        """Ask for the round when the books are whole; repeat it to whoever has not answered."""
        if not view.started or view.step >= self.settings.steps:
            return []
        commands = self._inquire(view, now) if self.facts.scan else []
        current = self.facts.rounds.open
        if current is None:
            return commands + self._open_round(view, now)
        if self.facts.scan:
            verdict = current.watch.verdict(current.reduced, self.facts.evidence.conduct, self.name, now)
            self.facts.convict(verdict)
        late = [
            share.peer
            for group in current.message.groups
            for share in group
            if share.peer not in current.reduced and now - current.sent_at[share.peer] > 4 * self.settings.beat_s
        ]
        current.sent_at.update(dict.fromkeys(late, now))
        return commands + [Send(peer, current.message) for peer in late]

    def _inquire(self, view: View, now: float) -> list[Command]:
        """Ask where what is missing hangs, and judge by the answers."""
        ledger = self.facts.ledger(view.work)
        if ledger.booked >= self.settings.stages * self.settings.microbatches:
            return []
        rates = [
            pulse.rate for peer, pulse in self.facts.pulses.items() if peer in self.facts.serving and pulse.rate > 0.0
        ]
        commands = self.facts.evidence.stalls.ask(view, ledger, 1.0 / min(rates) if rates else 0.0, now)
        verdicts, self.facts.evidence.reassigning = self.facts.evidence.stalls.judge(
            view, ledger, self.facts.evidence.conduct, now
        )
        for verdict in verdicts:
            self.facts.convict(verdict)
        self.facts.changed |= bool(self.facts.evidence.reassigning)
        return commands

    def _open_round(self, view: View, now: float) -> list[Command]:
        total, ledger = self.settings.stages * self.settings.microbatches, self.facts.ledger(view.step)
        if ledger.booked < total or now < self.facts.rounds.not_before:
            return []
        if not ledger.complete(view.members):
            return self._who_booked(view, ledger, now)
        if view.begun and not view.ahead:
            return []  # the next step goes on first
        if not all(self.facts.alive(member.peer) for member in view.members):
            return []  # a round that lists the dead ends with them, and its bytes are in the way of the next
        if self.facts.history.complete_at is None:
            self.facts.history.complete_at = now
        ready = tuple(member for member in view.joining if self._ready(member, view))
        near = [member.peer for member in view.joining if member not in ready and self.facts.near(member, view)]
        waited = now - self.facts.history.complete_at
        if any(
            self.facts.history.waited_s.get(peer, 0.0) + waited < NEAR_BEATS * self.settings.beat_s for peer in near
        ):
            return []
        for peer in near:
            self.facts.history.waited_s[peer] = self.facts.history.waited_s.get(peer, 0.0) + waited
        listeners = tuple(
            tuple(
                member.peer
                for member in view.joining
                if member.stage == stage and member not in ready and self.facts.confirmed(member.peer)
            )
            for stage in range(self.settings.stages)
        )
        self.facts.rounds.count += 1
        groups = ledger.groups(view.members, ready, self.settings.widths)
        message = Round(
            epoch=view.epoch,
            step=view.step,
            round=self.term * ROUNDS_PER_TERM + self.facts.rounds.count,
            view=view.number,
            groups=groups,
            listeners=listeners,
        )
        self.facts.rounds.opened(message, self.settings, now)
        return [Send(share.peer, message) for group in groups for share in group]

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
            self.facts.convict((worst, f"booked what {' and '.join(sorted(odds[worst]))} had booked"))
            return []
        if self.facts.rounds.asked_owner is None or self.facts.rounds.asked_owner[0] != first:
            self.facts.rounds.asked_owner = first, now
        owner = owner_of(view, first.index) if view.work == view.step else None
        waited = now - self.facts.rounds.asked_owner[1]
        if owner is None or waited > OWNER_BEATS * self.settings.beat_s:
            fewer = min((first.two, first.one), key=lambda peer: (peer == self.name, len(ledger.books[peer])))
            other = first.one if fewer == first.two else first.two
            self.facts.convict((fewer, f"booked microbatch {first.index}, which {other} had booked"))
            return []
        return [Send(owner, WhoBooked(view.epoch, view.step, first.index, first.stage))] if self.facts.scan else []

    # --------------------------------------------------------------------------------------------------- watching

    def _watch(self, view: View, now: float) -> list[Command]:
        """Compare the replicas' parameters; say when a stage has nobody."""
        commands: list[Command] = []
        taken = {member.stage for member in view.members + view.joining}
        empty = sorted(set(range(self.settings.stages)) - taken)
        stalled = f"stage {empty[0]} has nobody to serve it: the run waits for peers" if view.epoch and empty else ""
        if stalled != self.unserved:
            self.unserved = stalled
            commands += [Note("stall", stalled or "every stage is served again")]
        held: dict[int, dict[str, list[Peer]]] = {}
        for member in view.members:
            pulse = self.facts.pulses.get(member.peer)
            if pulse is not None and pulse.digest and (pulse.step, pulse.epoch) == (view.step, view.epoch):
                held.setdefault(member.stage, {}).setdefault(pulse.digest, []).append(member.peer)
        for stage, digests in held.items():
            if len(digests) > 1:
                self.facts.on_differing(f"its parameters differ from its stage {stage}'s others", digests)
        for peer, why in self.facts.evidence.progress.late(view, self.facts.history.step_s, now).items():
            self.facts.convict((peer, why))
        return commands

    def _why_stalled(self, view: View, now: float) -> str:
        """In words, when no step has been committed for long."""
        long_s = max(
            STALLED * self.settings.beat_s,
            2 * self.facts.history.step_s if self.facts.history.step_s < math.inf else 0.0,
        )
        since = self.facts.history.step_at if self.facts.history.step_at is not None else now
        if not view.started or view.finished or view.step >= self.settings.steps or now - since < long_s:
            return ""
        current = self.facts.rounds.open
        if current is not None:
            groups = current.message.groups
            late = [share.peer for group in groups for share in group if share.peer not in current.reduced]
            what = f"its round {self.facts.rounds.count} waits for {', '.join(late[:4])}{' and others' if len(late) > 4 else ''}"
        else:
            what = "; ".join(self.facts.ledger(view.step).faults(view.members)[:3]) or "everything is booked"
        return f"step {view.step} is not committed for {now - since:.0f} s: {what}"[:2000]

    def _measured(self, members: tuple[Member, ...]) -> tuple[tuple[float, ...], dict[Peer, float]]:
        """Seconds per microbatch at each stage and the peers' relative speeds: from the members' rates, else as planned."""
        rates: dict[Peer, float] = {}
        for member in members:
            pulse = self.facts.pulses.get(member.peer)
            if pulse is not None and pulse.stage == member.stage:
                rates[member.peer] = pulse.rate
        return measure(members, rates, self.settings.stages, self.settings.stage_seconds)

    def _decided(self, fleet: Fleet) -> tuple[Move, ...]:
        """Who goes to another stage now."""
        moves = rebalance(fleet)
        self.facts.history.remember(moves)
        return moves

    def _ready(self, member: Member, view: View) -> bool:
        if self.facts.misfit(member, view):
            self.facts.on_misfit(member)
            return False
        return self.facts.holds(member, view)

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
            recent=self.facts.history.moves,
            now=now,
            left_s=left_s,
            passed=passed,
        )

    def _left_s(self, step: int) -> float:
        """Seconds until the run's end, from that step on, as long as steps take what the last one took."""
        return (self.settings.steps - step) * self.facts.history.step_s

    def _dismiss(self, view: View, now: float) -> list[Command]:
        """A finished run: tell the others once all know, or after a while."""
        if self.farewell_at is None:
            self.farewell_at = now + 2 * self.settings.silence_s
        others = [member.peer for member in view.members + view.joining if member.peer != self.name]
        aware = all(peer in self.facts.pulses and self.facts.pulses[peer].number >= view.number for peer in others)
        if aware or now >= self.farewell_at:
            self.farewell_at = float("-inf")
            return [Send(peer, Dismissed(number=view.number)) for peer in others]
        return []

    @property
    def dismissed(self) -> bool:
        """Everybody has been told that the run is over."""
        return self.farewell_at == float("-inf")


def by_norm_of(current: OpenRound, peers: list[Peer]) -> dict[str, list[Peer]]:
    """Replicas by what they say the norm of their equal gradients is: alike where rounding explains the difference."""
    found: dict[str, list[Peer]] = {}
    for peer in peers:
        norm = current.reduced[peer].norm_sq
        same = (other for other in found if abs(float(other) - norm) <= NORMS * max(abs(norm), abs(float(other))))
        found.setdefault(next(same, repr(norm)), []).append(peer)
    return found
