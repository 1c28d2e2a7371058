"""What every part of one simulation shares: the case, virtual time, the network, the checkers, one random source.

The ground floor of a simulation: nodes, faults and the swarm import it, and it imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.core import messages as m
from shoal.sim.checkers import Watch
from shoal.sim.kernel import Kernel
from shoal.sim.network import Network
from shoal.sim.scenarios.scenario import Case
from shoal.sim.tasks.storage import CHUNKS, Blob
from shoal.sim.tasks.task_runner import World

# Of an activation store: tensors are as large as they are on the lines. Narrower ones are drawn in tensors of 100 bytes
ROOMY_BYTES = 1 << 32

Recorder = Callable[[float, m.Peer, m.Event, list[m.Command]], None]
Values = tuple[Blob, ...]  # the blobs of one message


class Timeline(msgspec.Struct):
    """Virtual seconds at which the phases of the run began; None: not yet."""

    began_s: float | None = None  # training
    healed_s: float | None = None  # every fault has ended, none follows
    over_s: float | None = None  # an honest peer holds the run for finished


class History:
    """The digest of all handled events. Equal digests mean equal histories."""

    def __init__(self) -> None:
        self.events = 0
        self._digest = 0

    def add(self, now: float, serial: int, commands: int) -> None:
        """One event of the process with that serial number, answered with so many commands."""
        self.events += 1
        word = int(now * 1e9) * 1009 + serial * 31 + commands
        self._digest = ((self._digest ^ word) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF

    def digest(self) -> str:
        return f"{self._digest:016x}"


class Context:
    """Shared state of one simulation. `settings` and `watch` are replaced when the whole run is started again (`restart`)."""

    def __init__(self, case: Case, record: Recorder | None = None) -> None:
        self.case = case
        self.settings = case.settings
        self.kernel = Kernel()
        values = case.wire.gradient_values if case.wire is not None else case.scenario.values
        self.world = World(
            case.settings.stages, values, case.settings.staleness, case.wire, case.nonfinite, case.settings.tokens
        )
        if case.wire is not None and case.settings.activation_store_bytes >= ROOMY_BYTES:
            self.world.boundary_bytes = case.wire.nbytes(("x", 0, 0, 1, ""), CHUNKS)
        self.watch = self._new_watch()
        self.network = Network(case.scenario, case.rng("network"), case.regions, case.wire)
        self.chance = case.rng("chance")
        self.record = record
        self.notes: list[str] | None = None  # what happens, in words; None: not wanted
        self.struck: dict[str, int] = {}  # by kind: aimed faults and hostile acts so far
        self.history = History()
        self.timeline = Timeline()

    @property
    def over(self) -> bool:
        """Some honest peer holds the run for finished."""
        return self.timeline.over_s is not None

    def settings_of(self, key: int) -> m.Settings:
        """What the process with that key is started with: after a restart of the run, the checkpoint's step."""
        return msgspec.structs.replace(self.case.settings_of(key), first_step=self.settings.first_step)

    def restart(self, first_step: int, digests: tuple[str, ...]) -> None:
        """The run begins again at `first_step`, with stages whose parameters have these digests. Violations stay."""
        self.settings = msgspec.structs.replace(self.settings, first_step=first_step)
        before = self.watch
        self.watch = self._new_watch()
        self.watch.violations, self.watch.durability = before.violations, before.durability
        self.watch.durability.watch = self.watch
        self.watch.durability.goes_back(first_step)
        self.watch.resumes(first_step, digests)

    def note(self, text: str) -> None:
        if self.notes is not None:
            self.notes.append(f"{self.kernel.now:9.3f} {text}")

    def count(self, kind: str) -> None:
        self.struck[kind] = self.struck.get(kind, 0) + 1

    def task_fails(self) -> bool:
        """Whether the next task that may fail does."""
        chance = self.network.faults.fail
        return chance > 0.0 and self.chance.random() < chance

    def _new_watch(self) -> Watch:
        watch = Watch(self.settings, self.world, lambda: self.kernel.now)
        watch.leavers.prompt = self.case.undisturbed
        watch.trusting = not (self.case.happenings.liars or self.case.hostile)
        return watch
