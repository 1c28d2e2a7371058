"""Memory of a swapping stage on device and host: counted, planned, and measured while it runs.

For the swapping executor, which takes its groups from `plan`. Device memory in a pass is two slots of parameters (the group
that computes and the one being loaded), fp32 slabs of gradient sums (likewise), and the activations of one slice in a group.
Only the activations cannot be counted from shapes; `live` measures them by running a group once. No plan exceeds the limit.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.executor.base import out_of_memory
from shoal.numerics.eightbit import nbytes

log = logging.getLogger(__name__)

ALIGN = 256  # bytes: the alignment of allocators; with less, matrix kernels may add in another order

CUDA_BLOCK = 512  # bytes: PyTorch's allocator rounds up to it
# Bytes: workspaces of matrix kernels (32 MiB on an H100), and the ends of the allocator's segments
CUDA_SPARE = 128 << 20
CPU_SPARE = 176 << 10  # bytes: workspaces inside of oneDNN's bf16 kernels; measured: 163 kB
# Bytes: below this limit the allocator is not capped, since its first segments may exceed it
CUDA_CAPPED = 2 * CUDA_SPARE

# ------------------------------------------------------------------------------------------------------------ the plan


class UnitSizes(msgspec.Struct, frozen=True):
    """A stage's units and their parameters. A name in two units is one shared parameter."""

    units: tuple[tuple[str, ...], ...]
    values: Mapping[str, int]  # per name
    itemsize: int  # of the compute dtype
    moments: str = "float32"  # train.moments
    frozen: Mapping[str, int] = {}  # bytes of those that are not trained, per name
    single: frozenset[str] = frozenset()  # names with one moment, of fp32 (numerics/muon.py)

    def slot_bytes(self, start: int, stop: int) -> int:
        """Bytes that the parameters of units `start` up to `stop` take in a slot."""
        names = {name for unit in self.units[start:stop] for name in unit}
        return sum(padded(self._nbytes(name)) for name in names)

    def _nbytes(self, name: str) -> int:
        return self.frozen[name] if name in self.frozen else self.values[name] * self.itemsize

    def own(self, start: int, stop: int) -> tuple[str, ...]:
        """Names whose gradient is complete after these units' backward pass: no earlier unit uses them."""
        earlier = {name for unit in self.units[:start] for name in unit}
        trained = (name for unit in self.units[start:stop] for name in unit if name not in self.frozen)
        return tuple(dict.fromkeys(name for name in trained if name not in earlier))

    def optimizer_bytes(self, names: Iterable[str]) -> int:
        """fp32 parameters and the optimizer's moments."""
        return sum(4 * self.values[name] + self._moment_bytes(name) for name in names)

    def _moment_bytes(self, name: str) -> int:
        return 4 * self.values[name] if name in self.single else nbytes(self.values[name], self.moments)

    def shared(self) -> tuple[str, ...]:
        """Names in more than one unit."""
        return tuple(name for name in self.values if sum(name in unit for unit in self.units) > 1)


class PlannedGroup(msgspec.Struct, frozen=True):
    """Consecutive units that are on the device together."""

    start: int
    stop: int
    parameter_bytes: int  # on the device, in the compute dtype, with those that are not trained
    gradient_bytes: int  # of the fp32 sums, in the slab during the backward pass
    optimizer_bytes: int  # on the host: fp32 parameters and moments
    activation_bytes: int  # peak of one slice on the device, its gradients included


