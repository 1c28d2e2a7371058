"""A replica of one stage: which hop runs next, what is booked, and what a commit does to the state held here.

For peer.py, which shows it agreed views and messages and tells the leader its books. Every microbatch is booked at most once:
a repeated request is answered from the books, and an attempt that was once answered with Cancelled, Busy or Refused is never
taken afterwards, because its owner may have gone elsewhere with it. Left to others: averaging (rounds.py), the state itself
(sync.py), who owns what (the view), tensors (the driver, which carries out tasks in the order they are given).
"""

from __future__ import annotations

from itertools import count

import msgspec

from shoal.core.messages import (
    Apply,
    AskBooks,
    AskPublish,
    AskSave,
    Backward,
    BlobRef,
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
    Member,
    Message,
    Note,
    Output,
    Part,
    Peer,
    Recall,
    Refused,
    Resend,
    Reset,
    Round,
    RunBackward,
    RunForward,
    Send,
    Settings,
    Share,
    Sum,
    View,
)
from shoal.core.rounds import TEXT, Rounds
from shoal.core.routing import BACKWARD_SIZE, Latency
from shoal.core.shards import Shards

SOON = 0.1  # of a beat: the wait asked for while a view or a version is on its way
DECLINED_PER_MICROBATCH = 8  # attempts remembered; beyond that a request from a view not seen yet gets no answer
REPEAT_BEATS = 4  # between two calls for a fresh state


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


