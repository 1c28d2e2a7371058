"""Microbatches as their owner keeps them: what has to be done next for one, and where all of them are. For trainer.py.

A microbatch is finished when every stage has booked its gradient at some server. Until the step is committed its owner knows the
servers that keep each stage's input and output gradient, so that a lost booking is redone alone: `plan` looks only at what is
kept and what is booked, never at how that happened.

`Owned` keeps the microbatches by place: waiting, in progress, parked
at a stage without a free replica, finished. Sending, waiting and repeating are trainer.py's.
"""

from __future__ import annotations

from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from shoal.core.messages import (
    Backward,
    Busy,
    Cancel,
    Cancelled,
    Forward,
    Gradient,
    Index,
    Missing,
    Output,
    Peer,
    Pending,
    Recall,
    Refused,
    Stage,
    View,
)
from shoal.core.trainer.routing import BACKWARD_SIZE, FORWARD_SIZE
from shoal.core.trainer.window import Window

Request = Forward | Backward | Recall | Cancel
Answer = Output | Gradient | Cancelled | Busy | Refused | Missing | Pending

Where = tuple[str, ...]  # the peers that hold a tensor, who made it first; of the tokens: my blob

FIRST_PAUSE_S = 0.05  # after the second failure in a row; doubles up to min_request_timeout_s
NAMED = 4  # holders of one tensor that are remembered: who made it and the newest
LOST, LOST_TO_ONE = (
    2,
    6,
)  # peers that could not have a tensor from another, or times that one could not, before the leader learns it
UNTRAINED = "-"  # booked[k] of a held-out microbatch below the last stage: there is nothing to book
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

    def __init__(self, _: str) -> None:
        self.size = BACKWARD_SIZE if self.name == "BACKWARD" else FORWARD_SIZE


class Progress(Enum):
    WAITING = "waiting"
    ACTIVE = "active"
    FINISHED = "finished"


_FORMS: dict[Kind, type[Request]] = {Kind.FORWARD: Forward, Kind.BACKWARD: Backward, Kind.RECALL: Recall}


class NextHop(msgspec.Struct, frozen=True, gc=False):
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
    to: Peer = ""  # gets what is made
    guessed: bool = False  # its deadline is: nothing of its stage was measured when it was sent
    asked: bool = False  # whether its server has got it, and there is no answer yet
    held: bool = False  # it waits or runs there, as its server has said: waited for once more
    holds: int = 0  # how often its server has said so
    extensions: int = 0  # deadlines that it got because what it lacks there is on its way
    ahead: float = 0.0  # size of what its owner had requested of that peer before

    @property
    def repeated(self) -> bool:
        return self.last > self.first

    @property
    def queries(self) -> bool:
        """Whether its server is asked after it, before it is repeated or goes elsewhere."""
        return self.kind in (Kind.FORWARD, Kind.BACKWARD) and not (self.repeated or self.asked or self.held)

    def answered_by(self, peer: Peer, stage: Stage, attempt: int) -> bool:
        return peer == self.peer and stage == self.stage and self.first <= attempt <= self.last


