"""Microbatches as their owner keeps them: what has to be done next for one, and where all of them are. For trainer.py.

A microbatch is finished when every stage has booked its gradient at some server. Its owner keeps each stage's input and
output gradient until the step is committed, so that a lost booking is redone alone: `plan` looks only at what is kept
and what is booked, never at how it came to be so. `Owned` keeps the microbatches by place: waiting, in progress, parked
at a stage without a free replica, finished. Sending, waiting and repeating are trainer.py's.
"""

from __future__ import annotations

from enum import Enum
from heapq import heapify, heappop, heappush

import msgspec

from shoal.core.messages import Backward, Cancel, Forward, Index, Peer, Recall, Stage, View
from shoal.core.routing import BACKWARD_SIZE, FORWARD_SIZE

Request = Forward | Backward | Recall | Cancel

LATE_KEPT = 8  # abandoned forwards of a microbatch whose late answer is still recognised


class TrainerLoad(msgspec.Struct, frozen=True):
    """Microbatches of the step that one trainer owns."""

    waiting: int = 0
    inflight: int = 0
    finished: int = 0


class Kind(Enum):
    FETCH = "fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECALL = "recall"
    FINISHED = "finished"

    @property
    def size(self) -> float:
        return BACKWARD_SIZE if self is Kind.BACKWARD else FORWARD_SIZE


class Place(Enum):
    WAITING = "waiting"
    ACTIVE = "active"
    FINISHED = "finished"


_FORMS: dict[Kind, type[Request]] = {Kind.FORWARD: Forward, Kind.BACKWARD: Backward, Kind.RECALL: Recall}


class Want(msgspec.Struct, frozen=True, gc=False):
    kind: Kind
    stage: Stage = 0


class Hop(msgspec.Struct, eq=False):
    """A request in flight. Its repeats (Cancel after Backward, Recall after Recall) have attempts up to `last`."""

    kind: Kind
    stage: Stage
    peer: Peer
    sent: float
    first: int = 0  # not sent yet
    last: int = 0

    @property
    def repeated(self) -> bool:
        return self.last > self.first

    def answered_by(self, peer: Peer, stage: Stage, attempt: int) -> bool:
        return peer == self.peer and stage == self.stage and self.first <= attempt <= self.last


class Microbatch(msgspec.Struct, eq=False):
    index: Index
    attempt: int  # the last number sent; never sent again
    x: list[str]  # x[k]: blob of stage k's input, '' if not held; x[0] holds the tokens
    g: list[str]  # g[k]: blob of the gradient of stage k's output; the last stage needs none
    booked: list[str]  # booked[k]: the server that added stage k's gradient to its sum, '' if none
    place: Place = Place.WAITING
    hop: Hop | None = None
    late: dict[int, Hop] = msgspec.field(default_factory=dict)  # abandoned forwards by attempt
    parked: int = -1  # stage without a free replica that it waits for
    avoid: str = ""  # the peer that was slow or failed with this hop
    slow: int = 0  # deadlines missed by this hop
    fails: int = 0  # failures in a row

    def abandon(self) -> None:
        """Give up the forward in flight; a late answer is still welcome."""
        assert self.hop is not None and self.hop.kind is Kind.FORWARD
        self.late[self.hop.first] = self.hop
        if len(self.late) > LATE_KEPT:
            del self.late[next(iter(self.late))]
        self.avoid, self.hop = self.hop.peer, None

    def progressed(self) -> None:
        self.hop, self.avoid, self.slow, self.fails = None, "", 0, 0

    def request(self, view: View) -> Request:
        """The message for the hop in flight, under an attempt number never used before."""
        assert self.hop is not None
        self.attempt += 1
        if self.hop.first == 0:
            self.hop.first = self.attempt
            form = _FORMS[self.hop.kind]
        else:
            form = Cancel if self.hop.kind is Kind.BACKWARD else Recall
        self.hop.last = self.attempt
        return form(view.epoch, view.step, self.index, self.hop.stage, self.attempt, view.number)

    def blobs(self) -> tuple[str, ...]:
        return tuple(blob for blob in self.x + self.g if blob)

    def inputs(self) -> tuple[str, ...]:
        """The blobs that the request in flight carries."""
        assert self.hop is not None
        stage, kind = self.hop.stage, self.hop.kind
        if kind is Kind.FORWARD or (kind is Kind.BACKWARD and len(self.x) == 1):
            return (self.x[stage],)
        if kind is Kind.BACKWARD:
            return (self.x[stage], self.x[0] if stage == len(self.x) - 1 else self.g[stage])
        return ()


