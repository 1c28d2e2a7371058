"""Hops that come before the view they belong to has come here, or while its version is being applied. For server.py.

Owners begin a step as soon as they hear of it, a moment before or after others do. Answering Busy sends their microbatches
to whoever received the view first: measured with six peers, the first to receive it served up to seven of its 24 microbatches and
the last none, and the step took 13.2 s for 8.1. Here such a hop waits; it is then handled as if the network had delivered it late.
"""

from __future__ import annotations

from shoal.core.messages import Backward, Command, Forward
from shoal.core.replica_state import ReplicaState, drop
from shoal.core.server.verdict import Request


class EarlyRequests:
    def __init__(self, replica: ReplicaState, limit: int) -> None:
        self._replica, self._limit = replica, limit
        self.held: list[Request] = []

    def keep(self, request: Request) -> bool:
        """It is early, and there is room: `ripe` returns it later."""
        if len(self.held) >= self._limit or not self._is_early(request.message):
            return False
        self.held.append(request)
        return True

    def ripe(self) -> list[Request]:
        """Those that can be judged now, in the order of their arrival."""
        done = [held for held in self.held if not self._is_early(held.message)]
        self.held = [held for held in self.held if self._is_early(held.message)]
        return done

    def forget(self) -> list[Command]:
        """I am out of the run, or serve another stage: their owners ask elsewhere."""
        held, self.held = self.held, []
        return drop(tuple(blob for one in held for blob in one.blobs))

    def _is_early(self, message: Forward | Backward) -> bool:
        replica, view = self._replica, self._replica.view
        if view is None or not replica.has_state or message.epoch != view.epoch or message.stage != replica.stage:
            return False
        return message.view > view.number or (
            message.step == view.work and replica.applying is not None and not replica.able
        )
