"""How a peer ends: when it was asked to leave, when the run is finished, or when its device is lost or too small. For peer.py.

A finished peer waits before its process ends: a leader for its last messages to leave, a member for the leader's dismissal.
"""

from __future__ import annotations

from shoal.core.messages import Command, Finish, Leave, Settings

LAST_BEATS = 2  # that a leader waits after it has dismissed all members
LAST_SILENCES = 4  # that a member waits for its dismissal


class Departure:
    """`finished`: the machine takes no more events."""

    def __init__(self, settings: Settings) -> None:
        self.leaving = ""  # why this peer leaves the run,
        self._since = 0.0  # and since when
        self.finished = False
        self.linger_at: float | None = None  # when a finished peer stops waiting
        self._settings = settings
        self._dismissed = False

    def leave(self, reason: str, now: float) -> None:
        if not self.leaving:
            self._since = now
        self.leaving = reason

    def notice(self, now: float) -> Leave:
        """What the leader learns of it."""
        return Leave(self.leaving, int(1000 * max(0.0, now - self._since)))

    def on_finished_view(self, now: float) -> None:
        """The agreed view says that the run is finished."""
        self.linger_at = now + LAST_SILENCES * self._settings.heartbeat_timeout_s

    def on_all_dismissed(self, now: float) -> None:
        """This leader has dismissed all members. Their messages would be lost if the process ended now."""
        if not self._dismissed:
            self._dismissed = True
            self.linger_at = now + LAST_BEATS * self._settings.heartbeat_s

    def due(self, now: float) -> bool:
        """It is time to end."""
        return self.linger_at is not None and now >= self.linger_at

    def finish(self, ok: bool, reason: str) -> list[Command]:
        self.finished, self.linger_at = True, None
        return [Finish(ok=ok, reason=reason)]
