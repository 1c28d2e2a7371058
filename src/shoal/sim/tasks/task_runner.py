"""Carries out a machine's tasks in symbols: what a real peer computes with tensors is here who put what where.

A boundary tensor is a tuple naming its microbatch and the parameters that made it (and, where a liar had a hand in it, which noise it
is), a gradient sum is the list of what was added, parameters are a chain of digests over all that was ever applied. So that two replicas
agree exactly if their tensors would, and the checkers can read from a digest which microbatches it holds. Takes virtual seconds: computing
goes one task after the other, reading and writing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.core import messages as m
from shoal.sim.lines import Wire
from shoal.sim.tasks.auditing import Audit, describe, entry_of
from shoal.sim.tasks.oddities import LOSS, NOTHING, Oddities, made_of
from shoal.sim.tasks.pace import Pace
from shoal.sim.tasks.sketches import checks_of, sketch_of
from shoal.sim.tasks.state_transfer import StateTransfer
from shoal.sim.tasks.storage import CHUNKS, Blob, Copies, Storage, shard_name, short
from shoal.sim.tasks.texts import Texts

BAD = ("bad",)  # a blob that a driver would find non-finite or misshapen
UNLIKE = "~"  # begins the digest of a state that follows from an optimizer step with other bits
ROUNDING = 1e-4  # of the norm, by which unlike machines' results differ
HUGE = ("huge",)  # among what was added: finite by itself, and nothing that is made of it is
Ends = Callable[[m.Done | m.Failed], None]
After = Callable[[float, Callable[[Any], None], Any], None]  # seconds, what, with what

MAY_FAIL = (
    m.Fetch, m.RunForward, m.RunBackward, m.Describe, m.RunAudit, m.EndAudit,
    m.ReadChunk, m.RunSave, m.RunPublish, m.OfferShard, m.ReadShard, m.WriteChunk,
    m.RunCopy,
)  # fmt: skip


def norm_sq(digest: str) -> float:
    """Of the reduced gradient with that digest."""
    return 1.0 + int(digest[:6], 16) / 2**24


class Reduced(msgspec.Struct, frozen=True):
    """A stage's reduced gradient: `chunks[c]` is what was added to values `bounds[c]` to `bounds[c + 1]`, in order."""

    stage: int
    bounds: tuple[int, ...]
    chunks: tuple[tuple[Blob, ...], ...]


class Unloadable(ValueError):
    """A checkpoint is no good here; `older`: the step of the newest older one that is whole, 0 for none."""

    def __init__(self, reason: str, older: int, lack: m.Lack) -> None:
        super().__init__(reason)
        self.older, self.lack = older, lack


class NotFinite(ValueError):
    """A result is not finite, whoever computes it."""


class World:
    """What all task runners of one simulation share: the storage, and for the checkers what each digest stands for."""

    def __init__(
        self,
        stages: int,
        values: int,
        staleness: int = 0,
        wire: Wire | None = None,
        nonfinite: frozenset[tuple[int, int, int]] = frozenset(),
        tokens: int = 0,
    ) -> None:
        self.wire = wire
        self.boundary_bytes = 100  # of a boundary tensor, as the machines see it
        self.lengths: tuple[int, ...] = ()  # of each stage's gradient, if they are given
        self.chunks = CHUNKS  # of a stage's state
        self.listed = True  # sums list what was added, for the checkers
        self.tokens = tokens  # of a microbatch, where not all are counted
        self.nonfinite = nonfinite  # (step, microbatch, stage)
        self.stages = stages
        self.values = values
        self.staleness = staleness
        self.storages: dict[str, Storage] = {}  # by place
        self.reduced: dict[str, Reduced] = {}
        self.versions: dict[tuple[int, str], int] = {}  # (stage, parameters) -> gradients that are in them
        self.faults: list[str] = []  # what no machine may ever ask for; the swarm makes violations of them

    @property
    def storage(self) -> Storage:
        """The one of a run whose peers share it."""
        return self.storage_of("")

    def storage_of(self, place: str) -> Storage:
        return self.storages.setdefault(place, Storage())

    def copies(self, step: int, digests: Sequence[str]) -> int:
        """Of that checkpoint's rarest shard."""
        return min(
            sum(storage.has(step, stage, digest) for storage in self.storages.values())
            for stage, digest in enumerate(digests)
        )

    def readable(self) -> dict[int, tuple[str, ...]]:
        """By step, the published checkpoints of which every shard is whole somewhere."""
        known = {(step, digests) for storage in self.storages.values() for step, digests in storage.published.items()}
        return {step: digests for step, digests in sorted(known) if self.copies(step, digests)}

    def counted(self, step: int, index: int) -> int:
        """Tokens of that microbatch whose loss counts: few, many, all or none."""
        return (7 * step + 3 * index) % 5 * self.tokens // 4

    def measured(self, step: int, index: int) -> m.Result:
        """The loss of a held-out microbatch, and its counted tokens."""
        return m.Result(loss=2.0 + step / 8 + index / 64, counted=(step + index) % 5)

    def length(self, stage: int) -> int:
        return self.lengths[stage] if self.lengths else self.values + 7 * stage


