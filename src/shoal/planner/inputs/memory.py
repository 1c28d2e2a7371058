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

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from shoal.planner.inputs.cluster import Device
from shoal.planner.inputs.profile import FP32_BYTES, MOMENTS_BYTES, Part, StageProfile

SLACK = 1.015  # tables of positions, masks, checks that values are finite; measured: 0.98 to 1.02 without it
CODEBOOK_BYTES = 2 * ((1 << 20) + 1024)  # of 8-bit moments (numerics/eightbit.py), once per process
MUON_BYTES = 44  # of a block's largest matrix, while it is stepped: at most, of a square one (numerics/muon.py)
DECODED_BYTES, PIECE = 12, 1 << 18  # of 8-bit moments, while so many values at most of a tensor are stepped
FP32 = 4  # bytes
RESERVE_BYTES = 1e9  # context, kernels and allocator slack of an accelerator: papers' rule of thumb
SMALL_BYTES = 8e9  # a device with less is a CPU process or a small card: it reserves an eighth


class Need(msgspec.Struct, frozen=True):
    """Bytes of a stage on its device and in its host's memory."""

    device_bytes: float
    host_bytes: float = 0.0
    checkpointed_bytes: float = 0.0  # device_bytes with activation checkpointing; 0: it is no choice
    kept_bytes: float = 0.0  # boundary tensors kept until the step commits, in the host's memory too
    # Of local steps: parameters at the start of the round and their momentum, in the host's memory
    outer_bytes: float = 0.0
    # Of a local or outer step, besides outer_bytes, where device and host share their memory
    stepping_bytes: float = 0.0
    graph_bytes: float = 0.0  # device bytes of a forward whose activations are kept
    collected_bytes: float = 0.0  # of each of several cards: what is whole there while it computes


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
    most_bytes = need.device_bytes + _beside_bytes(need, device) + reserve(device)
    return bool(device.memory_bytes and need.checkpointed_bytes) and most_bytes > device.memory_bytes


def peak(need: Need, device: Device) -> float:
    """Bytes in the device's memory, what it keeps in the host's included where that is the same."""
    own_bytes = need.checkpointed_bytes if checkpoints(need, device) else need.device_bytes
    if shared(device):
        own_bytes = max(own_bytes, need.stepping_bytes)
    return own_bytes + _beside_bytes(need, device)


def _beside_bytes(need: Need, device: Device) -> float:
    own_bytes = need.kept_bytes + need.outer_bytes if shared(device) else 0.0
    return own_bytes + (device.cards * need.collected_bytes if device.cards > 1 else 0.0)


