"""A group of replicas in one process that average: their core/allreduce/rounds.py for real, the network and the time played.

Messages of one pair stay in order, those of different pairs and the tasks come as they are drawn; some may be lost. Who puts what where is
for the runner: `Symbols` say whose microbatches were added in which order; tests/runtime/test_large_groups.py gives real tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any, Protocol

from shoal.core.allreduce.rounds import Rounds
from shoal.core.messages import (
    Add,
    AddRow,
    Command,
    Cut,
    Do,
    Done,
    Drop,
    Failed,
    Gather,
    GatherChunk,
    Member,
    Peer,
    ReduceChunk,
    Reduced,
    Resend,
    Result,
    Round,
    RoundFailed,
    RoundWaits,
    Send,
    Settings,
    Share,
    View,
)
from shoal.core.replica_state import ReplicaState

MOST = 60_000  # events of a round; more are a round that does not end


class TaskRunner(Protocol):
    def get(self, name: str) -> Any: ...

    def put(self, name: str, value: Any) -> None: ...

    def drop(self, name: str) -> None: ...

    def do(self, task: Cut | AddRow | Add | Gather) -> Done | Failed: ...


class Symbols:
    """A chunk is (first value, end, whose parts were added, in that order); `gathered` is what came of a round."""

    def __init__(self, name: Peer, length: int) -> None:
        self.name, self.length = name, length
        self.blobs: dict[str, tuple[int, int, tuple[Any, ...]]] = {}
        self.gathered: dict[int, list[tuple[int, int, tuple[Any, ...]]]] = {}

    def get(self, name: str) -> Any:
        return self.blobs[name]

    def put(self, name: str, value: Any) -> None:
        assert name not in self.blobs, f"{name} is used twice"
        self.blobs[name] = value

    def drop(self, name: str) -> None:
        del self.blobs[name]

    def do(self, task: Cut | AddRow | Add | Gather) -> Done | Failed:
        match task:
            case Cut():
                self._slices(task, (self.name,))
            case AddRow():
                low, high, _ = self._added(task.parts)
                assert (low, high) == (task.bounds[0], task.bounds[-1])
                self._slices(task, tuple(self.blobs[part][2] for part in task.parts))
            case Add():
                low, high, _ = self._added(task.parts)
                self.put(task.out, (low, high, tuple(self.blobs[part][2] for part in task.parts)))
            case Gather():
                at, gathered = task.start, self.gathered.setdefault(task.round, [])
                for name in task.sums:
                    assert self.blobs[name][0] == at, "sums do not join"
                    at = self.blobs[name][1]
                    gathered.append(self.blobs[name])
                assert not task.last or at == self.length
                return Done(task.id, Result(digest=str(gathered)))
        return Done(task.id, Result())

    def _slices(self, task: Cut | AddRow, held: tuple[Any, ...]) -> None:
        for low, high, out in zip(task.bounds[:-1], task.bounds[1:], task.outs, strict=True):
            self.put(out, (low, high, held))

    def _added(self, parts: tuple[str, ...]) -> tuple[int, int, Any]:
        origins = {self.blobs[part][:2] for part in parts}
        assert len(origins) == 1, f"parts of different chunks: {origins}"
        return self.blobs[parts[0]]


def held(play: Group, name: Peer) -> dict[str, tuple[int, int, tuple[Any, ...]]]:
    """What a replica of symbols holds."""
    runner = play.runner[name]
    assert isinstance(runner, Symbols)
    return runner.blobs


class Group:
    """`began` are those who have begun with the round; `lost` says what never comes; `asked` is what ends up at the leader."""

    def __init__(
        self,
        names: tuple[Peer, ...],
        length: int,
        piece_values: int = 0,
        joiners: tuple[Peer, ...] = (),
        runner: Callable[[Peer, int], TaskRunner] = Symbols,
        seed: int = 0,
        line_rates: tuple[int, ...] = (),
    ) -> None:
        self.names, self.rng = names, Random(seed)
        self.settings = Settings(1, len(names), steps=9, piece_values=piece_values, line_rates=line_rates)
        members = tuple(Member(name, 0) for name in names)
        joining = tuple(Member(name, 0) for name in joiners)
        self.view = View(number=5, step=3, members=members, joining=joining, owners=tuple(range(len(names))))
        known = line_rates or (0,) * len(names)
        self.shares = {name: Share(name, (index,), known[index]) for index, name in enumerate(names)}
        self.runner = {name: runner(name, length) for name in names}
        self.rounds: dict[Peer, Rounds] = {}
        for name in names:
            replica = ReplicaState(self.view, "leader", has_state=True, stage=0, step=3, length=length)
            self.rounds[name] = Rounds(name, self.settings, count(), replica)
        self.joiners = joiners
        self.lost: Callable[[Peer, Peer, Any], bool] = lambda *_: False
        self.now = 0.0
        self.sent: list[tuple[Peer, Peer, ReduceChunk | GatherChunk | Resend]] = []
        self.reduced: dict[Peer, Reduced] = {}
        self.failures: dict[Peer, RoundFailed] = {}
        self.waits: list[tuple[Peer, RoundWaits]] = []
        self.heard: list[tuple[Peer, Peer, GatherChunk]] = []  # from, to
        self.tasks: Counter[type] = Counter()
        self._lines: dict[tuple[Peer, Peer], deque[tuple[Any, tuple[Any, ...]]]] = {}
        self._doing: dict[Peer, deque[Any]] = {name: deque() for name in names}
        self._serial = count()

    def a_round(self, number: int = 7) -> Round:
        groups = (tuple(self.shares[name] for name in self.names),)
        return Round(epoch=0, step=3, round=number, view=5, groups=groups, joiners=(self.joiners,))

    def begin(self, *names: Peer, number: int = 7) -> None:
        for name in names or self.names:
            self.carry(name, self.rounds[name].begin(self.a_round(number), self.shares[name], self.now))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to happen, or what is asked for has."""
        for _ in range(MOST):
            if until():
                return
            ready = [pair for pair, line in self._lines.items() if line]
            busy = [name for name, tasks in self._doing.items() if tasks]
            if not ready and not busy:
                waits = [self.rounds[name].deadline for name in self.names if name not in self.reduced]
                if not (later := [at for at in waits if at is not None]):
                    return
                self.now = min(later)
                for name in self.names:
                    if name not in self.reduced:
                        self.carry(name, self.rounds[name].tick(self.now))
                continue
            at = self.rng.randrange(len(ready) + len(busy))
            if at < len(ready):
                self._arrive(*ready[at])
            else:
                self._end(busy[at - len(ready)])
        raise AssertionError(f"{MOST} events and no end")

    def carry(self, name: Peer, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Do():
                    self.tasks[type(command.task)] += 1
                    self._doing[name].append(command.task)
                case Drop():
                    for blob in command.blobs:
                        self.runner[name].drop(blob)
                case Send():
                    self._send(name, command)

    def _send(self, name: Peer, command: Send) -> None:
        message, values = command.message, tuple(self.runner[name].get(blob) for blob in command.blobs)
        if isinstance(message, Reduced):
            self.reduced[name] = message
        elif isinstance(message, RoundFailed):
            self.failures[name] = message
        elif isinstance(message, GatherChunk) and message.to_joiner:
            self.heard.append((name, command.peer, message))
        elif isinstance(message, RoundWaits):
            self.waits.append((name, message))
        else:
            assert isinstance(message, ReduceChunk | GatherChunk | Resend)
            self.sent.append((name, command.peer, message))
            if not self.lost(name, command.peer, message):
                self._lines.setdefault((name, command.peer), deque()).append((message, values))

    def _arrive(self, source: Peer, target: Peer) -> None:
        message, values = self._lines[source, target].popleft()
        names = tuple(f"r/{next(self._serial)}" for _ in values)
        for name, value in zip(names, values, strict=True):
            self.runner[target].put(name, value)
        self.carry(target, self.rounds[target].on_message(source, message, names, "", self.now))

    def _end(self, name: Peer) -> None:
        answer = self.runner[name].do(self._doing[name].popleft())
        if isinstance(answer, Done):
            self.carry(name, self.rounds[name].on_done(answer, self.now))
        else:
            self.carry(name, self.rounds[name].on_failed(answer, self.now))
