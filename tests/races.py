"""A race detector on the CPU: accesses to the same memory that no mark, wait or synchronization orders.

Every thread and every stream of `executor.streams.Streams` has a vector clock. `Watch` sees each operator of PyTorch: what it reads and
writes, and where it runs: on the stream of `on`, on `compute` if it touches memory of the device, else on its own thread. A
thread's work precedes what it issues to a stream; all other order comes from `mark`, `wait` and `settle`, from a queue between
threads, from an event. Two accesses in no order, one of them a write, are a race, whatever the machine did this time.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shoal.executor import streams
from shoal.executor.resident import Resident
from shoal.executor.swap.groups import Runner
from shoal.executor.swap.swapping import Swapping
from shoal.numerics import optimizer, pieces
from shoal.numerics.optimizer import Factors, separate_
from shoal.runtime.tasks.lane import Lane
from shoal.runtime.tasks.outgoing import Outgoing

STREAMS = ("compute", "loads", "stores")  # of a swapping stage, the only one that settles them
SCALAR = torch.ops.aten._local_scalar_dense.default  # item, bool, float: the host waits for the device

Clock = dict[str, int]  # per thread and stream: how much of its work is known to be done


class Accesses:
    """Of one storage: its last write, and the reads since."""

    def __init__(self) -> None:
        self.write: tuple[str, int] | None = None
        self.reads: Clock = {}


class Detector:
    """`without`: a place in the source (how one of `sites` begins) whose wait or settle is skipped. `fails_at`: the device has no
    memory for that operator, counted from the first. `slow`: copies of `loads` and `stores` are made when they are waited for."""

    def __init__(self, without: str = "", fails_at: int = 0, slow: bool = False) -> None:
        self.without = without
        self.fails_at = fails_at
        self.slow = slow
        self._pending: list[tuple[str, int, Callable[[], object]]] = []  # stream, its clock, and the copy
        self.operators = 0  # that touched the device
        self.sites: Counter[str] = Counter()
        self.races: list[str] = []
        self.scalars = 0  # times that the host waited for a number of the device
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, Accesses] = {}
        self._on_device: set[int] = set()
        self._local = threading.local()  # stream, forced
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------------- order

    def clock(self, agent: str) -> Clock:
        with self._lock:
            return dict(self._clocks.setdefault(agent, {}))

    def know(self, agent: str, clock: Clock) -> None:
        """Later work of that thread or stream comes after all that `clock` lists."""
        due = [each for each in self._pending if each[1] <= clock.get(each[0], 0)]
        self._pending = [each for each in self._pending if each not in due]
        with _disable_current_modes():
            for _, _, copy in due:
                copy()
        with self._lock:
            known = self._clocks.setdefault(agent, {})
            for other, count in clock.items():
                known[other] = max(known.get(other, 0), count)

    def skips(self) -> bool:
        """Count the place that called the caller; True: it is the one to leave out."""
        frame = sys._getframe(2)
        site = f"{frame.f_code.co_qualname}:{frame.f_lineno}" + (" after a failure" if sys.exception() else "")
        self.sites[site] += 1
        return bool(self.without) and site.startswith(self.without)

    # ------------------------------------------------------------------------------------------------------ memory

    def on_device(self, tensors: Iterable[Tensor]) -> None:
        self._on_device.update(self._key(tensor) for tensor in tensors)

    def is_on_device(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._on_device

    @contextmanager
    def issuing(self, stream: str | None, to_device: bool = False) -> Iterator[None]:
        """Operators inside run on that stream; `to_device`: what they make is on the device."""
        before = self._state()
        self._local.state = (stream or before[0], to_device)
        try:
            yield
        finally:
            self._local.state = before

    def _state(self) -> tuple[str | None, bool]:
        state: tuple[str | None, bool] = getattr(self._local, "state", (None, False))
        return state

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = Accesses()
            weakref.finalize(storage, self._freed, key)
        return key

    def _freed(self, key: int) -> None:
        with self._lock:
            self._memory.pop(key, None)
            self._on_device.discard(key)

    def ran(self, operator: Any, inputs: list[Tensor], outputs: list[Tensor], mutated: list[Tensor]) -> None:
        with self._lock:
            read, written = {self._key(one) for one in inputs}, {self._key(one) for one in mutated}
            created = {self._key(one) for one in outputs} - read
            stream, to_device = self._state()
            stream = stream or ("compute" if to_device or read & self._on_device else None)
            if operator is SCALAR and stream == "compute":
                self.scalars += 1
                self.know(host(), self.clock("compute"))
                return
            if stream is not None:
                self.operators += 1
                if self.operators == self.fails_at:
                    raise torch.OutOfMemoryError("out of memory on purpose")
                self.know(stream, self.clock(host()))
                self._on_device |= created
            agent = stream or host()
            clock = self._clocks.setdefault(agent, {})
            clock[agent] = clock.get(agent, 0) + 1
            for key in sorted(read | created):
                self._access(key, agent, clock, key in written | created, str(operator))

    def postpones(self, copy: Callable[[], object]) -> bool:
        """Whether a copy that was just recorded is made later."""
        stream, _ = self._state()
        if self.slow and stream is not None:
            self._pending.append((stream, self._clocks[stream][stream], copy))
        return self.slow and stream is not None

    def _access(self, key: int, agent: str, clock: Clock, writes: bool, operator: str) -> None:
        memory = self._memory[key]
        if memory.write is not None and clock.get(memory.write[0], 0) < memory.write[1]:
            self.races.append(f"{operator} on {agent} does not wait for a write on {memory.write[0]}")
        if not writes:
            memory.reads[agent] = clock[agent]
            return
        for other, count in memory.reads.items():
            if clock.get(other, 0) < count:
                self.races.append(f"{operator} on {agent} writes what is still read on {other}")
        memory.write, memory.reads = (agent, clock[agent]), {}


def host() -> str:
    return threading.current_thread().name


class Watch(TorchDispatchMode):
    """Shows a detector every operator of this thread."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated by torch
        self._detector = detector

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        copies = func is torch.ops.aten.copy_.default
        result = args[0] if copies else func(*args, **(kwargs or {}))
        if not func.is_view:
            mutated = [*zip(func._schema.arguments, args, strict=False)]
            mutated += [(each, kwargs[each.name]) for each in func._schema.arguments if kwargs and each.name in kwargs]
            written = [value for each, value in mutated if each.alias_info is not None and each.alias_info.is_write]
            self._detector.ran(func, tensors((args, kwargs)), tensors(result), tensors(written))
        if copies and not self._detector.postpones(partial(func, *args, **(kwargs or {}))):
            func(*args, **(kwargs or {}))
        return result


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class CheckedStreams:
    """See streams.Streams: the streams of a device that the CPU plays."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector

    def on(self, stream: str, group: int = 0, what: str = "", share: float = 1.0) -> Any:
        return self._detector.issuing(stream)

    def computed(self, group: int, back: bool) -> None: ...

    def mark(self, stream: str) -> object:
        return self._detector.clock(stream)

    def wait(self, stream: str, mark: object) -> None:
        skipped = self._detector.skips()
        if isinstance(mark, dict) and not skipped:
            self._detector.know(stream, mark)

    def reached(self, mark: object) -> None:
        skipped = self._detector.skips()
        if isinstance(mark, dict) and not skipped:
            self._detector.know(host(), mark)

    def settle(self) -> None:
        if not self._detector.skips():
            for stream in STREAMS:
                self._detector.know(host(), self._detector.clock(stream))


class CheckedEvent(threading.Event):
    """What a thread did before `set`, others know after `wait`."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector, self._clock = detector, Clock()

    def set(self) -> None:
        self._clock |= self._detector.clock(host())
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        if self._detector.skips():
            return True
        answer = super().wait(timeout)
        self._detector.know(host(), self._clock)
        return answer


