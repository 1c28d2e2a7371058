"""Since which step the parameters hold contributions of each key that no check has passed, and which checkpoints there are.

It is part of the View (`View.undoing`), so that every leader knows it and none has to be believed by heart: a key's contributions are
unchecked from the first step that it serves in, and after a check that passed from the step after that one. Whoever leaves stays listed
while there is room: a liar that leaves and comes back does not begin anew. For leader.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from shoal.core.messages import Peer, Settings, Unchecked, Undoing, View
from shoal.core.names import key_of

KEPT = 256  # keys of peers that have left


class Values:
    """What checks of values have shown this leader: which peers sent false ones, and at which step a check of each key last passed.

    Whoever checks values calls `Facts.convict(verdict, false=True)` and `Values.passes(peer, step)`; nothing else is needed here."""

    def __init__(self) -> None:
        self.false: set[Peer] = set()
        self.passed: dict[str, int] = {}  # by key

    def passes(self, peer: Peer, step: int) -> None:
        """A check of what that peer contributed to `step` has passed."""
        key = key_of(peer)
        self.passed[key] = max(step, self.passed.get(key, 0))

    def on_view(self, before: View | None, view: View, present: Iterable[Peer]) -> None:
        """Steps of another epoch are trained again; nothing is kept of peers that have left."""
        if before is not None and before.epoch != view.epoch:
            self.passed.clear()
        remaining = set(present)
        self.false &= remaining
        keys = {key_of(peer) for peer in remaining}
        self.passed = {key: step for key, step in self.passed.items() if key in keys}


def tracked(after: View, passed: Mapping[str, int], published: int, settings: Settings) -> Undoing:
    """What `after`, the next view, is to say. `passed`: by key, the step at which a check of it passed last; `published`: version of the
    newest checkpoint."""
    known = after.undoing or Undoing(saves=(settings.first_step,) if settings.first_step else ())
    present = dict.fromkeys(key_of(member.peer) for member in after.members)  # ordered as the view, which a set is not
    since = {one.key: min(one.since, after.work) for one in known.unchecked}
    for key in present:
        begins = since.get(key, after.work)
        since[key] = max(begins, min(passed[key] + 1, after.work)) if key in passed else begins
    left = [key for key, step in since.items() if key not in present and step < after.step]
    kept = {*present, *left[-KEPT:]}
    saves = [step for step in known.saves if step <= after.step]
    if max(saves, default=0) < published <= after.step:
        saves.append(published)
    return msgspec.structs.replace(
        known,
        unchecked=tuple(Unchecked(key, step) for key, step in since.items() if key in kept),
        saves=tuple(saves[-settings.keep :]),
    )
