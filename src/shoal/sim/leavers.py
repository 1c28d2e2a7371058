"""Watches each peer of a simulated swarm that was asked to leave: it leaves in time, and its stage is still served. For checkers.py.

Exactly once is the other checkers' matter: what a leaver booked is averaged once, by itself or by those who compute it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from shoal.core import messages as m
from shoal.core.leader.rules.removal import LEAVE_S

GRACE_S = 4.0  # from the request to the leader's view, on the slowest links
TAKEOVER_S = 90.0  # for a peer of another stage to download the state, on the slowest disks and links


class Leaver(msgspec.Struct):
    asked_s: float
    free_s: float  # since when it may go: it was asked, and somebody who stays serves its stage
    bare_s: float | None = None  # since when nobody who stays serves it


class Leavers:
    """`prompt`: nothing else disturbs this swarm, so that the time to leave is bounded."""

    def __init__(self, now: Callable[[], float], report: Callable[[m.Peer, str, str], None]) -> None:
        self.prompt = False
        self.waiting: dict[m.Peer, Leaver] = {}  # who was asked and has not left
        self._now, self._report = now, report

    def ask(self, peer: m.Peer, view: m.View | None) -> None:
        self.waiting.setdefault(peer, Leaver(self._now(), self._now()))
        if view is not None:
            self._count(view)

    def agreed(self, before: m.View | None, view: m.View) -> None:
        """A view that nobody held before."""
        members = {one.peer: one.stage for one in view.members}
        if before is not None and not view.finished:
            for one in before.members:
                if one.peer in self.waiting and one.peer not in members:
                    if f"{one.peer} leaves" in view.reason and one.stage not in members.values():
                        text = f"view {view.number} empties its stage {one.stage}: {view.reason}"
                        self._report(one.peer, "leaves", text)
                    del self.waiting[one.peer]
            if view.last != before.last and not before.ahead:  # else the next step has begun, and nobody leaves it
                self._stay(members, GRACE_S, view.reason)
        self._count(view)

    def look(self, view: m.View | None) -> None:
        """Now and then: nobody stays longer than it has to."""
        if view is None or not view.started or view.finished:
            return
        members = {one.peer: one.stage for one in view.members}
        self._stay(members, LEAVE_S + GRACE_S, "20 s have passed")
        spare = max(self._staying(view).values(), default=0) > 1
        for peer, leaver in self.waiting.items():
            if self.prompt and spare and leaver.bare_s is not None and self._now() - leaver.bare_s > TAKEOVER_S:
                self._report(peer, "leaves", f"nobody takes over its stage since {leaver.bare_s:.1f} s")

    def _staying(self, view: m.View) -> Counter[int]:
        return Counter(one.stage for one in view.members if one.peer not in self.waiting)

    def _count(self, view: m.View) -> None:
        staying, stages, now = self._staying(view), {one.peer: one.stage for one in view.members}, self._now()
        for peer, leaver in self.waiting.items():
            if peer in stages and not staying[stages[peer]]:
                leaver.bare_s = now if leaver.bare_s is None else leaver.bare_s
            elif leaver.bare_s is not None:
                leaver.bare_s, leaver.free_s = None, now

    def _stay(self, members: dict[m.Peer, int], most_s: float, why: str) -> None:
        """Those of the members that are still here, so long after they could go."""
        for peer, leaver in self.waiting.items():
            late = peer in members and leaver.bare_s is None and self._now() - leaver.free_s > most_s
            if self.prompt and late:
                self._report(peer, "leaves", f"was asked at {leaver.asked_s:.1f} s and stays: {why}")
