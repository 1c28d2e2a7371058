"""Plays the microbatches of a step: which hop runs where and when, with the decisions of core itself.

Each owner drives as many microbatches as its window says (window.py). What comes next for one, what its request carries and which replica
gets it is asked of core (microbatch.py, choice.py, routing.py), by the plan's routes where there are any, so the wiring that is
predicted is the one that runs.
A hop runs when its request and its tensor have both arrived; a replica computes one hop at a time, backward hops first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count

import msgspec
import numpy as np

from shoal.core.messages import TURNS, BoundaryTensor, Member, Settings, View, rank
from shoal.core.planned import NOWHERE, Planned
from shoal.core.trainer.choice import Choice
from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, Owned, new_microbatch, plan
from shoal.core.trainer.reports import Reports
from shoal.core.trainer.routing import Routes
from shoal.core.trainer.window import Window
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.lines import Lines
from shoal.planner.prediction.seats import Routing, Seats

TOKENS, OUTPUT, GRADIENT, EMPTY = "tokens", "output", "gradient", ""  # what a message carries
# Without a leader all pass in the order sent
RANK_OF = {
    TOKENS: 0,
    GRADIENT: rank(BoundaryTensor(0, 0, 0, 0, True)),
    OUTPUT: rank(BoundaryTensor(0, 0, 0, 0, False)),
    EMPTY: 0,
}
FIRST_VIEW = View(number=0, step=0, members=())


class Bar(msgspec.Struct, frozen=True):
    """One hop's compute at a device, in seconds since the play began."""

    device: int
    stage: int
    microbatch: int
    forward: bool
    start_s: float
    end_s: float


class _Owner(msgspec.Struct):
    """One device's decisions as an owner of microbatches, made by core."""

    routes: Routes
    choice: Choice
    owned: Owned


class _Server(msgspec.Struct):
    """One device as a replica: what it computes, and what waits for it, by (forward, microbatch, owner)."""

    queue: list[tuple[bool, int, int, Microbatch]]
    computes: bool = False


class _Progress(msgspec.Struct):
    """Of one step: microbatches that are left, and how much of request and tensor the next hop of each waits for."""

    left: int
    lacks: dict[Microbatch, int]
    known_s: float = 0.0  # when the leader knows what is booked


