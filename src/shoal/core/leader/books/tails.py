"""Owners whose microbatches all others wait for at the end of a step, again and again, each time too shortly to be asked. For leader.py.

A peer whose own microbatches come 2.5 s after everybody else's, in every step of 0.3 s, is late by no rule: books stand still for less time
than anybody is judged after. It is not evicted, since it may have a poor line, and owning microbatches is no right: it rests, for ever
longer (stalls.py), and the others own what it owned.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.core.leader.ledger import Ledger
from shoal.core.leader.membership import most_resting
from shoal.core.messages import Peer, Settings, View
from shoal.core.names import key_of
from shoal.core.replica_state import owner_of

TAIL_BEATS = 2.0  # books are known to the beat
TIMES, AGE = 2, 16  # steps that it has kept waiting, of so many, before it rests; once it has rested, one


class Tail(msgspec.Struct):
    """Of the step that is computed: when it began, and whose microbatches have been the last ones since when."""

    began: float
    owners: tuple[Peer, ...] = ()
    since: float = 0.0


class Tails:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._steps = 0
        self._work = -1, -1  # epoch and step of what is computed
        self._tail: Tail | None = None  # None: the step is not watched from its beginning, or its books are whole
        self._waited: dict[str, list[int]] = {}  # steps that each key has kept waiting
        self._rested: dict[str, None] = {}

    def begin(self, view: View, now: float) -> None:
        """A step begins, or an eviction has changed who owns what in it: that is no other step."""
        work = view.epoch, view.work
        self._steps += work != self._work
        self._work, self._tail = work, Tail(now)

    def clear(self) -> None:
        """This process was stopped: what is known of this step's times is false."""
        self._tail = None

    def look(self, view: View, ledger: Ledger, now: float) -> list[Peer]:
        """Owners that are to rest now, since they have kept others waiting too often."""
        tail = self._tail
        if tail is None:
            return []
        owners = () if ledger.whole else _owners(view, ledger)
        if owners == tail.owners:
            return []
        last, tail_s = tail.owners, now - tail.since
        tail.owners, tail.since = owners, now
        if not ledger.whole:
            return []
        self._tail = None
        long = tail_s >= TAIL_BEATS * self._settings.heartbeat_s and tail_s > now - tail_s - tail.began
        few = 0 < len(last) <= most_resting(len(view.members))
        return [peer for peer in last if self._strike(key_of(peer))] if long and few else []

    def _strike(self, key: str) -> bool:
        """It has kept this step waiting: whether that is too often."""
        before = [step for step in self._waited.get(key, ()) if self._steps - AGE < step < self._steps]
        steps = [*before, self._steps]
        rests = len(steps) >= TIMES or key in self._rested
        self._waited[key] = [] if rests else steps
        if rests:
            self._rested[key] = None
        return rests

    def keep(self, present: Iterable[Peer]) -> None:
        keys = {key_of(peer) for peer in present}
        self._waited = {key: steps for key, steps in self._waited.items() if key in keys}
        self._rested = {key: None for key in self._rested if key in keys}


def _owners(view: View, ledger: Ledger) -> tuple[Peer, ...]:
    """Of what is open."""
    owners = dict.fromkeys(owner_of(view, index) for index in ledger.open_indices(view.members))
    return tuple(peer for peer in owners if peer is not None)
