"""What the planner is asked: the model, the work, the machines, and how tensors travel."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import msgspec

from shoal import codec
from shoal.core.allreduce.layout import row_lengths
from shoal.planner.inputs import memory
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.inputs.profile import Profile, Shape, Work, profile

GRADIENT_BYTES = 4  # sums travel as fp32
Wiring = Literal["best", "planned", "stochastic"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run, and on what."""

    shape: Shape
    work: Work
    cluster: Cluster
    emulated_s: float = 0.0  # a forward takes this long at every stage, whatever the model: for labs
    emulated_bytes: float = 0.0  # of a boundary tensor then
    emulated_gradient_bytes: float = 1024.0  # that every stage averages then
    wiring: Wiring = "best"
    uneven: bool = False  # stages may differ in their number of blocks by more than one
    swapping: bool = False  # a stage may be larger than its device
    travel: codec.Travel = codec.Travel()
    # Of the model itself, with `counted_sequences` in a microbatch; else by formula from its shape
    counted: Profile | None = None
    counted_sequences: int = 1
    staleness: int = 0  # train.staleness: averaging beside the next step's microbatches
    audits: bool = False  # run.spot_checks above 0
    moments: str = "float32"  # train.moments
    muon: bool = False  # train.optimizer = "muon"
    store_limits: memory.StoreLimits = memory.StoreLimits()
    kept_activations: int = 0  # device.kept_activations
    local_steps: int = 1  # between two averagings; `work` holds the microbatches of all of them

    @property
    def optimizer(self) -> memory.Optimizer:
        return memory.Optimizer(self.moments, self.staleness, self.local_steps > 1, self.audits, self.muon)

    def kept_bytes(self, span: range, microbatches: float) -> float:
        """Of one that serves so many microbatches of a stage, at most; see memory.py."""
        there_bytes, inner, last = self.profile.boundary_bytes, span.start > 0, span.stop == self.shape.layers
        return self.store_limits.kept_bytes(microbatches, inner, last, there_bytes, self.returned_bytes)

    @property
    def profile(self) -> Profile:
        """With boundary tensors as large as they are when they travel and are kept."""
        model_profile = profile(self.shape, self.work)
        if self.counted is not None:
            model_profile = _sized(self.counted, self.work.sequences / self.counted_sequences)
        return msgspec.structs.replace(model_profile, boundary_bytes=self._boundary_bytes(self.travel.activations))

    @property
    def returned_bytes(self) -> float:
        """Of a boundary tensor's gradient."""
        return self._boundary_bytes(self.travel.gradients) / self.work.passes

    @property
    def boundary_values(self) -> float:
        if self.emulated_s:
            return self.emulated_bytes / 4
        return self.work.passes * self.work.microbatch_tokens * self.shape.hidden / self.travel.narrow

    def _boundary_bytes(self, how: str) -> float:
        return self.boundary_values * codec.bytes_per_value(how, 4 if self.emulated_s else self.work.value_bytes)

    def codec_s(self, stage: int, stages: int, backward: bool) -> float:
        """Of one hop: what comes is decoded, what goes is encoded. Nothing comes encoded to the first stage's forward."""
        values, how = self.boundary_values, self.travel
        seconds = codec.decode_s(how.activations, values) if stage else 0.0
        if not backward:
            return seconds + (codec.encode_s(how.activations, values) if stage < stages - 1 else 0.0)
        back_values = values / self.work.passes
        seconds += codec.decode_s(how.gradients, back_values) if stage < stages - 1 else 0.0
        return seconds + (codec.encode_s(how.gradients, back_values) if stage else 0.0)

    def averaging_codec_s(self, gradient_bytes: float, replicas: int, owned: float = 0.0) -> float:
        """Of one replica in a round: its parts, its row's if there are several, and its own sum are encoded; what it added up,
        what it left out and the whole sum are decoded. `owned`: its share of the gradient; 0: an even one."""
        if replicas < 2:
            return 0.0
        values, how = gradient_bytes / codec.bytes_per_value(self.travel.averaging, 4), self.travel.averaging
        rows = row_lengths(replicas)
        of_row = 1 / rows[0] if len(rows) > 1 else 0.0
        own = owned or 1 / replicas
        encoded, added = 1 + of_row + own, replicas * own + of_row
        return codec.encode_s(how, values * encoded) + codec.decode_s(how, values * (added + encoded + 1))


@cache
def _sized(counted: Profile, factor: float) -> Profile:
    return counted.of_size(factor)


def gradient_bytes(model_profile: Profile, span: range, how: str) -> float:
    """What the replicas of these blocks average, encoded as `how`."""
    return model_profile.stage(span).parameters * codec.bytes_per_value(how, GRADIENT_BYTES)


def best_stages(problem: Problem, local_steps: int = 1) -> float:
    """S* of the formula above."""
    model_profile, work = problem.profile, problem.work
    tokens = work.step_tokens / len(problem.cluster.devices)
    moved_bytes = local_steps * tokens * model_profile.boundary_bytes / work.microbatch_tokens
    return math.sqrt(
        model_profile.parameters * codec.bytes_per_value(problem.travel.averaging, GRADIENT_BYTES) / moved_bytes
    )


def basis(problem: Problem) -> str:
    """Where the figures come from that all others are computed from."""
    if problem.emulated_s:
        return "seconds of an emulated model"
    devices = problem.cluster.devices
    measured = sum(device.basis.startswith("measured") for device in devices)
    speeds = (
        "measured" if measured == len(devices) else f"measured on {measured}, else stated" if measured else "stated"
    )
    return f"{problem.profile.basis}; FLOP/s {speeds}"


def stages_text(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"
