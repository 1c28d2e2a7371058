"""Who serves which stage in a predicted step, what that takes, and the bytes of its messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.core.leader.rebalance import boundaries
from shoal.core.leader.rules.lines import shown, turns_of
from shoal.core.messages import TURNS, Settings
from shoal.core.trainer.window import MOST
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.memory import FP32

Routing = tuple[tuple[tuple[int, ...], ...], ...]  # by owner's device and stage: devices, in turn
SETTLES = 4  # steps
QUEUE_LIMIT = Settings(stages=1, microbatches=1, steps=1).queue_limit  # as it is where nothing else is said
WIDEST_Bps = 1e12  # what a line without a stated rate is taken for


class Seats(msgspec.Struct, frozen=True):
    """Who serves what, and what that takes. Tuples by device unless they say stage."""

    stage_of: tuple[int, ...]
    forward_s: tuple[float, ...]  # one forward of the device's own stage
    backward_s: tuple[float, ...]
    gradient_bytes: tuple[float, ...]  # by stage
    boundary_bytes: float
    tokens_bytes: float
    microbatches: int
    inflight: int  # 0: as many as fill the lines
    routes: Routing = ()  # empty: stochastic wiring
    returned_bytes: float | None = None  # of a boundary tensor's gradient; None: as the tensor itself
    # Of a gradient's value as it is averaged: how many values there are says in how many slices they go
    value_bytes: float = FP32
    averaging_codec_s: float = 0.0  # encoding and decoding in a round, at the stage where it takes longest
    updating_s: float = 0.0  # of the optimizer and what goes with it, at the replica that takes longest
    # Where each step is begun by a view, as in a run (play.py, `spread`): by which device's, None: one that is drawn; and how long the
    # optimizer of the step before then works, while first requests wait. That is counted in the round
    leader: int | None = None
    applied_s: float = 0.0
    staleness: int = 0  # 1: averaged while the next step's microbatches are computed
    # Of the devices' lines, kB/s, if who owns what of a round follows them; empty: even
    line_rates: tuple[int, ...] = ()
    # Of TURNS, by device, that replicas have by what they pass (core/leader/rules/lines.py); empty: all have all
    turns: tuple[int, ...] = ()
    # Devices that serve another stage than their seat's, so that they hold none: they own after the others (core/leader/membership.py)
    unseated: tuple[int, ...] = ()
    queue_limit: int = QUEUE_LIMIT  # hops that wait at a replica before it answers Busy (detours.py)

    @property
    def stages(self) -> int:
        return len(self.gradient_bytes)

    @property
    def most_inflight(self) -> int:
        return self.inflight or MOST

    @property
    def round_work_s(self) -> float:
        """Of a round, beside what travels."""
        return self.averaging_codec_s + self.updating_s

    @property
    def back_bytes(self) -> float:
        return self.boundary_bytes if self.returned_bytes is None else self.returned_bytes

    @property
    def members(self) -> list[int]:
        return [device for device, stage in enumerate(self.stage_of) if stage >= 0]

    @property
    def seated(self) -> list[int]:
        """Members in the order of a plan's seats: by stage; then those that hold none."""
        return sorted(
            self.members, key=lambda one: (one in self.unseated, one not in self.unseated and self.stage_of[one], one)
        )

    def replicas(self, stage: int) -> list[int]:
        return [device for device, own in enumerate(self.stage_of) if own == stage]


