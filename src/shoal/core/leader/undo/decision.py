"""Whether the run goes back because a peer was evicted for false values, how far, and what that costs.

Back to the newest checkpoint that holds nothing of the peer but what checks have passed. Not at any price: whoever lies could otherwise
have the run go back again and again, with a new key each time. So the steps that evictions undo are at most a tenth of all that are
trained, beside a few at the beginning. What cannot be undone stays, and is said. For rules/removal.py.
docs/design/2026-11-24-undo.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from shoal.core.messages import Peer, Settings, Undoing, View
from shoal.core.names import key_of

MOST = 0.1  # of the steps that are trained: those that evictions undo
FEW, INTERVALS = 16, 2  # steps, and intervals of checkpoints, that they may undo in any case


class Decision(msgspec.Struct, frozen=True):
    """`back_to`: the version to go back to; None: the run goes on. `words`: why, '' where there is nothing to undo."""

    back_to: int | None = None
    words: str = ""
    undoing: Undoing | None = None  # of the view that goes back


def decide(view: View, false: Collection[Peer], known: Undoing, step_s: float, settings: Settings) -> Decision:
    """What becomes of what these peers contributed; they are evicted for false values. `known`: what the view says, and what has been
    found since; `step_s`: what the last step took."""
    if settings.undo == "none" or not settings.checks_values or not false:
        return Decision()
    keys = {key_of(peer) for peer in false}
    since = min((one.since for one in known.unchecked if one.key in keys), default=view.step)
    if since >= view.step:
        return Decision()
    what = f"what {' and '.join(sorted(false))} contributed since step {since}, of which no check has passed,"
    able = [step for step in (*known.saves, *(() if settings.first_step else (0,))) if step <= since]
    if not able:
        return Decision(words=f"{what} stays: no checkpoint is as old")
    steps, bound = view.step - max(able), most(view, known, settings)
    if known.steps + steps > bound:
        before = f" after {known.steps}" if known.steps else ""
        words = f"{what} stays: {steps} steps{before} would be undone for evictions, and at most {bound} may be"
        return Decision(words=words)
    seconds = f", about {steps * step_s:.0f} s of training," if step_s < math.inf else ""
    back = f"back from step {view.step} to the state of step {max(able)}"
    words = f"{what} is undone: {back}, {steps} steps{seconds} are trained again"
    counts = {"times": known.times + 1, "steps": known.steps + steps, "epoch": view.epoch + 1}
    return Decision(max(able), words, msgspec.structs.replace(known, **counts))


def most(view: View, known: Undoing, settings: Settings) -> int:
    """Steps that evictions may undo in this session, those that they have undone included."""
    trained = view.step - settings.first_step + known.steps
    return max(FEW, INTERVALS * settings.save_every, int(MOST * trained))
