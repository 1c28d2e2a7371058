"""The hops of one replica: which requests are taken, which one runs next, what is booked and what is answered.

For server.py. Every microbatch is booked at most once: a repeated request is answered from the books, and an attempt that was
once answered with Cancelled, Busy, Refused or Missing is never taken afterwards, because its owner may have gone elsewhere with it.
Inputs and results lie in the activation store (activation_store.py): a hop runs when all that it needs is there.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.messages import (
    AuditRequest,
    Backward,
    BlobRef,
    Booker,
    BookerRequest,
    Booking,
    Books,
    BooksRequest,
    BoundaryTensor,
    Busy,
    Cancel,
    Cancelled,
    Command,
    Do,
    Done,
    Failed,
    Forward,
    Gradient,
    Index,
    Missing,
    NonFinite,
    Output,
    Peer,
    Pending,
    Query,
    Recall,
    Refused,
    RunBackward,
    RunForward,
    Send,
    Settings,
    TensorGone,
    TensorPending,
    TensorRequest,
    View,
)
from shoal.core.replica_state import TEXT, ReplicaState, complain, drop, owner_of
from shoal.core.server.activation_store import ActivationStore, Key, keys_of, needs
from shoal.core.server.audits import Audits
from shoal.core.server.jobs import Book, Declined, Job, Pace, hop_of, job_of, next_of
from shoal.core.server.verdict import AnswerFromBooks, Facts, Postpone, Refuse, Request, Take, judge
from shoal.core.timers import soonest

SOON = 0.1  # of a beat: the wait asked for while a view or a version is on its way
STUCK = 4.0  # of min_request_timeout_s without a booking while the store is full: then unused tensors go, too


class Hops:
    def __init__(self, name: Peer, settings: Settings, serial: Iterator[int], replica: ReplicaState) -> None:
        self._name, self._settings, self._serial, self._replica = name, settings, serial, replica
        self._queue: dict[tuple[bool, Index], Job] = {}
        self._running: Job | None = None
        self._void: dict[str, Job] = {}  # running, but of a step or a state that is void
        # By step: of the one computed and, with delayed updates, of the one beside it
        self._books: dict[int, Book] = {}
        self._declined = Declined(settings, replica)
        self._asks: dict[Peer, BooksRequest] = {}
        self.pace = Pace(settings, replica)
        self.store = ActivationStore(name, settings, replica)
        self.audits = Audits(name, settings, serial, replica, self.store)
        self._freed_at = 0.0  # last booking, or when room was made by force

    def adding(self, step: int) -> bool:
        """A backward is being added to my sum of that step."""
        return self._running is not None and self._running.backward and self._running.message.step == step

    def running(self, step: int) -> bool:
        """A hop of that step runs."""
        return self._running is not None and self._running.message.step == step

    @property
    def busy(self) -> bool:
        """A hop runs, or could."""
        return bool(self._running or self._void) or any(job.complete(self.store.held) for job in self._queue.values())

    def books(self, step: int) -> tuple[Booking, ...]:
        """What I have booked of that step."""
        book = self._books.get(step)
        return book.entries if book is not None else ()

    @property
    def _booked(self) -> dict[Index, Booking]:
        """What I have booked of the step that is computed."""
        view = self._replica.view
        return self._book_of(view.work).kept if view is not None else {}

    def _book_of(self, step: int) -> Book:
        return self._books.get(step) or self._books.setdefault(step, Book())

    @property
    def deadline(self) -> float | None:
        return soonest(self.store.deadline, self.audits.deadline if self.audits.jobs else None)

    @property
    def queue_s(self) -> float:
        """Seconds of work waiting or running here, as measured."""
        return self.pace.whole_s([*self._queue.values(), *([self._running] if self._running else [])])

    # ---------------------------------------------------------------------------------------------- views and state

    def on_view(self, before: View | None, view: View, now: float) -> list[Command]:
        """Members left and their microbatches have new owners: nothing more is begun for the old ones."""
        self._declined.on_view(before, view)
        commands: list[Command] = []
        for key, job in list(self._queue.items()):
            if self._void_by_owner(job):
                del self._queue[key]
                commands += drop(job.blobs)
        if before is not None and view.epoch != before.epoch:
            commands += self.store.turn(everything=True, read=())
        return commands + self.audits.on_view(view, now) + self.store.on_view(now) + self._send_missing()

    def forget(self, everything: bool) -> tuple[list[Command], bool]:
        """The step is over, or (`everything`) what I hold of it is void. Also whether anything is or will be in the sum."""
        blobs = tuple(blob for job in self._queue.values() for blob in job.blobs)
        adding = self._running is not None and self._running.backward
        dirty = any(book.entries for book in self._books.values()) or adding
        read = self._disown()
        self._queue, self._books = {}, {}
        return drop(blobs) + self.audits.forget() + self.store.turn(everything, read), dirty

    def turn(self, before: View, view: View) -> list[Command]:
        """With delayed updates: a step is committed, closed, or opened again. What is older than the view's step goes; the books
        of the two steps that are open stay, and what runs is still booked in its own."""
        self._books = {step: book for step, book in self._books.items() if step >= view.step}
        running = self._running
        read = self._inputs(running) if running is not None else ()
        if running is not None and running.message.step < view.step:
            self._disown()
        goes_on = (before.work, before.since) == (view.work, view.since)
        blobs: tuple[str, ...] = ()
        if not goes_on:
            blobs = tuple(blob for job in self._queue.values() for blob in job.blobs)
            self._queue = {}
        return drop(blobs) + self.store.turn(False, read, goes_on)

    def _disown(self) -> tuple[str, ...]:
        """Nobody wants any more what runs; the blobs that it reads."""
        job, self._running = self._running, None
        if job is None:
            return ()
        read = self._inputs(job)
        self._void[job.task] = msgspec.structs.replace(job, blobs=read)
        return read

    # ----------------------------------------------------------------------------------------------------- requests

    def on_hop(self, request: Request, now: float) -> list[Command]:
        """Take it, answer it from the books, decline it for good, or ignore it."""
        message, soon = request.message, self._settings.heartbeat_s * SOON
        facts = Facts(self._declined.has(request.peer, hop_of(message)), self._is_here(message.index))
        verdict = judge(request, self._name, self._replica, self._settings, facts)
        if isinstance(verdict, Take):
            return self._take(request, soon, now)
        commands = drop(request.blobs)
        match verdict:
            case AnswerFromBooks() if isinstance(message, Backward):
                commands += self._again(request.peer, message)
            case Postpone():
                commands += self._busy(request.peer, message, soon)
            case Refuse(reason, faulty):
                commands += self._refuse(request.peer, message, reason)
                commands += complain(self._replica, request.peer, f"{request.name}: {reason}") if faulty else []
        return commands

    def _take(self, request: Request, soon: float, now: float) -> list[Command]:
        """Queue it, or answer Busy when there is no room. One that waits or runs already is answered under the newer attempt."""
        peer, message = request.peer, request.message
        job = job_of(message, peer, request.blobs)
        if job.key in self._queue or self._is_running(job):
            return self._replace(job) + self._await(now)
        commands, room = ([], True) if job.backward else self._make_room(now)
        limit, queue = self._settings.queue_limit, self._queue
        looked_at = queue.values() if len(queue) >= limit and not job.backward else ()  # a backward gives room
        full = sum(other.complete(self.store.held) for other in looked_at) >= limit
        if not room or full or len(queue) >= 2 * limit:
            return commands + drop(request.blobs) + self._busy(peer, message, max(self.queue_s, soon))
        self._queue[job.key] = job
        return commands + self._await(now)

    def _is_here(self, index: Index) -> bool:
        """Its backward is booked, runs or waits."""
        return index in self._booked or self._here(index) is not None

    def _here(self, index: Index) -> Job | None:
        """The backward of that microbatch that runs or waits."""
        if self._runs((False, index)):
            return self._running
        return self._queue.get((False, index))

    def _again(self, peer: Peer, message: Backward | Recall | Cancel) -> list[Command]:
        """Its owner asks after a backward that is booked, or will be answered when it has run."""
        if message.index in self._booked:
            return self._gradient(peer, message.step, message.index, message.attempt)
        job = self._here(message.index)
        assert job is not None
        attempt = max(job.attempt, message.attempt) if job.reply == peer else message.attempt
        job = msgspec.structs.replace(job, reply=peer, attempt=attempt)
        if job.task:
            self._running = job
        else:
            self._queue[job.key] = job
        return [Send(peer, Pending(*hop_of(message)))]  # it shows that I live

    def _is_running(self, job: Job) -> bool:
        return self._runs(job.key) and self._running is not None and self._running.sender == job.sender

    def _runs(self, key: tuple[bool, Index]) -> bool:
        """That hop, of the step that is computed, is running."""
        job, view = self._running, self._replica.view
        return job is not None and view is not None and job.key == key and job.message.step == view.work

    def _replace(self, job: Job) -> list[Command]:
        """A forward sent again: the newer attempt counts. If it runs it is not begun anew, only answered under that number."""
        queued = self._queue.get(job.key)
        if queued is not None and job.attempt > queued.attempt:
            self._queue[job.key] = job
            return drop(queued.blobs)
        if queued is None and self._running is not None:
            newer = job if job.attempt > self._running.attempt else self._running
            attempt, message, needed = newer.attempt, newer.message, newer.needs
            self._running = msgspec.structs.replace(self._running, attempt=attempt, message=message, needs=needed)
        return drop(job.blobs)

    def on_cancel(self, peer: Peer, message: Recall | Cancel) -> list[Command]:
        """Both ask: is it booked? Cancelled is final, so whatever waits under that attempt or an older one is dropped."""
        index = message.index
        if not self._answers(peer, message):
            return []
        if self._runs((False, index)) or index in self._booked:
            return self._again(peer, message)
        self._declined.add(peer, message.step, index, message.attempt)
        queued = self._queue.get((False, index))
        commands: list[Command] = []
        if queued is not None and queued.attempt <= message.attempt:
            del self._queue[queued.key]
            commands = drop(queued.blobs)
        return [*commands, Send(peer, Cancelled(*hop_of(message)))]

    def on_query(self, peer: Peer, message: Query) -> list[Command]:
        """Its owner wonders. Of what is not here nothing is said, and the owner takes it for lost."""
        index = message.index
        if not self._answers(peer, message):
            return []
        if message.backward and index in self._booked:
            return self._gradient(peer, message.step, index, message.attempt)
        key = not message.backward, index
        job = (self._running if self._runs(key) else None) or self._queue.get(key)
        if job is not None:
            coming = not job.task and self.store.coming(needs(job.message))
            return [Send(peer, Pending(*hop_of(message), coming=coming))] if job.reply == peer else []
        output = Key(message.step, index, message.stage + 1, False)
        if message.backward or output not in self.store:
            return []
        return [Send(peer, Output(*hop_of(message), self.store.size(output)))]

    def _answers(self, peer: Peer, message: Recall | Cancel | Query) -> bool:
        """Its owner asks, of the step that is computed, and I can keep to what I answer; else the owner asks again."""
        view = self._replica.view
        if view is None or (message.epoch, message.step) != (view.epoch, view.work):
            return False
        return owner_of(view, message.index) == peer and self._replica.able and message.stage == self._replica.stage

    def on_ask_books(self, peer: Peer, message: BooksRequest) -> list[Command]:
        view = self._replica.view
        if view is None or message.epoch != view.epoch or message.step < view.step:
            return []
        if peer not in self._replica.known.serving:
            return []
        self._asks[peer] = message
        return self.answer_asks()

    def answer_asks(self) -> list[Command]:
        """Only when no former owner's backward can be booked any more after the answer."""
        if not self._asks:
            return []
        view, job = self._replica.view, self._running
        serving = self._replica.known.serving
        stage = serving.get(self._name)
        if view is None or stage is None:
            return []
        if job is not None and job.backward and self._void_by_owner(job):
            return []
        indices = tuple(booking.index for booking in self.books(view.work))
        commands: list[Command] = []
        for peer, ask in list(self._asks.items()):
            if ask.view > view.number:
                continue
            del self._asks[peer]
            if (ask.epoch, ask.step) == (view.epoch, view.work) and peer in serving:
                commands.append(Send(peer, Books(view.epoch, view.work, view.number, stage, indices)))
        return commands

    def on_who_booked(self, peer: Peer, asked: BookerRequest) -> list[Command]:
        """The leader wonders: an owner says that it waits for me."""
        view, index = self._replica.view, asked.index
        if view is None or (asked.epoch, asked.step) != (view.epoch, view.work):
            return []
        jobs = (self._here(index), self._running if self._runs((True, index)) else self._queue.get((True, index)))
        waits = [self.store.waits_for(needs(job.message)) or self._name for job in jobs if job is not None]
        booked, at = self._name if index in self._booked else "", waits[0] if waits else ""
        return [Send(peer, Booker(asked.epoch, asked.step, index, asked.stage, booked, at))]

    # ---------------------------------------------------------------------------------------------- boundary tensors

    def on_audit(self, message: AuditRequest) -> list[Command]:
        """The leader asks what my hops have used and made."""
        return self.audits.on_request(message, self._booked)

    def on_tensor(
        self,
        peer: Peer,
        message: BoundaryTensor | TensorRequest | TensorPending | TensorGone,
        blobs: tuple[BlobRef, ...],
        fault: str,
        now: float,
    ) -> list[Command]:
        match message:
            case BoundaryTensor() if not fault and self.audits.on_boundary(peer, message, blobs):
                commands = []
            case BoundaryTensor():
                pairs = tuple((blob.id, blob.nbytes) for blob in blobs)
                commands = self._room(force=False)
                commands += self.store.on_boundary(peer, message, pairs, fault, now)
            case TensorRequest():
                commands = self.store.on_pull(peer, message)
            case TensorPending():
                self.audits.on_coming(peer, message, now)
                commands = self.store.on_coming(peer, message, now)
            case TensorGone():
                commands = self.audits.on_gone(peer, message, now) + self.store.on_gone(peer, message, now)
        return commands + self._send_missing()

    def tick(self, now: float) -> list[Command]:
        """What a hop waits for has not come."""
        self.store.keep_wants(keys_of(job.message for job in self._queue.values()))
        return self.audits.tick(now) + self.store.tick(now) + self._send_missing()

    def _await(self, now: float) -> list[Command]:
        """Whatever the hops in the queue lack is wanted."""
        commands: list[Command] = []
        for job in self._queue.values():
            commands += self.store.want(job.needs, now)
        return commands + self._send_missing()

    def _send_missing(self) -> list[Command]:
        """Hops whose inputs do not come go back to their owner, for good."""
        commands: list[Command] = []
        for key in self.store.take_failed() if self.store.failed else ():
            for job in [job for job in self._queue.values() if key in job.needs]:
                del self._queue[job.key]
                commands += drop(job.blobs)
                epoch, step, index, stage, _ = hop_of(job.message)
                if job.backward:
                    self._declined.add(job.reply, step, index, job.attempt)
                answer = Missing(epoch, step, index, stage, job.attempt, job.backward, key.gradient)
                commands.append(Send(job.reply, answer))
        return commands

    def _make_room(self, now: float) -> tuple[list[Command], bool]:
        """Whether a forward may be taken: what it makes has to be kept."""
        commands = self._room(force=False)
        if not self.store.full or not self.store.under_way(self._booked):
            return commands, True
        if now - self._freed_at < STUCK * self._settings.min_request_timeout_s:
            return commands, False
        self._freed_at = now
        return commands + self._room(force=True), True

    def _room(self, force: bool) -> list[Command]:
        if not self.store.full:
            return []
        dropped = self.store.make_room(self._used(), self._booked, force)
        return self.audits.before_drop(dropped, self._booked) + drop(tuple(held.blob for held in dropped.values()))

    def _used(self) -> dict[Key, None]:
        running = [self._running.message] if self._running is not None else []
        return keys_of([job.message for job in self._queue.values()] + running)

    def _inputs(self, job: Job) -> tuple[str, ...]:
        """The blobs that its task reads: the stage's input, then the gradient of its output or the tokens."""
        kept = tuple(self.store.blob(key) for key in job.needs)
        return job.blobs + kept if job.message.stage == 0 else kept + job.blobs

    def _keep(self, job: Job, key: Key, nbytes: int) -> list[Command]:
        """What a hop has made stays here, and goes straight to whoever goes on with it."""
        commands = self.store.put(key, job.out, nbytes)
        if job.message.to in self._replica.known.serving:
            commands += self.store.send(job.message.to, key)
        return commands

    # ------------------------------------------------------------------------------------------------------ answers

    def _gradient(self, peer: Peer, step: int, index: Index, attempt: int) -> list[Command]:
        booking, replica = self._book_of(step).kept[index], self._replica
        gradient = Key(step, index, replica.stage - 1, True)
        nbytes = self.store.size(gradient)
        return [Send(peer, Gradient(replica.epoch, step, index, replica.stage, attempt, booking.loss, nbytes))]

    def _busy(self, peer: Peer, message: Forward | Backward, wait_s: float) -> list[Command]:
        backward = isinstance(message, Backward)
        if backward and not self._declined.add(peer, message.step, message.index, message.attempt):
            return []
        return [Send(peer, Busy(*hop_of(message), backward=backward, wait_s=wait_s))]

    def _refuse(self, peer: Peer, message: Forward | Backward, reason: str, attempt: int = 0) -> list[Command]:
        backward, attempt = isinstance(message, Backward), max(attempt, message.attempt)
        if backward and not self._declined.add(peer, message.step, message.index, attempt):
            return []
        epoch, step, index, stage, _ = hop_of(message)
        return [Send(peer, Refused(epoch, step, index, stage, attempt, backward, reason[:TEXT]))]

    # -------------------------------------------------------------------------------------------------------- tasks

    def start(self, cutting: int | None) -> list[Command]:
        """One hop at a time. While my sum of a step is being cut nothing is added to it."""
        if self._running is not None or self.audits.running or not self._replica.able:
            return []
        first = next_of(self._queue, self.store.held, cutting)
        return self._run(self._queue.pop(first)) if first is not None else self.audits.start()

    def _run(self, job: Job) -> list[Command]:
        heldout = job.message.index >= self._settings.microbatches
        out = "" if job.backward and (self._replica.stage == 0 or heldout) else self._id()
        self._running = job = msgspec.structs.replace(job, task=self._id(), out=out)
        step, index, stage = job.message.step, job.message.index, self._replica.stage
        x, *more = self._inputs(job)
        if job.backward:
            return [Do(RunBackward(job.task, step, index, stage, x, more[0] if more else "", out, heldout))]
        return [Do(RunForward(job.task, step, index, stage, x, out, heldout))]

    def on_done(self, done: Done, now: float) -> list[Command] | None:
        """None: not a task of mine."""
        job = self._void.pop(done.id, None)
        if job is not None:
            return drop(job.blobs + ((job.out,) if job.out else ()))
        if self._running is None or self._running.task != done.id:
            return self.audits.on_done(done, now)
        job, self._running = self._running, None
        if not job.backward:
            return self._finish_forward(job, done) + drop(job.blobs)
        return self._book(job, done, now) + self.audits.keep_tokens(job)

    def on_failed(self, failed: Failed, now: float) -> list[Command] | None:
        """A hop that failed here left the sum as it was; its owner may try again elsewhere. None: not a task of mine."""
        job = self._void.pop(failed.id, None)
        if job is not None:
            return drop(job.blobs)
        if self._running is None or self._running.task != failed.id:
            return self.audits.on_failed(failed, now)
        job, self._running = self._running, None
        commands = self._refuse(job.reply, job.message, failed.reason, job.attempt) + drop(job.blobs)
        if failed.nonfinite and self._replica.leader is not None:
            epoch, step, index, stage, _ = hop_of(job.message)
            commands.append(Send(self._replica.leader, NonFinite(epoch, step, index, stage, failed.reason[:TEXT])))
        return commands

    def _book(self, job: Job, done: Done, now: float) -> list[Command]:
        step, index, stage = job.message.step, job.message.index, job.message.stage
        book = self._book_of(step)
        assert index not in book.kept, f"microbatch {index} would be booked twice"
        booking = Booking(index, done.result.loss, done.result.counted, done.result.rewards)
        book.kept[index] = booking
        book.entries += (booking,)
        if index < self._settings.microbatches:
            self.pace.add(True, done.seconds)
        self._freed_at = now
        commands = self._keep(job, Key(step, index, stage - 1, True), done.result.nbytes) if job.out else []
        return commands + self._gradient(job.reply, step, index, job.attempt)

    def _finish_forward(self, job: Job, done: Done) -> list[Command]:
        self.pace.add(False, done.seconds)
        epoch, step, index, stage, _ = hop_of(job.message)
        commands = self._keep(job, Key(step, index, stage + 1, False), done.result.nbytes)
        return [*commands, Send(job.reply, Output(epoch, step, index, stage, job.attempt, done.result.nbytes))]

    def on_unreachable(self, peer: Peer) -> None:
        """What was on its way there is lost."""
        self.store.on_unreachable(peer)

    def _void_by_owner(self, job: Job) -> bool:
        """Whoever sent it has no say any more."""
        return not self._replica.speaks_for(job.message.index, job.sender, job.message.view)

    def _id(self) -> str:
        return f"s/{next(self._serial)}"