def thinned(stage_of: tuple[int, ...], stages: int, most: int) -> list[int]:
    """At most so many of the devices, or one for each stage, as many of each stage in proportion, taken evenly from its replicas."""
    members = sum(stage >= 0 for stage in stage_of)
    share = min(1.0, most / members)
    kept: list[int] = []
    for stage in range(stages):
        group = [device for device, own in enumerate(stage_of) if own == stage]
        count = max(1, round(len(group) * share))
        kept += [group[number * len(group) // count] for number in range(count)]
    return sorted(kept)


def part_of(seats: Seats, devices: list[int]) -> Seats:
    """These devices' part of a step, without routes, which name devices that may be left out."""

    def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[device] for device in devices) if values else ()

    at = {device: place for place, device in enumerate(devices)}
    return msgspec.structs.replace(
        seats,
        stage_of=of(seats.stage_of),
        forward_s=of(seats.forward_s),
        backward_s=of(seats.backward_s),
        line_rates=of(seats.line_rates),
        turns=of(seats.turns),
        leader=None if seats.leader is None else at.get(seats.leader),
        unseated=tuple(at[device] for device in seats.unseated if device in at),
        routes=(),
        microbatches=max(1, round(seats.microbatches * len(devices) / len(seats.members))),
    )


def line_rates(cluster: Cluster) -> tuple[int, ...]:
    """The slower direction of every device's line, kB/s."""
    return tuple(map(line_rate, cluster.devices))


def line_rate(device: Device) -> int:
    line_Bps = min(device.up_Bps or math.inf, device.down_Bps or math.inf)
    return max(1, round(min(line_Bps, WIDEST_Bps) / 1000))


def of_group(line_rates: tuple[int, ...], group: list[int]) -> tuple[int, ...]:
    """The line rates of these devices; empty if none are given."""
    return tuple(line_rates[device] for device in group) if line_rates else ()


def request_bytes(seats: Seats) -> list[float]:
    """Tokens that an owner sends for one microbatch, by stage, over forward and backward. What it receives are receipts."""
    last = seats.stages - 1
    return [seats.tokens_bytes * ((stage == 0 < last) + (stage in (0, last))) for stage in range(seats.stages)]


def handed_bytes(seats: Seats) -> tuple[list[float], list[float]]:
    """What a replica sends to other replicas and receives from them for one microbatch that passes it, by stage."""
    return handed(seats.stages, seats.boundary_bytes, seats.back_bytes)


def handed(stages: int, body: float, back: float) -> tuple[list[float], list[float]]:
    """The same for boundary tensors of `body` bytes, and of `back` on their way back."""
    last = stages - 1
    sent = [body * (stage < last) + back * (stage > 0) for stage in range(last + 1)]
    return sent, [body * (stage > 0) + back * (stage < last) for stage in range(last + 1)]


def hop_s(seats: Seats, device: int) -> float:
    """Compute of one microbatch at a device; the last stage runs no forward of its own."""
    last = seats.stage_of[device] == seats.stages - 1
    return max(seats.backward_s[device] + (0.0 if last else seats.forward_s[device]), 1e-12)


def paced(seats: Seats, line_rates: Sequence[int], microbatches_s: float = 0.0) -> Seats:
    """With turns as a leader gives them once it has measured its peers (by_pace). `line_rates`: of the devices, kB/s. `microbatches_s`:
    what a step's microbatches take; then a rate counts only as far beyond what its replica books, first with even turns."""
    if seats.stages == 1:
        return seats
    turns = [TURNS] * len(seats.stage_of)
    for stage in range(seats.stages):
        group = seats.replicas(stage)
        tensor_kB = boundaries(stage, seats.stages) * seats.boundary_bytes / 1000
        lines = {str(device): line_rates[device] for device in group}
        rates = {str(device): 1 / hop_s(seats, device) for device in group}
        if microbatches_s:
            known = _settled(lines, tensor_kB, rates, seats.microbatches / microbatches_s)
        else:
            known = turns_of(lines, tensor_kB, rates)
        for device in group:
            turns[device] = known[str(device)]
    return msgspec.structs.replace(seats, turns=tuple(turns))


def _settled(lines: dict[str, int], tensor_kB: float, rates: dict[str, float], pace: float) -> dict[str, int]:
    """The turns of a stage that passes so many microbatches a second, after a few steps."""
    turns = dict.fromkeys(rates, TURNS)
    booked = dict.fromkeys(rates, 0.0)
    for _ in range(SETTLES):
        whole = max(1, sum(turns.values()))
        booked = {peer: max(most, pace * turns[peer] / whole) for peer, most in booked.items()}
        turns = turns_of(lines, tensor_kB, shown(rates, booked))
    return turns