def new_microbatch(index: Index, booked: list[str], view: View) -> Microbatch:
    """Attempts start above every number a former owner can have used: ownership moves only with a newer view."""
    return Microbatch(index, view.number << 20, [""] * len(booked), [""] * len(booked), booked)


def plan(m: Microbatch) -> Want:
    """The next thing to do: book the highest stage not yet booked, from what is kept."""
    k = len(m.booked) - 1
    while k >= 0 and m.booked[k]:
        k -= 1
    if k < 0:
        return Want(Kind.FINISHED)
    if m.x[k]:
        if k < len(m.booked) - 1 and not m.g[k]:
            return Want(Kind.RECALL, k + 1)  # booked there by the choice of k: its server keeps the gradient
        return Want(Kind.BACKWARD, k)
    while k > 0 and not m.x[k]:
        k -= 1
    return Want(Kind.FORWARD, k) if m.x[k] else Want(Kind.FETCH)


class Owned:
    """The microbatches a trainer owns, by place. Every one is in exactly one place until its step is over."""

    def __init__(self) -> None:
        self.held: dict[Index, Microbatch] = {}
        self.active: dict[Index, Microbatch] = {}
        self._waiting: list[Index] = []  # heap: oldest first
        self._parked: dict[Stage, dict[Index, None]] = {}

    def wait(self, m: Microbatch) -> None:
        self.held[m.index] = m
        m.place = Place.WAITING
        heappush(self._waiting, m.index)

    def start(self, most: int) -> Microbatch | None:
        """The oldest that waits is now in progress, unless `most` are."""
        if not self._waiting or len(self.active) >= most:
            return None
        m = self.held[heappop(self._waiting)]
        m.place = Place.ACTIVE
        self.active[m.index] = m
        return m

    def finish(self, m: Microbatch) -> None:
        """Its blobs stay: a booking can still be lost."""
        m.place = Place.FINISHED
        m.late.clear()
        del self.active[m.index]

    def park(self, m: Microbatch, stage: Stage) -> None:
        m.parked = stage
        self._parked.setdefault(stage, {})[m.index] = None

    def leave_park(self, m: Microbatch) -> None:
        if m.parked >= 0:
            self._parked[m.parked].pop(m.index, None)
            m.parked = -1

    def unpark(self, stage: Stage) -> list[Microbatch]:
        """All that wait for that stage, oldest first; they are parked no longer."""
        freed = [self.active[index] for index in sorted(self._parked.pop(stage, ()))]
        for m in freed:
            m.parked = -1
        return freed

    def parked_stages(self) -> list[Stage]:
        return sorted(stage for stage, parked in self._parked.items() if parked)

    def give_up(self, indices: list[Index]) -> list[Microbatch]:
        """They are no longer mine."""
        lost = [self.held.pop(index) for index in indices]
        for m in lost:
            self.active.pop(m.index, None)
            self.leave_park(m)
        self._waiting = [index for index in self._waiting if index in self.held]
        heapify(self._waiting)
        return lost

    def lose_bookings(self, members: dict[Peer, Stage]) -> None:
        """What was booked at peers that have left is to be done again."""
        for m in self.held.values():
            lost = [k for k, peer in enumerate(m.booked) if peer and peer not in members]
            for k in lost:
                m.booked[k] = ""
            if lost and m.place is Place.FINISHED:
                self.wait(m)

    def load(self, adopted: int) -> TrainerLoad:
        waiting, inflight = len(self._waiting), len(self.active)
        return TrainerLoad(waiting + adopted, inflight, len(self.held) - waiting - inflight)
