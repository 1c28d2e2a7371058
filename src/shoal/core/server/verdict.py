"""What a replica does with a request for a hop: a function of the request, of the replica's standing, and of what it knows of the
microbatch. For hops.py, which carries the verdict out and alone knows whether there is room.

The order of the questions is the rule. An attempt that was declined is never taken. A backward that is here is answered and never
declined, whoever owns it by now. Only then is asked whether the view, the version and the request itself allow it.
"""

from __future__ import annotations

import msgspec

from shoal.core.messages import Backward, Forward, Peer, Settings
from shoal.core.replica_state import ReplicaState
from shoal.core.server.activation_store import needs
from shoal.core.server.jobs import wanted


class Request(msgspec.Struct, frozen=True):
    """A hop that `peer` asks for. `blobs` are those of its message; `fault` says what the driver found wrong with them."""

    peer: Peer
    message: Forward | Backward
    blobs: tuple[str, ...] = ()
    fault: str = ""

    @property
    def backward(self) -> bool:
        return isinstance(self.message, Backward)

    @property
    def name(self) -> str:
        message = self.message
        return f"{type(message).__name__} of microbatch {message.index} at stage {message.stage}"


class Facts(msgspec.Struct, frozen=True):
    """What this replica knows of the microbatch. `declined`: this attempt or a later one was; `here`: its backward is booked, runs or
    waits."""

    declined: bool
    here: bool


class Ignore(msgspec.Struct, frozen=True):
    """Say nothing: it is void, or the owner asks again."""


class AnswerFromBooks(msgspec.Struct, frozen=True):
    """It is booked, or is answered when it has run."""


class Postpone(msgspec.Struct, frozen=True):
    """Busy: the view or the version that it needs is on its way."""


class Refuse(msgspec.Struct, frozen=True):
    """It is wrong and will never be taken. `faulty`: the leader receives a complaint of its sender."""

    reason: str
    faulty: bool


class Take(msgspec.Struct, frozen=True):
    """Queue it, if there is room."""


Verdict = Ignore | AnswerFromBooks | Postpone | Refuse | Take


def judge(request: Request, name: Peer, replica: ReplicaState, settings: Settings, facts: Facts) -> Verdict:
    """Of a request that has just arrived at replica `name`."""
    view, message = replica.view, request.message
    if view is None or message.epoch != view.epoch or message.step < view.step:
        return Ignore()
    if request.backward and facts.declined:
        return Ignore()
    current, owned = message.step == view.work, replica.speaks_for(message.index, request.peer, message.view)
    if request.backward and current and facts.here:
        # never declined while it is here; the owner of a view I have not seen yet gets no answer and asks again
        return AnswerFromBooks() if owned else Ignore()
    if message.view > view.number:
        return Postpone()
    if not current or not owned or name not in replica.known.serving:
        return Ignore()
    if not replica.able:
        return Postpone()
    return _checked(request, replica, settings)


def _checked(request: Request, replica: ReplicaState, settings: Settings) -> Refuse | Take:
    message = request.message
    if message.stage != replica.stage:
        return Refuse(f"stage {message.stage} is not served here", faulty=False)
    blobs, holders = wanted(message, settings.stages)
    if request.fault:
        return Refuse(request.fault, faulty=True)
    if len(request.blobs) != blobs:
        return Refuse(f"{len(request.blobs)} blobs where {blobs} belong", faulty=True)
    if len(needs(message)) != holders:
        return Refuse(f"{len(needs(message))} holders named where {holders} belong", faulty=True)
    return Take()
