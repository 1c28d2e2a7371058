"""Which replica gets a hop of a microbatch, when some already hold its input. For trainer.py.

A boundary tensor lies with the servers. The gradient goes back the way the activation came: the replica that made a stage's
output has its input, and may have kept the activations of that forward, which any other replica would recompute; so every
boundary is crossed once in each direction, and any other replica has to be sent the input again. Who makes a tensor is told, when
asked to, who goes on with it: that peer is chosen, and charged, one hop ahead.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.messages import Peer, Settings
from shoal.core.planned import Planned
from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, NextHop, after
from shoal.core.trainer.reports import Reports
from shoal.core.trainer.routing import FORWARD_SIZE, Routes

Active = Iterable[Microbatch]  # the owner's, in progress


def in_progress(active: Active) -> dict[Peer, float]:
    """Size of what each peer has been asked, or will be asked next."""
    load: dict[Peer, float] = {}
    for m in active:
        hop, then = m.hop, m.next
        if hop is None or hop.kind is Kind.FETCH:
            load[then] = load.get(then, 0.0) + FORWARD_SIZE
            continue
        peer, to = hop.peer, hop.to
        load[peer] = load.get(peer, 0.0) + hop.kind.size
        if to != peer:
            load[to] = load.get(to, 0.0) + FORWARD_SIZE
        if then != peer and then != to:
            load[then] = load.get(then, 0.0) + FORWARD_SIZE
    return load


def in_progress_at(peer: Peer, active: Active, but: Microbatch) -> float:
    """The same of one peer, without one of them."""
    size = 0.0
    for m in active:
        hop = m.hop
        if m is but:
            continue
        if hop is not None and hop.kind is not Kind.FETCH and peer in (hop.peer, hop.to):
            size += hop.kind.size if peer == hop.peer else FORWARD_SIZE
        elif m.next == peer:
            size += FORWARD_SIZE
    return size


class Choice:
    def __init__(self, name: Peer, settings: Settings, routes: Routes, planned: Planned, reports: Reports) -> None:
        self._name, self._settings = name, settings
        self._routes, self._planned, self._reports = routes, planned, reports

    def peer(self, m: Microbatch, want: NextHop, active: Active, now: float, *, ahead: bool = False) -> Peer:
        """Who serves that hop: whoever was chosen ahead, ran its forward, has its input, or is due by the routes; '' while nobody is.
        `ahead`: of the hop after the one in progress."""
        avoid = m.avoided(want.stage, ahead)
        above = m.x[want.stage + 1][:1] if want.kind is Kind.BACKWARD and want.stage + 1 < len(m.x) else ()
        holders = m.x[want.stage] if want.stage > 0 else ()
        for peer in (m.next, *above, *reversed(holders)):
            charge = 0.0 if peer == m.next else want.kind.size
            if peer and peer != avoid and self._routes.claim(peer, want.stage, now, charge, want.kind is Kind.BACKWARD):
                return peer
        home = self._name if self._settings.home and avoid != self._name else ""
        planned = self._planned.peer(want.stage, m.index)
        load = in_progress(active)
        chosen = self._routes.choose(
            want.stage, now, want.kind.size, avoid, home=home, planned=planned, load=load, index=m.index
        )
        if chosen is None:
            return ""
        if planned and chosen[0] != planned:
            self._reports.note_once("route", "plan", planned, f"{planned} is passed over: {chosen[1]}")
        return chosen[0]

    def after(self, m: Microbatch, want: NextHop, active: Active, now: float) -> Peer:
        """Who gets what that hop makes; '' if nobody needs it, or nobody is free yet."""
        then = after(m, want)
        return "" if then is None else self.peer(m, then, active, now, ahead=True)

    def hop(self, m: Microbatch, want: NextHop, peer: Peer, active: Active, now: float) -> None:
        """It is on its way to that peer from now on, and who goes on with it is chosen."""
        m.next = ""
        m.hop = Hop(want.kind, want.stage, peer, now, ahead=in_progress_at(peer, active, m))
        m.hop.to = self.after(m, want, active, now)
