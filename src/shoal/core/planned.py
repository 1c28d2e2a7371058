"""Planned wiring: the peer that a plan gives to each microbatch at each stage. For trainer.py and the planner's step.py.

Paper: DT-FM (arXiv 2206.01288). Claim: on unequal links, fixed pipelines whose hops take near links beat a wiring that ignores
locations. A plan has seats, one for each machine that it lists: `Settings.seats[k]` is the stage of seat k, and
`Settings.routes[k][stage]` lists the seats that serve the microbatches of the owner on seat k at that stage, in turn.

What we changed: a plan is a preference. Routes.choose takes the planned peer while it is in good standing; else, with a reason in
words, the peer that the stochastic rule chooses. That rule serves a seat that no peer holds, too.
"""

from __future__ import annotations

from shoal.core.messages import Index, Member, Peer, Settings, Stage

NOWHERE = -1  # the seat of a peer that is not in the plan


def planned_stage(settings: Settings, seat: int, taken: set[int]) -> tuple[Stage, str] | None:
    """The stage of the seat that a joiner asks for, and the reason; None if the plan has no such seat or another peer holds it.
    `taken`: seats that are held."""
    if not 0 <= seat < len(settings.seats) or seat in taken:
        return None
    return settings.seats[seat], f"as planned, seat {seat}"


def planned_seat(settings: Settings, seat: int, stage: Stage, taken: set[int]) -> int:
    """The seat of a peer that asks for `seat` and serves `stage`: `seat` if the plan has that stage there, else NOWHERE."""
    planned = planned_stage(settings, seat, taken)
    return seat if planned is not None and planned[0] == stage else NOWHERE


def complete(settings: Settings, members: tuple[Member, ...]) -> bool:
    """Each seat of the plan has one member, and there is no other member."""
    return bool(settings.seats) and sorted(member.seat for member in members) == list(range(len(settings.seats)))


class Planned:
    """One owner's planned peers. Empty if the run has no plan, or the owner no seat in it."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self._name = name
        self._seats = settings.seats
        self._routes = settings.routes
        self._mine: tuple[tuple[int, ...], ...] = ()  # seats of this owner's routes, by stage
        self._at: dict[int, Peer] = {}  # who holds each seat

    def on_view(self, members: tuple[Member, ...]) -> list[str]:
        """Take in who holds which seat. Returns one sentence for each seat of this owner's routes that has become empty."""
        before = self._empty()
        self._at = {member.seat: member.peer for member in members if self._holds(member)}
        seat = next((member.seat for member in members if member.peer == self._name and self._holds(member)), NOWHERE)
        self._mine = self._routes[seat] if 0 <= seat < len(self._routes) else ()
        return [
            f"nobody holds seat {empty} of the plan: what it was to serve at stage {self._seats[empty]} is wired by measured times"
            for empty in self._empty()
            if empty not in before and self._at
        ]

    def peer(self, stage: Stage, index: Index) -> Peer:
        """The peer that the plan gives that hop; '' if it gives none, or an empty seat."""
        turns = self._mine[stage] if stage < len(self._mine) else ()
        return self._at.get(turns[index // len(self._seats) % len(turns)], "") if turns else ""

    def _holds(self, member: Member) -> bool:
        """It serves the stage of its seat: a peer that was moved to another stage does not."""
        return 0 <= member.seat < len(self._seats) and self._seats[member.seat] == member.stage

    def _empty(self) -> list[int]:
        wanted = sorted({seat for turns in self._mine for seat in turns})
        return [seat for seat in wanted if seat not in self._at]
