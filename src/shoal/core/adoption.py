"""Microbatches that come from another owner, held back until every member has shown its books. For trainer.py.

An owner that vanished may have backwards booked anywhere. Its heir asks every member for its books and goes on from
there; an answer counts only if it was given in the view that made the heir the owner, or a newer one, because only then
nothing that the former owner sent can still be booked. Who asks, and how often, is trainer.py's.
"""

from __future__ import annotations

import msgspec

from shoal.core.messages import Books, Index, Peer, Stage


class Group(msgspec.Struct, eq=False):
    """Indices that one view gave me."""

    floor: int  # the number of that view: older answers do not count
    missing: dict[Peer, None]
    found: dict[Index, dict[Stage, Peer]]


class Adoptions:
    def __init__(self) -> None:
        self._groups: list[Group] = []  # floors rise

    def add(self, floor: int, members: dict[Peer, Stage], indices: list[Index]) -> None:
        self._groups.append(Group(floor, dict.fromkeys(members), {index: {} for index in indices}))

    def clear(self) -> None:
        self._groups.clear()

    def __contains__(self, index: Index) -> bool:
        return any(index in group.found for group in self._groups)

    def __len__(self) -> int:
        return sum(len(group.found) for group in self._groups)

    @property
    def floor(self) -> int:
        """What to ask for: the newest group's view satisfies all."""
        return self._groups[-1].floor

    @property
    def missing(self) -> list[Peer]:
        return list(dict.fromkeys(peer for group in self._groups for peer in group.missing))

    def hear(self, peer: Peer, books: Books) -> None:
        for group in self._groups:
            if group.floor > books.view or peer not in group.missing:
                continue
            del group.missing[peer]
            for index in books.indices:
                if index in group.found:
                    group.found[index].setdefault(books.stage, peer)

    def keep(self, members: dict[Peer, Stage], mine: dict[Index, None]) -> None:
        """A newer view: forget peers that have left and indices that are no longer mine."""
        for group in self._groups:
            group.missing = {peer: None for peer in group.missing if peer in members}
            group.found = {
                index: {stage: peer for stage, peer in at.items() if peer in members}
                for index, at in group.found.items()
                if index in mine
            }

    def take(self) -> dict[Index, dict[Stage, Peer]]:
        """Indices about which everybody has answered: where each is booked. They are held back no longer."""
        ready = [group for group in self._groups if not group.missing]
        self._groups = [group for group in self._groups if group.missing]
        return {index: at for group in ready for index, at in group.found.items()}
