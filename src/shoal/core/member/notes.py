"""What a peer tells people of the run: changes of the view, and why nothing is committed. For peer.py."""

from __future__ import annotations

from shoal.core.messages import Command, Note, Settings, View

SAY_AGAIN_BEATS = 60  # between two notes that say why nothing is committed


class StallNotes:
    """Notes of every peer, in the words of the leader's heartbeats."""

    def __init__(self, settings: Settings) -> None:
        self.noted_at: float | None = None  # when it was last noted why nothing is committed; None: steps are committed
        self._settings = settings

    def note(self, why: str, now: float) -> list[Command]:
        """`why` nothing is committed, '' if steps are: when that changes, and again from time to time."""
        if not why:
            before, self.noted_at = self.noted_at, None
            return [Note("stall", "steps are committed again")] if before is not None else []
        if self.noted_at is not None and now - self.noted_at < SAY_AGAIN_BEATS * self._settings.heartbeat_s:
            return []
        self.noted_at = now
        return [Note("stall", why)]


def change_note(before: View | None, view: View) -> list[Command]:
    """The leader's note of a change of the view."""
    if before is None or not view.reason:
        return []
    if view.finished and not before.finished:
        return [Note("finished", view.reason)]
    if view.epoch > before.epoch:
        return [Note("recovered", view.reason)]
    if view.step > before.step:
        return [Note("skipped" if view.last is not None and view.last.skipped else "commit", view.reason)]
    if view.ahead and not before.ahead:
        return [Note("round", view.reason)]
    return [Note("removed" if _left(before, view) else "joined", view.reason)]


def _left(before: View, view: View) -> bool:
    """One is no member any more, or not even a joiner."""
    members, joining = ({one.peer for one in each} for each in (view.members, view.joining))
    return any(one.peer not in members for one in before.members) or any(
        one.peer not in members | joining for one in before.joining
    )
