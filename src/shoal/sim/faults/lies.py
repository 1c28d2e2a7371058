"""What a hostile member does with the messages of an honest machine: each lie changes or withholds them, and nothing else.

Pure functions of a message and its blobs, for simulated peers (strangers.py) and for real processes (benchmarks/liars.py), which say how
a blob is made huge. What hostile peers send besides, unasked, is `unasked`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Generic, Literal, TypeVar

import msgspec

from shoal.core import messages as m

Value = TypeVar("Value")

FALSE = "0" * 16  # a digest of nothing
CHARGES: tuple[Literal["faulty", "unreachable", "stale"], ...] = ("faulty", "unreachable", "faulty", "stale")  # in turn
TENSORS = (m.BoundaryTensor, m.TensorGone, m.TensorPending)
ANSWERS = (
    m.Output, m.Gradient, m.Pending, m.Cancelled, m.Busy, m.Refused, m.Missing, m.Books, m.Offer, m.Chunk, *TENSORS
)  # fmt: skip
BOOKS = ("impossible", "twice", "all")
SOON_S = 0.05
FAR = 1000  # steps by which a heartbeat is wrong

replace = msgspec.structs.replace


class Situation(msgspec.Struct, frozen=True):
    """What a hostile peer knows when it sends something unasked. `someone`: one of the honest."""

    view: m.View
    round: int
    stages: int
    someone: m.Peer


class Lies(Generic[Value]):
    """The lies of one peer. `heavy(message, value)` is a blob that no honest peer would send, and that a driver lets in."""

    def __init__(
        self,
        name: m.Peer,
        settings: m.Settings,
        view: Callable[[], m.View | None],
        heavy: Callable[[m.Message, Value], Value],
        books: str,
    ) -> None:
        self.name, self._settings, self._view, self._heavy, self._books = name, settings, view, heavy, books
        self._frozen: m.Heartbeat | None = None
        self._turn = 0
        self._changes: dict[str, Callable[[m.Message], m.Message | None]] = {
            "mute": self._without(m.ReduceChunk, m.GatherChunk),
            "withhold": self._without(*ANSWERS),
            "idle": self._idle, "wander": self._wander,
            "held": self._held, "frozen": self._freeze, "hollow": self._hollow, "books": self._book, "gone": self._gone,
            "sums": self._sums, "norm": self._norm, "digest": self._digest, "busy": self._busy, "missing": self._missing,
            "keep": self._without(m.Chunk), "linger": self._linger,
            "refuse": self._refuse, "coming": self._coming, "far": self._far, "loss": self._loss, "rate": self._rate, "lazy": self._lazy,
        }  # fmt: skip

    def sends(
        self, act: str, message: m.Message, values: tuple[Value, ...]
    ) -> tuple[m.Message, tuple[Value, ...]] | None:
        """What leaves instead; None: nothing."""
        if act == "overflow":
            return message, self._overflow(message, values)
        change = self._changes.get(act)
        changed = message if change is None else change(message)
        if changed is None:
            return None
        return changed, values if changed is message or isinstance(changed, type(message)) else ()

    def _without(self, *kinds: type[m.Message]) -> Callable[[m.Message], m.Message | None]:
        return lambda message: None if isinstance(message, kinds) else message

    def _idle(self, message: m.Message) -> m.Message | None:
        """It does nothing for its own microbatches."""
        return None if isinstance(message, m.Forward | m.Backward | m.Recall | m.Cancel | m.Query) else message

    def _wander(self, message: m.Message) -> m.Message | None:
        """Nor does it, and each time that it is asked it waits for another server, it says."""
        view = self._view()
        if not isinstance(message, m.Booker) or message.peer or not message.at or view is None:
            return self._idle(message)
        others = [one.peer for one in view.members if one.stage == message.stage and one.peer != self.name]
        self._turn += 1
        return replace(message, at=others[self._turn % len(others)]) if others else message

    def _overflow(self, message: m.Message, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """Finite, and so large that whatever is made of it is not."""
        if isinstance(message, m.ReduceChunk | m.BoundaryTensor | m.Output | m.Gradient | m.Forward | m.Backward):
            return tuple(self._heavy(message, value) for value in values)
        return values

    def _held(self, message: m.Message) -> m.Message | None:
        """It has every request, it says, and what that lacks is on its way; no result ever follows."""
        if isinstance(message, m.Output | m.Gradient | m.Pending):
            return m.Pending(message.epoch, message.step, message.index, message.stage, message.attempt, coming=True)
        return None if isinstance(message, TENSORS) else message

    def _freeze(self, message: m.Message) -> m.Message:
        if isinstance(message, m.Heartbeat):
            self._frozen = self._frozen or message
            return self._frozen
        return message

    def _hollow(self, message: m.Message) -> m.Message | None:
        """A joiner that downloads nothing and is ready, it says."""
        if isinstance(message, m.StateRequest | m.ChunkRequest):
            return None
        view = self._view()
        if not isinstance(message, m.Heartbeat) or message.ready or view is None:
            return message
        stage = next((one.stage for one in view.members + view.joining if one.peer == self.name), 0)
        return replace(
            message, ready=True, step=view.step, epoch=view.epoch, work=view.work, stage=stage, number=view.number
        )

    def _book(self, message: m.Message) -> m.Message:
        if not isinstance(message, m.Heartbeat):
            return message
        most = self._settings.microbatches
        books = {
            "impossible": (*message.books, m.Booking(most, 1.0), m.Booking(2**20 - 1, 1e308)),
            "twice": message.books * 2,
            "all": tuple(m.Booking(index, 1.0) for index in range(most)),
        }[self._books]
        return replace(message, books=books)

    def _gone(self, message: m.Message) -> m.Message:
        if isinstance(message, m.BoundaryTensor | m.TensorPending):
            return m.TensorGone(message.epoch, message.step, message.index, message.stage, message.gradient)
        return message

    def _coming(self, message: m.Message) -> m.Message:
        """Every tensor has been sent before, it says, and is large."""
        if isinstance(message, m.BoundaryTensor | m.TensorGone | m.TensorPending):
            key = message.epoch, message.step, message.index, message.stage, message.gradient
            return m.TensorPending(*key, 1 << 40)
        return message

    def _sums(self, message: m.Message) -> m.Message:
        return replace(message, digest=FALSE) if isinstance(message, m.Reduced) else message

    def _norm(self, message: m.Message) -> m.Message:
        return replace(message, norm_sq=1e150) if isinstance(message, m.Reduced) else message

    def _digest(self, message: m.Message) -> m.Message:
        return replace(message, digest=FALSE) if isinstance(message, m.Heartbeat) else message

    def _far(self, message: m.Message) -> m.Message:
        """Heartbeats of a step that is not trained."""
        return replace(message, step=message.step + FAR) if isinstance(message, m.Heartbeat) else message

    def _loss(self, message: m.Message) -> m.Message:
        if isinstance(message, m.Heartbeat):
            books, closed = (tuple(replace(one, loss=-1e300) for one in of) for of in (message.books, message.closed))
            return replace(message, books=books, closed=closed)
        return message

    def _lazy(self, message: m.Message) -> m.Message:
        """It computes nobody's hops again either."""
        return replace(message, hops=(), parts=()) if isinstance(message, m.Recomputed) else message

    def _rate(self, message: m.Message) -> m.Message | None:
        """It is so slow, it says, that nothing can be late; and it answers nothing."""
        if isinstance(message, m.Heartbeat):
            return replace(message, rate=1e-9)
        return None if isinstance(message, ANSWERS) else message

    def _busy(self, message: m.Message) -> m.Message:
        """Whatever was asked is to wait for ever."""
        if isinstance(message, m.Output | m.Gradient | m.Pending):
            backward = isinstance(message, m.Gradient)
            return m.Busy(message.epoch, message.step, message.index, message.stage, message.attempt, backward, 1e308)
        return message

    def _linger(self, message: m.Message) -> m.Message:
        """A joiner that never has its state, it says."""
        return replace(message, ready=False) if isinstance(message, m.Heartbeat) else message

    def _missing(self, message: m.Message) -> m.Message:
        """Whatever was asked could not be done, and is done again elsewhere."""
        if isinstance(message, m.Output | m.Gradient):
            backward = isinstance(message, m.Gradient)
            return m.Missing(
                message.epoch, message.step, message.index, message.stage, message.attempt, backward, False
            )
        return message

    def _refuse(self, message: m.Message) -> m.Message:
        if isinstance(message, m.Output | m.Gradient):
            backward = isinstance(message, m.Gradient)
            return m.Refused(
                message.epoch, message.step, message.index, message.stage, message.attempt, backward, "I do not like it"
            )
        return message


