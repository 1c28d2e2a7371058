"""The trainer of a peer: drives the microbatches it owns through the stages until each is booked once at every stage.

What is next for a microbatch is microbatch.plan, who serves it is routing.Routes; this file sends, waits, repeats, and keeps the
one rule that needs care: after a backward was sent to A, another peer may get it only when A said that it will not book it
(Cancelled, Busy, Refused) or has left the agreed view. A forward changes nothing at a server and is simply sent elsewhere.
Left to others: which view is agreed and who leads (PeerMachine), counting of lost and repeated work (coordinator).
Every event costs O(log n) and what it touches; only a view walks over the microbatches.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec

from shoal.core.messages import (
    AskBooks,
    Backward,
    BlobRef,
    Books,
    Busy,
    Cancel,
    Cancelled,
    Command,
    Complaint,
    Do,
    Done,
    Drop,
    Failed,
    Fetch,
    Forward,
    Gradient,
    Index,
    Message,
    Note,
    Output,
    Peer,
    Recall,
    Refused,
    Send,
    Settings,
    Stage,
    View,
)
from shoal.core.microbatch import Adoption, Hop, Kind, Microbatch, Place, Want, new_microbatch, plan
from shoal.core.routing import BACKWARD_SIZE, FORWARD_SIZE, Chance, Routes
from shoal.core.timers import Timers

BOOKS = -1  # timer keys: an index, this, or PARKED - stage
PARKED = -2
FIRST_PAUSE_S = 0.05  # after the second failure in a row; doubles up to hop_floor_s
BOOKS_AGAIN = 8  # AskBooks is first repeated after hop_floor_s / 8: a lost one holds up every adopted microbatch


class TrainerLoad(msgspec.Struct, frozen=True):
    """Microbatches of the step owned here."""

    waiting: int = 0
    inflight: int = 0
    finished: int = 0


class Trainer:
    def __init__(self, name: Peer, settings: Settings, rng: Chance) -> None:
        self.name = name
        self.leader: Peer | None = None  # set by PeerMachine before each call
        self._settings = settings
        self._routes = Routes(settings, rng)
        self._timers = Timers()
        self._view: View | None = None
        self._stage_of: dict[Peer, Stage] = {}
        self._held: dict[Index, Microbatch] = {}  # all I own but those being adopted
        self._waiting: list[Index] = []  # heap: oldest first
        self._active: dict[Index, Microbatch] = {}
        self._parked: dict[Stage, dict[Index, None]] = {}
        self._adoptions: list[Adoption] = []
        self._books_s = 0.0  # until AskBooks is repeated
        self._fetches: dict[str, Microbatch] = {}
        self._told: set[tuple[str, Peer]] = set()  # notes given once per peer
        self._serial = 0
        self._out: list[Command] = []

    # ------------------------------------------------------------------------------------------------------- events

    def on_view(self, view: View, now: float) -> list[Command]:
        old = self._view
        if old is not None and view.number <= old.number:
            return []
        self._view = view
        runs = view.started and not view.finished
        self._stage_of = {member.peer: member.stage for member in view.members} if runs else {}
        self._routes.on_view(view.members if runs else (), now)
        mine: dict[Index, None] = {}
        if self.name in self._stage_of:
            mine = {i: None for i, at in enumerate(view.owners) if view.members[at].peer == self.name}
        if old is None or (old.epoch, old.step, old.started) != (view.epoch, view.step, view.started):
            self._forget_all()
            # Without a gap in the numbers this is the step's first view, and nobody owned anything of it before.
            first = old is not None and view.number == old.number + 1
        else:
            first = False
            self._lose(mine)
        new = [i for i in mine if i not in self._held and not any(i in group.found for group in self._adoptions)]
        if first:
            for i in new:
                self._wait(new_microbatch(i, self._settings.stages, view))
        elif new:
            self._adopt(new, now)
        self._close_adoptions()
        for stage in list(self._parked):
            self._unpark(stage, now)
        return self._flush(now)

    def on_message(
        self, peer: Peer, message: Message, blobs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        """Answers of servers. Anything stale, foreign or unasked changes nothing; blobs that are not kept are dropped."""
        kept = ""
        view = self._view
        if (
            view is not None
            and peer in self._stage_of
            and isinstance(message, Output | Gradient | Cancelled | Busy | Refused | Books)
            and (message.epoch, message.step) == (view.epoch, view.step)
        ):
            self._routes.heard(peer)
            if isinstance(message, Books):
                self._hear_books(peer, message)
            elif (m := self._active.get(message.index)) is not None:
                kept = self._answer(m, peer, message, (blobs[0].id if blobs else "", fault), now)
        unused = tuple(blob.id for blob in blobs if blob.id != kept)
        if unused:
            self._out.append(Drop(unused))
        return self._flush(now)

    def on_done(self, done: Done, now: float) -> list[Command]:
        m = self._fetches.pop(done.id, None)
        if m is None:
            return [Drop((_out_of(done.id),))]
        m.x[0] = _out_of(done.id)
        m.progressed()
        self._advance(m, now)
        return self._flush(now)

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        m = self._fetches.pop(failed.id, None)
        if m is not None:
            m.hop = None
            self._note_once(
                "stall", self.name, f"microbatch {m.index} cannot be read and is tried again: {failed.reason}"
            )
            self._timers.set(m.index, now + self._settings.hop_floor_s)
        return self._flush(now)

    def on_unreachable(self, peer: Peer, now: float) -> list[Command]:
        """Forwards go elsewhere at once. A backward may have arrived: it waits for an answer or for the view."""
        if peer in self._stage_of:
            self._fail(peer, "cannot be reached", now)
            self._missed(peer, now)
            for m in list(self._active.values()):
                if m.hop is not None and m.hop.peer == peer and m.hop.kind is Kind.FORWARD:
                    m.abandon()
                    self._retry(m, now)
        return self._flush(now)

    def tick(self, now: float) -> list[Command]:
        while (key := self._timers.pop_due(now)) is not None:
            if key == BOOKS:
                self._ask_books({peer: None for group in self._adoptions for peer in group.missing}, now)
            elif key <= PARKED:
                self._unpark(PARKED - key, now)
            else:
                self._expire(self._active[key], now)
        return self._flush(now)

    @property
    def deadline(self) -> float | None:
        return self._timers.deadline

    def summary(self) -> TrainerLoad:
        adopted = sum(len(group.found) for group in self._adoptions)
        finished = len(self._held) - len(self._waiting) - len(self._active)
        return TrainerLoad(waiting=len(self._waiting) + adopted, inflight=len(self._active), finished=finished)

    # -------------------------------------------------------------------------------------------------------- views

    def _forget_all(self) -> None:
        self._drop([blob for m in self._held.values() for blob in m.blobs()])
        self._timers.forget_all()
        for kept in (self._held, self._waiting, self._active, self._parked, self._adoptions, self._fetches):
            kept.clear()

    def _lose(self, mine: dict[Index, None]) -> None:
        """A newer view of the same step: what had to do with peers that left is void, and so is what is no longer mine."""
        self._told = {(kind, peer) for kind, peer in self._told if peer in self._stage_of}
        for m in [m for i, m in self._held.items() if i not in mine]:
            self._drop(m.blobs())
            self._fetches = {task: other for task, other in self._fetches.items() if other is not m}
            del self._held[m.index]
            self._release(m)
        self._waiting = [i for i in self._waiting if i in mine]
        heapify(self._waiting)
        for m in self._held.values():
            lost = [k for k, peer in enumerate(m.booked) if peer and peer not in self._stage_of]
            for k in lost:
                m.booked[k] = ""
            if m.hop is not None and m.hop.kind is not Kind.FETCH and m.hop.peer not in self._stage_of:
                m.hop, m.slow = None, 0
                self._timers.set(m.index, 0.0)  # due at once: advanced by the tick of this flush
            if lost and m.place is Place.FINISHED:
                self._wait(m)
        for group in self._adoptions:
            group.keep(self._stage_of, mine)

    def _adopt(self, indices: list[Index], now: float) -> None:
        assert self._view is not None
        text = f"take over {len(indices)} microbatches of step {self._view.step}, asking {len(self._stage_of)} peers for books"
        self._out.append(Note("route", text))
        group = Adoption(self._view.number, dict.fromkeys(self._stage_of), {i: {} for i in indices})
        self._adoptions.append(group)
        self._books_s = self._settings.hop_floor_s / BOOKS_AGAIN
        self._ask_books(group.missing, now)

    def _ask_books(self, peers: dict[Peer, None], now: float) -> None:
        if not peers:
            return
        view = self._now_view
        for peer in peers:
            self._routes.asked(peer, now)
            self._out.append(Send(peer, AskBooks(view.epoch, view.step, self._adoptions[-1].floor)))
        self._timers.set(BOOKS, now + self._books_s)
        self._books_s = min(2 * self._books_s, self._settings.hop_floor_s)

    def _hear_books(self, peer: Peer, books: Books) -> None:
        if books.stage != self._stage_of[peer]:
            return
        for group in self._adoptions:
            if group.floor <= books.view and peer in group.missing:
                group.hear(peer, books.stage, books.indices)
        self._close_adoptions()

    def _close_adoptions(self) -> None:
        for group in [group for group in self._adoptions if not group.missing]:
            self._adoptions.remove(group)
            for index, at in group.found.items():
                m = new_microbatch(index, self._settings.stages, self._now_view)
                for stage, peer in at.items():
                    m.booked[stage] = peer
                self._wait(m)
        if not self._adoptions:
            self._timers.forget(BOOKS)

    # ------------------------------------------------------------------------------------------------- microbatches

    @property
    def _now_view(self) -> View:
        assert self._view is not None
        return self._view

    def _wait(self, m: Microbatch) -> None:
        self._held[m.index] = m
        m.place = Place.WAITING
        heappush(self._waiting, m.index)

    def _release(self, m: Microbatch) -> None:
        """Out of those in progress."""
        self._active.pop(m.index, None)
        self._timers.forget(m.index)
        self._leave_park(m)

    def _pump(self, now: float) -> None:
        while self._waiting and len(self._active) < self._settings.inflight:
            m = self._held[heappop(self._waiting)]
            m.place = Place.ACTIVE
            self._active[m.index] = m
            self._advance(m, now)

    def _advance(self, m: Microbatch, now: float) -> None:
        """Nothing is in flight for it: do what comes next."""
        assert m.hop is None and m.place is Place.ACTIVE
        self._leave_park(m)
        want = plan(m)
        if want.kind is Kind.FINISHED:
            m.place = Place.FINISHED
            m.late.clear()
            self._release(m)
        elif want.kind is Kind.FETCH:
            self._fetch(m, now)
        elif want.kind is Kind.RECALL:
            self._send(m, want, m.booked[want.stage], now)
        else:
            size = BACKWARD_SIZE if want.kind is Kind.BACKWARD else FORWARD_SIZE
            chosen = self._routes.choose(want.stage, now, size, m.avoid)
            if chosen is None:
                self._park(m, want.stage)
            else:
                self._send(m, want, chosen[0], now)

    def _fetch(self, m: Microbatch, now: float) -> None:
        self._serial += 1
        task = f"t/{self._serial}"
        self._fetches[task] = m
        m.hop = Hop(Kind.FETCH, 0, self.name, 0, 0, now)
        self._timers.forget(m.index)
        self._out.append(Do(Fetch(task, self._now_view.step, m.index, _out_of(task))))

    def _send(self, m: Microbatch, want: Want, peer: Peer, now: float) -> None:
        m.attempt += 1
        m.hop = Hop(want.kind, want.stage, peer, m.attempt, m.attempt, now)
        self._out.append(Send(peer, self._request(m, _REQUEST[want.kind]), m.inputs(want)))
        self._routes.asked(peer, now)
        size = BACKWARD_SIZE if want.kind is Kind.BACKWARD else FORWARD_SIZE
        # Doubled with every miss: a swarm that got slower must not be asked the same thing ever more often.
        self._timers.set(m.index, now + self._routes.patience(peer, size) * 2 ** min(m.slow, 3))

    def _repeat(self, m: Microbatch, hop: Hop, now: float) -> None:
        """Cancel a backward, or recall once more, at the peer that has it: under a number of its own, answered like the first."""
        m.attempt += 1
        hop.last = m.attempt
        self._out.append(Send(hop.peer, self._request(m, Cancel if hop.kind is Kind.BACKWARD else Recall)))
        self._timers.set(m.index, now + self._routes.patience(hop.peer, FORWARD_SIZE))

    def _request(
        self, m: Microbatch, form: type[Forward | Backward | Recall | Cancel]
    ) -> Forward | Backward | Recall | Cancel:
        view, stage = self._now_view, m.hop.stage if m.hop is not None else 0
        return form(view.epoch, view.step, m.index, stage, m.attempt, view.number)

    def _park(self, m: Microbatch, stage: Stage) -> None:
        """No replica is free: wait for the first one to wake, or for a view."""
        m.parked = stage
        self._timers.forget(m.index)
        self._parked.setdefault(stage, {})[m.index] = None
        wake = self._routes.wake(stage)
        if wake is not None:
            self._timers.set(PARKED - stage, wake)

    def _leave_park(self, m: Microbatch) -> None:
        if m.parked >= 0:
            self._parked[m.parked].pop(m.index, None)
            m.parked = -1

    def _unpark(self, stage: Stage, now: float) -> None:
        for index in sorted(self._parked.pop(stage, ())):
            m = self._active[index]
            m.parked = -1
            self._advance(m, now)

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(
        self,
        m: Microbatch,
        peer: Peer,
        message: Output | Gradient | Cancelled | Busy | Refused,
        came: tuple[str, str],  # the blob, and what is wrong with it
        now: float,
    ) -> str:
        """The blob that is kept, if any."""
        hop = m.hop
        live = hop is not None and hop.kind is not Kind.FETCH and hop.answered_by(peer, message.stage, message.attempt)
        if isinstance(message, Output):
            return self._output(m, peer, message, came, now)
        if not live or hop is None:
            return ""
        if isinstance(message, Gradient) and hop.kind is not Kind.FORWARD:
            return self._gradient(m, hop, message, came, now)
        if isinstance(message, Cancelled) and hop.kind is not Kind.FORWARD:
            self._cancelled(m, hop, now)
        elif isinstance(message, Busy | Refused):
            self._declined(m, hop, message, now)
        return ""

    def _output(self, m: Microbatch, peer: Peer, message: Output, came: tuple[str, str], now: float) -> str:
        hop = m.hop
        live = hop is not None and hop.kind is Kind.FORWARD and hop.answered_by(peer, message.stage, message.attempt)
        asked = hop if live else m.late.get(message.attempt)
        if asked is None or not asked.answered_by(peer, message.stage, message.attempt):
            return ""
        if not live:
            del m.late[message.attempt]
        blob, fault = came
        if fault or not blob or asked.stage + 1 >= self._settings.stages:
            self._complain(peer, f"output of stage {asked.stage}: {fault or 'no blob came with it'}")
            self._fail(peer, "sends faulty outputs", now)
            if live:
                m.abandon()
                self._retry(m, now)
            return ""
        self._routes.answered(peer, now - asked.sent, FORWARD_SIZE, now)
        if m.x[asked.stage + 1]:
            return ""
        m.x[asked.stage + 1] = blob
        if hop is not None and hop.stage == asked.stage and hop.kind is Kind.FORWARD and not live:
            m.abandon()  # the peer that was asked instead need not have been
        if m.hop is None or live:
            m.progressed()
            self._advance(m, now)
        return blob

    def _gradient(self, m: Microbatch, hop: Hop, message: Gradient, came: tuple[str, str], now: float) -> str:
        stage, (blob, fault) = hop.stage, came
        if hop.kind is Kind.BACKWARD:
            self._routes.answered(hop.peer, now - hop.sent, BACKWARD_SIZE, now)
        m.booked[stage] = hop.peer
        m.progressed()
        kept = ""
        if stage > 0 and not m.g[stage - 1]:
            if fault or not blob:
                # It is booked all the same. Ask again, and complain each time: the leader removes it in the end.
                self._complain(hop.peer, f"gradient of stage {stage}: {fault or 'no blob came with it'}")
                self._fail(hop.peer, "sends faulty gradients", now)
                self._timers.set(m.index, now + self._settings.hop_floor_s)
                return ""
            m.g[stage - 1] = kept = blob
        self._advance(m, now)
        return kept

    def _cancelled(self, m: Microbatch, hop: Hop, now: float) -> None:
        """It is not booked there and will not be."""
        if hop.kind is Kind.RECALL:
            m.booked[hop.stage] = ""
        else:
            m.avoid = hop.peer
        m.hop = None
        self._advance(m, now)

    def _declined(self, m: Microbatch, hop: Hop, message: Busy | Refused, now: float) -> None:
        if hop.kind is Kind.RECALL:  # only that peer has it
            self._timers.set(m.index, now + self._settings.hop_floor_s / BOOKS_AGAIN)
        elif message.attempt == hop.first:  # an answer to a later Cancel says nothing about the backward itself
            m.hop = None
            if isinstance(message, Busy):
                size = BACKWARD_SIZE if hop.kind is Kind.BACKWARD else FORWARD_SIZE
                self._routes.busy(hop.peer, message.wait_s, size, now)
                self._advance(m, now)
            else:
                m.avoid = hop.peer
                self._fail(hop.peer, f"refuses {hop.kind.value}s: {message.reason}", now)
                self._retry(m, now)

    # --------------------------------------------------------------------------------------------- slow and failing

    def _expire(self, m: Microbatch, now: float) -> None:
        hop = m.hop
        if hop is None:  # a pause is over
            self._advance(m, now)
            return
        self._missed(hop.peer, now)
        if hop.last == hop.first and hop.kind is not Kind.RECALL:
            m.slow += 1
            size = BACKWARD_SIZE if hop.kind is Kind.BACKWARD else FORWARD_SIZE
            self._routes.slow(hop.peer, now - hop.sent, size, now)
            then = "cancelled there" if hop.kind is Kind.BACKWARD else "sent elsewhere"
            waited = f"no answer to a {hop.kind.value} of stage {hop.stage} for {now - hop.sent:.1f} s"
            self._note_once(hop.kind.value, hop.peer, f"{hop.peer}: {waited}, {then}")
        if hop.kind is Kind.FORWARD:
            m.abandon()
            self._advance(m, now)
        else:
            self._repeat(m, hop, now)

    def _retry(self, m: Microbatch, now: float) -> None:
        """After a failure: at once the first time, then with growing pauses, since the only replica may be the failing one."""
        m.fails += 1
        if m.fails == 1:
            self._advance(m, now)
        else:
            self._timers.set(m.index, now + min(FIRST_PAUSE_S * 2 ** min(m.fails - 2, 20), self._settings.hop_floor_s))

    def _fail(self, peer: Peer, reason: str, now: float) -> None:
        ban_s = self._routes.failed(peer, now)
        if ban_s:
            self._out.append(Note("route", f"{peer} gets no requests for {ban_s:g} s: {reason}"))

    def _missed(self, peer: Peer, now: float) -> None:
        if self._routes.missed(peer, now):
            silent_s = 2 * self._settings.silence_s
            self._complain(peer, f"answered nothing for more than {silent_s:g} s", unreachable=True)

    def _complain(self, about: Peer, reason: str, unreachable: bool = False) -> None:
        if self.leader is not None:
            self._out.append(Send(self.leader, Complaint(about, reason[:2000], unreachable)))

    def _note_once(self, kind: str, peer: Peer, text: str) -> None:
        if (kind, peer) not in self._told:
            self._told.add((kind, peer))
            self._out.append(Note("stall" if kind == "stall" else "route", text))

    def _drop(self, blobs: list[str] | tuple[str, ...]) -> None:
        if blobs:
            self._out.append(Drop(tuple(blobs)))

    def _flush(self, now: float) -> list[Command]:
        self._pump(now)
        out, self._out = self._out, []
        return out


_REQUEST: dict[Kind, type[Forward | Backward | Recall]] = {
    Kind.FORWARD: Forward,
    Kind.BACKWARD: Backward,
    Kind.RECALL: Recall,
}


def _out_of(task: str) -> str:
    """The blob of a fetch, nameable also when the fetch itself is forgotten."""
    return f"{task}/x"
