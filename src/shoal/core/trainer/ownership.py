"""What a view gives to a trainer: which microbatches it owns, and for how long what it keeps of them is good. For trainer.py."""

from __future__ import annotations

from shoal.core.messages import Index, Peer, View

NOTHING = View(number=0, step=0, members=())  # before the first view


def owned_by(name: Peer, view: View) -> dict[Index, None]:
    return {index: None for index, at in enumerate(view.owners) if view.members[at].peer == name}


def period(view: View) -> tuple[int, int, int, bool, bool]:
    """What a trainer keeps is good for that long."""
    return view.epoch, view.work, view.since, view.started, view.finished


def begins(old: View, view: View) -> bool:
    """Without a gap in the numbers this is the step's first view, and nobody owned anything of it before, unless the step had been
    begun and left."""
    again = old.epoch == view.epoch and old.begun
    return period(old) != period(view) and view.number == old.number + 1 and old is not NOTHING and not again