class Rounds:
    """The sums of the stage that a peer serves: pieces gathered in order, and the reduced gradients that they make."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.audit = Audit()
        self.wrong = False  # it adds something up twice, on purpose
        self._reduced: dict[int, Reduced] = {}
        self._gathered: list[Blob] = []  # of the round that goes piece by piece

    def gather(self, task: m.Gather, inputs: Sequence[Blob], stage: int) -> m.Result:
        if task.start == 0:
            self._gathered = []
        end = self._gathered[-1][3] if self._gathered else 0
        if task.start != end:
            raise ValueError(f"sums from {task.start} on, where {end} are here")
        sums = inputs[: len(task.sums)]
        checks = checks_of(sums, inputs[len(task.sums) :], task.own)
        for part in sums:
            if part[:3] != ("part", stage, end):
                raise ValueError(f"sums do not join: {part[:4]} after {end} of stage {stage}")
            if HUGE in part[4]:
                raise ValueError("the reduced gradient is not finite")
            end = part[3]
            self._gathered.append(part)
        if not task.last:
            return checks
        if end != self._world.length(stage):
            raise ValueError(f"sums end at {end}, not at {self._world.length(stage)}")
        bounds = (0, *(part[3] for part in self._gathered))
        reduced = Reduced(stage, bounds, tuple(part[4] for part in self._gathered))
        digest = short(reduced.stage, reduced.bounds, reduced.chunks)
        self._world.reduced[digest] = reduced
        self._reduced[task.round] = reduced
        return msgspec.structs.replace(checks, digest=digest, norm_sq=norm_sq(digest))

    def reduced(self, round_: int) -> Reduced:
        reduced = self._reduced.get(round_)
        if reduced is None:
            self._world.faults.append(f"Apply of round {round_}, whose reduced gradient is not held")
            raise ValueError("no such round")
        return reduced

    def forget(self) -> None:
        """The stage has other parameters: what was reduced is of no use."""
        self._reduced.clear()


class TaskRunner:
    """One peer's blobs, stage state and compute. `submit` answers through `ends` after virtual seconds."""

    def __init__(self, world: World, after: After, now: Callable[[], float], place: str = "") -> None:
        self.world = world
        self.copies = Copies(world.stages, place, world.storage_of, world.faults)
        self.blobs: dict[str, Blob] = {}
        self.pace = Pace(world.wire, world.stages)
        self.fails: Callable[[], bool] = lambda: False
        self.oddities = Oddities()
        self._times = after, now
        self.stage = -1
        self.version = -1
        self.digest = ""
        self.previous = ""  # with delayed updates, the parameters of the version before; at first the same
        self.sums: dict[int, list[Blob]] = {}  # by step
        self.rounds = Rounds(world)
        self.transfer = StateTransfer(world.chunks)
        self._texts = Texts()

    def submit(self, task: m.Task, ends: Ends) -> None:
        """Inputs are resolved when the task is given, so a Drop may follow at once."""
        inputs = [self._find(name, task) for name in task.reads]
        seconds = self.pace.seconds(task, inputs, self.world.length(self.stage))
        after, now = self._times
        wait_s = self.pace.wait_s(task, seconds, now())
        after(wait_s, self._end, (task, inputs, seconds, ends))

    def _find(self, name: str, task: m.Task) -> Blob:
        blob = self.blobs.get(name)
        if blob is None:
            self.world.faults.append(f"{type(task).__name__} needs blob {name!r}, which is not held")
            return BAD
        return blob

    def _end(self, given: tuple[m.Task, list[Blob], float, Ends]) -> None:
        task, inputs, seconds, ends = given
        try:
            if isinstance(task, MAY_FAIL) and self.fails():
                raise ValueError("fault drawn by the simulation")
            result = _WORK[type(task)](self, task, inputs)
        except ValueError as error:
            unloadable = error if isinstance(error, Unloadable) else None
            older, lacks = (unloadable.older, (unloadable.lack,)) if unloadable else (None, ())
            ends(m.Failed(task.id, str(error), nonfinite=isinstance(error, NotFinite), older=older, lacks=lacks))
            return
        ends(m.Done(task.id, result, seconds))

    def _put(self, name: str, blob: Blob) -> None:
        if name in self.blobs:
            self.world.faults.append(f"blob name {name!r} is used twice")
        self.blobs[name] = blob

    def _infer(self, task: m.Infer, inputs: Sequence[Blob]) -> m.Result:
        if task.stage != self.stage:
            raise ValueError(f"stage {self.stage} is here, not stage {task.stage}")
        result, hidden = self._texts.run(task, inputs)
        if task.out:
            self._put(task.out, hidden)
        return result

    def _seat(self, stage: int, version: int, digest: str, previous: str) -> m.Result:
        if stage != self.stage:
            self._texts.clear()
        self.stage, self.version, self.digest, self.previous = stage, version, digest, previous
        self.world.versions.setdefault((stage, digest), version)
        self.sums = {step: held for step, held in self.sums.items() if step >= version and self.world.staleness}
        self.pace.share = 1.0
        self.rounds.forget()
        self.transfer.forget_download()
        self.pace.kept.clear()
        return m.Result(digest=digest, length=self.world.length(stage))

    # ------------------------------------------------------------------------------------------------------- hops

    def _fetch(self, task: m.Fetch, inputs: Sequence[Blob]) -> m.Result:
        self._put(task.out, ("x", task.step, task.index, 0, ""))
        return m.Result(nbytes=100)

    def _forward(self, task: m.RunForward, inputs: Sequence[Blob]) -> m.Result:
        (x,) = inputs
        self._match(x, ("x", task.step, task.index, task.stage), "RunForward")
        _small(x)
        self._finite(task)
        used = self._used(task.stage, task.step, "RunForward")
        self._put(task.out, ("x", task.step, task.index, task.stage + 1, used, *self._noise(task, x)))
        return m.Result(nbytes=self.world.boundary_bytes)

    def _backward(self, task: m.RunBackward, inputs: Sequence[Blob]) -> m.Result:
        x = inputs[0]
        last = self.world.stages - 1
        self._match(x, ("x", task.step, task.index, task.stage), "RunBackward")
        if task.grad:
            wanted = ("x", task.step, task.index, 0) if task.stage == last else ("g", task.step, task.index, task.stage)
            self._match(inputs[1], wanted, "RunBackward")
            _small(inputs[1])
        _small(x)
        self._finite(task)
        used = self._used(task.stage, task.step, "RunBackward")
        if task.heldout:
            return self.world.measured(task.step, task.index)
        if self.world.listed:
            entry = entry_of(task, x, used, inputs[1:])
            if instead := self.oddities.adds:
                entry = (*entry[:5], instead)
            self.sums.setdefault(task.step, []).append(entry)
        if task.out:
            noise = self._noise(task, x, *inputs[1:])
            self._put(task.out, ("g", task.step, task.index, task.stage - 1, used, *noise))
        nbytes = self.world.boundary_bytes
        if task.stage != last:
            return m.Result(nbytes=nbytes)
        loss = LOSS if self.oddities.idles else 1.0 + task.index / 64
        return m.Result(loss=loss, nbytes=nbytes, counted=self.world.counted(task.step, task.index))

    def _audit(self, task: m.RunAudit, inputs: Sequence[Blob]) -> m.Result:
        self._match(inputs[0], ("x", task.step, task.index, task.stage), "RunAudit")
        used = self._used(task.stage, task.step, "RunAudit")
        return self.rounds.audit.run(task, inputs, used, self.world.stages - 1, self._rounding)

    @property
    def _rounding(self) -> float:
        return max(self.oddities.rounding, ROUNDING if self.oddities.unlike else 0.0)

    def _noise(self, task: m.RunForward | m.RunBackward, *inputs: Blob) -> Blob:
        if self.oddities.idles and isinstance(task, m.RunBackward):
            return (NOTHING,)
        if self.oddities.invents:
            return (short("invented", task.step, task.index, task.stage, type(task).__name__),)
        return made_of(*inputs)

    def _finite(self, task: m.RunForward | m.RunBackward) -> None:
        if (task.step, task.index, task.stage) in self.world.nonfinite:
            raise NotFinite("not finite, whoever computes it")

    def _match(self, blob: Blob, wanted: Blob, what: str) -> None:
        if blob[: len(wanted)] != wanted:
            self.world.faults.append(f"{what} of {blob} where {wanted} belongs")
            raise ValueError("not the right blob")

    def _used(self, stage: int, step: int, what: str) -> str:
        """The parameters that compute that step."""
        if self.world.staleness and step == self.version + 1:
            self._expect(stage, self.version, what)
            return self.digest
        self._expect(stage, step, what)
        return self.previous if self.world.staleness else self.digest

    def _expect(self, stage: int, version: int, what: str) -> None:
        if (stage, version) != (self.stage, self.version):
            self.world.faults.append(
                f"{what} of stage {stage} step {version} on stage {self.stage} version {self.version}"
            )

    # ----------------------------------------------------------------------------------------------------- rounds

    def _cut(self, task: m.Cut, inputs: Sequence[Blob]) -> m.Result:
        self._expect(self.stage, task.step, "Cut")
        held = tuple(self.sums.get(task.step, ()))
        for low, high, out in zip(task.bounds[:-1], task.bounds[1:], task.outs, strict=True):
            self._put(out, ("part", self.stage, low, high, held))
        return m.Result()

    def _add(self, task: m.Add, inputs: Sequence[Blob]) -> m.Result:
        total = _added(inputs)
        self._put(task.out, (*total[:4], (*total[4], *total[4][:1])) if self.rounds.wrong else total)
        return m.Result(sketches=(*(sketch_of(part) for part in inputs), m.Sketch())) if task.check else m.Result()

    def _add_row(self, task: m.AddRow, inputs: Sequence[Blob]) -> m.Result:
        kind, stage, low, high, held = _added(inputs)
        if (low, high) != (task.bounds[0], task.bounds[-1]):
            raise ValueError(f"the row's sum is of values {low} to {high}, not {task.bounds}")
        for start, end, out in zip(task.bounds[:-1], task.bounds[1:], task.outs, strict=True):
            self._put(out, (kind, stage, start, end, held))
        return m.Result()

    def _gather(self, task: m.Gather, inputs: Sequence[Blob]) -> m.Result:
        return self.rounds.gather(task, inputs, self.stage)

    def _apply(self, task: m.Apply, inputs: Sequence[Blob]) -> m.Result:
        self._expect(self.stage, task.step, "Apply")
        if task.skip:
            digest = short(self.digest, task.step, "skip")  # another one, for checkers to know the version by
        else:
            chunks = self.rounds.reduced(task.round).chunks
            scale = [task.scale] if self.world.tokens else []
            digest = short(
                self.digest, task.step, chunks, task.norm, *scale, *([UNLIKE] if self.oddities.unlike else [])
            )
        if self.oddities.unlike or self.digest.startswith(UNLIKE):
            digest = UNLIKE + digest
        if task.save:
            self.copies.keep(self.stage, task.step + 1, digest)
        return self._seat(self.stage, task.step + 1, digest, self.digest)

    def _reset(self, task: m.Reset, inputs: Sequence[Blob]) -> m.Result:
        self.sums.clear()
        self.pace.kept.clear()
        return m.Result()

    # ------------------------------------------------------------------------------------------ state, checkpoints

    def _build(self, stage: int, version: int, digest: str, previous: str) -> m.Result:
        self.transfer.withdraw()  # it goes with the seat that was
        return self._seat(stage, version, digest, previous)

    def _init(self, task: m.Init, inputs: Sequence[Blob]) -> m.Result:
        self.sums.clear()
        self.copies.storage.delete_undone(task.step, task.void_before)
        if task.step == 0:
            digest = short("init", task.stage)
            return self._build(task.stage, 0, digest, digest)
        storage = self.copies.storage
        saved = storage.published.get(task.step)
        if saved is None or not storage.has(task.step, task.stage, saved[task.stage]):
            older = max(
                (step for step in storage.published if step < task.step and step not in storage.damaged), default=0
            )
            name = shard_name(task.step, task.stage, saved[task.stage]) if saved is not None else m.ABOUT
            why = f"there is no whole checkpoint of step {task.step}"
            raise Unloadable(why, older, m.Lack(task.stage if saved is not None else 0, name))
        return self._build(task.stage, task.step, saved[task.stage], saved[task.stage])

    def _export(self, task: m.Export, inputs: Sequence[Blob]) -> m.Result:
        if task.step != self.version:
            raise ValueError(f"version {self.version} is held, not {task.step}")
        return self.transfer.export((self.version, self.stage, self.digest, self.previous))

    def _read(self, task: m.ReadChunk, inputs: Sequence[Blob]) -> m.Result:
        self._put(task.out, self.transfer.read(task))
        return m.Result(nbytes=1000)

    def _import(self, task: m.Import, inputs: Sequence[Blob]) -> m.Result:
        version, stage, digest, previous = self.transfer.downloaded(range(task.chunks))
        if (stage, version) != (task.stage, task.step):
            raise ValueError(f"kept: stage {stage} version {version}; wanted: {task.stage} version {task.step}")
        self.sums.clear()
        return self._build(stage, version, digest, previous)

    def _blend(self, task: m.Blend, inputs: Sequence[Blob]) -> m.Result:
        """Both neighbours at that version: whoever makes the stage of them gets the same."""
        neighbours = []
        for first, count, of in ((0, task.chunks[0], -1), (task.chunks[0], task.chunks[1], 1)):
            version, stage, digest, previous = self.transfer.downloaded(range(first, first + count))
            if (stage, version) != (task.stage + of, task.step):
                raise ValueError(f"kept: stage {stage} version {version}, for stage {task.stage} version {task.step}")
            neighbours.append((digest, previous))
        self.sums.clear()
        digest, previous = (short("blend", task.stage, task.below, *both) for both in zip(*neighbours, strict=True))
        self.world.versions.setdefault((task.stage, previous), max(task.step - 1, 0))
        return self._build(task.stage, task.step, digest, previous)

    def _save(self, task: m.RunSave, inputs: Sequence[Blob]) -> m.Result:
        here = (self.stage, self.version) == (task.stage, task.step)
        return self.copies.save(task, self.digest if here else None)

    def _read_shard(self, task: m.ReadShard, inputs: Sequence[Blob]) -> m.Result:
        self._put(task.out, self.copies.read(task))
        return m.Result(nbytes=1000)


