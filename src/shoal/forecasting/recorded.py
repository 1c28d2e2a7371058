"""What a run's trace says of its machines: seconds of hops and rounds, bytes, delays, line rates, who died and who joined.

For fitted.py, which makes a forecast's inputs of it. Every line is checked against what no true record can say: times that go back, a task
that took longer than since it was given, a message that arrives and was not sent. ValueError says where.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import msgspec

from shoal import trace
from shoal.core.allreduce.layout import row_lengths
from shoal.core.messages import (
    Add,
    AddRow,
    Apply,
    Backward,
    BoundaryTensor,
    Chunk,
    Cut,
    Do,
    Done,
    Finish,
    Forward,
    Gather,
    GatherChunk,
    Gradient,
    Join,
    Offer,
    Output,
    Peer,
    Received,
    ReduceChunk,
    Reduced,
    Round,
    RunBackward,
    RunForward,
    Send,
    Settings,
    Task,
)

UNWRITTEN_S = 5.0  # of a peer's last lines may not be here: it was killed before they were written
LONGER_S = 0.05  # than since it was given may a task have taken: the two are read one after the other
ROUND_TASKS = (Cut, Add, AddRow, Gather, Apply)
FOLLOWED = (Forward, Backward, Output, Gradient, BoundaryTensor, ReduceChunk, GatherChunk, Chunk, Reduced)


class Transfer(msgspec.Struct, frozen=True):
    """A message from one peer to another; `nbytes` of its tensors."""

    source: Peer
    target: Peer
    sent_s: float
    arrived_s: float
    nbytes: int


class StepParts(msgspec.Struct, frozen=True):
    """Moments of one step: its round was announced, and the last replica had its sums."""

    round_s: float
    reduced_s: float


class Recorded(msgspec.Struct, frozen=True, eq=False):
    """Of the peers whose trace is here, in the order in which they began."""

    settings: Settings
    peers: tuple[Peer, ...]
    hops_s: dict[tuple[Peer, int, bool], list[float]]  # by peer, stage and whether it is a backward
    rounds_s: dict[int, float]  # by step: tasks of the busiest replica
    transfers: list[Transfer]
    tensors: dict[str, list[int]]  # bytes of "tokens", "activation", "gradient"
    gradient_bytes: dict[int, float]  # by stage, as they are averaged
    state_bytes: dict[int, float]  # by stage, as they were offered to joiners
    parts: dict[int, StepParts]  # by step
    asked_s: dict[Peer, float]  # when it asked to join
    last_s: dict[Peer, float]  # its last line
    ended: frozenset[Peer]  # with the run, or by leaving


def read(path: Path) -> Recorded:
    reader = _Reader(path)
    for number, item in enumerate(trace.read(path), start=1):
        if isinstance(item, trace.Header):
            reader.on_header(item)
        elif isinstance(item, trace.TraceRecord):
            reader.on_record(item, number)
    return reader.recorded()


class _Life(msgspec.Struct):
    """What a peer's lines say of itself."""

    settings: Settings
    last_s: float = 0.0
    asked_s: float | None = None
    ended: bool = False


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lives: dict[Peer, _Life] = {}
        self._now = float("-inf")
        self._tasks: dict[tuple[Peer, str], tuple[float, Task]] = {}
        self._sent: dict[tuple[Peer, Peer, object], deque[float]] = defaultdict(deque)
        self._hops: dict[tuple[Peer, int, bool], list[float]] = defaultdict(list)
        self._round_tasks: dict[tuple[int, Peer], float] = defaultdict(float)
        self._transfers: list[Transfer] = []
        self._tensors: dict[str, list[int]] = {"tokens": [], "activation": [], "gradient": []}
        self._rounds: dict[int, tuple[float, Round]] = {}  # when it was announced
        self._reduced: dict[int, float] = {}
        self._averaged: dict[tuple[int, Peer], int] = defaultdict(int)  # bytes of chunks received, by round
        self._state: dict[int, float] = {}
        self._unsent: list[tuple[float, Peer, str]] = []  # when, from whom, and what was received

    def on_header(self, header: trace.Header) -> None:
        if header.before:
            raise ValueError(
                f"{self._path}: {header.before:,} lines of {header.peer} are not in this trace any more;"
                " a larger run.trace_bytes keeps them"
            )
        self._lives.setdefault(header.peer, _Life(header.settings))

    def on_record(self, record: trace.TraceRecord, number: int) -> None:
        where, peer, now = f"{self._path}, line {number}", record.peer, record.time_s
        if peer not in self._lives:
            raise ValueError(f"{where}: {peer} acts before the header that introduces it")
        if now < self._now:
            raise ValueError(f"{where}: {self._now - now:.3f} s before the line above; a trace is in order of time")
        self._now = self._lives[peer].last_s = now
        match record.event:
            case Received():
                self._on_received(record.event, peer, now, where)
            case Done():
                self._on_done(record.event, peer, now, where)
        for command in record.commands:
            match command:
                case Do():
                    self._tasks[peer, command.task.id] = now, command.task
                case Send():
                    self._on_send(command, peer, now)
                case Finish():
                    self._lives[peer].ended = True

    def _on_send(self, command: Send, peer: Peer, now: float) -> None:
        message = command.message
        if isinstance(message, Join):
            life = self._lives[peer]
            life.asked_s = now if life.asked_s is None else life.asked_s
        elif isinstance(message, Round):
            self._rounds.setdefault(message.round, (now, message))
        if isinstance(message, FOLLOWED) and command.peer != peer:
            self._sent[peer, command.peer, message].append(now)

    def _on_received(self, event: Received, peer: Peer, now: float, where: str) -> None:
        message, nbytes = event.message, sum(blob.nbytes for blob in event.blobs)
        if isinstance(message, Offer):
            self._state[message.stage] = float(sum(message.manifest.sizes))
        if not isinstance(message, FOLLOWED):
            return
        if isinstance(message, Reduced):
            self._reduced[message.step] = now
        elif isinstance(message, ReduceChunk):
            self._averaged[message.round, peer] += nbytes
        elif isinstance(message, BoundaryTensor):
            self._tensors["gradient" if message.gradient else "activation"].append(nbytes)
        elif nbytes and isinstance(message, Forward | Backward):
            self._tensors["tokens"].append(nbytes)
        waiting = self._sent.get((event.peer, peer, message))
        if waiting:
            self._transfers.append(Transfer(event.peer, peer, waiting.popleft(), now, nbytes))
        elif event.peer != peer:
            self._unsent.append((now, event.peer, f"{where}: a {type(message).__name__} arrives"))

    def _on_done(self, event: Done, peer: Peer, now: float, where: str) -> None:
        given = self._tasks.pop((peer, event.id), None)
        if given is None:
            return
        given_s, task = given
        if not 0 <= event.seconds <= now - given_s + LONGER_S:
            raise ValueError(
                f"{where}: a {type(task).__name__} that took {event.seconds:.3f} s ends {now - given_s:.3f} s after it was given;"
                " this record is not true"
            )
        if isinstance(task, RunForward | RunBackward):
            self._hops[peer, task.stage, isinstance(task, RunBackward)].append(event.seconds)
        elif isinstance(task, ROUND_TASKS) and isinstance(step := getattr(task, "step", None), int):
            self._round_tasks[step, peer] += event.seconds

    def _refuse_unsent(self) -> None:
        for at_s, source, what in self._unsent:
            if source in self._lives and self._lives[source].last_s > at_s + UNWRITTEN_S:
                raise ValueError(f"{what} that {source} has not sent before; this record is not true")

    def recorded(self) -> Recorded:
        if not self._lives:
            raise ValueError(f"{self._path}: holds no peer's trace")
        self._refuse_unsent()
        rounds_s: dict[int, float] = {}
        for (step, _), seconds in self._round_tasks.items():
            rounds_s[step] = max(seconds, rounds_s.get(step, 0.0))
        return Recorded(
            settings=next(iter(self._lives.values())).settings,
            peers=tuple(self._lives),
            hops_s=dict(self._hops),
            rounds_s=rounds_s,
            transfers=self._transfers,
            tensors=self._tensors,
            gradient_bytes=_averaged([message for _, message in self._rounds.values()], self._averaged),
            state_bytes=self._state,
            parts={
                message.step: StepParts(at_s, self._reduced[message.step])
                for at_s, message in reversed(self._rounds.values())
                if message.step in self._reduced
            },
            asked_s={peer: life.asked_s for peer, life in self._lives.items() if life.asked_s is not None},
            last_s={peer: life.last_s for peer, life in self._lives.items()},
            ended=frozenset(peer for peer, life in self._lives.items() if life.ended),
        )


def _averaged(rounds: Iterable[Round], received: dict[tuple[int, Peer], int]) -> dict[int, float]:
    """Bytes of each stage's gradient, from what its replicas received of each other to add."""
    by_stage: dict[int, list[float]] = defaultdict(list)
    for message in rounds:
        for stage, group in enumerate(message.groups):
            nbytes = sum(received.get((message.round, share.peer), 0) for share in group)
            if len(group) < 2 or not nbytes:
                continue
            rows, held, each = row_lengths(len(group)), 1.0, 0.0
            for among in (rows[0], len(rows)) if len(rows) > 1 else rows:
                each += held * (1 - 1 / among)
                held /= among
            by_stage[stage].append(nbytes / (each * len(group)))
    return {stage: median(values) for stage, values in sorted(by_stage.items())}
