"""Planned wiring: which peer a plan gives each microbatch at each stage. For trainer.py and the planner's step.py.

Paper: DT-FM (arXiv 2206.01288). Claim: on unequal links fixed pipelines, wired ahead so that hops take near links, beat a
wiring that does not look at places. A plan has seats, one for each machine it knows: `Settings.seats[k]` is the stage of
seat k, and `Settings.routes[k][stage]` the seats that serve the microbatches of the owner on seat k there, in turn.

What we changed: a plan is a wish. Routes.choose takes the planned peer while it is in good standing and else, with a
reason in words, whom the stochastic rule would take; a seat that nobody holds is served by that rule too.
"""

from __future__ import annotations

from shoal.core.messages import Index, Member, Peer, Settings, Stage

NOWHERE = -1  # the seat of a peer that the plan does not know


def seated(settings: Settings, seat: int, taken: set[int]) -> tuple[Stage, str] | None:
    """The stage of a newcomer's seat, and why; None: the plan has no such seat, or somebody holds it."""
    if not 0 <= seat < len(settings.seats) or seat in taken:
        return None
    return settings.seats[seat], f"as planned, seat {seat}"


def holder(settings: Settings, seat: int, stage: Stage, taken: set[int]) -> int:
    """The seat of a peer that asks for `seat` and gets that stage: its own, or none."""
    planned = seated(settings, seat, taken)
    return seat if planned is not None and planned[0] == stage else NOWHERE


def complete(settings: Settings, members: tuple[Member, ...]) -> bool:
    """Everybody is where the plan has them, and nobody else is there."""
    return bool(settings.seats) and sorted(member.seat for member in members) == list(range(len(settings.seats)))


class Planned:
    """One owner's planned peers. Empty where the run has no plan, or the owner no seat in it."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self._name = name
        self._seats = settings.seats
        self._routes = settings.routes
        self._mine: tuple[tuple[int, ...], ...] = ()  # by stage
        self._at: dict[int, Peer] = {}

    def on_view(self, members: tuple[Member, ...]) -> list[str]:
        """Who holds which seat now; what has come between me and the plan, in words, when that is new."""
        before = self._missing()
        self._at = {member.seat: member.peer for member in members if self._holds(member)}
        seat = next((member.seat for member in members if member.peer == self._name and self._holds(member)), NOWHERE)
        self._mine = self._routes[seat] if 0 <= seat < len(self._routes) else ()
        return [
            f"nobody holds seat {gone} of the plan: what it was to serve at stage {self._seats[gone]} is wired by measured times"
            for gone in self._missing()
            if gone not in before and self._at
        ]

    def peer(self, stage: Stage, index: Index) -> Peer:
        """Whom the plan wants for that hop; '' when it wants nobody, or a seat that is empty."""
        turns = self._mine[stage] if stage < len(self._mine) else ()
        return self._at.get(turns[index // len(self._seats) % len(turns)], "") if turns else ""

    def _holds(self, member: Member) -> bool:
        """A peer that was moved away serves no longer what the plan says."""
        return 0 <= member.seat < len(self._seats) and self._seats[member.seat] == member.stage

    def _missing(self) -> list[int]:
        wanted = sorted({seat for turns in self._mine for seat in turns})
        return [seat for seat in wanted if seat not in self._at]