class Optimizer(msgspec.Struct, frozen=True):
    """What is kept beside the values that compute: train.moments, train.staleness, whether train.local_steps is above 1, whether
    steps are audited (run.spot_checks), which takes a sum of another replica's gradients while it goes on, and whether
    train.optimizer is Muon, which keeps one moment of each block's matrices."""

    moments: str = "float32"
    staleness: int = 0
    local: bool = False
    audits: bool = False
    muon: bool = False

    @property
    def fixed_bytes(self) -> float:
        return CODEBOOK_BYTES if self.moments == "8bit" else 0.0

    def stepping_bytes(self, stage: StageProfile) -> float:
        """Of an optimizer step: the averaged gradient, and moments as they are decoded or a matrix as it is made orthogonal."""
        decoded = min(PIECE, max(part.matrix for part in stage.parts)) if self.moments == "8bit" else 0.0
        matrix = max((part.matrix for part in stage.parts if part.input_bytes), default=0.0) if self.muon else 0.0
        return FP32 * stage.parameters + DECODED_BYTES * decoded + MUON_BYTES * matrix

    def outer_bytes(self, stage: StageProfile) -> float:
        """Of local steps, on the host: parameters at the start of the round and momentum."""
        return 2 * FP32 * stage.parameters if self.local else 0.0

    def outer_stepping_bytes(self, stage: StageProfile) -> float:
        """On the host: the averaged gradient, and as much in the outer step, or the squares of 2^20 values in a local step's norm."""
        values_bytes = FP32 * stage.parameters
        return values_bytes + max(values_bytes, 16 * min(stage.parameters, 1 << 20)) if self.local else 0.0

    def state_bytes(self, stage: StageProfile) -> float:
        """As it is saved and sent: fp32 values and moments."""
        return stage.parameters * (FP32 + MOMENTS_BYTES[self.moments]) - self._spared_bytes(stage)

    def _spared_bytes(self, stage: StageProfile) -> float:
        """Of second moments that are not kept."""
        return FP32 * sum(part.parameters for part in stage.parts if part.input_bytes) if self.muon else 0.0

    def kept_bytes(self, stage: StageProfile, value_bytes: int) -> float:
        """Of all parameters, without what computes."""
        return stage.parameters * self._each_bytes(value_bytes) - self._spared_bytes(stage)

    def _each_bytes(self, value_bytes: int) -> float:
        """Per parameter: fp32 value, sum and moments; with staleness the sum of a second step, the older of two versions as it computes,
        and fp32 values that compute apart from those that are stepped (executor/delayed.py)."""
        late = 4 + value_bytes + (4 if value_bytes == 4 else 0)
        return FP32_BYTES + MOMENTS_BYTES[self.moments] + late * self.staleness + FP32 * self.audits


def resident(stage: StageProfile, boundary_bytes: float, value_bytes: int, optimizer: Optimizer = Optimizer()) -> Need:
    copies_bytes = stage.parameters * (value_bytes if value_bytes < 4 else 0)
    fixed_bytes = optimizer.kept_bytes(stage, value_bytes) + copies_bytes + optimizer.fixed_bytes + stage.frozen_bytes
    stepping_bytes = optimizer.stepping_bytes(stage)

    def peak_bytes(checkpointing: bool) -> float:
        passing_bytes = backward_bytes(stage, boundary_bytes, value_bytes, checkpointing=checkpointing)
        return passing_bytes + stepping_bytes if optimizer.staleness else max(passing_bytes, stepping_bytes)

    whole, fewer = peak_bytes(False), peak_bytes(True)
    return Need(
        SLACK * (fixed_bytes + whole),
        checkpointed_bytes=SLACK * (fixed_bytes + fewer) if fewer < whole else 0.0,
        outer_bytes=optimizer.outer_bytes(stage),
        stepping_bytes=SLACK * (fixed_bytes + optimizer.outer_stepping_bytes(stage)) if optimizer.local else 0.0,
        graph_bytes=graph_bytes(stage, boundary_bytes, value_bytes),
        collected_bytes=_collected_bytes(stage, value_bytes),
    )


def _collected_bytes(stage: StageProfile, value_bytes: int) -> float:
    """Of executor/shards: values and fp32 gradients of two blocks, the next one is collected meanwhile, and of all beside the blocks."""
    blocks = [part.parameters for part in stage.parts if part.input_bytes]
    return (stage.parameters - sum(blocks) + 2 * max(blocks, default=0.0)) * (value_bytes + FP32)


def backward_bytes(stage: StageProfile, boundary_bytes: float, value_bytes: int, *, checkpointing: bool) -> float:
    """Peak of a backward pass beyond what a stage always holds; in the end all gradients."""
    hand_bytes, others = max(boundary_bytes / stage.passes, stage.input_bytes), 1 - 1 / stage.slices
    input_bytes = 0.0 if stage.first else hand_bytes
    given_bytes = 0.0 if stage.last else hand_bytes  # the gradient of its output
    unsaved_bytes = 0.0 if checkpointing else _unsaved_bytes(stage)
    output_bytes = given_bytes / stage.slices
    most, gradients = _passing(stage.parts, value_bytes, output_bytes, checkpointing, unsaved_bytes=unsaved_bytes)
    if stage.tied:  # the head's gradient, the embedding's, and their sum
        most = max(most, gradients + stage.parts[0].parameters * value_bytes)
    most = max(most, stage.parameters * value_bytes + input_bytes / stage.slices)  # with the gradient of its input
    if value_bytes < 4 and not checkpointing:  # else its first block saves it
        most += input_bytes / stage.slices
    # Of slices: the sum before, in case a later one fails, the inputs of the others and the gradients of those.
    most += (stage.passes - 1) * input_bytes  # the rows without gradient, which came with the others
    return most + given_bytes + 2 * others * input_bytes + FP32 * stage.parameters * (stage.slices > 1)