class Server:
    """Read by peer.py: ready, step, stage, epoch, books, digest, queue_s, rate, seated. `changed` asks for a pulse at once;
    `stale` says in words why this replica needs its stage's state again."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.stage, self.step, self.epoch, self.digest = 0, 0, 0, ""
        self.seated = False
        self.changed = False
        self.stale = ""
        self.books: tuple[Booking, ...] = ()
        self._unfit = ""  # the reason in `stale`, for as long as it holds
        self._retell_at: float | None = None
        self._length = 0
        self._view: View | None = None
        self._serial = count()
        self._rounds = Rounds(name, settings, self._serial)
        self._queue: dict[tuple[bool, Index], Job] = {}
        self._running: Job | None = None
        self._void: dict[str, Job] = {}  # running, but of a step or a seat that is over
        self._booked: dict[Index, tuple[Booking, str]] = {}  # with the kept gradient of the input, '' at stage 0
        self._declined: dict[
            tuple[Peer, int, Index], int
        ] = {}  # (owner, step, index) -> no attempt up to this is taken
        self._asks: dict[Peer, AskBooks] = {}
        self._round: tuple[Peer, Round] | None = None  # came before its view or version did, or while a backward ran
        self._applying: Apply | None = None
        self._shards = Shards(self._serial)
        self._forward_s, self._backward_s = Latency(), Latency()

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def leader(self) -> Peer | None:
        return self._rounds.leader

    @leader.setter
    def leader(self, peer: Peer | None) -> None:
        self._rounds.leader = peer

    @property
    def ready(self) -> bool:
        """My parameters are those of `step`, and nothing is changing them."""
        return self.seated and not self._unfit and self._applying is None

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

    @property
    def deadline(self) -> float | None:
        times = [at for at in (self._rounds.deadline, self._retell_at) if at is not None]
        return min(times, default=None)

    def _seconds(self, backward: bool) -> float:
        """Of one hop: measured, else the other direction's by the ratio of their work, else as planned."""
        own, other = (self._backward_s, self._forward_s) if backward else (self._forward_s, self._backward_s)
        if own.value is not None:
            return own.value
        if other.value is not None:
            return other.value * (BACKWARD_SIZE if backward else 1 / BACKWARD_SIZE)
        planned = self.settings.stage_seconds
        whole = planned[self.stage] if self.stage < len(planned) else 0.0
        return whole * (BACKWARD_SIZE if backward else 1.0) / (1.0 + BACKWARD_SIZE)

    # ----------------------------------------------------------------------------------------------- state and views

    def seat(self, stage: int, step: int, epoch: int, length: int, digest: str, now: float) -> list[Command]:
        """The stage's state stands, freshly built: its sum is empty."""
        commands = self._forget()
        self.seated, self.stage, self.step, self.epoch = True, stage, step, epoch
        self._length, self.digest, self._unfit, self.stale, self._retell_at = length, digest, "", "", None
        self._applying, self.changed = None, True
        self._forward_s, self._backward_s = Latency(), Latency()
        view = self._view
        if view is not None and (view.epoch, view.step) > (epoch, step):
            commands += self._need_state(
                f"seated at step {step} of epoch {epoch}, too late for view {view.number}", now
            )
        return commands + self._continue(now)

    def unseat(self) -> list[Command]:
        """The state held here is void."""
        commands = self._forget(empty_sum=True) if self.seated else []
        self.seated, self.digest, self.changed = False, "", True
        self._unfit, self.stale, self._retell_at, self._applying = "", "", None, None
        self._shards.kept = None
        return commands

    def on_view(self, view: View, now: float) -> list[Command]:
        before, self._view = self._view, view
        if before is not None and view.number < before.number:
            self._view = before
            return []
        if before is None or view.epoch != before.epoch:
            self._declined.clear()
        elif view.step != before.step:
            self._declined = {key: attempt for key, attempt in self._declined.items() if key[1] >= view.step}
        me = _member(view.members + view.joining, self.name)
        if self.seated and (view.epoch != self.epoch or (me is not None and me.stage != self.stage)):
            commands = self.unseat() + self._rounds.on_view(view)
        elif before is not None and (before.epoch, before.step) == (view.epoch, view.step):
            commands = self._same_step(before, view)
        else:
            commands = self._next_step(view, now)
        return commands + self._continue(now)

    def _same_step(self, before: View, view: View) -> list[Command]:
        """Members left, and their microbatches have new owners: nothing more is begun for the old ones."""
        commands = self._rounds.on_view(view)
        if _member(before.members, self.name) and not _member(view.members, self.name):
            return commands + self._forget(empty_sum=True)  # fenced: others compute again what I had booked
        for key, job in list(self._queue.items()):
            if _owner(view, job.message.index) != job.sender:
                del self._queue[key]
                commands += _drop(job.blobs)
        return commands

    def _next_step(self, view: View, now: float) -> list[Command]:
        """Do to the parameters what was committed, or say that I cannot."""
        last, held = view.last, view.last is not None and self._rounds.holds(view.last)
        commands = self._forget() + self._rounds.on_view(view)
        if not self.seated or self._unfit or self.step >= view.step:
            return commands
        if last is None or not held or self._applying is not None or self.step + 1 != view.step:
            reason = f"holds step {self.step} and not the gradient that led to step {view.step}"
            return commands + self._need_state(reason, now)
        self._applying = Apply(self._id(), self.step, last.round, last.norm, last.save)
        return [*commands, Do(self._applying)]

    def _need_state(self, reason: str, now: float) -> list[Command]:
        self._unfit, self.changed = reason, True
        return [Note("state", f"stage {self.stage} must be downloaded again: {reason}"), *self._call_stale(now)]

    def _call_stale(self, now: float) -> list[Command]:
        """Repeated, since the message that peer.py makes of it may vanish. A joiner's sync sees to itself."""
        self._retell_at = now + REPEAT_BEATS * self.settings.beat_s
        if self._view is not None and _member(self._view.members, self.name):
            self.stale = self._unfit
        return []

    def _forget(self, empty_sum: bool = False) -> list[Command]:
        """Let go of everything that belongs to the step: it is over, or what I hold of it is void."""
        commands = self._rounds.turn()
        blobs = [blob for job in self._queue.values() for blob in job.blobs]
        blobs += [out for _, out in self._booked.values() if out]
        dirty = bool(self.books) or (self._running is not None and self._running.backward)
        if self._running is not None:
            self._void[self._running.task] = self._running
        if self.books:
            self.changed = True
        self._queue, self._booked, self.books, self._running = {}, {}, (), None
        commands += _drop(tuple(blobs))
        return [*commands, Do(Reset(self._id()))] if empty_sum and dirty else commands

    def _continue(self, now: float) -> list[Command]:
        """What may go on after anything has changed: a round that waited, questions, the next hop."""
        return self._try_round(now) + self._answer_asks() + self._start()

    # ------------------------------------------------------------------------------------------------------- messages

    def on_message(
        self, peer: Peer, message: Message, blobs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        names = tuple(blob.id for blob in blobs)
        match message:
            case Forward() | Backward():
                return self._on_hop(peer, message, names, fault) + self._start()
            case Part() | Sum() | Resend():
                return self._rounds.on_message(peer, message, names, fault, now)
            case Recall() | Cancel():
                commands = self._on_cancel(peer, message)
            case AskBooks():
                commands = self._on_ask_books(peer, message)
            case Round():
                commands = self._on_round(peer, message, now)
            case AskSave() | AskPublish():
                commands = self._on_ask_shard(peer, message)
            case _:
                commands = []
        return commands + _drop(names)

    def tick(self, now: float) -> list[Command]:
        commands = self._rounds.tick(now)
        if self._retell_at is not None and now >= self._retell_at:
            commands += self._call_stale(now)
        return commands

    def _on_hop(self, peer: Peer, message: Forward | Backward, blobs: tuple[str, ...], fault: str) -> list[Command]:
        """Take it, answer it from the books, decline it for good, or ignore it; in that order of trust."""
        view, index = self._view, message.index
        if view is None or message.epoch != view.epoch or message.step < view.step:
            return _drop(blobs)
        if message.attempt <= self._declined.get((peer, message.step, index), -1) and isinstance(message, Backward):
            return _drop(blobs)
        current, owned = message.step == view.step, _owner(view, index) == peer
        if current and isinstance(message, Backward) and (index in self._booked or self._here(index)):
            return _drop(blobs) + (self._again(peer, message) if owned else [])  # a newer view's owner asks again
        soon = self.settings.beat_s * SOON
        if message.view > view.number:
            return _drop(blobs) + self._busy(peer, message, soon)
        if not current or not owned or _member(view.members, self.name) is None:
            return _drop(blobs)
        if not self.ready or self.step != message.step:
            return _drop(blobs) + self._busy(peer, message, soon)
        if message.stage != self.stage:
            return _drop(blobs) + self._refuse(peer, message, f"stage {message.stage} is not served here")
        wanted = 2 if isinstance(message, Backward) and self.settings.stages > 1 else 1
        if fault or len(blobs) != wanted:
            reason = fault or f"{len(blobs)} blobs where {wanted} belong"
            return _drop(blobs) + self._refuse(peer, message, reason) + self._complain(peer, message, reason)
        if isinstance(message, Forward) and self._repeats(peer, message):
            return self._replace(peer, message, blobs)
        if len(self._queue) >= self.settings.queue_limit:
            return _drop(blobs) + self._busy(peer, message, max(self.queue_s, soon))
        job = Job(message, peer, blobs, peer, message.attempt)
        self._queue[job.key] = job
        return []

    def _here(self, index: Index) -> Job | None:
        """The backward of that microbatch that runs or waits."""
        if self._running is not None and self._running.key == (False, index):
            return self._running
        return self._queue.get((False, index))

    def _again(self, peer: Peer, message: Backward | Recall | Cancel) -> list[Command]:
        """Its owner asks after a backward that is booked, or will be answered when it has run."""
        index = message.index
        if index in self._booked:
            return self._gradient(peer, index, message.attempt)
        job = self._here(index)
        assert job is not None
        attempt = max(job.attempt, message.attempt) if job.reply == peer else message.attempt
        self._put(msgspec.structs.replace(job, reply=peer, attempt=attempt))
        return []

    def _put(self, job: Job) -> None:
        if job.task:
            self._running = job
        else:
            self._queue[job.key] = job

    def _repeats(self, peer: Peer, message: Forward) -> bool:
        running = self._running is not None and self._running.key == (True, message.index)
        return (True, message.index) in self._queue or (
            running and self._running is not None and self._running.sender == peer
        )

    def _replace(self, peer: Peer, message: Forward, blobs: tuple[str, ...]) -> list[Command]:
        """A forward sent again: the newer attempt counts. Running it is not begun anew, only answered under that number."""
        queued = self._queue.get((True, message.index))
        if queued is None:
            assert self._running is not None
            attempt = max(self._running.attempt, message.attempt)
            self._running = msgspec.structs.replace(self._running, attempt=attempt)
            return _drop(blobs)
        if message.attempt <= queued.attempt:
            return _drop(blobs)
        self._queue[queued.key] = Job(message, peer, blobs, peer, message.attempt)
        return _drop(queued.blobs)

    def _on_cancel(self, peer: Peer, message: Recall | Cancel) -> list[Command]:
        """Both ask: is it booked? Cancelled is final, so whatever waits under that attempt or an older one is dropped."""
        view, index = self._view, message.index
        current = view is not None and (message.epoch, message.step) == (view.epoch, view.step)
        if not current or _owner(view, index) != peer or not self._stands(message.stage):
            return []  # no answer I could keep to; the owner asks again
        running = self._running is not None and self._running.key == (False, index)
        if running or index in self._booked:
            return self._again(peer, message)
        self._decline(peer, message.step, index, message.attempt)
        queued = self._queue.get((False, index))
        commands: list[Command] = []
        if queued is not None and queued.attempt <= message.attempt:
            del self._queue[queued.key]
            commands = _drop(queued.blobs)
        return [*commands, Send(peer, Cancelled(*_hop(message)))]

    def _stands(self, stage: int) -> bool:
        view = self._view
        return view is not None and self.ready and (self.step, self.stage) == (view.step, stage)

    def _on_ask_books(self, peer: Peer, message: AskBooks) -> list[Command]:
        view = self._view
        if view is None or message.epoch != view.epoch or message.step < view.step or not _member(view.members, peer):
            return []
        self._asks[peer] = message
        return self._answer_asks()

    def _answer_asks(self) -> list[Command]:
        """Only when no former owner's backward can be booked any more after the answer."""
        view, job = self._view, self._running
        me = _member(view.members, self.name) if view is not None else None
        if view is None or me is None:
            return []
        if job is not None and job.backward and _owner(view, job.message.index) != job.sender:
            return []
        indices = tuple(booking.index for booking in self.books)
        commands: list[Command] = []
        for peer, ask in list(self._asks.items()):
            if ask.view > view.number:
                continue
            del self._asks[peer]
            if (ask.epoch, ask.step) == (view.epoch, view.step) and _member(view.members, peer):
                commands.append(Send(peer, Books(view.epoch, view.step, view.number, me.stage, indices)))
        return commands

    # ----------------------------------------------------------------------------------------------------- the answers

    def _gradient(self, peer: Peer, index: Index, attempt: int) -> list[Command]:
        booking, out = self._booked[index]
        message = Gradient(self.epoch, self.step, index, self.stage, attempt, booking.loss)
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
        key = peer, step, index
        known = self._view is not None and _owner(self._view, index) == peer and step == self._view.step
        room = len(self._declined) < DECLINED_PER_MICROBATCH * self.settings.microbatches
        if key not in self._declined and not known and not room:
            return False
        self._declined[key] = max(attempt, self._declined.get(key, -1))
        return True

    def _complain(self, peer: Peer, message: Forward | Backward, reason: str) -> list[Command]:
        if self.leader is None:
            return []
        what = f"{type(message).__name__} of microbatch {message.index} at stage {message.stage}: {reason}"
        return [Send(self.leader, Complaint(peer, what[:TEXT]))]

    # ---------------------------------------------------------------------------------------------------------- tasks

    def _start(self) -> list[Command]:
        """One hop at a time. While my sum is being cut nothing is added to it."""
        if self._running is not None or not self.ready:
            return []
        keys = [key for key, job in self._queue.items() if not (job.backward and self._rounds.cutting)]
        if not keys:
            return []
        job = self._queue.pop(min(keys))
        out = "" if job.backward and self.stage == 0 else self._id()
        self._running = job = msgspec.structs.replace(job, task=self._id(), out=out)
        step, index, x = job.message.step, job.message.index, job.blobs[0]
        if job.backward:
            grad = job.blobs[1] if len(job.blobs) > 1 else ""
            return [Do(RunBackward(job.task, step, index, self.stage, x, grad, out))]
        return [Do(RunForward(job.task, step, index, self.stage, x, out))]

    def on_done(self, done: Done, now: float) -> list[Command]:
        job = self._void.pop(done.id, None)
        if job is not None:
            return _drop(job.blobs + ((job.out,) if job.out else ()))
        if self._running is not None and self._running.task == done.id:
            job, self._running = self._running, None
            commands = self._book(job, done) if job.backward else self._put_out(job, done)
            return commands + _drop(job.blobs) + self._continue(now)
        if self._applying is not None and self._applying.id == done.id:
            return self._applied(self._applying, done) + self._continue(now)
        return self._shards.on_done(done) + self._rounds.on_done(done, now) + self._continue(now)

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        job = self._void.pop(failed.id, None)
        if job is not None:
            return _drop(job.blobs)
        if self._running is not None and self._running.task == failed.id:
            job, self._running = self._running, None
            commands = self._refuse(job.reply, job.message, failed.reason, job.attempt)
            return commands + _drop(job.blobs) + self._continue(now)
        if self._applying is not None and self._applying.id == failed.id:
            self._applying = None
            return self._need_state(f"the optimizer step failed: {failed.reason}", now)
        return self._shards.on_failed(failed) + self._rounds.on_failed(failed, now) + self._continue(now)

    def _book(self, job: Job, done: Done) -> list[Command]:
        index = job.message.index
        assert index not in self._booked, f"microbatch {index} would be booked twice"
        booking = Booking(index, done.result.loss)
        self._booked[index] = booking, job.out
        self.books += (booking,)
        self.changed = True
        self._backward_s.add(done.seconds)
        return self._gradient(job.reply, index, job.attempt)

    def _put_out(self, job: Job, done: Done) -> list[Command]:
        self._forward_s.add(done.seconds)
        epoch, step, index, stage, _ = _hop(job.message)
        return [Send(job.reply, Output(epoch, step, index, stage, job.attempt), (job.out,)), Drop((job.out,))]

    def _applied(self, task: Apply, done: Done) -> list[Command]:
        self._applying = None
        self.step, self.digest, self.changed = task.step + 1, done.result.digest, True
        if task.save:
            self._shards.kept = self.stage, self.step
        return self._shards.go_on(self.stage, self.step)

    # ------------------------------------------------------------------------------------------ asked by the leader

    def _on_round(self, peer: Peer, message: Round, now: float) -> list[Command]:
        view = self._view
        if view is None or peer != self.leader or message.epoch != view.epoch or message.step < view.step:
            return []
        if self._round is None or message.round >= self._round[1].round:
            self._round = peer, message
        return self._try_round(now)

    def _try_round(self, now: float) -> list[Command]:
        """Begin the round that was asked for, once my view and version are there and nothing is being added to my sum."""
        if self._round is None or self._view is None:
            return []
        peer, message = self._round
        view, adding = self._view, self._running is not None and self._running.backward
        if peer != self.leader or message.epoch != view.epoch or message.step < view.step:
            self._round = None
            return []
        if message.view > view.number or message.step != view.step or not self._stands(self.stage):
            return []
        if adding and self._rounds.active != message.round:
            return []
        self._round = None
        me = Share(self.name, tuple(booking.index for booking in self.books))
        commands = self._rounds.begin(message, me, self.stage, self._length, now)
        if self._rounds.active != message.round:
            self.changed = True  # the leader may not know my books as they are
        return commands

    def _on_ask_shard(self, peer: Peer, message: AskSave | AskPublish) -> list[Command]:
        if self._view is None or peer != self.leader or message.epoch != self._view.epoch:
            return []
        if isinstance(message, AskPublish):
            return self._shards.publish(peer, message)
        step = self.step if self.seated and not self._unfit else message.step  # of a lost version nothing will come
        return self._shards.save(peer, message) + self._shards.go_on(self.stage, step)

    def _id(self) -> str:
        return f"s/{next(self._serial)}"


def _member(members: tuple[Member, ...], peer: Peer) -> Member | None:
    return next((member for member in members if member.peer == peer), None)


def _owner(view: View | None, index: Index) -> Peer | None:
    if view is None or index >= len(view.owners) or view.owners[index] >= len(view.members):
        return None
    return view.members[view.owners[index]].peer


def _hop(message: Forward | Backward | Recall | Cancel) -> tuple[int, int, int, int, int]:
    return message.epoch, message.step, message.index, message.stage, message.attempt


def _drop(blobs: tuple[str, ...]) -> list[Command]:
    return [Drop(blobs)] if blobs else []
