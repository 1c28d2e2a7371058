"""The hops of one replica: which requests are taken, which one runs next, what is booked and what is answered.

For server.py. Every microbatch is booked at most once: a repeated request is answered from the books, and an attempt that was
once answered with Cancelled, Busy or Refused is never taken afterwards, because its owner may have gone elsewhere with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.messages import (
    AskBooks,
    Backward,
    Booking,
    Books,
    Busy,
    Cancel,
    Cancelled,
    Command,
    Complaint,
    Do,
    Done,
    Drop,
    Failed,
    Forward,
    Gradient,
    Index,
    Output,
    Peer,
    Recall,
    Refused,
    RunBackward,
    RunForward,
    Send,
    Settings,
    View,
)
from shoal.core.routing import BACKWARD_SIZE, Latency
from shoal.core.seat import TEXT, Seat, drop, owner_of

SOON = 0.1  # of a beat: the wait asked for while a view or a version is on its way
DECLINED_PER_MICROBATCH = 8  # attempts remembered; beyond that a request from a view not seen yet gets no answer


class Job(msgspec.Struct, frozen=True):
    """A hop that waits or runs here. `sender` sent what is computed; `reply` gets the answer, under `attempt`."""

    message: Forward | Backward
    sender: Peer
    blobs: tuple[str, ...]
    reply: Peer
    attempt: int
    task: str = ""
    out: str = ""

    @property
    def backward(self) -> bool:
        return isinstance(self.message, Backward)

    @property
    def key(self) -> tuple[bool, Index]:
        """Backwards first: they free memory here and at the owner. Then the older microbatch."""
        return not self.backward, self.message.index


class Hops:
    def __init__(self, name: Peer, settings: Settings, serial: Iterator[int], seat: Seat) -> None:
        self.books: tuple[Booking, ...] = ()
        self._name, self._settings, self._serial, self._seat = name, settings, serial, seat
        self._queue: dict[tuple[bool, Index], Job] = {}
        self._running: Job | None = None
        self._void: dict[str, Job] = {}  # running, but of a step or a seat that is over
        self._booked: dict[Index, tuple[Booking, str]] = {}  # with the kept gradient of the input, '' at stage 0
        self._declined: dict[
            tuple[Peer, int, Index], int
        ] = {}  # (owner, step, index) -> no attempt up to this is taken
        self._asks: dict[Peer, AskBooks] = {}
        self._forward_s, self._backward_s = Latency(), Latency()

    @property
    def adding(self) -> bool:
        """A backward is being added to my sum."""
        return self._running is not None and self._running.backward

    @property
    def queue_s(self) -> float:
        """Seconds of work waiting or running here, as measured."""
        jobs = [*self._queue.values(), *([self._running] if self._running else [])]
        return sum(self._seconds(job.backward) for job in jobs)

    @property
    def rate(self) -> float:
        """Microbatches per second, forward and backward, when busy; 0 before anything is known."""
        seconds = self._seconds(False) + self._seconds(True)
        return 1.0 / seconds if seconds > 0 else 0.0

    def _seconds(self, backward: bool) -> float:
        """Of one hop: measured, else the other direction's by the ratio of their work, else as planned."""
        own, other = (self._backward_s, self._forward_s) if backward else (self._forward_s, self._backward_s)
        if own.value is not None:
            return own.value
        if other.value is not None:
            return other.value * (BACKWARD_SIZE if backward else 1 / BACKWARD_SIZE)
        planned = self._settings.stage_seconds
        whole = planned[self._seat.stage] if self._seat.stage < len(planned) else 0.0
        return whole * (BACKWARD_SIZE if backward else 1.0) / (1.0 + BACKWARD_SIZE)

    # ---------------------------------------------------------------------------------------------- views and state

    def on_view(self, before: View | None, view: View) -> list[Command]:
        """Members left and their microbatches have new owners: nothing more is begun for the old ones."""
        if before is None or view.epoch != before.epoch:
            self._declined.clear()
        elif view.step != before.step:
            self._declined = {key: attempt for key, attempt in self._declined.items() if key[1] >= view.step}
        commands: list[Command] = []
        for key, job in list(self._queue.items()):
            if owner_of(view, job.message.index) != job.sender:
                del self._queue[key]
                commands += drop(job.blobs)
        return commands

    def forget(self) -> tuple[list[Command], bool]:
        """The step is over, or what I hold of it is void. Also whether anything is or will be in the sum."""
        blobs = [blob for job in self._queue.values() for blob in job.blobs]
        blobs += [out for _, out in self._booked.values() if out]
        dirty = bool(self.books) or self.adding
        if self._running is not None:
            self._void[self._running.task] = self._running
        self._queue, self._booked, self.books, self._running = {}, {}, (), None
        return drop(tuple(blobs)), dirty

    def measure_anew(self) -> None:
        """Another stage takes other seconds."""
        self._forward_s, self._backward_s = Latency(), Latency()

    # ----------------------------------------------------------------------------------------------------- requests

    def on_hop(self, peer: Peer, message: Forward | Backward, blobs: tuple[str, ...], fault: str) -> list[Command]:
        """Take it, answer it from the books, decline it for good, or ignore it."""
        view, index, soon = self._seat.view, message.index, self._settings.beat_s * SOON
        if view is None or message.epoch != view.epoch or message.step < view.step:
            return drop(blobs)
        backward, current, owned = (
            isinstance(message, Backward),
            message.step == view.step,
            owner_of(view, index) == peer,
        )
        if backward and message.attempt <= self._declined.get((peer, message.step, index), -1):
            return drop(blobs)
        if isinstance(message, Backward) and current and (index in self._booked or self._here(index)):
            # never declined while it is here; the owner of a view I have not seen yet gets no answer and asks again
            return drop(blobs) + (self._again(peer, message) if owned else [])
        if message.view > view.number:
            return drop(blobs) + self._busy(peer, message, soon)
        if not current or not owned or self._name not in self._seat.known.serving:
            return drop(blobs)
        if not self._seat.current:
            return drop(blobs) + self._busy(peer, message, soon)
        if message.stage != self._seat.stage:
            return drop(blobs) + self._refuse(peer, message, f"stage {message.stage} is not served here")
        wanted = 2 if backward and self._settings.stages > 1 else 1
        if fault or len(blobs) != wanted:
            reason = fault or f"{len(blobs)} blobs where {wanted} belong"
            return drop(blobs) + self._refuse(peer, message, reason) + self._complain(peer, message, reason)
        job = Job(message, peer, blobs, peer, message.attempt)
        if job.key in self._queue or self._is_running(job):
            return self._replace(job)
        if len(self._queue) >= self._settings.queue_limit:
            return drop(blobs) + self._busy(peer, message, max(self.queue_s, soon))
        self._queue[job.key] = job
        return []

    def _here(self, index: Index) -> Job | None:
        """The backward of that microbatch that runs or waits."""
        if self._running is not None and self._running.key == (False, index):
            return self._running
        return self._queue.get((False, index))

    def _again(self, peer: Peer, message: Backward | Recall | Cancel) -> list[Command]:
        """Its owner asks after a backward that is booked, or will be answered when it has run."""
        if message.index in self._booked:
            return self._gradient(peer, message.index, message.attempt)
        job = self._here(message.index)
        assert job is not None
        attempt = max(job.attempt, message.attempt) if job.reply == peer else message.attempt
        job = msgspec.structs.replace(job, reply=peer, attempt=attempt)
        if job.task:
            self._running = job
        else:
            self._queue[job.key] = job
        return []

    def _is_running(self, job: Job) -> bool:
        return self._running is not None and (self._running.key, self._running.sender) == (job.key, job.sender)

    def _replace(self, job: Job) -> list[Command]:
        """A forward sent again: the newer attempt counts. If it runs it is not begun anew, only answered under that number."""
        queued = self._queue.get(job.key)
        if queued is not None and job.attempt > queued.attempt:
            self._queue[job.key] = job
            return drop(queued.blobs)
        if queued is None and self._running is not None:
            attempt = max(self._running.attempt, job.attempt)
            self._running = msgspec.structs.replace(self._running, attempt=attempt)
        return drop(job.blobs)

    def on_cancel(self, peer: Peer, message: Recall | Cancel) -> list[Command]:
        """Both ask: is it booked? Cancelled is final, so whatever waits under that attempt or an older one is dropped."""
        view, index = self._seat.view, message.index
        if view is None or (message.epoch, message.step) != (view.epoch, view.step) or owner_of(view, index) != peer:
            return []
        if not self._seat.current or message.stage != self._seat.stage:
            return []  # no answer I could keep to; the owner asks again
        running = self._running is not None and self._running.key == (False, index)
        if running or index in self._booked:
            return self._again(peer, message)
        self._decline(peer, message.step, index, message.attempt)
        queued = self._queue.get((False, index))
        commands: list[Command] = []
        if queued is not None and queued.attempt <= message.attempt:
            del self._queue[queued.key]
            commands = drop(queued.blobs)
        return [*commands, Send(peer, Cancelled(*_hop(message)))]

    def on_ask_books(self, peer: Peer, message: AskBooks) -> list[Command]:
        view = self._seat.view
        if view is None or message.epoch != view.epoch or message.step < view.step:
            return []
        if peer not in self._seat.known.serving:
            return []
        self._asks[peer] = message
        return self.answer_asks()

    def answer_asks(self) -> list[Command]:
        """Only when no former owner's backward can be booked any more after the answer."""
        view, job = self._seat.view, self._running
        serving = self._seat.known.serving
        stage = serving.get(self._name)
        if view is None or stage is None:
            return []
        if job is not None and job.backward and owner_of(view, job.message.index) != job.sender:
            return []
        indices = tuple(booking.index for booking in self.books)
        commands: list[Command] = []
        for peer, ask in list(self._asks.items()):
            if ask.view > view.number:
                continue
            del self._asks[peer]
            if (ask.epoch, ask.step) == (view.epoch, view.step) and peer in serving:
                commands.append(Send(peer, Books(view.epoch, view.step, view.number, stage, indices)))
        return commands

    # ------------------------------------------------------------------------------------------------------ answers

    def _gradient(self, peer: Peer, index: Index, attempt: int) -> list[Command]:
        booking, out = self._booked[index]
        seat = self._seat
        message = Gradient(seat.epoch, seat.step, index, seat.stage, attempt, booking.loss)
        return [Send(peer, message, (out,) if out else ())]

    def _busy(self, peer: Peer, message: Forward | Backward, wait_s: float) -> list[Command]:
        backward = isinstance(message, Backward)
        if backward and not self._decline(peer, message.step, message.index, message.attempt):
            return []
        return [Send(peer, Busy(*_hop(message), backward=backward, wait_s=wait_s))]

    def _refuse(self, peer: Peer, message: Forward | Backward, reason: str, attempt: int = 0) -> list[Command]:
        backward, attempt = isinstance(message, Backward), max(attempt, message.attempt)
        if backward and not self._decline(peer, message.step, message.index, attempt):
            return []
        epoch, step, index, stage, _ = _hop(message)
        return [Send(peer, Refused(epoch, step, index, stage, attempt, backward, reason[:TEXT]))]

    def _decline(self, peer: Peer, step: int, index: Index, attempt: int) -> bool:
        """Remember that this attempt is never taken; False when memory is used up, and then nothing may be answered."""
        key, view = (peer, step, index), self._seat.view
        known = view is not None and owner_of(view, index) == peer and step == view.step
        room = len(self._declined) < DECLINED_PER_MICROBATCH * self._settings.microbatches
        if key not in self._declined and not known and not room:
            return False
        self._declined[key] = max(attempt, self._declined.get(key, -1))
        return True

    def _complain(self, peer: Peer, message: Forward | Backward, reason: str) -> list[Command]:
        if self._seat.leader is None:
            return []
        what = f"{type(message).__name__} of microbatch {message.index} at stage {message.stage}: {reason}"
        return [Send(self._seat.leader, Complaint(peer, what[:TEXT]))]

    # -------------------------------------------------------------------------------------------------------- tasks

    def start(self, cutting: bool) -> list[Command]:
        """One hop at a time. While my sum is being cut nothing is added to it."""
        if self._running is not None or not self._seat.ready:
            return []
        keys = [key for key, job in self._queue.items() if not (job.backward and cutting)]
        if not keys:
            return []
        job = self._queue.pop(min(keys))
        out = "" if job.backward and self._seat.stage == 0 else self._id()
        self._running = job = msgspec.structs.replace(job, task=self._id(), out=out)
        step, index, stage, x = job.message.step, job.message.index, self._seat.stage, job.blobs[0]
        if job.backward:
            grad = job.blobs[1] if len(job.blobs) > 1 else ""
            return [Do(RunBackward(job.task, step, index, stage, x, grad, out))]
        return [Do(RunForward(job.task, step, index, stage, x, out))]

    def on_done(self, done: Done) -> list[Command] | None:
        """None: not a task of mine."""
        job = self._void.pop(done.id, None)
        if job is not None:
            return drop(job.blobs + ((job.out,) if job.out else ()))
        if self._running is None or self._running.task != done.id:
            return None
        job, self._running = self._running, None
        return (self._book(job, done) if job.backward else self._put_out(job, done)) + drop(job.blobs)

    def on_failed(self, failed: Failed) -> list[Command] | None:
        """A hop that failed here left the sum as it was; its owner may try again elsewhere. None: not a task of mine."""
        job = self._void.pop(failed.id, None)
        if job is not None:
            return drop(job.blobs)
        if self._running is None or self._running.task != failed.id:
            return None
        job, self._running = self._running, None
        return self._refuse(job.reply, job.message, failed.reason, job.attempt) + drop(job.blobs)

    def _book(self, job: Job, done: Done) -> list[Command]:
        index = job.message.index
        assert index not in self._booked, f"microbatch {index} would be booked twice"
        booking = Booking(index, done.result.loss)
        self._booked[index] = booking, job.out
        self.books += (booking,)
        self._backward_s.add(done.seconds)
        return self._gradient(job.reply, index, job.attempt)

    def _put_out(self, job: Job, done: Done) -> list[Command]:
        self._forward_s.add(done.seconds)
        epoch, step, index, stage, _ = _hop(job.message)
        return [Send(job.reply, Output(epoch, step, index, stage, job.attempt), (job.out,)), Drop((job.out,))]

    def _id(self) -> str:
        return f"s/{next(self._serial)}"


def _hop(message: Forward | Backward | Recall | Cancel) -> tuple[int, int, int, int, int]:
    return message.epoch, message.step, message.index, message.stage, message.attempt
