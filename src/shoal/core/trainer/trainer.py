"""The trainer of a peer: drives the microbatches it owns through the stages until each is booked once at every stage.

What is next for a microbatch is microbatch.plan, who serves it is routing.Routes; this file sends, waits, repeats, and
keeps the one rule that needs care: after a backward was sent to A, another peer may get it only when A said that it
will not book it (Cancelled, Busy, Refused, Missing) or has left the agreed view. A forward changes nothing at a server and is
simply sent elsewhere. Every request and every repeat has an attempt number of its own.
Left to others: which view is agreed and who leads (PeerMachine), counting of lost and repeated work (coordinator).
An event costs O(log n) and what it touches; only a view walks over the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from msgspec.structs import replace

from shoal.core.consensus.phases import ended
from shoal.core.messages import (
    BlobRef,
    Booker,
    BookerRequest,
    Books,
    BooksRequest,
    Busy,
    Command,
    Do,
    Done,
    Drop,
    Failed,
    Fetch,
    Gradient,
    Index,
    Message,
    Missing,
    Note,
    Output,
    Peer,
    Pending,
    Query,
    Refused,
    Send,
    Settings,
    Stage,
    View,
)
from shoal.core.planned import Planned
from shoal.core.timers import Timers
from shoal.core.trainer.choice import Choice
from shoal.core.trainer.microbatch import (
    UNTRAINED,
    Answer,
    Hop,
    Kind,
    Microbatch,
    NextHop,
    Owned,
    Progress,
    TrainerLoad,
    new_microbatch,
    plan,
)
from shoal.core.trainer.ownership import NOTHING, begins, owned_by, period
from shoal.core.trainer.reports import Reports
from shoal.core.trainer.routing import EXTENSIONS, Routes
from shoal.core.trainer.takeover import Takeovers
from shoal.core.trainer.window import Window
from shoal.core.trainer.wiring import Chance

ANSWERS = (*get_args(Answer), Books)
BOOKS = -1  # timer keys: an index, this, or PARKED - stage
PARKED = -2
LOOK_FLOORS = 0.25  # of min_request_timeout_s: no server is asked sooner whether it has got a request,
ASK_FLOORS = 0.5  # and one that has says so within that
MOST_HOLDS = 8  # with a guess of 1 s: up to 17 minutes for a forward whose server says that it has got it


class Trainer:
    def __init__(self, name: Peer, settings: Settings, rng: Chance) -> None:
        self.name = name
        self._settings = settings
        self._out: list[Command] = []
        self._routes = Routes(settings, rng)
        self._planned = Planned(name, settings)
        self._reports = Reports(self._routes, self._out)
        self._choice = Choice(name, settings, self._routes, self._planned, self._reports)
        self.timers = Timers()
        self._view = NOTHING
        self._stage_of: dict[Peer, Stage] = {}
        self._owned = Owned(Window(settings))
        self._takeovers = Takeovers()  # mine too, but not before everybody has shown their books
        self._fetches: dict[str, Microbatch] = {}
        self._serial = 0

    @property
    def leader(self) -> Peer | None:
        """To whom complaints go; set by PeerMachine before each call."""
        return self._reports.leader

    @leader.setter
    def leader(self, peer: Peer | None) -> None:
        self._reports.leader = peer

    # ------------------------------------------------------------------------------------------------------- events

    def on_view(self, view: View, now: float) -> list[Command]:
        if view.number < self._view.number:
            return []
        old, self._view = self._view, view
        members = view.members if view.started and not view.finished else ()
        self._stage_of = {member.peer: member.stage for member in members}
        self._routes.on_view(members, now, {one.key for one in view.newcomers}, period(old) != period(view))
        self._out += [Note("route", text) for text in self._planned.on_view(members)]
        mine = owned_by(self.name, view) if members else {}
        if period(old) != period(view):
            self._forget_all()
        else:
            self._lose(mine, now)
        self._own_new(mine, begins(old, view), now)
        for stage in self._owned.parked_stages():
            self._unpark(stage, now)
        return self._flush(now)

    def on_message(
        self, peer: Peer, message: Message, blobs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        """Answers of servers, none of which carries a tensor. What is stale, foreign or unasked changes nothing."""
        if (
            peer in self._stage_of
            and isinstance(message, ANSWERS)
            and (message.epoch, message.step) == (self._view.epoch, self._view.work)
        ):
            self._routes.received(peer)
            if isinstance(message, Books):
                if message.stage == self._stage_of[peer]:
                    self._takeovers.hear(peer, message)
                    self._own(self._takeovers.take())
            elif (m := self._owned.active.get(message.index)) is not None:
                self._answer(m, peer, message, fault or ("a tensor in a receipt" if blobs else ""), now)
        self._drop([blob.id for blob in blobs])
        return self._flush(now)

    def on_done(self, done: Done, now: float) -> list[Command]:
        m = self._fetches.pop(done.id, None)
        tokens = f"{done.id}/x"  # as _fetch named it, also where the fetch is forgotten
        if m is None:
            return [Drop((tokens,))]
        m.x[0] = (tokens,)
        m.progressed()
        self._advance(m, now)
        return self._flush(now)

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        m = self._fetches.pop(failed.id, None)
        if m is not None:
            m.hop = None
            text = f"microbatch {m.index} cannot be read and is tried again: {failed.reason}"
            self._reports.note_once("stall", "fetch", self.name, text)
            self.timers.set(m.index, now + self._settings.min_request_timeout_s)
        return self._flush(now)

    def on_unreachable(self, peer: Peer, now: float) -> list[Command]:
        """Forwards go elsewhere at once. A backward may have arrived: it waits for an answer or for the view."""
        if peer in self._stage_of:
            self._reports.failed(peer, "cannot be reached", now)
            self._reports.missed(peer, now)
            for m in list(self._owned.active.values()):
                if m.hop is not None and m.hop.peer == peer and m.hop.kind is Kind.FORWARD:
                    m.abandon()
                    self._retry(m, now)
        return self._flush(now)

    def forgive(self, gap_s: float) -> None:
        self._owned.forgive(gap_s)

    def tick(self, now: float) -> list[Command]:
        while (key := self.timers.pop_due(now)) is not None:
            if key == BOOKS:
                for peer in self._takeovers.missing:
                    self._reports.missed(peer, now)
                self._ask_books(now)
            elif key <= PARKED:
                self._unpark(PARKED - key, now)
            else:
                self._expire(self._owned.active[key], now)
        return self._flush(now)

    def on_who_booked(self, peer: Peer, asked: BookerRequest, now: float) -> list[Command]:
        """The leader wonders where one of my microbatches is. So does its owner, then: a request may be lost."""
        known = (asked.epoch, asked.step) == (self._view.epoch, self._view.work)
        if not known or asked.stage >= self._settings.stages:
            return []
        m, booker = self._owned.held.get(asked.index), Booker(asked.epoch, asked.step, asked.index, asked.stage)
        if m is not None:
            late = max(m.slow, 1) if m.withheld else m.slow
            booker = replace(booker, peer=m.booked[asked.stage], at=m.waits_for, slow=late)
            if m.hop is not None and m.hop.queries and now - m.hop.sent >= self._settings.min_request_timeout_s:
                self._query(m, m.hop, now)
        elif asked.index in self._takeovers:
            booker = replace(booker, at=next(iter(self._takeovers.missing), ""), slow=1)
        else:
            return []
        return [Send(peer, booker), *self._flush(now)]

    @property
    def deadline(self) -> float | None:
        return self.timers.deadline

    def summary(self) -> TrainerLoad:
        return self._owned.load(len(self._takeovers))

    # -------------------------------------------------------------------------------------------------------- views

    def _own_new(self, mine: dict[Index, None], begins: bool, now: float) -> None:
        """Of microbatches assigned to me: those of a new step begin here, those of a peer that was evicted are taken over."""
        new = [i for i in mine if i not in self._owned.held and i not in self._takeovers]
        if begins:
            self._own({index: {} for index in new})
        elif new:
            self._take_over(new, now)
        self._own(self._takeovers.take())

    def _forget_all(self) -> None:
        self._drop([blob for m in self._owned.held.values() for blob in m.blobs()])
        self._owned = self._owned.next_step()
        self._takeovers.clear()
        self.timers.forget_all()
        self._fetches.clear()

    def _lose(self, mine: dict[Index, None], now: float) -> None:
        """A newer view of the same step: what had to do with peers that left is void, as is what is no longer mine."""
        self._reports.keep(self._stage_of)
        for m in self._owned.give_up([index for index in self._owned.held if index not in mine]):
            self._drop(m.blobs())
            self.timers.forget(m.index)
            self._fetches = {task: other for task, other in self._fetches.items() if other is not m}
        self._owned.lose_bookings(self._stage_of)
        self._takeovers.keep(self._stage_of, mine)
        for m in list(self._owned.active.values()):
            if m.hop is not None and m.hop.kind is not Kind.FETCH and m.hop.peer not in self._stage_of:
                m.hop, m.slow = None, 0
                self._advance(m, now)

    def _own(self, booked_at: dict[Index, dict[Stage, Peer]]) -> None:
        last, over = self._settings.stages - 1, ended(self._view, self._settings)
        for index, at in booked_at.items():
            trained = index < self._settings.microbatches
            below, top = UNTRAINED if over or not trained else "", UNTRAINED if over and trained else ""
            booked = [*(at.get(stage, below) for stage in range(last)), at.get(last, top)]
            self._owned.wait(new_microbatch(index, booked, self._view))

    def _take_over(self, indices: list[Index], now: float) -> None:
        text = f"take over {len(indices)} microbatches of step {self._view.work}: everybody is asked for books"
        self._out.append(Note("route", text))
        self._takeovers.add(self._view.number, self._stage_of, indices)
        self._ask_books(now)

    def _ask_books(self, now: float) -> None:
        view, missing = self._view, self._takeovers.missing
        for peer in missing:
            self._routes.asked(peer, now)
            self._out.append(Send(peer, BooksRequest(view.epoch, view.work, self._takeovers.floor)))
        if missing:
            self.timers.set(BOOKS, now + self._takeovers.pause_s(self._settings.min_request_timeout_s))

    # ------------------------------------------------------------------------------------------------- microbatches

    def _advance(self, m: Microbatch, now: float) -> None:
        """Nothing is in flight for it: do what comes next."""
        assert m.hop is None and m.progress is Progress.ACTIVE
        self._owned.leave_park(m)
        want = plan(m)
        if want.kind is Kind.FINISHED:
            self._owned.finish(m, now)
            self.timers.forget(m.index)
        elif want.kind is Kind.FETCH:
            self._fetch(m, now)
        elif want.kind is Kind.RECALL:
            self._send(m, want, m.booked[want.stage], now)
        else:
            peer = self._choice.peer(m, want, self._owned.active.values(), now)
            if peer:
                self._send(m, want, peer, now)
            else:
                self._park(m, want.stage)

    def _fetch(self, m: Microbatch, now: float) -> None:
        self._serial += 1
        task = f"t/{self._serial}"
        self._fetches[task] = m
        m.hop = Hop(Kind.FETCH, 0, self.name, now)
        self.timers.forget(m.index)
        self._out.append(Do(Fetch(task, self._view.work, m.index, f"{task}/x")))

    def _send(self, m: Microbatch, want: NextHop, peer: Peer, now: float) -> None:
        self._choice.hop(m, want, peer, self._owned.active.values(), now)
        assert m.hop is not None
        self._out.append(Send(peer, m.request(self._view), m.inputs()))
        self._routes.asked(peer, now)
        m.hop.guessed = not self._routes.knows(peer)
        floor_s = LOOK_FLOORS * self._settings.min_request_timeout_s
        self.timers.set(m.index, now + (floor_s if m.hop.guessed else self._look_s(m, m.hop)))

    def _look_s(self, m: Microbatch, hop: Hop) -> float:
        """From its sending until its server is asked after it. Doubled with every miss: a swarm that got slower must not be asked the same
        thing ever more often."""
        floor_s = LOOK_FLOORS * self._settings.min_request_timeout_s
        return max(floor_s, self._routes.due(hop.peer, hop.kind.size, hop.ahead)) * 2.0 ** min(m.slow, 2)

    def _repeat(self, m: Microbatch, hop: Hop, now: float) -> None:
        """At the peer that has it: cancel a backward, or recall once more."""
        self._out.append(Send(hop.peer, m.request(self._view)))
        # Less and less often: what it answers may be a gradient that was on its way all the time.
        self.timers.set(m.index, now + self._routes.repeat_s(hop.peer) * 2 ** min(hop.last - hop.first - 1, 2))

    def _park(self, m: Microbatch, stage: Stage) -> None:
        """No replica is free: wait for the first one to wake, or for a view."""
        self._owned.park(m, stage)
        self.timers.forget(m.index)
        wake = self._routes.wake(stage)
        if wake is not None:
            self.timers.set(PARKED - stage, wake)

    def _unpark(self, stage: Stage, now: float) -> None:
        for m in self._owned.unpark(stage):
            self._advance(m, now)

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(self, m: Microbatch, peer: Peer, message: Answer, fault: str, now: float) -> None:
        hop = m.hop
        if isinstance(message, Output):
            self._output(m, peer, message, fault, now)
        elif hop is None or not hop.answered_by(peer, message.stage, message.attempt):
            return
        elif isinstance(message, Pending):
            if hop.asked:
                self._held(m, hop, message.coming, now)
        elif isinstance(message, (Busy, Refused, Missing)):
            self._declined(m, hop, message, now)
        elif hop.kind is not Kind.FORWARD:
            if isinstance(message, Gradient):
                self._gradient(m, hop, fault, now)
            else:
                self._cancelled(m, hop, now)

    def _held(self, m: Microbatch, hop: Hop, coming: bool, now: float) -> None:
        """Its server has got it. It has one more deadline, or a few if what it lacks is on its way: anybody else would get that later, over
        the same line. While nothing is known of how long that stage takes it is waited for as long again, several times."""
        hop.asked, hop.holds = False, hop.holds + 1
        known = self._routes.knows(hop.peer)
        extends = known and coming and hop.extensions < EXTENSIONS
        hop.extensions += extends
        hop.held = hop.holds == MOST_HOLDS or (known and not extends)
        wait_s = self._routes.patience(hop.peer, hop.kind.size, hop.ahead)
        self.timers.set(m.index, now + (wait_s if known or hop.held else max(wait_s, now - hop.sent)))

    def _output(self, m: Microbatch, peer: Peer, message: Output, fault: str, now: float) -> None:
        asked, live = m.forward_of(peer, message.stage, message.attempt)
        if asked is None:
            return
        if fault or asked.stage + 1 >= self._settings.stages:
            self._reports.faulty(peer, f"output of stage {asked.stage}", fault, now)
            if live:
                m.hop, m.avoid = None, peer
                self._retry(m, now)
            return
        self._routes.answered(peer, now - asked.sent, asked.kind.size, now, asked.asked, asked.ahead)
        self._owned.window.made(message.nbytes)
        if asked.stage:
            self._routes.given(m.x[asked.stage][:1])
        if m.x[asked.stage + 1]:
            return
        m.made(asked, gradient=False)
        hop = m.hop
        if hop is not None and not live and hop.kind is Kind.FORWARD and hop.stage == asked.stage:
            m.abandon()  # the peer that was asked instead need not have been
        if m.hop is None or live:
            m.progressed()
            m.next = asked.to
            self._advance(m, now)

    def _gradient(self, m: Microbatch, hop: Hop, fault: str, now: float) -> None:
        stage = hop.stage
        if hop.kind is Kind.BACKWARD:
            self._routes.answered(hop.peer, now - hop.sent, hop.kind.size, now, hop.repeated or hop.asked, hop.ahead)
            self._routes.given((*m.x[stage][: bool(stage)], *(m.g[stage][:1] if stage < len(m.booked) - 1 else ())))
            m.lost.clear()  # whoever did not give what that took is not in the way of what comes next
        m.booked[stage] = hop.peer
        m.progressed()
        m.next = hop.to
        if stage == 0 or m.g[stage - 1]:
            self._advance(m, now)
        elif fault:
            # It is booked all the same. Ask again, and complain each time: the leader removes it in the end.
            self._reports.faulty(hop.peer, f"gradient of stage {stage}", fault, now)
            self.timers.set(m.index, now + self._settings.min_request_timeout_s)
        else:
            m.made(hop, gradient=True)
            self._advance(m, now)

    def _cancelled(self, m: Microbatch, hop: Hop, now: float) -> None:
        """It is not booked there and will not be."""
        if hop.kind is Kind.RECALL:
            m.booked[hop.stage] = ""
        else:
            m.avoid = hop.peer
        m.hop = None
        self._advance(m, now)

    def _declined(self, m: Microbatch, hop: Hop, message: Busy | Refused | Missing, now: float) -> None:
        if hop.kind is Kind.RECALL:  # only that peer has it: it is asked again
            self.timers.set(m.index, now + self._settings.min_request_timeout_s)
        elif message.attempt == hop.first:  # an answer to a later Cancel says nothing about the backward itself
            m.hop = None
            if isinstance(message, Busy):
                self._routes.busy(hop.peer, message.wait_s, hop.kind.size, now, hop.kind is Kind.BACKWARD)
                self._advance(m, now)
            elif isinstance(message, Missing):
                for maker in (m.g if message.gradient else m.x)[hop.stage][:1]:  # nobody: it was evicted
                    self._reports.not_served(hop.peer, maker, now, late=False)
                    if maker != hop.peer:
                        self._reports.not_given(maker, hop.peer, now)
                m.forget_holders(hop.stage, message.gradient, hop.peer)
                self._retry(m, now)
            else:
                m.avoid = hop.peer
                self._reports.failed(hop.peer, f"refuses {hop.kind.value}s: {message.reason}", now)
                self._retry(m, now)

    # --------------------------------------------------------------------------------------------- slow and failing

    def _expire(self, m: Microbatch, now: float) -> None:
        hop = m.hop
        if hop is None:  # a pause is over
            self._advance(m, now)
            return
        if hop.guessed and hop.queries and not self._measured(m, hop, now):
            return
        if hop.queries:
            self._query(m, hop, now)
            return
        self._reports.missed(hop.peer, now)
        # A Cancel or a Recall needs no tensor: a server that does not answer it is nobody's victim.
        for maker in m.x[hop.stage][:1] if hop.stage and not hop.repeated else ("",):
            self._reports.not_served(hop.peer, maker, now, late=True)
        if not hop.repeated and hop.kind is not Kind.RECALL:
            m.slow += 1
            self._routes.slow(hop.peer, now - hop.sent, hop.kind.size, now, hop.ahead)
            then = "cancelled there" if hop.kind is Kind.BACKWARD else "sent elsewhere"
            waited = f"no answer to a {hop.kind.value} of stage {hop.stage} for {now - hop.sent:.1f} s"
            self._reports.note_once("route", hop.kind.value, hop.peer, f"{hop.peer}: {waited}, {then}")
        if hop.kind is Kind.FORWARD:
            m.abandon()
            self._advance(m, now)
        else:
            self._repeat(m, hop, now)

    def _query(self, m: Microbatch, hop: Hop, now: float) -> None:
        """Ask its server whether it has got it: a request that carries tokens may still be behind tensors on the line, unlike this."""
        hop.asked = True
        query = Query(self._view.epoch, self._view.work, m.index, hop.stage, hop.first, hop.kind is Kind.BACKWARD)
        self._out.append(Send(hop.peer, query))
        floor_s, floors = self._settings.min_request_timeout_s, 1.0 + ASK_FLOORS * bool(m.inputs())
        self.timers.set(m.index, max(now + ASK_FLOORS * floor_s, hop.sent + floors * floor_s))

    def _measured(self, m: Microbatch, hop: Hop, now: float) -> bool:
        """A hop sent when nobody knew how long its stage takes is due, by what is known now. Else its deadline moves."""
        hop.guessed = not self._routes.knows(hop.peer)
        due = hop.sent + self._look_s(m, hop)
        if now < due:
            again_s = LOOK_FLOORS * self._settings.min_request_timeout_s
            self.timers.set(m.index, min(due, now + again_s) if hop.guessed else due)
        return now >= due

    def _retry(self, m: Microbatch, now: float) -> None:
        """After a failure: at once the first time."""
        m.fails += 1
        pause_s = m.pause_s(self._settings.min_request_timeout_s)
        if pause_s:
            self.timers.set(m.index, now + pause_s)
        else:
            self._advance(m, now)

    def _drop(self, blobs: Sequence[str]) -> None:
        if blobs:
            self._out.append(Drop(tuple(blobs)))

    def _flush(self, now: float) -> list[Command]:
        while (m := self._owned.start(now)) is not None:
            self._advance(m, now)
        out = self._out[:]
        self._out.clear()
        return out