def graph_bytes(stage: StageProfile, boundary_bytes: float, value_bytes: int, *, checkpointing: bool = False) -> float:
    """Of one forward whose activations are kept: its input, which fp32 blocks save themselves, and its output with them."""
    own_bytes = sum(_kept_bytes_of(stage.parts, checkpointing)) + _shared_bytes(stage.parts, checkpointing)
    saved = stage.first or checkpointing or value_bytes == 4
    output_bytes = boundary_bytes / stage.passes
    hand_bytes = max(output_bytes, stage.input_bytes)
    whole_bytes = 0.0 if stage.first else (stage.passes - 1) * hand_bytes  # the tensor that the input is a part of
    return stage.slices * own_bytes + output_bytes + whole_bytes + (0.0 if saved else hand_bytes)


def _kept_bytes_of(parts: Sequence[Part], checkpointing: bool) -> list[float]:
    return [part.input_bytes if checkpointing and part.input_bytes else part.activation_bytes for part in parts]


def _shared_bytes(parts: Sequence[Part], checkpointing: bool) -> float:
    return max((part.passed_bytes if checkpointing else part.shared_bytes for part in parts), default=0.0)


def _passing(
    parts: Sequence[Part],
    value_bytes: int,
    output_bytes: float,
    checkpointing: bool = False,
    *,
    unsaved_bytes: float = 0.0,
) -> tuple[float, float]:
    """The peak of the parts' passes, and the bytes of their gradients: at each part what the parts before keep, what it keeps
    and works with, and the gradients made so far. Without the gradient of the output, but with the output. `unsaved_bytes`: of the
    first block's input, where no block saves it."""
    most, gradients = 0.0, 0.0
    kept, shared = _kept_bytes_of(parts, checkpointing), _shared_bytes(parts, checkpointing)
    passed = _shared_bytes(parts, True)
    first = next((number for number, part in enumerate(parts) if part.input_bytes), len(parts))
    for number in reversed(range(len(parts))):
        part = parts[number]
        gradients += part.parameters * value_bytes
        own_bytes = part.activation_bytes + part.working_bytes
        if checkpointing and value_bytes < 4:
            own_bytes += part.input_bytes  # fp32 blocks save it themselves
        if number + 1 < len(parts):  # of the last part, the gradient of the output is among what it works with
            own_bytes += output_bytes
        most = max(most, sum(kept[:number]) + own_bytes + gradients + shared)
        if not (checkpointing and part.input_bytes):
            held_bytes = (
                unsaved_bytes if number > first and part.input_bytes else 0.0
            )  # the family's code holds it meanwhile
            most = max(most, sum(kept[:number]) + part.forward_bytes + passed + held_bytes)
    return most, gradients


def _unsaved_bytes(stage: StageProfile, start: int = 0) -> float:
    """Of the input of the first block among the parts from `start`, where it has no gradient: all before it is frozen."""
    first = next((number for number, part in enumerate(stage.parts) if number >= start and part.input_bytes), None)
    if first is None or not stage.first or any(part.parameters for part in stage.parts[:first]):
        return 0.0
    return stage.parts[first].input_bytes


