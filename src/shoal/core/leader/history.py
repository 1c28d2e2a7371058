"""What a leader remembers of times and of its own decisions. For facts.py; forgotten with the leader."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.leader.ledger import Ledger
from shoal.core.leader.rebalance import Move
from shoal.core.messages import Peer, View

FADES = 0.95  # from step to step: what a peer has shown
MOVES_KEPT = 256  # decided moves: older ones restrict no peer any more


class History:
    """Times and decisions that the leader remembers."""

    def __init__(self) -> None:
        self.step_at: float | None = None  # when this step began, as far as this leader saw it
        self.step_s = math.inf  # what the step before took
        self.complete_at: float | None = None  # since when this step's books are complete
        self.held_since: dict[str, float] = {}  # by rule: since when what it waits for has been so
        self.due: dict[str, float] = {}  # by rule: not to be asked earlier
        self.waited_s: dict[Peer, float] = {}  # joiners: how long steps have waited for them
        self.moves: tuple[Move, ...] = ()  # decided before
        self.norms: tuple[float, ...] = ()  # squared, of each stage's last gradient
        self._paces: Mapping[Peer, float] = {}  # microbatches per second that peers have shown

    def on_step(self, before: View | None, ledger: Ledger, now: float) -> None:
        """A step begins after the one of `before`, whose ledger that is."""
        self._paces = self.booked_paces(ledger)
        if before is not None and before.started and self.step_at is not None:
            self.step_s = now - self.step_at
        self.step_at, self.complete_at = None, None

    def booked_paces(self, ledger: Ledger) -> Mapping[Peer, float]:
        """Microbatches per second that each member has booked in a step, at best; also in this one, if its books are complete. A step in
        which somebody dies takes long and says little."""
        if self.complete_at is None or self.step_at is None:
            return self._paces
        seconds = max(self.complete_at - self.step_at, 1e-3)
        paces = {peer: len(booked) / seconds for peer, booked in ledger.books.items()}
        return {peer: max(pace, FADES * self._paces.get(peer, 0.0)) for peer, pace in paces.items()}

    def since(self, rule: Callable[..., Any]) -> float:
        """Since when what that rule waits for has been so."""
        return self.held_since[rule.__name__]

    def remember(self, moves: tuple[Move, ...], norms: tuple[float, ...]) -> None:
        """Moves that were decided; norms of a commit."""
        self.moves = (*self.moves, *moves)[-MOVES_KEPT:]
        self.norms = norms or self.norms

    def rest_s(self, share: float, now: float) -> float:
        """Seconds until this step's books are complete, if they fill as they have so far; as long as the last step when they are empty.
        `share`: the part of them that is booked."""
        if self.step_at is None:
            return 0.0
        passed_s = now - self.step_at
        if share:
            return passed_s * (1.0 - share) / share
        return max(passed_s, self.step_s) if self.step_s < math.inf else passed_s