def watch_swapping(monkeypatch: pytest.MonkeyPatch, detector: Detector) -> None:
    """Swapping stages that are built from now on run on a device that the CPU plays."""
    construct, to_device = Swapping.__init__, Runner.to_device

    def constructed(self: Swapping, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        detector.on_device((*self._link.slots, *self._link.slabs, *self._row._model.buffers()))

    def copied(self: Runner, value: Tensor) -> Tensor:
        with detector.issuing(None, to_device=True):
            return to_device(self, value)

    monkeypatch.setattr(streams, "NoStreams", lambda: CheckedStreams(detector))
    monkeypatch.setattr(Swapping, "__init__", constructed)
    monkeypatch.setattr(Runner, "to_device", copied)


def watch_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer steps by torch operations, as on a GPU: a compiled loop's accesses are seen by nobody."""

    def by_operations(values: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], factors: Factors) -> None:
        separate_(factors, *(tensor.detach().view(-1) for tensor in (values, gradient, *moments)))

    monkeypatch.setattr(optimizer, "adamw_", by_operations)


def watch_pieces(monkeypatch: pytest.MonkeyPatch, detector: Detector) -> None:
    """Likewise of copies and sums. A copy from the device to the host waits for the stream that it is issued on."""

    def copy_(into: Tensor, source: Tensor) -> None:
        into.copy_(source)
        if detector.is_on_device(source):
            detector.know(host(), detector.clock("compute"))

    def sum_of(parts: Sequence[Tensor]) -> Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    monkeypatch.setattr(pieces, "copy_", copy_)
    monkeypatch.setattr(pieces, "sum_of", sum_of)


def watch_resident(monkeypatch: pytest.MonkeyPatch, detector: Detector) -> None:
    """Resident stages that are built from now on are on a device that the CPU plays, and their results leave through pinned buffers."""
    construct = Resident.__init__

    def constructed(self: Resident, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        detector.on_device((*self.computing, *self._master.parameters, self.sum, *self._master.state().values()))

    monkeypatch.setattr(Resident, "__init__", constructed)
    monkeypatch.setattr(Outgoing, "staged", lambda self, tensor: detector.is_on_device(tensor))
    monkeypatch.setattr(streams, "NoStreams", lambda: CheckedStreams(detector))


def watch_lanes(monkeypatch: pytest.MonkeyPatch, detector: Detector) -> None:
    """Lanes that are started from now on are watched; what a thread did before `put` is done before the work."""
    construct, put = Lane.__init__, Lane.put

    def constructed(self: Lane, name: str, begin: Callable[[], None]) -> None:
        def watched() -> None:
            Watch(detector).__enter__()  # for as long as the thread lives
            begin()

        construct(self, name, watched)

    def ordered(self: Lane, work: Callable[[], None]) -> None:
        before = detector.clock(host())

        def later() -> None:
            detector.know(host(), before)
            work()

        put(self, later)

    monkeypatch.setattr(Lane, "__init__", constructed)
    monkeypatch.setattr(Lane, "put", ordered)
