"""What a replica knows of its hops besides the tensors: the jobs that wait or run, what it has booked and declined for good, its pace.

For hops.py, which decides with them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

import msgspec

from shoal.core.latency import Latency
from shoal.core.messages import Backward, Booking, Cancel, Forward, Index, Peer, Query, Recall, Settings, View
from shoal.core.replica_state import ReplicaState, owner_of
from shoal.core.server.activation_store import Key, needs
from shoal.core.trainer.routing import BACKWARD_SIZE

DECLINED_PER_MICROBATCH = 8  # attempts remembered; beyond that a request from a view not seen yet gets no answer


class Book(msgspec.Struct):
    """What is in one step's sum, in the order in which it was added."""

    entries: tuple[Booking, ...] = ()
    kept: dict[Index, Booking] = msgspec.field(default_factory=dict)


class Job(msgspec.Struct, frozen=True):
    """A hop that waits or runs here. `sender` sent it with `blobs`; `reply` gets the answer, under `attempt`. `needs`: what it reads from
    the activation store, and who are said to hold it. `key`: backwards first, as they free memory here and at the owner; then the older
    microbatch."""

    message: Forward | Backward
    sender: Peer
    blobs: tuple[str, ...]
    reply: Peer
    attempt: int
    needs: dict[Key, tuple[Peer, ...]]
    backward: bool
    key: tuple[bool, Index]
    task: str = ""
    out: str = ""

    def complete(self, held: Container[Key]) -> bool:
        """All that it reads is `held`."""
        for key in self.needs:
            if key not in held:
                return False
        return True


def job_of(message: Forward | Backward, sender: Peer, blobs: tuple[str, ...]) -> Job:
    """What that message asks for."""
    backward = isinstance(message, Backward)
    key = not backward, message.index
    return Job(message, sender, blobs, sender, message.attempt, needs(message), backward, key)


def hop_of(message: Forward | Backward | Recall | Cancel | Query) -> tuple[int, int, int, int, int]:
    """The fields that every answer begins with."""
    return message.epoch, message.step, message.index, message.stage, message.attempt


def wanted(message: Forward | Backward, stages: int) -> tuple[int, int]:
    """How many blobs come with that request, and how many inputs are in the activation store or will be."""
    backward, last = isinstance(message, Backward), stages - 1
    first, top = message.stage == 0, backward and message.stage == last
    return int(first or top), int(not first) + int(backward and not top)


class Declined:
    """(owner, step, index) -> no attempt up to this is taken: its owner may have gone elsewhere with it."""

    def __init__(self, settings: Settings, replica: ReplicaState) -> None:
        self._room = DECLINED_PER_MICROBATCH * (settings.microbatches + settings.heldout)
        self._replica = replica
        self._upto: dict[tuple[Peer, int, Index], int] = {}

    def on_view(self, before: View | None, view: View) -> None:
        if before is None or view.epoch != before.epoch:
            self._upto.clear()
        elif view.step != before.step:
            self._upto = {key: attempt for key, attempt in self._upto.items() if key[1] >= view.step}

    def has(self, peer: Peer, hop: tuple[int, int, int, int, int]) -> bool:
        """`hop` as `hop_of` gives it: this attempt, or a later one, was declined."""
        _, step, index, _, attempt = hop
        return attempt <= self._upto.get((peer, step, index), -1)

    def add(self, peer: Peer, step: int, index: Index, attempt: int) -> bool:
        """Remember that this attempt is never taken; False when memory is used up, and then nothing may be answered."""
        key, view = (peer, step, index), self._replica.view
        known = view is not None and owner_of(view, index) == peer and step == view.work
        if key not in self._upto and not known and len(self._upto) >= self._room:
            return False
        self._upto[key] = max(attempt, self._upto.get(key, -1))
        return True


class Pace:
    """Seconds of one hop here: measured, else the other direction's by the ratio of their work, else as planned."""

    def __init__(self, settings: Settings, replica: ReplicaState) -> None:
        self._settings, self._replica = settings, replica
        self.measure_anew()

    def measure_anew(self) -> None:
        """Another stage takes other seconds."""
        self._forward_s, self._backward_s = Latency(), Latency()

    def add(self, backward: bool, seconds: float) -> None:
        (self._backward_s if backward else self._forward_s).add(seconds)

    def seconds(self, backward: bool) -> float:
        own, other = (self._backward_s, self._forward_s) if backward else (self._forward_s, self._backward_s)
        if (seconds := own.value) is not None:
            return seconds
        if (seconds := other.value) is not None:
            return seconds * (BACKWARD_SIZE if backward else 1 / BACKWARD_SIZE)
        planned = self._settings.stage_seconds
        whole = planned[self._replica.stage] if self._replica.stage < len(planned) else 0.0
        size = BACKWARD_SIZE + (0.0 if self._last else 1.0)
        return whole * (BACKWARD_SIZE if backward else 1.0) / size

    def whole_s(self, jobs: Collection[Job]) -> float:
        """Of all these."""
        if not jobs:
            return 0
        forward_s, backward_s = self.seconds(False), self.seconds(True)
        return sum([backward_s if job.backward else forward_s for job in jobs])

    @property
    def rate(self) -> float:
        """Microbatches per second when busy: a forward and a backward of each, but at the last stage a backward alone. 0: not known yet."""
        seconds = self.seconds(True) + (0.0 if self._last else self.seconds(False))
        return 1.0 / seconds if seconds > 0 else 0.0

    @property
    def _last(self) -> bool:
        return self._replica.stage == self._settings.stages - 1


def next_of(
    queue: Mapping[tuple[bool, Index], Job], held: Container[Key], cutting: int | None
) -> tuple[bool, Index] | None:
    """The hop to run of those that wait; no backward of the step whose sum is being cut. None: nothing can run."""
    first: tuple[bool, Index] | None = None
    for key, job in queue.items():
        waits = job.backward and job.message.step == cutting
        if (first is None or key < first) and not waits and job.complete(held):
            first = key
    return first
