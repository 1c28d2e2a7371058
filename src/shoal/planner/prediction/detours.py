"""Plays a step in which hops go elsewhere than they were first asked for: a replica with a full queue answers Busy, one that was not sent
what it reads asks for it.

Not in it: deadlines, and the memory of activations.
"""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np

from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, NextHop, plan
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.play import GRADIENT, OUTPUT, Play
from shoal.planner.prediction.seats import Seats


class Coming(msgspec.Struct, frozen=True):
    """A tensor on its way."""

    source: int
    tensor: str
    target: int


def may_be_full(seats: Seats) -> bool:
    """As many requests can be on their way at once as fill a queue."""
    return min(seats.microbatches, len(seats.members) * seats.most_inflight) > seats.queue_limit


class PlayWithDetours(Play):
    def __init__(self, seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float) -> None:
        super().__init__(seats, cluster, rng, spread)
        self._may_be_full = may_be_full(seats)
        self._coming: dict[Microbatch, list[Coming]] = {}  # what its next hop reads and has not got
        # By replica, what it has been asked for and has not computed
        self._asked: dict[int, dict[Microbatch, Hop]] = {device: {} for device in self._members}

    @property
    def _straight(self) -> bool:
        """No hop goes elsewhere."""
        return not self._may_be_full

    # --------------------------------------------------------------------------------------------------------- tensors

    def _hand_on(self, owner: int, m: Microbatch, hop: Hop, output: str, now: float) -> None:
        self._comes(owner, m, None, Coming(int(hop.peer), output, int(hop.to)), now)

    def _comes(self, owner: int, m: Microbatch, hop: Hop | None, what: Coming, now: float) -> None:
        """A tensor that `hop` reads, or the next one, leaves."""

        def arrives(then: float) -> None:
            if what in self._coming.get(m, ()) and hop in (None, m.hop):
                self._coming[m].remove(what)
                self._arrived(owner, m, then)

        if hop is None:
            self._coming.setdefault(m, []).append(what)
        self._send(what.source, what.target, (what.tensor,), now, arrives)

    def _absent(self, m: Microbatch, want: NextHop, peer: str) -> list[Coming]:
        """Tensors that this hop reads and its replica has not been sent: from who holds them."""
        stage, absent = want.stage, []
        if want.kind is Kind.RECALL:
            return []
        if stage > 0 and peer not in m.x[stage]:
            absent.append(Coming(int(m.x[stage][0]), OUTPUT, int(peer)))
        if want.kind is Kind.BACKWARD and stage < len(m.g) - 1 and peer not in m.g[stage]:
            absent.append(Coming(int(m.g[stage][0]), GRADIENT, int(peer)))
        return absent

    # ---------------------------------------------------------------------------------------------------------- owners

    def _advance(self, owner: int, m: Microbatch, now: float) -> None:
        """Where the replica has not been sent what it needs, it asks for it."""
        want = plan(m)
        if self._straight or want.kind is Kind.FINISHED:
            super()._advance(owner, m, now)
            return
        mine = self._owners[owner]
        active = mine.owned.active.values()
        peer = m.booked[want.stage] if want.kind is Kind.RECALL else mine.choice.peer(m, want, active, now)
        if not peer:
            self._park(owner, m, want.stage, now)
            return
        if peer != m.next:
            self._progress.lacks[m] = 1
            self._coming.pop(m, None)
        mine.choice.hop(m, want, peer, active, now)
        hop = m.hop
        assert hop is not None
        absent = self._absent(m, want, peer)
        self._coming.setdefault(m, []).extend(absent)
        self._progress.lacks[m] += len(absent)
        self._send(owner, int(peer), m.inputs(), now, lambda then: self._requested(owner, m, hop, absent, then))

    def _park(self, owner: int, m: Microbatch, stage: int, now: float) -> None:
        """Until a replica has room again."""
        wakes_s = self._owners[owner].routes.wake(stage)
        assert wakes_s is not None, "a stage's last replica is not banned"

        def wake(then: float) -> None:
            if m.hop is None and m.index in self._owners[owner].owned.active:
                self._advance(owner, m, then)

        self._at(max(wakes_s, now), wake)

    def _declined(self, owner: int, m: Microbatch, hop: Hop, wait_s: float, now: float) -> None:
        if m.hop is hop:
            self._owners[owner].routes.busy(hop.peer, wait_s, hop.kind.size, now)
            m.hop = None
            self._advance(owner, m, now)

    def _answered(self, owner: int, m: Microbatch, hop: Hop, output: str, now: float) -> None:
        if m.hop is hop:
            super()._answered(owner, m, hop, output, now)

    # -------------------------------------------------------------------------------------------------------- replicas

    def _requested(self, owner: int, m: Microbatch, hop: Hop, absent: list[Coming], now: float) -> None:
        """The request is at its replica."""
        if m.hop is not hop:
            return
        peer = int(hop.peer)
        if hop.kind is Kind.RECALL:  # it has kept the gradient
            self._send(peer, owner, (), now, lambda then: self._recalled(owner, m, hop, then))
            return
        if hop.kind is Kind.FORWARD and self._full(peer):
            wait_s = self._queue_s(peer)
            self._send(peer, owner, (), now, lambda then: self._declined(owner, m, hop, wait_s, then))
            return
        self._asked[peer][m] = hop
        for what in absent:
            self._send(peer, what.source, (), now, partial(self._comes, owner, m, hop, what))
        self._arrived(owner, m, now)

    def _full(self, peer: int) -> bool:
        """As hops.py counts: hops that could run, or all that were asked for."""
        server, limit = self._servers[peer], self._seats.queue_limit
        waiting = len(self._asked[peer]) - server.computes
        return self._may_be_full and (len(server.queue) >= limit or waiting >= 2 * limit)

    def _queue_s(self, peer: int) -> float:
        forwards = sum(hop.kind is Kind.FORWARD for hop in self._asked[peer].values())
        backwards = len(self._asked[peer]) - forwards
        return forwards * self._seats.forward_s[peer] + backwards * self._seats.backward_s[peer]

    def _computed(self, owner: int, m: Microbatch, hop: Hop, now: float) -> None:
        self._asked[int(hop.peer)].pop(m, None)
        super()._computed(owner, m, hop, now)

    def _recalled(self, owner: int, m: Microbatch, hop: Hop, now: float) -> None:
        if m.hop is hop:
            m.made(hop, gradient=True)
            m.progressed()
            m.next = hop.to
            self._advance(owner, m, now)
