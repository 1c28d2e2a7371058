"""What a forecast is asked: a plan's stages on machines, seconds and bytes of its parts, settings of the run that time depends on."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from shoal.config import Config, derived
from shoal.core.messages import Settings
from shoal.forecasting.machines import Machines, grouped
from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.profile import MOMENTS_BYTES
from shoal.planner.prediction.seats import Seats
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.pricing import as_planned
from shoal.planner.strategy.problem import Problem

SCAN_BEATS = 0.9  # the leader looks for silent members so often (core/leader/leader.py)
ENTRY_BEATS = 2.0  # asking a member, and the view that admits
VALUE_BYTES = 4  # of a parameter, as it is averaged and downloaded
CHUNK_BYTES, MOST_CHUNKS = 16 << 20, 48  # of a state, as runtime/state.py cuts it; more would only be more events


class Patience(msgspec.Struct, frozen=True):
    """How long a run waits."""

    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 4.0
    detection_s: float = 4.45  # from a death to the leader's decision to evict, without the messages' delays
    lost_stage_wait_s: float = 5.0
    entry_s: float = 1.0  # of a join beside its download: finding the run, being admitted, building the state

    def election_s(self, voters: int) -> float:
        """Until one of them stands for election, after the leader's death: the first of random timeouts (core/consensus/election.py)."""
        return self.heartbeat_timeout_s * (0.6 + 0.4 / (voters + 1))


class Job(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One configuration on machines. Arrays by kind of machine and stage, in seconds of one microbatch."""

    machines: Machines
    stage_of: tuple[int, ...]  # by slot, as planned; -1: left out
    forward_s: Floats
    backward_s: Floats
    seats: Seats  # the plan's, as the planner plays them
    state_bytes: tuple[float, ...]  # by stage, that a joiner downloads
    tokens: int  # of a microbatch
    save_every: int = 0  # steps between checkpoints
    patience: Patience = Patience()
    steps: float = math.inf  # of the run: near its end nobody moves
    settings: Settings | None = None  # of the run, for who plays its messages; what this struct says goes first
    round_s: float = 0.0  # of a step beside what is predicted: the optimizer, the tasks of a round
    chunks: int = 0  # that a state is downloaded in, each from one replica; 0: by its bytes

    @property
    def stages(self) -> int:
        return self.seats.stages

    @property
    def microbatches(self) -> int:
        return self.seats.microbatches

    @property
    def state_chunks(self) -> int:
        """As many for every stage."""
        return self.chunks or min(MOST_CHUNKS, max(1, math.ceil(max(self.state_bytes) / CHUNK_BYTES)))

    @property
    def delay_s(self) -> float:
        """Of a message between two machines, on average over kinds."""
        return float(self.machines.delay_s.mean())

    @property
    def hop_s(self) -> Floats:
        """Compute of one microbatch, forward and backward; the last stage runs no forward of its own. By kind and stage."""
        forward_s = self.forward_s.copy()
        forward_s[:, -1] = 0.0
        return np.maximum(forward_s + self.backward_s, 1e-12)

    @property
    def again(self) -> Floats:
        """By stage, the part of a hop that a lost microbatch takes. Neighbours keep its input and its gradient: it is the backward, which
        recomputes."""
        return np.asarray((self.backward_s / self.hop_s).mean(axis=0))


def job_of(problem: Problem, plan: Plan, config: Config) -> Job:
    """That plan, run as the configuration says."""
    seats = msgspec.structs.replace(as_planned(problem, plan), queue_limit=config.run.queue_limit)
    machines = grouped(problem.cluster)
    emulated = problem.emulated_s > 0
    forward_s, backward_s = (_by_kind(each, seats, machines, emulated) for each in (seats.forward_s, seats.backward_s))
    emulated_bytes = problem.emulated_gradient_bytes * (1 + MOMENTS_BYTES[problem.moments] / VALUE_BYTES)
    state_bytes = [emulated_bytes] * seats.stages
    if not problem.emulated_s:
        held = [problem.profile.stage(range(stage.first, stage.end)) for stage in plan.stages]
        state_bytes = [problem.optimizer.state_bytes(stage) for stage in held]
    run = config.run
    return Job(
        machines=machines,
        stage_of=seats.stage_of,
        forward_s=forward_s,
        backward_s=backward_s,
        seats=seats,
        state_bytes=tuple(state_bytes),
        tokens=problem.work.microbatch_tokens,
        save_every=config.checkpoint.every,
        settings=derived.settings(config),
        patience=Patience(
            run.heartbeat_s,
            run.heartbeat_timeout_s,
            run.heartbeat_timeout_s + SCAN_BEATS * run.heartbeat_s,
            run.lost_stage_wait_s,
            ENTRY_BEATS * run.heartbeat_s,
        ),
    )


def _by_kind(seconds: tuple[float, ...], seats: Seats, machines: Machines, emulated: bool) -> Floats:
    """What each kind would take at each stage: as planned where one of it serves that stage, else by FLOP/s from one that does."""
    table = np.zeros((len(machines.kinds), seats.stages))
    for stage in range(seats.stages):
        group = seats.replicas(stage)
        model = group[0]
        flops = machines.kinds[machines.kind_of[model]].flops
        for kind, device in enumerate(machines.kinds):
            table[kind, stage] = seconds[model] * (1.0 if emulated else flops / device.flops)
        for slot in reversed(group):
            table[machines.kind_of[slot], stage] = seconds[slot]
    return table
