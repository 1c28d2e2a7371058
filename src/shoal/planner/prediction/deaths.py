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

from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, Progress, new_microbatch
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.detours import PlayWithDetours
from shoal.planner.prediction.play import FIRST_VIEW, GRADIENT, TOKENS
from shoal.planner.prediction.seats import Seats

REFUSED_S = 0.05  # until a sender knows that nobody is there


class Death(msgspec.Struct, frozen=True):
    """Of `device`, so many seconds after the step has begun; the leader decides on a view without it later."""

    device: int
    at_s: float
    evicted_s: float


class PlayWithDeath(PlayWithDetours):
    """`through` plays the step with the death; `run` before it those that warm up."""

    def __init__(self, seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float) -> None:
        super().__init__(seats, cluster, rng, spread)
        self._died_s = 0.0
        self._dead, self._evicted = -1, True
        self._told = len(self._members)  # owners that have the view without it
        self._booked: dict[tuple[int, int], int] = {}  # microbatch, stage: where
        self._refused = set[int]()  # owners that learn soon that it cannot be reached

    def through(self, microbatches: int, start: float, death: Death) -> float:
        """When the leader knows that all is booked by those who live."""
        self._evicted, self._told = False, 0
        self._died_s, evicted_s = start + death.at_s, start + death.evicted_s
        self._booked.clear()
        self._refused.clear()
        self._coming.clear()
        for asked in self._asked.values():
            asked.clear()
        self._at(self._died_s, partial(self._die, death.device))
        self._at(evicted_s, self._evict)
        return max(self.run(microbatches, start), evicted_s)

    @property
    def _straight(self) -> bool:
        return super()._straight and self._dead < 0

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
        gone = set(self._owners[self._dead].owned.held.values())
        for asked in self._asked.values():
            for m in gone & asked.keys():
                del asked[m]
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
            if m.hop is None:  # it waits until a replica has room
                continue
            lost = [one.tensor for one in self._coming.get(m, ()) if one.source == self._dead]
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
        self._refused.discard(owner)
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
            elif not self._evicted and source not in self._refused:
                self._refused.add(source)
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

    def _advance(self, owner: int, m: Microbatch, now: float) -> None:
        if not self._lost(owner, now):
            super()._advance(owner, m, now)
