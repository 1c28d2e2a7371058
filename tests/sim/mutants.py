"""Ways to break the machines on purpose, for test_mutants.py: each undoes one rule of 'exactly once' or of the agreement.

A mutant is a function that patches a core class; a seed that no checker complains about under any mutant proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shoal.core import averaging, microbatch, quorum, rounds
from shoal.core.coordinator import Coordinator
from shoal.core.hops import Hops
from shoal.core.ledger import Ledger
from shoal.core.microbatch import Hop, Microbatch, Owned
from shoal.core.rounds import Rounds
from shoal.core.trainer import Trainer

Patch = pytest.MonkeyPatch


def accepts_a_stale_answer(patch: Patch) -> None:
    """An answer to any attempt of any step counts."""
    on_message = Trainer.on_message

    def trusting(self: Trainer, peer: str, message: Any, *rest: Any) -> Any:
        if hasattr(message, "step") and hasattr(message, "attempt"):
            message = msgspec.structs.replace(message, step=self._view.step)
        return on_message(self, peer, message, *rest)

    patch.setattr(Trainer, "on_message", trusting)
    patch.setattr(Hop, "answered_by", lambda self, peer, stage, attempt: (peer, stage) == (self.peer, self.stage))


def forgets_a_waiting_microbatch(patch: Patch) -> None:
    """One whose booking was lost is not put back."""
    wait = Owned.wait

    def forgetful(self: Owned, m: Microbatch) -> None:
        if m.place is microbatch.Place.FINISHED:
            return
        wait(self, m)

    patch.setattr(Owned, "wait", forgetful)


def averages_a_fenced_peer(patch: Patch) -> None:
    """A round goes on although a member of it has left the view."""
    patch.setattr(rounds, "fenced", lambda message, view: None)
    patch.setattr(Coordinator, "_holds", lambda self, round_: True)


def books_twice_after_a_retry(patch: Patch) -> None:
    """A slow backward is sent elsewhere like a slow forward."""

    def elsewhere(self: Trainer, m: Microbatch, hop: Hop, now: float) -> None:
        m.avoid, m.hop = hop.peer, None
        self._advance(m, now)

    patch.setattr(Trainer, "_repeat", elsewhere)


def adds_a_booked_microbatch_again(patch: Patch) -> None:
    """A server looks only at what waits or runs, not at its books, and books without looking."""
    on_hop = Hops.on_hop

    def blind(self: Hops, *arguments: Any) -> Any:
        booked, self._booked = self._booked, {}
        try:
            return on_hop(self, *arguments)
        finally:
            self._booked = {**booked, **self._booked}

    patch.setattr(Hops, "on_hop", blind)


def takes_half_for_a_majority(patch: Patch) -> None:
    def half(voters: Any, yes: set[str]) -> bool:
        voters = tuple(voters)
        return 2 * sum(voter in yes for voter in voters) >= len(voters)

    patch.setattr(quorum, "majority", half)


def keeps_a_fenced_peers_books(patch: Patch) -> None:
    patch.setattr(Ledger, "forget", lambda self, peer: 0)


def adopts_without_asking_for_books(patch: Patch) -> None:
    def at_once(self: Trainer, indices: list[int], now: float) -> None:
        self._own({index: {} for index in indices})

    patch.setattr(Trainer, "_adopt", at_once)


def applies_what_it_does_not_hold(patch: Patch) -> None:
    """A replica takes every commit for its own."""
    patch.setattr(Rounds, "holds", lambda self, last: True)


def commits_before_all_is_booked(patch: Patch) -> None:
    """The leader lets one booking lack, and the replicas do not object."""
    init = Ledger.__init__

    def generous(self: Ledger, stages: int, microbatches: int) -> None:
        init(self, stages, microbatches)
        self.booked = 1

    patch.setattr(Ledger, "__init__", generous)
    patch.setattr(Ledger, "complete", lambda self, members: True)
    patch.setattr(averaging, "_coverage", lambda group, microbatches: "")


MUTANTS: list[Callable[[Patch], None]] = [
    accepts_a_stale_answer,
    forgets_a_waiting_microbatch,
    averages_a_fenced_peer,
    books_twice_after_a_retry,
    adds_a_booked_microbatch_again,
    takes_half_for_a_majority,
    keeps_a_fenced_peers_books,
    adopts_without_asking_for_books,
    applies_what_it_does_not_hold,
    commits_before_all_is_booked,
]
