"""How much memory a stage needs on a device, resident or swapping, and whether it fits. For strategy.py.

Resident (executor/resident.py): fp32 master values, two moments (fp32 or 8-bit) and the step's sum, the compute copy when the dtype is
narrower, the activations of one microbatch through the whole stage (where those do not fit, the inputs of its blocks and the
activations of one: device.checkpointing), and the boundary tensors in hand; what is left may keep the activations of other
forwards, whose backwards then do not recompute them (executor/graphs.py). Swapping (swapping.py):
the optimizer's state lives in the host's memory; two of the stage's largest parts are on the device at a time, and what one of them
keeps for its backward pass. With more memory it takes more parts at once. tests/planner/test_memory.py compares with what is measured.

A server keeps both ends of its boundaries until the step is committed
(core/server/activation_store.py), in the host's memory as
far as network.activation_memory_bytes goes. A device whose host's memory is not stated, or is as large as its own, is taken to share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.planner.inputs.cluster import Device
from shoal.planner.inputs.profile import FP32_BYTES, MOMENTS_BYTES, Part, StageProfile

SLACK = 1.015  # tables of positions, masks, checks that values are finite; measured: 0.98 to 1.02 without it
STEPPING_BYTES = 4  # per parameter in an optimizer step: the averaged gradient
RESERVE_BYTES = 1e9  # context, kernels and allocator slack of an accelerator: papers' rule of thumb
SMALL_BYTES = 8e9  # a device with less is a CPU process or a small card: it reserves an eighth


class Need(msgspec.Struct, frozen=True):
    """Bytes of a stage on its device and in its host's memory."""

    device_bytes: float
    host_bytes: float = 0.0
    checkpointed_bytes: float = 0.0  # device_bytes with activation checkpointing; 0: it is no choice
    kept_bytes: float = 0.0  # boundary tensors kept until the step commits, in the host's memory too


class StoreLimits(msgspec.Struct, frozen=True):
    """How much of a step's boundary tensors a server keeps: network.activation_store_bytes and network.activation_memory_bytes."""

    keep_bytes: float = 2.0**32
    spill_bytes: float = 2.0**30  # of these in memory; 0: all

    def kept_bytes(self, microbatches: float, inner: bool, last: bool, there_bytes: float, back_bytes: float) -> float:
        """In memory, of one that serves so many microbatches; `inner`: a stage stands before its own. Tensors go there and their
        gradients back; the gradients made here are kept beyond the limit, as they cannot be made again."""
        bounded = there_bytes * inner + (there_bytes + back_bytes) * (not last)
        kept = min(microbatches * bounded, self.keep_bytes) + microbatches * back_bytes * inner
        return min(kept, self.spill_bytes) if self.spill_bytes else kept


def shared(device: Device) -> bool:
    """One memory for device and host, as of a CPU."""
    return device.host_memory_bytes in (0.0, device.memory_bytes)


def checkpoints(need: Need, device: Device) -> bool:
    """Whether the backward pass does not fit the device without activation checkpointing."""
    most_bytes = need.device_bytes + _kept_bytes(need, device) + reserve(device)
    return bool(device.memory_bytes and need.checkpointed_bytes) and most_bytes > device.memory_bytes


def peak(need: Need, device: Device) -> float:
    """Bytes in the device's memory, what it keeps in the host's included where that is the same."""
    own_bytes = need.checkpointed_bytes if checkpoints(need, device) else need.device_bytes
    return own_bytes + _kept_bytes(need, device)


def _kept_bytes(need: Need, device: Device) -> float:
    return need.kept_bytes if shared(device) else 0.0


class Optimizer(msgspec.Struct, frozen=True):
    """What is kept beside the values that compute: train.moments and train.staleness."""

    moments: str = "float32"
    staleness: int = 0

    def nbytes(self, value_bytes: int) -> float:
        """Per parameter: fp32 value, sum and moments; with staleness the sum of a second step, the older of two versions as it computes,
        and fp32 values that compute apart from those that are stepped (executor/delayed.py)."""
        late = 4 + value_bytes + (4 if value_bytes == 4 else 0)
        return FP32_BYTES + MOMENTS_BYTES[self.moments] + late * self.staleness


