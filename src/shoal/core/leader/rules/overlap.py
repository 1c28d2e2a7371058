"""Delayed updates: the next step is computed while one is averaged, and every gradient is one step late.

With Settings.staleness = 1 step s is computed with version s - 1 of the parameters, so that step s + 1 needs nothing of step s.

    View(step s, TRAINING)      s is computed
    View(step s, OVERLAPPING)   the books of s are complete and closed: s is averaged, s + 1 is computed
    View(step s + 1, TRAINING)  s is committed; s + 1 is computed, as before
    View(step s, REOPENED)      a death took books of s: what is missing of it is computed again, s + 1 waits

What replicas do with the books of two steps is hops.py's, the tensors are the driver's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.leader.facts import Facts
from shoal.core.leader.membership import on_probation, owned
from shoal.core.leader.rebalance import rebalance
from shoal.core.leader.rules.moves import before_the_next_step
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.messages import Phase, Settings, View
from shoal.core.planned import complete


def overlap(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Complete books are closed, and the next step is computed while the step is averaged.

    Not when peers wait for a step's end, to leave, to move, or to come back after they were removed: then this step is committed
    before the next one begins. What is computed is the same, for no step ever waits for the gradient of the one before."""
    opens = bool(settings.staleness) and view.started and not view.ahead and facts.rounds.open is None
    if not opens or view.step + 1 >= settings.steps or not facts.ledger(view.step).complete(view.members):
        return None
    if not view.begun and (view.fenced or _awaited(view, facts, settings, now)):
        return None
    account = view.account
    if not view.begun:
        account = msgspec.structs.replace(account, issued=account.issued + settings.microbatches)
    reason = f"step {view.step} is averaged, step {view.step + 1} {'goes on' if view.begun else 'begins'}"
    after = successor(
        view,
        [reason],
        phase=Phase.OVERLAPPING,
        since=view.number + 1,
        owners=owned(view.members, settings.count(view.step + 1), (), on_probation(view), settings),
        account=account,
    )
    return Proposal(after)


def _awaited(view: View, facts: Facts, settings: Settings, now: float) -> bool:
    """A member asks to leave, or is to move: both need a moment between two steps."""
    if any(member.peer in facts.requests.leaves for member in view.members):
        return True
    if complete(settings, view.members):
        return False
    return bool(rebalance(before_the_next_step(view.members, view.joining, view, facts, settings, now)))


def opened_again(view: View) -> dict[str, Any]:
    """What changes when the step that is being averaged is computed again, before all else."""
    return {"phase": Phase.REOPENED, "since": view.number + 1}
