"""Plays a step in which one member dies. Hops that were there, bookings that go with it and microbatches that it owned are done by
the others, as core decides it. For the forecaster.

Between its death and the view without it, whoever sends it something learns that it cannot be reached, and takes its forwards elsewhere.
A replica that lacks a tensor asks for it whoever holds it. Not in it: deadlines, and a stage whose last replica dies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, NextHop, Progress, new_microbatch, plan
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.play import FIRST_VIEW, GRADIENT, OUTPUT, TOKENS, Play
from shoal.planner.prediction.seats import Seats

REFUSED_S = 0.05  # until a sender knows that nobody is there


class Death(msgspec.Struct, frozen=True):
    """Of `device`, so many seconds after the step has begun; the leader decides on a view without it later."""

    device: int
    at_s: float
    evicted_s: float


class PlayWithDeath(Play):
    """`through` plays the step with the death; `run` before it those that warm up."""

    def __init__(self, seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float) -> None:
        super().__init__(seats, cluster, rng, spread)
        self._died_s = 0.0
        self._dead, self._evicted = -1, True
        self._told = len(self._members)  # owners that have the view without it
        self._booked: dict[tuple[int, int], int] = {}  # microbatch, stage: where
        # What its next hop reads and has not got: who sends it, and what it is
        self._coming: dict[Microbatch, list[tuple[int, str]]] = {}

    def through(self, microbatches: int, start: float, death: Death) -> float:
        """When the leader knows that all is booked by those who live."""
        self._evicted, self._told = False, 0
        self._died_s, evicted_s = start + death.at_s, start + death.evicted_s
        self._booked.clear()
        self._coming.clear()
        self._at(self._died_s, partial(self._die, death.device))
        self._at(evicted_s, self._evict)
        return max(self.run(microbatches, start), evicted_s)

    @property
    def _done(self) -> bool:
        return not self._progress.left and self._told == len(self._living)

    # ------------------------------------------------------------------------------------------------------------ its end

    def _die(self, device: int, _: float) -> None:
        self._dead = device
        self._servers[device].queue.clear()

    def _evict(self, now: float) -> None:
        """The view without it goes to everybody; who leads knows it at once."""
        assert self._leader is not None
        self._evicted = True
        living = self._living
        leader = self._leader if self._leader != self._dead else min(living)
        for index, m in sorted(self._owners[self._dead].owned.held.items()):
            self._hand_over(m, living[index % len(living)], leader, now)
        for server in self._servers.values():
            server.queue = sorted(one for one in server.queue if one[2] != self._dead)
        for owner in living:
            self._at(self.lines.control(leader, owner, now), partial(self._on_view, owner))

    @property
    def _living(self) -> list[int]:
        return [device for device in self._members if device != self._dead]

    def _hand_over(self, m: Microbatch, owner: int, leader: int, now: float) -> None:
        """One that it owned: what is booked elsewhere stays, all else of it begins anew, once the new owner has asked for all books."""
        booked = [self._booked.get((m.index, stage), self._dead) for stage in range(self._seats.stages)]
        lives = [str(device) if device != self._dead else "" for device in booked]
        self._progress.left += (m.progress is Progress.FINISHED) - all(lives)
        if all(lives):
            return
        taken = new_microbatch(m.index, lives, FIRST_VIEW)
        taken.x[0] = (TOKENS,)
        self._progress.lacks[taken] = 1
        heard_s = self.lines.control(leader, owner, now) + 2 * self.lines.farthest(owner, self._living)
        self._at(heard_s, partial(self._take_over, owner, taken))

    def _take_over(self, owner: int, m: Microbatch, now: float) -> None:
        self._owners[owner].owned.wait(m)
        self._begin(owner, now)

    def _on_view(self, owner: int, now: float) -> None:
        """As trainer.py does it."""
        self._told += 1
        mine, members = self._owners[owner], self._view_of(self._living)
        mine.routes.on_view(members, now, begins=False)
        finished = [m for m in mine.owned.held.values() if m.progress is Progress.FINISHED]
        mine.owned.lose_bookings({member.peer: member.stage for member in members})
        self._progress.left += sum(m.progress is not Progress.FINISHED for m in finished)
        for m in list(mine.owned.active.values()):
            assert m.hop is not None
            lost = [tensor for source, tensor in self._coming.get(m, ()) if source == self._dead]
            if m.hop.peer != str(self._dead):
                if not lost:
                    continue
                for tensor in lost:  # nobody holds it
                    (m.g if tensor == GRADIENT else m.x)[m.hop.stage] = ()
            m.hop, m.next = None, ""
            self._advance(owner, m, now)
        self._begin(owner, now)

    def _unreachable(self, owner: int, now: float) -> None:
        """Forwards go elsewhere. A backward may have arrived: it waits for the view."""
        dead = str(self._dead)
        self._owners[owner].routes.failed(dead, now)
        for m in list(self._owners[owner].owned.active.values()):
            if m.hop is not None and m.hop.peer == dead and m.hop.kind is Kind.FORWARD:
                m.abandon()
                self._advance(owner, m, now)

    # -------------------------------------------------------------------------------------------------------- what is lost

    def _lost(self, device: int, now: float) -> bool:
        return device == self._dead and now >= self._died_s

    def _send(
        self, source: int, target: int, tensors: tuple[str, ...], now: float, act: Callable[[float], None]
    ) -> None:
        def arrives(then: float) -> None:
            if source == self._dead and source != target and then - self.lines.delay_s(source, target) > self._died_s:
                return  # it had not left its line
            if not self._lost(target, then):
                act(then)
            elif not self._evicted:
                self._at(then + REFUSED_S + self.lines.delay_s(target, source), partial(self._unreachable, source))

        if not self._lost(source, now):
            super()._send(source, target, tensors, now, arrives)

    def _compute(self, peer: int, now: float) -> None:
        if not self._lost(peer, now):
            super()._compute(peer, now)

    def _computed(self, owner: int, m: Microbatch, hop: Hop, now: float) -> None:
        peer = int(hop.peer)
        if self._lost(peer, now):
            return
        if hop.kind is Kind.BACKWARD:
            self._booked[m.index, hop.stage] = peer
        super()._computed(owner, m, hop, now)

    def _hand_on(self, owner: int, m: Microbatch, hop: Hop, output: str, now: float) -> None:
        self._comes(owner, m, None, (int(hop.peer), output), int(hop.to), now)

    def _comes(self, owner: int, m: Microbatch, hop: Hop | None, what: tuple[int, str], peer: int, now: float) -> None:
        """A tensor that `hop` reads, or the next one, leaves for that peer."""

        def arrives(then: float) -> None:
            if what in self._coming.get(m, ()) and hop in (None, m.hop):
                self._coming[m].remove(what)
                self._arrived(owner, m, then)

        if hop is None:
            self._coming.setdefault(m, []).append(what)
        self._send(what[0], peer, (what[1],), now, arrives)

    def _answered(self, owner: int, m: Microbatch, hop: Hop, output: str, now: float) -> None:
        if m.hop is hop:
            super()._answered(owner, m, hop, output, now)

    # ---------------------------------------------------------------------------------------------------------- what is next

    def _advance(self, owner: int, m: Microbatch, now: float) -> None:
        """Where the replica has not been sent what it needs, it asks for it."""
        want = plan(m)
        if self._lost(owner, now):
            return
        if self._dead < 0 or want.kind is Kind.FINISHED:
            super()._advance(owner, m, now)
            return
        mine = self._owners[owner]
        active = mine.owned.active.values()
        if want.kind is Kind.RECALL:
            peer = m.booked[want.stage]
        else:
            peer = mine.choice.peer(m, want, active, now)
        assert peer, "nobody is ever busy here, and a stage's last replica is not banned"
        if peer != m.next:
            self._progress.lacks[m] = 1
            self._coming.pop(m, None)
        mine.choice.hop(m, want, peer, active, now)
        hop = m.hop
        assert hop is not None
        absent = self._absent(m, want, peer)
        self._coming.setdefault(m, []).extend(absent)
        self._progress.lacks[m] += len(absent)
        self._send(owner, int(peer), m.inputs(), now, lambda then: self._asked(owner, m, hop, absent, then))

    def _absent(self, m: Microbatch, want: NextHop, peer: str) -> list[tuple[int, str]]:
        """Tensors that this hop reads and its replica has not: who holds them, and what they are."""
        stage, absent = want.stage, []
        if want.kind is Kind.RECALL:
            return []
        if stage > 0 and peer not in m.x[stage]:
            absent.append((int(m.x[stage][0]), OUTPUT))
        if want.kind is Kind.BACKWARD and stage < len(m.g) - 1 and peer not in m.g[stage]:
            absent.append((int(m.g[stage][0]), GRADIENT))
        return absent

    def _asked(self, owner: int, m: Microbatch, hop: Hop, absent: list[tuple[int, str]], now: float) -> None:
        """The request is at its replica."""
        if m.hop is not hop:
            return
        peer = int(hop.peer)
        if hop.kind is Kind.RECALL:  # it has kept the gradient
            self._send(peer, owner, (), now, lambda then: self._recalled(owner, m, hop, then))
            return
        for what in absent:
            self._send(peer, what[0], (), now, partial(self._comes, owner, m, hop, what, peer))
        self._arrived(owner, m, now)

    def _recalled(self, owner: int, m: Microbatch, hop: Hop, now: float) -> None:
        if m.hop is hop:
            m.made(hop, gradient=True)
            m.progressed()
            m.next = hop.to
            self._advance(owner, m, now)