class Microbatch(msgspec.Struct, eq=False):
    index: Index
    attempt: int  # the last number sent; never sent again
    x: list[Where]  # x[k]: where stage k's input is, () if nowhere; x[0]: the tokens, always my own blob
    g: list[Where]  # g[k]: the gradient of stage k's output; the last stage needs none
    booked: list[str]  # booked[k]: the server that added stage k's gradient to its sum, or UNTRAINED; '' if none
    progress: Progress = Progress.WAITING
    hop: Hop | None = None
    late: dict[int, Hop] = msgspec.field(default_factory=dict)  # abandoned forwards by attempt
    parked: int = -1  # stage without a free replica that it waits for
    avoid: str = ""  # the peer that was slow or failed with this hop
    slow: int = 0  # deadlines missed by this hop
    fails: int = 0  # failures in a row
    next: Peer = ""  # who was chosen, and charged, for the hop that comes next
    # What those should hold could not be had from them: by whom, each time
    lost: dict[Peer, list[Peer]] = msgspec.field(default_factory=dict)
    unable: dict[Stage, Peer] = msgspec.field(
        default_factory=dict
    )  # who called a tensor missing there last: another may get it

    def abandon(self) -> None:
        """Give up the forward in flight; a late answer is still welcome."""
        assert self.hop is not None and self.hop.kind is Kind.FORWARD
        self.late[self.hop.first] = self.hop
        if len(self.late) > LATE_KEPT:
            del self.late[next(iter(self.late))]
        self.avoid, self.hop = self.hop.peer, None

    def forward_of(self, peer: Peer, stage: Stage, attempt: int) -> tuple[Hop | None, bool]:
        """The forward that this attempt answers, and whether it is the one in flight. One that was abandoned is forgotten with that."""
        hop = self.hop
        if hop is not None and hop.kind is Kind.FORWARD and hop.answered_by(peer, stage, attempt):
            return hop, True
        late = self.late.get(attempt)
        if late is None or not late.answered_by(peer, stage, attempt):
            return None, False
        del self.late[attempt]
        return late, False

    def progressed(self) -> None:
        self.hop, self.avoid, self.slow, self.fails = None, "", 0, 0

    def avoided(self, stage: Stage, ahead: bool) -> Peer:
        """Whom the next hop, at that stage, does not go to where there is another; `ahead`: the one after it. '': nobody."""
        return ("" if ahead else self.avoid) or self.unable.get(stage, "")

    def pause_s(self, most_s: float) -> float:
        """After one failure none, then growing ones: there may be no other replica. What was missing counts though it was made anew."""
        fails = max(self.fails, *map(len, self.lost.values())) if self.lost else self.fails
        return min(FIRST_PAUSE_S * 2 ** min(fails - 2, 20), most_s) if fails > 1 else 0.0

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
        route = self._route(self.hop) if form is Forward or form is Backward else {}
        return form(view.epoch, view.work, self.index, self.hop.stage, self.attempt, view.number, **route)

    def _route(self, hop: Hop) -> dict[str, Any]:
        """Who holds what that hop needs, and who gets what it makes."""
        route: dict[str, Any] = {"to": hop.to}
        if hop.stage > 0:
            route["input_from"] = _first(hop.peer, self.x[hop.stage])
        if hop.kind is Kind.BACKWARD and hop.stage < len(self.g) - 1:
            route["grad_from"] = _first(hop.peer, self.g[hop.stage])
        return route

    def blobs(self) -> tuple[str, ...]:
        """All that the owner holds itself: the tokens."""
        return self.x[0]

    def inputs(self) -> tuple[str, ...]:
        """The blobs that the request in flight carries."""
        assert self.hop is not None
        stage, kind, last = self.hop.stage, self.hop.kind, len(self.x) - 1
        tokens = stage == 0 or (stage == last and kind is Kind.BACKWARD)
        return self.x[0] if tokens and kind in (Kind.FORWARD, Kind.BACKWARD) else ()

    @property
    def withheld(self) -> Peer:
        """Who has not given what it holds to several, or to one again and again, which may be that one's fault; '' if nobody."""
        several = {peer: (len(set(by)), len(by)) for peer, by in self.lost.items()}
        worst = max(several, key=lambda peer: several[peer], default="")
        return worst if worst and (several[worst][0] >= LOST or several[worst][1] >= LOST_TO_ONE) else ""

    @property
    def waits_for(self) -> Peer:
        """Who is in the way: whoever has not given what it holds twice, else who was asked last; '' while nobody is."""
        if self.withheld:
            return self.withheld
        return self.hop.peer if self.hop is not None and self.hop.kind is not Kind.FETCH else ""

    def made(self, hop: Hop, gradient: bool) -> None:
        """What that hop has made is where it was made, and with whom it was sent to."""
        where = tuple(peer for peer in (hop.peer, hop.to) if peer)
        if gradient:
            self.g[hop.stage - 1] = where
        else:
            self.x[hop.stage + 1] = where
        if hop.stage > 0 and hop.peer not in self.x[hop.stage]:
            self.x[hop.stage] = (*self.x[hop.stage][: NAMED - 1], hop.peer)  # it has had to get it

    def forget_holders(self, stage: Stage, gradient: bool, by: Peer) -> None:
        """None of those who should hold it can give it: it is made again from what is nearest, or recalled."""
        held = self.g if gradient else self.x
        self.unable[stage] = by
        for peer in held[stage]:
            self.lost.setdefault(peer, []).append(by)
        held[stage] = ()

    def keep_holders(self, members: dict[Peer, Stage]) -> None:
        self.x[1:] = [tuple(peer for peer in where if peer in members) for where in self.x[1:]]
        self.g = [tuple(peer for peer in where if peer in members) for where in self.g]