def soon(message: m.Forward | m.Backward) -> m.Busy:
    """Whatever is asked is to wait for a moment, each time. It never comes to the liar's machine."""
    backward = isinstance(message, m.Backward)
    return m.Busy(message.epoch, message.step, message.index, message.stage, message.attempt, backward, SOON_S)


def unasked(act: str, now: Situation, rng: Random) -> Iterator[m.Message]:
    """What it sends to the leader again and again."""
    view = now.view
    match act:
        case "complain":
            yield m.Complaint(now.someone, "its tensors are not finite", rng.choice(CHARGES))
        case "culprit":
            yield m.RoundFailed(view.epoch, view.step, now.round, "its part is not finite", now.someone)
        case "waits":
            yield m.RoundWaits(view.epoch, view.step, now.round, (now.someone,), (now.someone,))
        case "unable":
            yield m.RoundFailed(view.epoch, view.step, now.round, "because I say so")
        case "nonfinite":
            for index in range(len(view.owners)):
                yield from (m.NonFinite(view.epoch, view.work, index, stage) for stage in range(now.stages))
        case "saved":
            stage = rng.choice((0, now.stages, 4095))
            for step in (view.saved, view.step):
                yield m.Saved(view.epoch, step, stage, record='{"step": -1}')
            yield m.Published(view.epoch, 2**53, "checkpoints/step-9007199254740992")