def swapping(stage: StageProfile, boundary_bytes: float, value_bytes: int, optimizer: Optimizer = Optimizer()) -> Need:
    """In the groups that take least, of those that the executor may choose (executor/swap/memory.py)."""
    hand_bytes = max(boundary_bytes, stage.input_bytes) / stage.slices
    loaded = [part.parameters * value_bytes + part.frozen_bytes for part in stage.parts]
    least = math.inf
    for spans in _partitions(loaded):
        group_bytes = [sum(loaded[start:stop]) for start, stop in spans]
        sizes = [sum(part.parameters for part in stage.parts[start:stop]) for start, stop in spans]
        if stage.tied:  # the first group adds up both gradients
            sizes[-1] -= stage.parts[0].parameters
            group_bytes[-1] -= loaded[0] if len(spans) == 1 else 0.0
        held_bytes = sum(max(group_bytes[slot::2], default=0.0) for slot in range(2)) + FP32 * max(sizes)
        if held_bytes < least:  # a coarser cut seldom makes up for what it loads
            passing_bytes = max(_group_bytes(stage, span, value_bytes, hand_bytes) for span in spans)
            least = min(least, held_bytes + passing_bytes)
    return Need(
        SLACK * least,
        optimizer.kept_bytes(stage, value_bytes) + stage.parameters * value_bytes + stage.frozen_bytes,
        outer_bytes=optimizer.outer_bytes(stage),
    )


def _partitions(sizes: Sequence[float]) -> Iterator[list[tuple[int, int]]]:
    """Cuts into fewer and fewer groups, filled one after another; each has the smallest largest group for its number of groups."""
    sums = [0.0, *accumulate(sizes)]
    caps = sorted({stop - start for number, start in enumerate(sums) for stop in sums[number + 1 :]})
    fewest = len(sizes) + 1
    for cap in caps[bisect_left(caps, max(sizes)) :]:
        spans, start = list[tuple[int, int]](), 0
        for stop in range(1, len(sums)):
            if sums[stop] - sums[start] > cap:
                spans.append((start, stop - 1))
                start = stop - 1
        spans.append((start, len(sizes)))
        if len(spans) < fewest:
            fewest = len(spans)
            yield spans


def _group_bytes(stage: StageProfile, span: tuple[int, int], value_bytes: int, hand_bytes: float) -> float:
    """Peak of a slice's backward pass through the parts of that span of a swapping stage."""
    group = stage.parts[slice(*span)]
    first, last = stage.first and group[0] is stage.parts[0], stage.last and group[-1] is stage.parts[-1]
    input_bytes, given_bytes = 0.0 if first else hand_bytes, 0.0 if last else hand_bytes
    most, gradients = _passing(group, value_bytes, given_bytes, unsaved_bytes=_unsaved_bytes(stage, span[0]))
    if stage.tied and first:  # the head's gradient comes back, and is added
        most = max(most, gradients + 2 * stage.parts[0].parameters * value_bytes)
    most = max(most, gradients + input_bytes)
    return most + given_bytes + (input_bytes if value_bytes < 4 else 0.0)


def kept_activations(need: Need, device: Device, wanted: int) -> int:
    """Of how many forwards a resident stage keeps the activations, at most `wanted`: in half of what is left, as it does when it runs."""
    if device.cards > 1:
        return 0
    if not device.memory_bytes:
        return wanted
    left_bytes = device.memory_bytes - reserve(device) - peak(need, device)
    return max(0, min(wanted, int(left_bytes / 2 // max(need.graph_bytes, 1.0))))


def reserve(device: Device) -> float:
    return (
        device.cards * RESERVE_BYTES if device.memory_bytes >= device.cards * SMALL_BYTES else device.memory_bytes / 8
    )


def lacking(need: Need, device: Device) -> float:
    """Bytes that are missing; 0 when it fits or the device's memory is not stated."""
    on_device = peak(need, device) + reserve(device) - device.memory_bytes if device.memory_bytes else 0.0
    host_bytes = need.host_bytes + (0.0 if shared(device) else need.kept_bytes + need.outer_bytes)
    on_host = host_bytes - device.host_memory_bytes if host_bytes else 0.0
    return max(on_device, on_host, 0.0)