def new_microbatch(index: Index, booked: list[str], view: View) -> Microbatch:
    """Attempts start above every number a former owner can have used: ownership moves only with a newer view."""
    nowhere: list[Where] = [()] * len(booked)
    return Microbatch(index, view.number << 20, nowhere, nowhere[:], booked)


def plan(m: Microbatch) -> NextHop:
    """The next thing to do: book the highest stage not yet booked, from what is kept."""
    k = len(m.booked) - 1
    while k >= 0 and m.booked[k]:
        k -= 1
    if k < 0:
        return NextHop(Kind.FINISHED)
    if m.x[k]:
        if k < len(m.booked) - 1 and not m.g[k]:
            return NextHop(Kind.RECALL, k + 1)  # booked there by the choice of k: its server keeps the gradient
        return NextHop(Kind.BACKWARD, k)
    while k > 0 and not m.x[k]:
        k -= 1
    return NextHop(Kind.FORWARD, k) if m.x[k] else NextHop(Kind.FETCH)


def after(m: Microbatch, want: NextHop) -> NextHop | None:
    """The hop that goes on from what `want` makes; None: nobody needs it."""
    below = want.stage - 1
    if want.kind is Kind.RECALL:
        return None
    if want.kind is Kind.FORWARD:
        above = want.stage + 1
        higher = any(not peer for peer in m.booked[above + 1 :])
        return NextHop(Kind.FORWARD if higher else Kind.BACKWARD, above)
    return NextHop(Kind.BACKWARD, below) if below >= 0 and not m.booked[below] and m.x[below] else None


def _first(peer: Peer, where: Where) -> Where:
    return (peer, *(other for other in where if other != peer)) if peer in where else where


class Owned:
    """The microbatches of a step that a trainer owns, by place. Every one is in exactly one place until its step is over."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.held: dict[Index, Microbatch] = {}
        self.active: dict[Index, Microbatch] = {}
        self._waiting: list[Index] = []  # heap: oldest first
        self._parked: dict[Stage, dict[Index, None]] = {}

    def wait(self, m: Microbatch) -> None:
        self.held[m.index] = m
        m.progress = Progress.WAITING
        heappush(self._waiting, m.index)

    def next_step(self) -> Owned:
        self.window.begin()
        return Owned(self.window)

    def start(self, now: float) -> Microbatch | None:
        """The oldest that waits is now in progress, unless the window is full."""
        if not self._waiting or len(self.active) >= self.window.size:
            return None
        m = self.held[heappop(self._waiting)]
        m.progress = Progress.ACTIVE
        self.active[m.index] = m
        self.window.start(m.index, now)
        return m

    def finish(self, m: Microbatch, now: float) -> None:
        """Its blobs stay: a booking can still be lost."""
        self.window.finish(m.index, now)
        m.progress = Progress.FINISHED
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

    def forgive(self, gap_s: float) -> None:
        """This process was stopped for `gap_s`: no peer is called slow for that time."""
        for m in self.active.values():
            if m.hop is not None:
                m.hop.sent += gap_s

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
        """What was booked at peers that have left is to be done again; what only they kept is nowhere."""
        for m in self.held.values():
            m.keep_holders(members)
            lost = [k for k, peer in enumerate(m.booked) if peer and peer not in members and peer != UNTRAINED]
            for k in lost:
                m.booked[k] = ""
            if lost and m.progress is Progress.FINISHED:
                self.wait(m)

    def load(self, taken_over: int) -> TrainerLoad:
        waiting, inflight = len(self._waiting), len(self.active)
        return TrainerLoad(waiting + taken_over, inflight, len(self.held) - waiting - inflight)
