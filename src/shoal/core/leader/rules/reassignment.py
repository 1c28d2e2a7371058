"""Microbatches that make no progress with their owner go to another one (stalls.py says which)."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.leader.books.stalls import Takeovers
from shoal.core.leader.facts import Facts
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.messages import Settings, View


def takeovers(view: View, facts: Facts, settings: Settings, now: float) -> Iterable[Takeovers]:
    """Who takes over the microbatches that were found to hang, and which owners are evicted instead."""
    hanging = facts.evidence.reassigning
    if not hanging or not view.owners:
        return ()
    moves = {index: why for index, why in hanging.items() if index < len(view.owners)}
    return (facts.evidence.stalls.takeovers(view, moves, facts.name),)


def reassign(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Give each of them its new owner."""
    decided = facts.evidence.takeovers
    if decided is None or decided.owners == view.owners:
        return None
    return Proposal(successor(view, decided.reasons, owners=decided.owners))
