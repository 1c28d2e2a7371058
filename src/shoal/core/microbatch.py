"""One microbatch of the step as its owner keeps it, and what has to be done next for it. For trainer.py.

A microbatch is finished when every stage has booked its gradient at some server. Its owner keeps each stage's input and
output gradient until the step is committed, so that a lost booking is redone alone: `plan` looks only at what is kept and
what is booked, never at how it came to be so.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from shoal.core.messages import Index, Peer, Stage, View

LATE_KEPT = 8  # abandoned forwards of a microbatch whose late answer is still recognised


class Kind(Enum):
    FETCH = "fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECALL = "recall"
    FINISHED = "finished"


class Place(Enum):
    WAITING = "waiting"
    ACTIVE = "active"
    FINISHED = "finished"


class Want(msgspec.Struct, frozen=True, gc=False):
    kind: Kind
    stage: Stage = 0


class Hop(msgspec.Struct, eq=False):
    """A request in flight. Its repeats (Cancel after Backward, Recall after Recall) have attempts up to `last`."""

    kind: Kind
    stage: Stage
    peer: Peer
    first: int
    last: int
    sent: float

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

    def blobs(self) -> tuple[str, ...]:
        return tuple(blob for blob in self.x + self.g if blob)

    def inputs(self, want: Want) -> tuple[str, ...]:
        """The blobs that a request carries."""
        if want.kind is Kind.FORWARD or (want.kind is Kind.BACKWARD and len(self.x) == 1):
            return (self.x[want.stage],)
        if want.kind is Kind.BACKWARD:
            last = want.stage == len(self.x) - 1
            return (self.x[want.stage], self.x[0] if last else self.g[want.stage])
        return ()


def new_microbatch(index: Index, stages: int, view: View) -> Microbatch:
    """Attempts start above every number a former owner can have used: ownership moves only with a newer view."""
    return Microbatch(index, view.number << 20, [""] * stages, [""] * stages, [""] * stages)


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


class Adoption(msgspec.Struct, eq=False):
    """Indices that came from another owner, until every member has said what of them it has booked."""

    floor: int  # the view that gave me the indices: older answers may lack what the former owner had running
    missing: dict[Peer, None]
    found: dict[Index, dict[Stage, Peer]]

    def hear(self, peer: Peer, stage: Stage, indices: tuple[Index, ...]) -> None:
        del self.missing[peer]
        for index in indices:
            if index in self.found:
                self.found[index].setdefault(stage, peer)

    def keep(self, members: dict[Peer, Stage], owned: dict[Index, None]) -> None:
        """A newer view: forget peers that have left and indices that are no longer mine."""
        self.missing = {peer: None for peer in self.missing if peer in members}
        self.found = {
            index: {stage: peer for stage, peer in at.items() if peer in members}
            for index, at in self.found.items()
            if index in owned
        }