def resident(stage: StageProfile, boundary_bytes: float, value_bytes: int, optimizer: Optimizer = Optimizer()) -> Need:
    each_bytes = optimizer.nbytes(value_bytes) + (value_bytes if value_bytes < 4 else 0)
    fixed_bytes = stage.parameters * each_bytes
    stepping_bytes = stage.parameters * STEPPING_BYTES

    def whole(checkpointing: bool) -> float:
        passing_bytes = backward_bytes(stage, boundary_bytes, value_bytes, checkpointing=checkpointing)
        peak_bytes = passing_bytes + stepping_bytes if optimizer.staleness else max(passing_bytes, stepping_bytes)
        return SLACK * (fixed_bytes + peak_bytes)

    return Need(whole(False), checkpointed_bytes=whole(True) if whole(True) < whole(False) else 0.0)


def backward_bytes(stage: StageProfile, boundary_bytes: float, value_bytes: int, *, checkpointing: bool) -> float:
    """Peak of a backward pass beyond what a stage always holds; in the end all gradients with, of bf16, their fp32 copies."""
    hand_bytes, others = max(boundary_bytes, stage.input_bytes), 1 - 1 / stage.slices
    given_bytes = 0.0 if stage.last else hand_bytes  # the gradient of its output
    most, gradients = _passing(stage.parts, value_bytes, given_bytes, others, checkpointing)
    if stage.tied:  # the head's gradient, the embedding's, and their sum
        most = max(most, gradients + stage.parts[0].parameters * value_bytes)
    copies = 4 * stage.parameters if value_bytes < 4 else 0.0
    most = max(most, stage.parameters * value_bytes + copies)
    # Of slices: the sum before, in case a later one fails, and the gradients of their inputs. fp32 blocks save their input itself.
    inner = 0.0 if stage.first else others + (1.0 if value_bytes < 4 else others)
    return most + inner * hand_bytes + 4 * stage.parameters * (stage.slices > 1)


def _passing(
    parts: Sequence[Part], value_bytes: int, given_bytes: float, others: float, checkpointing: bool
) -> tuple[float, float]:
    """The peak of the parts' backward passes, and the bytes of their gradients: at each part what the parts before keep, what it keeps
    and works with, and the gradients made so far. One slice of what is given, but not the `others`, is the last part's work."""
    most, gradients = 0.0, 0.0
    kept = [part.input_bytes if checkpointing and part.input_bytes else part.activation_bytes for part in parts]
    for number in reversed(range(len(parts))):
        part = parts[number]
        gradients += part.parameters * value_bytes
        own_bytes = part.activation_bytes + part.working_bytes
        if checkpointing and value_bytes < 4:
            own_bytes += part.input_bytes  # fp32 blocks save it themselves
        given = given_bytes * (others if number + 1 == len(parts) and not checkpointing else 1.0)
        most = max(most, sum(kept[:number]) + own_bytes + gradients + given)
    return most, gradients


def swapping(stage: StageProfile, boundary_bytes: float, value_bytes: int, optimizer: Optimizer = Optimizer()) -> Need:
    hand_bytes = max(boundary_bytes, stage.input_bytes) / stage.slices
    groups: list[list[Part]] = [[]]  # as the executor makes the most of them: by parameters
    for part in stage.parts:
        if groups[-1] and sum(each.parameters for each in groups[-1]) + part.parameters > stage.largest_parameters:
            groups.append([])
        groups[-1].append(part)
    passing_bytes = 0.0
    for group in groups:
        most, gradients = _passing(group, value_bytes, hand_bytes, 1.0, False)
        checking = (2 * value_bytes + 3) * max(part.matrix for part in group)
        passing_bytes = max(passing_bytes, most, gradients + checking)
    part_bytes = 2 * stage.largest_parameters * (value_bytes + 4)
    return Need(
        SLACK * (part_bytes + passing_bytes + hand_bytes),
        stage.parameters * (optimizer.nbytes(value_bytes) + value_bytes),
    )


def kept_activations(need: Need, device: Device, activation_bytes: float, wanted: int) -> int:
    """Of how many forwards a resident stage keeps the activations, at most `wanted`: in half of what is left, as it does when it runs."""
    if not device.memory_bytes:
        return wanted
    left_bytes = device.memory_bytes - reserve(device) - peak(need, device)
    return max(0, min(wanted, int(left_bytes / 2 // max(activation_bytes, 1.0))))


def reserve(device: Device) -> float:
    return RESERVE_BYTES if device.memory_bytes >= SMALL_BYTES else device.memory_bytes / 8


def lacking(need: Need, device: Device) -> float:
    """Bytes that are missing; 0 when it fits or the device's memory is not stated."""
    on_device = peak(need, device) + reserve(device) - device.memory_bytes if device.memory_bytes else 0.0
    host_bytes = need.host_bytes + (0.0 if shared(device) else need.kept_bytes)
    on_host = host_bytes - device.host_memory_bytes if host_bytes else 0.0
    return max(on_device, on_host, 0.0)
