"""Carries out core's tasks with real tensors: keeps the blobs, the stage's executor, rounds, copies of state, checkpoints.

For runtime/node.py, which gives it every Do and passes each Done or Failed back to the machine; which task, when and for
whom is core's. Work goes to three threads ("lanes"): `compute` runs the model and the arithmetic of rounds, one task at a
time in the order asked, whose results leave by outgoing.py; `read` fetches samples and serves chunks; `write` hashes copies
and writes checkpoints, so that a storage which takes minutes holds up neither training nor data. With delayed updates a
fourth, `average`, adds up what a round brings and steps the optimizer beside the hops of the next step: what it reads was
copied from the sum before, and what it writes is not computed with (executor/delayed.py). Blobs lie in the CPU's memory,
whatever the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cached_property

import msgspec
import torch

from shoal.config import Config, masked, paired, token_rows
from shoal.core.messages import (
    Add,
    AddRow,
    Apply,
    Blend,
    CheckChunk,
    Cut,
    Describe,
    Done,
    EndAudit,
    Export,
    Failed,
    Fetch,
    Forget,
    Gather,
    Import,
    Infer,
    Init,
    Message,
    OfferShard,
    ReadChunk,
    ReadShard,
    Reset,
    Result,
    RunAudit,
    RunBackward,
    RunCopy,
    RunForward,
    RunPublish,
    RunSave,
    Task,
    WriteChunk,
)
from shoal.executor import create
from shoal.executor.base import Executor, device_of, draw, evaluate, prepare_thread, rewards
from shoal.executor.delayed import PREVIOUS, Delayed
from shoal.model.cut import counted
from shoal.numerics import sketches
from shoal.runtime.checkpoints import checkpoint, marker
from shoal.runtime.data.dataset import Dataset
from shoal.runtime.state import Copy
from shoal.runtime.tasks import auditing, coding
from shoal.runtime.tasks.blobs import Blobs
from shoal.runtime.tasks.borders import Borders
from shoal.runtime.tasks.coding import Held
from shoal.runtime.tasks.failures import DoesNotFit, Failures
from shoal.runtime.tasks.kinds import Kinds, checked, sendable
from shoal.runtime.tasks.lane import Lane, Later
from shoal.runtime.tasks.outgoing import Outgoing
from shoal.runtime.tasks.seat import Download, Seat, Snapshots
from shoal.runtime.tasks.shards import Shards
from shoal.runtime.tasks.sums import Sums
from shoal.traffic import StoredBytes
from shoal.transport.base import Blob

log = logging.getLogger(__name__)

BUILDING = (Init, Import, Blend)  # tasks that build a stage

Answer = Callable[[Done | Failed], None]
Make = Callable[[Config, int], Executor]
Take = Callable[..., torch.Tensor]  # (name, device="cpu") -> the blob's values


class TaskRunner:
    """One peer's tensors and what is done with them. `dataset` is not needed by emulated stages, `store` not without
    checkpoints. `put`, `get`, `drop`, `blob`, `check` and `submit` are called from one thread, the driver's."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset | None = None,
        store: checkpoint.Store | None = None,
        make: Make = create,
    ) -> None:
        self._config = config
        prepare_thread(config)  # for the driver's thread, which checks blobs; each lane needs it again
        self._dataset = dataset
        self._borders = Borders(config, dataset)
        self._make = make
        self._seat: Seat | None = None
        self._sums = Sums(config)
        emulated = config.device.executor == "emulated"
        self._outgoing = Outgoing("cpu" if emulated else str(device_of(config)), lambda: prepare_thread(config))
        self._snapshots, self._download = Snapshots(), Download()
        self._failures = Failures(config)
        self._shards = Shards(config, store)
        self._stepped = threading.Event()  # no optimizer step goes on beside the hops
        self._stepped.set()
        self._kinds = Kinds(config)
        names = ("compute", "read", "write", *(("average",) if config.train.staleness else ()))
        self._lanes = {name: Lane(name, lambda: prepare_thread(config)) for name in names}
        self._lanes["read"].put(sketches.load)  # beside joining
        self._blobs = Blobs(config.network.activation_memory_bytes, config.run.directory, self._lanes["write"].put)

    @property
    def place(self) -> str:
        """Names where checkpoints are written; '' when nothing can be."""
        return self._shards.store.place if self._shards.store is not None else ""

    # -------------------------------------------------------------------------------------------------------- blobs

    def put(self, name: str, value: Held) -> int:
        """Keep a tensor, or what came off the network, under `name`. Returns its size in bytes. What is encoded stays so."""
        held = checked(value) if isinstance(value, Blob) else value
        self._blobs.put(name, held)
        return coding.nbytes(held)

    def get(self, name: str) -> Held:
        """KeyError: never put, or dropped."""
        held = self._blobs.get(name)
        if held is None:
            raise KeyError(name)
        return held

    def drop(self, name: str) -> None:
        """Forget a blob, also one that a task is still making."""
        self._blobs.drop(name)

    def blob(self, name: str) -> Blob:
        """The blob as the network takes it, without a copy. Waits for one that is pending."""
        return sendable(self.get(name))

    def held(self) -> int:
        """Blobs in the table: what leaks would make grow."""
        return len(self._blobs)

    def kept(self, store: int) -> StoredBytes:
        """Bytes of tensors held now; `store`: what the machine keeps of them for the step."""
        return StoredBytes(store, self._blobs.memory_bytes, self._blobs.disk_bytes)

    def kept_most(self, store: int) -> StoredBytes:
        """The same, at most so far."""
        return StoredBytes(store, self._blobs.most_memory_bytes, self._blobs.most_disk_bytes)

    def check(self, message: Message, blobs: tuple[Blob, ...]) -> str:
        """What is wrong with a message's blobs, in words for its sender; '' when nothing is."""
        seat = self._seat
        return self._kinds.fault(message, blobs, seat.executor.length if seat else 0)

    # -------------------------------------------------------------------------------------------------------- tasks

    def submit(self, task: Task, done: Answer) -> None:
        """Carry out a task; `done` is called once, on the thread that did it.

        Blobs that are here now may be dropped at once; others are looked for when the task's turn has come."""
        here = [(name, self._blobs.get(name)) for name in task.reads]
        held = {name: blob for name, blob in here if blob is not None}
        self._blobs.expect(task.makes)
        lane = self._lanes.get(task.lane, self._lanes["compute"])
        lane.put(lambda: self._carry_out(lambda: self._run(task, held), task, done, 0.0))

    def close(self, timeout_s: float = 10.0) -> None:
        """End after the tasks that are running, but wait no longer than that; those that wait are not answered."""
        until_s = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        if "average" in self._lanes:
            self._lanes["average"].thread.join(max(0.0, until_s - time.monotonic()))
            self._stepped.set()  # a step whose turn has not come is not made, and nobody waits for it
        for lane in self._lanes.values():
            # Daemons: a storage that hangs does not keep the process
            lane.thread.join(max(0.0, until_s - time.monotonic()))
        self._outgoing.close(max(0.0, until_s - time.monotonic()))

    def _carry_out(self, work: Callable[[], Result], task: Task, done: Answer, spent_s: float) -> None:
        start = time.monotonic()
        answer: Done | Failed
        try:
            result = work()
            answer = self._failures.on_done(Done(task.id, result, spent_s + time.monotonic() - start), task)
        except Later as later:
            again, spent_s = later.work, spent_s + time.monotonic() - start
            self._lanes[later.lane].put(lambda: self._carry_out(again, task, done, spent_s))
            return
        except Exception as error:  # noqa: BLE001  # such as no memory: core waits for an answer, and a lane outlives its tasks
            served = self._seat.stage if self._seat is not None else None
            answer = self._failures.answer(task, task.stage if isinstance(task, BUILDING) else served, error)
        self._blobs.settle(task.makes)
        done(answer)

    def _run(self, task: Task, held: dict[str, Held]) -> Result:
        take = self._taker(held)
        if isinstance(task, (*BUILDING, Apply, Reset, Export)):
            self._stepped.wait()  # they need the newest parameters, or change them
        match task:
            case Fetch() | RunForward() | RunBackward():
                return self._hop(task, take)
            case Describe() | RunAudit() | EndAudit():
                return self._audited(task, held)
            case Infer() | Forget():
                return self._serve(task, take)
            case Cut() | AddRow() | Add() | Gather() | Apply() | Reset():
                return self._round(task, take)
            case Init() | Import() | Blend():
                return self._take_seat(task)
            case Export():
                return self._export(task)
            case ReadChunk():
                return self._read_chunk(task)
            case CheckChunk():
                return self._download.add(task, take(task.blob))
            case RunSave():
                copy = self._kept_copy(task.step)
                raise Later("write", lambda: self._write(task, lambda: self._save(task, copy)))
            case RunPublish():
                return self._write(task, lambda: self._publish(task))
            case OfferShard() | RunCopy() | ReadShard() | WriteChunk():
                return self._shards.run(task, take, self._keep)

    def _taker(self, held: dict[str, Held]) -> Take:
        def take(name: str, device: str = "cpu") -> torch.Tensor:
            value = held[name] if name in held else self._blobs.get(name)
            if value is None:
                raise ValueError(f"blob {name} is not held here")
            return coding.plain(value, device)

        return take

    def _keep(self, name: str, held: Held) -> Result:
        """Keep what a task made."""
        self._blobs.put(name, held)
        return Result(nbytes=coding.nbytes(held))

    def _keep_all(self, names: tuple[str, ...], held: list[Held]) -> Result:
        return Result(nbytes=sum(self._keep(name, one).nbytes for name, one in zip(names, held, strict=True)))

    # --------------------------------------------------------------------------------------------------------- hops

    def _hop(self, task: Fetch | RunForward | RunBackward, take: Take) -> Result:
        match task:
            case Fetch():
                return self._keep(task.out, self._fetch(task))
            case RunForward():
                self._outgoing.check()
                y = self._forward(task, take(task.x, self._outgoing.device))
                return self._keep(task.out, self._outgoing.put(y, self._config.network.activations))
            case RunBackward():
                self._outgoing.check()
                grad = take(task.grad, self._outgoing.device) if task.grad else None
                return self._backward(task, take(task.x, self._outgoing.device), grad)

    def _fetch(self, task: Fetch) -> torch.Tensor:
        if self._dataset is not None:
            return self._dataset.microbatch(task.step, task.index)
        if self._config.device.executor == "emulated":
            return torch.zeros(token_rows(self._config), self._config.data.sequence + 1, dtype=torch.int64)
        raise ValueError("this peer has no data")

    def _forward(self, task: RunForward, x: torch.Tensor) -> torch.Tensor:
        executor = self._computing(task.stage, task.step)
        draw(executor, None if task.heldout else (task.step, task.index))
        if task.heldout:
            y = evaluate(executor, self._borders.input(task, x), None)
            assert isinstance(y, torch.Tensor)
            return self._borders.plain(task, y)
        return self._borders.plain(task, executor.forward(self._borders.input(task, x)))

    def _backward(self, task: RunBackward, x: torch.Tensor, grad: torch.Tensor | None) -> Result:
        executor = self._computing(task.stage, task.step)
        draw(executor, None if task.heldout else (task.step, task.index))
        first, last = task.stage == 0, task.stage == self._config.run.stages - 1
        tokens = (x if first else grad) if last else None
        if task.heldout:
            assert tokens is not None
            mean = evaluate(executor, self._borders.input(task, x), tokens)
            return Result(loss=float(mean), counted=counted(tokens, paired(self._config)), rewards=rewards(executor))
        grad_x, loss = executor.backward(self._borders.input(task, x), self._borders.gradient(task, grad), tokens)
        result = Result(loss=loss)
        if tokens is not None and masked(self._config):
            result = Result(loss=loss, counted=counted(tokens, paired(self._config)), rewards=rewards(executor))
        if grad_x is None or not task.out:
            return result
        grad_x = self._borders.plain(task, grad_x)
        held = self._outgoing.put(grad_x, self._config.network.gradients)
        return msgspec.structs.replace(result, nbytes=self._keep(task.out, held).nbytes)

    def _audited(self, task: Describe | RunAudit | EndAudit, held: dict[str, Held]) -> Result:
        match task:
            case Describe():
                return auditing.describe(task, [held[name] for name in task.blobs])
            case RunAudit():
                self._outgoing.check()
                grad = held[task.grad] if task.grad else None
                executor = self._at(task.stage, task.step)
                draw(executor, (task.step, task.index))
                inputs = held[task.x], grad
                return self._sums.audit.run(task, executor, self._borders, inputs, self._outgoing.device)
            case EndAudit():
                return self._sums.audit.end(task)

    def _serve(self, task: Infer | Forget, take: Take) -> Result:
        seat = self._seated()
        if isinstance(task, Forget):
            seat.texts.forget(task.sessions)
            return Result()
        if seat.stage != task.stage:
            raise ValueError(f"stage {seat.stage} is here, not stage {task.stage}")
        result, y = seat.texts.run(task, seat.executor, take(task.x) if task.x else None)
        if task.out:
            self._keep(task.out, y.to("cpu"))
        return result

    def _computing(self, stage: int, step: int) -> Executor:
        """What computes that step and adds it up. With delayed updates the one before the next may still go on."""
        seat = self._seated()
        if not isinstance(seat.executor, Delayed):
            return self._at(stage, step)
        if seat.stage != stage:
            raise ValueError(f"stage {seat.stage} is here, not stage {stage}")
        if step > seat.step:
            self._stepped.wait()  # with the parameters that are being made; core asks for that when they are
        seat.executor.at(step)
        return seat.executor

    def _at(self, stage: int, step: int) -> Executor:
        seat = self._seated()
        if (seat.stage, seat.step) != (stage, step):
            raise ValueError(f"stage {seat.stage} at step {seat.step} is here, not stage {stage} at step {step}")
        return seat.executor

    def _seated(self) -> Seat:
        if self._seat is None:
            raise ValueError("no stage is here")
        return self._seat

    # ------------------------------------------------------------------------------------------------------- rounds

    def _round(self, task: Cut | AddRow | Add | Gather | Apply | Reset, take: Take) -> Result:
        match task:
            case Cut():
                return self._keep_all(task.outs, self._sums.cut(task, self._computing(self._seated().stage, task.step)))
            case AddRow():
                return self._keep_all(task.outs, self._sums.add_row(task, [take(name) for name in task.parts]))
            case Add():
                total, sketches = self._sums.add(task, [take(name) for name in task.parts])
                return msgspec.structs.replace(self._keep(task.out, total), sketches=sketches)
            case Gather():
                totals, own = [take(name) for name in task.sums], [take(name) if name else None for name in task.own]
                return self._sums.gather(task, totals, own, self._at(self._seated().stage, task.step).length)
            case Apply():
                return self._apply(task)
            case Reset():
                return self._reset()

    def _apply(self, task: Apply) -> Result:
        seat = self._seated()
        executor = self._at(seat.stage, task.step)
        self._snapshots.finish()
        if task.skip:
            return self._skip(task, seat, executor)
        reduced = self._sums.commit(task.step, task.round)
        if isinstance(executor, Delayed):
            executor.begin(task.step)
            seat.step = task.step + 1
            self._stepped.clear()
            raise Later("average", lambda: self._apply_beside(task, executor, reduced))
        executor.apply(reduced, task.norm, task.step, task.scale)
        executor.zero(task.step + 1)
        seat.step = task.step + 1
        return self._applied(task, seat)

    def _skip(self, task: Apply, seat: Seat, executor: Executor) -> Result:
        if isinstance(executor, Delayed):
            executor.skip(task.step)
        else:
            executor.zero(task.step + 1)
        seat.step = task.step + 1
        return self._applied(task, seat)

    def _apply_beside(self, task: Apply, executor: Delayed, reduced: torch.Tensor) -> Result:
        """The second half of it with delayed updates, beside the hops of the next step."""
        try:
            executor.finish(reduced, task.norm, task.step, task.scale)
            return self._applied(task, self._seated())
        finally:
            self._stepped.set()

    def _applied(self, task: Apply, seat: Seat) -> Result:
        if task.save:
            self._snapshots.keep(seat)
        return Result(digest=seat.executor.digest())

    def _reset(self) -> Result:
        if self._seat is not None:
            self._seat.executor.zero(self._seat.step)
        self._sums.void(seat=False)
        return Result()

    # -------------------------------------------------------------------------------------------------------- state

    def _take_seat(self, task: Init | Import | Blend) -> Result:
        self._seat = None  # two stages may not fit beside each other
        self._sums.void(seat=True)
        self._snapshots.clear()
        with self._shards.frozen.building(task.stage):
            executor = self._built(task)
        executor.zero(task.step)
        self._seat = Seat(executor, task.stage, task.step)
        self._shards.frozen.serve(task.stage, executor)
        return Result(digest=executor.digest(), length=executor.length)

    def _built(self, task: Init | Import | Blend) -> Executor:
        try:
            executor = self._make(self._config, task.stage)
        except ValueError as error:
            raise DoesNotFit(f"stage {task.stage} cannot be built here: {error}") from error
        if isinstance(task, (Import, Blend)):
            self._download.load(executor, task)
        else:
            self._begin_with(task, executor)
        return executor

    def _begin_with(self, task: Init, executor: Executor) -> None:
        """The state of that version, from a checkpoint but for version 0."""
        if task.void_before and self._shards.store is not None:
            self._shards.store.delete_undone(task.step, task.void_before)
        if task.step:
            executor.load_state(self._shards.place().load(task.step, executor.state()))

    def _export(self, task: Export) -> Result:
        self._at(self._seated().stage, task.step)
        self._snapshots.export(self._seated())
        return self._export_on(task.step)

    def _export_on(self, step: int) -> Result:
        copy = self._snapshots.go_on(step)
        if copy is None:
            raise Later("compute", lambda: self._export_on(step))
        raise Later("write", lambda: Result(manifest=copy.manifest(), nbytes=copy.nbytes))

    def _read_chunk(self, task: ReadChunk) -> Result:
        copy = self._snapshots.exported(task.step)
        return self._keep(task.out, torch.frombuffer(copy.read(task.chunk), dtype=torch.uint8))

    # -------------------------------------------------------------------------------------------------- checkpoints

    def _write(self, task: RunSave | RunPublish, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except OSError as error:
            raise OSError(
                f"writing the checkpoint of step {task.step} to {self._shards.place().url}: {error}"
            ) from error

    def _kept_copy(self, step: int) -> Copy:
        """What Apply kept of that version, or a copy made now, while the parameters are still those."""
        copy = self._snapshots.kept(step)
        if copy is None:
            seat = self._seated()
            if seat.step != step:
                raise ValueError(f"no copy of step {step} was kept here")
            self._stepped.wait()
            copy = self._snapshots.keep(seat)
        return copy

    def _save(self, task: RunSave, copy: Copy) -> Result:
        state = {name: value for name, value in copy.state.items() if not name.startswith(PREVIOUS)}
        record = self._shards.place().write_shard(task.step, task.stage, self._config.run.stages, state)
        self._snapshots.saved(copy)
        files = checkpoint.RECORDS.decode(record)
        return Result(record=record, digest=marker.content_of((files.model, files.optimizer)))

    def _publish(self, task: RunPublish) -> Result:
        store = self._shards.place()
        path = store.publish(task.step, task.records, self._about, task.copies, task.epoch)
        try:
            store.delete_undone(task.step, task.epoch)
            store.prune(self._config.checkpoint.keep, task.best)
        except OSError as error:  # the new one is there; the old ones are only in the way
            log.warning("older checkpoints could not be deleted: %s", error)
        return Result(record=path)

    @cached_property
    def _about(self) -> checkpoint.About:
        digest, note = (self._dataset.digest, self._dataset.describe) if self._dataset else ("", "none")
        return checkpoint.about(self._config, digest, note)
