"""Microbatches that come from another owner, held back until every member has shown its books. For trainer.py.

An owner that vanished may have backwards booked anywhere. The one that takes over asks every member for its books and goes on from
there; an answer counts only if it was given in the view that made it the owner, or a newer one, because only then
nothing that the former owner sent can still be booked. Asking is trainer.py's.
"""

from __future__ import annotations

import msgspec

from shoal.core.messages import Books, Index, Peer, Stage

# BooksRequest is first repeated after min_request_timeout_s / 8: every microbatch taken over waits for it
BOOKS_AGAIN = 8


class Group(msgspec.Struct, eq=False):
    """Indices that one view gave me."""

    floor: int  # the number of that view: older answers do not count
    missing: dict[Peer, None]
    booked_at: dict[Index, dict[Stage, Peer]]


class Takeovers:
    def __init__(self) -> None:
        self._groups: list[Group] = []  # floors rise
        self._again = 1.0 / BOOKS_AGAIN  # of min_request_timeout_s, until the question is repeated

    def add(self, floor: int, members: dict[Peer, Stage], indices: list[Index]) -> None:
        self._again = 1.0 / BOOKS_AGAIN
        self._groups.append(Group(floor, dict.fromkeys(members), {index: {} for index in indices}))

    def clear(self) -> None:
        self._groups.clear()

    def __contains__(self, index: Index) -> bool:
        return any(index in group.booked_at for group in self._groups)

    def __len__(self) -> int:
        return sum(len(group.booked_at) for group in self._groups)

    @property
    def floor(self) -> int:
        """What to ask for: the newest group's view satisfies all."""
        return self._groups[-1].floor

    @property
    def missing(self) -> list[Peer]:
        return list(dict.fromkeys(peer for group in self._groups for peer in group.missing))

    def pause_s(self, floor_s: float) -> float:
        """Until those who are missing are asked again: longer every time."""
        again, self._again = self._again, min(2 * self._again, 1.0)
        return again * floor_s

    def hear(self, peer: Peer, books: Books) -> None:
        for group in self._groups:
            if group.floor > books.view or peer not in group.missing:
                continue
            del group.missing[peer]
            for index in books.indices:
                if index in group.booked_at:
                    group.booked_at[index].setdefault(books.stage, peer)

    def keep(self, members: dict[Peer, Stage], mine: dict[Index, None]) -> None:
        """A newer view: forget peers that have left and indices that are no longer mine."""
        for group in self._groups:
            group.missing = {peer: None for peer in group.missing if peer in members}
            group.booked_at = {
                index: {stage: peer for stage, peer in at.items() if peer in members}
                for index, at in group.booked_at.items()
                if index in mine
            }

    def take(self) -> dict[Index, dict[Stage, Peer]]:
        """Indices about which everybody has answered: where each is booked. They are held back no longer."""
        ready = [group for group in self._groups if not group.missing]
        self._groups = [group for group in self._groups if group.missing]
        return {index: at for group in ready for index, at in group.booked_at.items()}