class Play:
    """One run of the microbatches of several steps. `spread`: of delays (lines.py); then a step also begins as it does in a run, at each
    owner when the view of one of them has reached it. Else all begin at once: owners and replicas that are alike stay in lockstep."""

    def __init__(self, seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float = 0.0) -> None:
        self._seats = seats
        self._rng = rng
        self._members = seats.seated
        self._settings = Settings(
            stages=seats.stages,
            microbatches=seats.microbatches,
            steps=1,
            seats=tuple(seats.stage_of[device] for device in self._members),
            routes=self._seat_routes(),
            home=seats.stages == 1 and not seats.routes,
            inflight=seats.inflight,
            queue_limit=seats.queue_limit,
        )
        self.lines = Lines(cluster, rng, spread)
        self._leader = seats.leader if spread else None
        if spread and self._leader is None:
            self._leader = self._members[int(rng.integers(len(self._members)))]
        self.computed = np.zeros(len(cluster.devices))
        self.bars: list[Bar] = []  # of the last step: those of all would take gigabytes
        self._nbytes = {
            TOKENS: seats.tokens_bytes,
            OUTPUT: seats.boundary_bytes,
            GRADIENT: seats.back_bytes,
            EMPTY: 0.0,
        }
        self._owners: dict[int, _Owner] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = count()
        self._servers = {device: _Server([]) for device in self._members}
        self._progress = _Progress(0, {})

    def run(self, microbatches: int, start: float) -> float:
        """All microbatches once; when the last is booked, and where a leader begins steps, when it knows."""
        if not self._owners:
            self._owners = self._new_owners(start)
        self.bars.clear()
        for owner in self._owners.values():
            owner.owned = owner.owned.next_step()
        self._progress = progress = _Progress(microbatches, {})
        for index in range(microbatches):
            m = new_microbatch(index, [""] * self._seats.stages, FIRST_VIEW)
            m.x[0] = (TOKENS,)
            progress.lacks[m] = 1
            self._owners[self._members[index % len(self._members)]].owned.wait(m)
        for device in self._members:
            if self._leader is None:
                self._begin(device, start)
            else:
                self._servers[device].computes = True
                self._at(self.lines.control(self._leader, device, start), partial(self._apply, device))
        now = start
        while not self._done:
            now, _, act = heappop(self._events)
            act(now)
        return now if self._leader is None else progress.known_s

    @property
    def _done(self) -> bool:
        return not self._progress.left

    def _apply(self, device: int, now: float) -> None:
        """The step has begun there. Its first requests wait for the optimizer of the step before."""
        self._at(now + self._seats.applied_s, partial(self._applied, device))
        self._begin(device, now)

    def _applied(self, device: int, now: float) -> None:
        self._servers[device].computes = False
        self._compute(device, now)

    @property
    def view_s(self) -> float:
        """Of a step, beside its microbatches: views on their way, the optimizer's work of the step before, and reports."""
        if self._leader is None:
            return 0.0
        return 2 * self.lines.farthest(self._leader, self._members) + self._seats.applied_s

    def _view_of(self, devices: list[int]) -> tuple[Member, ...]:
        turns, unseated = self._seats.turns, self._seats.unseated
        return tuple(
            Member(
                str(device),
                self._seats.stage_of[device],
                seat=NOWHERE if device in unseated else seat,
                turns=turns[device] if turns else TURNS,
            )
            for seat, device in enumerate(self._members)
            if device in devices
        )

    def _new_owners(self, now: float) -> dict[int, _Owner]:
        members, owners = self._view_of(self._members), {}
        for device in self._members:
            routes, planned = Routes(self._settings, self._rng), Planned(str(device), self._settings)
            routes.on_view(members, now)
            planned.on_view(members)
            choice = Choice(str(device), self._settings, routes, planned, Reports(routes, []))
            owners[device] = _Owner(routes, choice, Owned(Window(self._settings)))
        return owners

    def _seat_routes(self) -> Routing:
        """By seats instead of devices."""
        seat_of = {device: seat for seat, device in enumerate(self._members)}
        if not self._seats.routes:
            return ()
        return tuple(
            tuple(tuple(seat_of[device] for device in turns) for turns in self._seats.routes[owner])
            for owner in self._members
        )

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._serial), act))

    def _send(
        self, source: int, target: int, tensors: tuple[str, ...], now: float, act: Callable[[float], None]
    ) -> None:
        """Call `act` when all of it has arrived. Without tensors it is a control message."""
        if source == target or not tensors:
            self._at(self.lines.control(source, target, now), act)
            return
        nbytes = sum(self._nbytes[tensor] for tensor in tensors)
        place = 0 if self._leader is None else min(RANK_OF[tensor] for tensor in tensors)
        left = self.lines.leave(source, target, nbytes, now, place)
        self._at(left, lambda then: self._at(self.lines.arrive(source, target, nbytes, then, place), act))

    def _begin(self, owner: int, now: float) -> None:
        while (m := self._owners[owner].owned.start(now)) is not None:
            self._advance(owner, m, now)

    def _advance(self, owner: int, m: Microbatch, now: float) -> None:
        """Send the request of its next hop, as trainer.py does."""
        want = plan(m)
        if want.kind is Kind.FINISHED:
            self._progress.left -= 1
            self._owners[owner].owned.finish(m, now)
            self._begin(owner, now)
            return
        choice, active = self._owners[owner].choice, self._owners[owner].owned.active.values()
        peer = choice.peer(m, want, active, now)
        assert peer, "nobody is ever busy or banned here"
        choice.hop(m, want, peer, active, now)
        self._send(owner, int(peer), m.inputs(), now, lambda then: self._arrived(owner, m, then))

    def _arrived(self, owner: int, m: Microbatch, now: float) -> None:
        """The request of its next hop, or the tensor that the request names, is at its replica."""
        self._progress.lacks[m] -= 1
        if self._progress.lacks[m] == 0:
            assert m.hop is not None
            peer = int(m.hop.peer)
            heappush(self._servers[peer].queue, (m.hop.kind is Kind.FORWARD, m.index, owner, m))
            self._compute(peer, now)

    def _compute(self, peer: int, now: float) -> None:
        server = self._servers[peer]
        if server.computes or not server.queue:
            return
        forward, index, owner, m = heappop(server.queue)
        hop = m.hop
        assert hop is not None
        server.computes = True
        seconds = self._seats.forward_s[peer] if forward else self._seats.backward_s[peer]
        self.computed[peer] += seconds
        self.bars.append(Bar(peer, hop.stage, index, forward, now, now + seconds))
        self._at(now + seconds, lambda then: self._computed(owner, m, hop, then))

    def _computed(self, owner: int, m: Microbatch, hop: Hop, now: float) -> None:
        """The output goes straight to the next hop's replica, a receipt to the owner."""
        peer = int(hop.peer)
        self._servers[peer].computes = False
        if self._leader is not None and hop.kind is Kind.BACKWARD:
            known_s = now + self.lines.delay_s(peer, self._leader)
            self._progress.known_s = max(self._progress.known_s, known_s)
        self._progress.lacks[m] = 2 if hop.to else 1
        output = OUTPUT if hop.kind is Kind.FORWARD else GRADIENT if hop.stage > 0 else EMPTY
        if hop.to:
            self._hand_on(owner, m, hop, output, now)
        self._send(peer, owner, (), now, lambda then: self._answered(owner, m, hop, output, then))
        self._compute(peer, now)

    def _hand_on(self, owner: int, m: Microbatch, hop: Hop, output: str, now: float) -> None:
        self._send(int(hop.peer), int(hop.to), (output,), now, lambda then: self._arrived(owner, m, then))

    def _answered(self, owner: int, m: Microbatch, hop: Hop, output: str, now: float) -> None:
        self._owners[owner].routes.answered(hop.peer, now - hop.sent, hop.kind.size, now, ahead=hop.ahead)
        if hop.kind is Kind.BACKWARD:
            m.booked[hop.stage] = hop.peer
        if output:
            m.made(hop, hop.kind is Kind.BACKWARD)
        m.progressed()
        m.next = hop.to
        self._advance(owner, m, now)