def _small(blob: Blob) -> None:
    if blob[4:5] == HUGE:
        raise ValueError("the stage's output is not finite")


def overflown(blob: Blob) -> bool:
    """Finite, and too large for anything to be made of it, as every driver sees that receives it."""
    return HUGE in blob[4] if blob[:1] == ("part",) else blob[4:5] == HUGE


def _added(parts: Sequence[Blob]) -> Blob:
    if any(part[:4] != parts[0][:4] or part[0] != "part" for part in parts):
        raise ValueError(f"parts of different chunks: {[part[:4] for part in parts]}")
    return (*parts[0][:4], tuple(one for part in parts for one in part[4]))


_WORK: dict[type, Callable[[TaskRunner, Any, Sequence[Blob]], m.Result]] = {
    m.Fetch: TaskRunner._fetch,
    m.RunForward: TaskRunner._forward,
    m.RunBackward: TaskRunner._backward,
    m.Describe: lambda runner, task, inputs: describe(task, inputs),
    m.RunAudit: TaskRunner._audit,
    m.EndAudit: lambda runner, task, inputs: runner.rounds.audit.end(task, runner._rounding),
    m.Cut: TaskRunner._cut,
    m.AddRow: TaskRunner._add_row,
    m.Add: TaskRunner._add,
    m.Gather: TaskRunner._gather,
    m.Apply: TaskRunner._apply,
    m.Reset: TaskRunner._reset,
    m.Init: TaskRunner._init,
    m.Export: TaskRunner._export,
    m.ReadChunk: TaskRunner._read,
    m.CheckChunk: lambda runner, task, inputs: runner.transfer.check(task, inputs[0]),
    m.Import: TaskRunner._import,
    m.Blend: TaskRunner._blend,
    m.RunSave: TaskRunner._save,
    m.ReadShard: TaskRunner._read_shard,
    m.RunPublish: lambda runner, task, inputs: runner.copies.publish(task),
    m.OfferShard: lambda runner, task, inputs: runner.copies.offer(task),
    m.WriteChunk: lambda runner, task, inputs: runner.copies.write(task, inputs[0]),
    m.RunCopy: lambda runner, task, inputs: runner.copies.finish(task),
    m.Infer: TaskRunner._infer,
    m.Forget: lambda runner, task, inputs: runner._texts.forget(task),
}