class SwapPlan(msgspec.Struct, frozen=True):
    """Groups in order, and the bytes that they need together."""

    groups: tuple[PlannedGroup, ...]
    fixed_bytes: int  # always on the device: tables of positions
    slabs: int  # with two, a group's sums are stored while the next group's are added
    host_bytes: int  # parameters, moments, two sums, the copies in the compute dtype, and what is not trained

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Each slot holds every other group in turn; a stage of one group needs one."""
        return tuple(max(group.parameter_bytes for group in self.groups[slot::2]) for slot in range(min(2, self.count)))

    @property
    def slab_bytes(self) -> tuple[int, ...]:
        return tuple(max(group.gradient_bytes for group in self.groups[n :: self.slabs]) for n in range(self.slabs))

    @property
    def device_bytes(self) -> int:
        """Peak bytes on the device."""
        live = max(group.activation_bytes for group in self.groups)
        return self.fixed_bytes + sum(self.slot_bytes) + sum(self.slab_bytes) + live

    @property
    def count(self) -> int:
        return len(self.groups)


Live = Callable[[int, int], int]  # (start, stop) of units -> peak bytes of one slice in them, forward and backward


def plan(sizes: UnitSizes, live: Live, *, limit: int, fixed_bytes: int = 0) -> SwapPlan:
    """The fewest groups that fit `limit` bytes of device memory (0 = no limit), with parameters cut as evenly as possible;
    with one slab of sums only where two do not fit: a group's first slice then waits for the store of the sums before.
    Groups whose trial runs out of memory, whatever the limit, do not fit either.

    ValueError: none fits."""
    measured_bytes: dict[tuple[int, int], int] = {}

    def measured(start: int, stop: int) -> int:
        if (start, stop) not in measured_bytes:
            measured_bytes[start, stop] = live(start, stop)
        return measured_bytes[start, stop]

    *coarser, finest = _partitions(sizes)
    for slabs in (2, 1):
        for spans in (*coarser, finest):
            if limit and _plan(sizes, spans, _nothing, fixed_bytes, slabs).device_bytes > limit:
                continue  # measuring is slow
            try:
                candidate = _plan(sizes, spans, measured, fixed_bytes, slabs)
            except Exception as error:  # torch has several for memory that ran out
                if not out_of_memory(error):
                    raise
                log.info("%d groups are too large for the memory that is free; trying more", len(spans))
                continue
            if not limit or candidate.device_bytes <= limit:
                return candidate
    finest_plan = _plan(sizes, finest, measured, fixed_bytes, slabs=1)
    # The finest cut holds least of parameters. Where they are small beside activations, a coarser one may cut those more evenly.
    held = [
        spans
        for spans in coarser
        if _plan(sizes, spans, _nothing, fixed_bytes, 1).device_bytes < finest_plan.device_bytes
    ]
    others = [_plan(sizes, spans, measured, fixed_bytes, slabs=1) for spans in held]
    return _within_limit(min([finest_plan, *others], key=lambda one: one.device_bytes), limit, sizes)


def _nothing(start: int, stop: int) -> int:
    return 0


def refuse(sizes: UnitSizes, live: Live, *, limit: int, fixed_bytes: int = 0) -> None:
    """ValueError: no `plan` fits. Measures the finest cut, and others only where that does not fit."""
    *_, finest = _partitions(sizes)
    if _plan(sizes, finest, live, fixed_bytes, slabs=1).device_bytes > limit:
        plan(sizes, live, limit=limit, fixed_bytes=fixed_bytes)


def _within_limit(plan: SwapPlan, limit: int, sizes: UnitSizes) -> SwapPlan:
    if limit and plan.device_bytes > limit:
        largest = max(plan.groups, key=lambda group: group.parameter_bytes)
        weights = sum(plan.slot_bytes) + sum(plan.slab_bytes)
        raise ValueError(
            f"device.memory_bytes = {limit:,} is too little for this stage's largest unit, that of"
            f" {sizes.units[largest.start][0]}: at least {plan.device_bytes:,} bytes are needed, {weights:,} of them for parameters"
            f" and gradients on their way; try device.memory_bytes={plan.device_bytes} or more, device.sequences=1, or a smaller"
            " train.microbatch"
        )
    return plan


def _plan(sizes: UnitSizes, spans: Sequence[tuple[int, int]], live: Live, fixed_bytes: int, slabs: int) -> SwapPlan:
    copies = 2 * 4 + (0 if sizes.itemsize == 4 else sizes.itemsize)
    host_bytes = sizes.optimizer_bytes(sizes.values) + copies * sum(sizes.values.values()) + sum(sizes.frozen.values())
    groups = tuple(_group(sizes, start, stop, live(start, stop)) for start, stop in spans)
    return SwapPlan(groups, fixed_bytes, min(slabs, len(groups)), host_bytes=host_bytes)


def _group(sizes: UnitSizes, start: int, stop: int, live_bytes: int) -> PlannedGroup:
    own = sizes.own(start, stop)
    return PlannedGroup(
        start,
        stop,
        parameter_bytes=sizes.slot_bytes(start, stop),
        gradient_bytes=4 * sum(sizes.values[name] for name in own),
        optimizer_bytes=sizes.optimizer_bytes(own),
        activation_bytes=live_bytes,
    )


def _partitions(sizes: UnitSizes) -> Iterator[list[tuple[int, int]]]:
    """Cuts into more and more groups; each minimises the largest group for its number of groups."""
    units = range(len(sizes.units))
    caps = sorted({sizes.slot_bytes(start, stop + 1) for start in units for stop in units[start:]})
    cuts: dict[int, list[tuple[int, int]]] = {}
    for cap in caps:  # ascending: the first cut into n groups is the most even one
        spans = _greedy_cut(sizes, cap)
        if spans:
            cuts.setdefault(len(spans), spans)
    for count in sorted(cuts):
        yield cuts[count]


def _greedy_cut(sizes: UnitSizes, cap: int) -> list[tuple[int, int]]:
    """Groups filled up to `cap` bytes one after another; [] when a single unit exceeds it."""
    spans: list[tuple[int, int]] = []
    start = 0
    for unit in range(len(sizes.units)):
        if sizes.slot_bytes(unit, unit + 1) > cap:
            return []
        if sizes.slot_bytes(start, unit + 1) > cap:
            spans.append((start, unit))
            start = unit
    return [*spans, (start, len(sizes.units))]


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


# ------------------------------------------------------------------------------------------------ the allocator


def spare_bytes(device: str, limit: int) -> int:
    """Device bytes reserved for PyTorch's allocator where it is capped at the limit."""
    return CUDA_SPARE if device.startswith("cuda") and limit >= CUDA_CAPPED else 0


def unseen_bytes(device: str, dtype: torch.dtype, live_bytes: int) -> int:
    """What kernels of the CPU allocate inside, which MemoryMeter does not see; of matrices as small as in tests next to nothing.
    Cards: spare_bytes."""
    return CPU_SPARE if device == "cpu" and dtype == torch.bfloat16 and live_bytes >= 1 << 20 else 0


def cap_(device: str, limit: int) -> None:
    """Cap this process's allocator at `limit` bytes: a wrong plan ends in an error, not above the limit."""
    if spare_bytes(device, limit):
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))


# --------------------------------------------------------------------------------------------------- measured

_ON_HOST: ContextVar[bool] = ContextVar("on_host", default=False)


@contextmanager
def host() -> Iterator[None]:
    """Allocations inside count as host memory; needed where the device is the CPU."""
    token = _ON_HOST.set(True)
    try:
        yield
    finally:
        _ON_HOST.reset(token)


class MemoryMeter(TorchDispatchMode):
    """Counts device memory allocated and freed inside: `now` and `peak` bytes. Slows every operator."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated by torch
        self.now: int = 0
        self.peak: int = 0
        self._device = device
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        if not _ON_HOST.get():
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.device.type == self._device.partition(":")[0]:
                    self._count(leaf.untyped_storage(), inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if self._device.startswith("cuda"):
            nbytes = -(-nbytes // CUDA_BLOCK) * CUDA_BLOCK
        if key in inputs or key in self._alive:
            return

        def freed(_: object) -> None:
            self._alive.pop(key, None)
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, freed)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
