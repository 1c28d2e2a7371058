"""What a stage that passes through device memory needs there and on the host: counted, planned, and seen while it runs.

For the swapping executor, which asks `plan` for its groups, and for whoever plans machines. Device memory in a pass is two
slots of parameters (the group that computes and the one on its way), fp32 slabs of gradient sums (likewise), and what one
microbatch needs while it runs through a group. Only the last cannot be counted from shapes; it comes from `live`, which the
executor measures by running a group once. A limit is kept by construction: no plan is made that does not fit it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.numerics.eightbit import nbytes

ALIGN = 256  # bytes: what allocators give by themselves; matrix kernels may add in another order on less

CUDA_BLOCK = 512  # bytes: PyTorch's allocator rounds up to it
CUDA_SPARE = (
    128 << 20
)  # bytes: workspaces of matrix kernels (32 MiB on an H100), and the ends of the allocator's segments
CUDA_CAPPED = 2 * CUDA_SPARE  # bytes: a smaller limit is planned for, but the allocator's first segments may pass it

# ------------------------------------------------------------------------------------------------------------ the plan


class Sizes(msgspec.Struct, frozen=True):
    """A stage's units and their parameters. A name in two units is one parameter that both use."""

    units: tuple[tuple[str, ...], ...]
    values: Mapping[str, int]  # per name
    itemsize: int  # of the dtype that computes
    moments: str = "float32"  # train.moments

    def slot_bytes(self, start: int, stop: int) -> int:
        """Parameters of the units `start` up to `stop` as they lie in a slot."""
        names = {name for unit in self.units[start:stop] for name in unit}
        return sum(padded(self.values[name] * self.itemsize) for name in names)

    def own(self, start: int, stop: int) -> tuple[str, ...]:
        """Names whose gradient is complete once these units have run back: those that no earlier unit uses too."""
        earlier = {name for unit in self.units[:start] for name in unit}
        return tuple(dict.fromkeys(name for unit in self.units[start:stop] for name in unit if name not in earlier))

    def optimizer_bytes(self, names: Iterable[str]) -> int:
        """fp32 parameters and AdamW's two moments."""
        return sum(4 * self.values[name] + nbytes(self.values[name], self.moments) for name in names)

    def shared(self) -> tuple[str, ...]:
        """Names in more than one unit."""
        return tuple(name for name in self.values if sum(name in unit for unit in self.units) > 1)


class Group(msgspec.Struct, frozen=True):
    """Consecutive units that are on the device together."""

    start: int
    stop: int
    parameter_bytes: int  # on the device, in the dtype that computes
    gradient_bytes: int  # of the fp32 sums, in the slab while the group runs back
    optimizer_bytes: int  # on the host: fp32 parameters and AdamW's two moments
    activation_bytes: int  # most that one microbatch takes on the device, its own gradients included


class Plan(msgspec.Struct, frozen=True):
    """Groups in order, and what they need together."""

    groups: tuple[Group, ...]
    fixed_bytes: int  # on the device for good: tables of positions
    slabs: int  # of sums: with two, a group's leave while the next one's are added
    host_bytes: int  # parameters, moments, two sums, and the copies that travel

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Each slot holds every other group in turn; a stage of one group needs one."""
        return tuple(max(group.parameter_bytes for group in self.groups[slot::2]) for slot in range(min(2, self.count)))

    @property
    def slab_bytes(self) -> tuple[int, ...]:
        return tuple(max(group.gradient_bytes for group in self.groups[n :: self.slabs]) for n in range(self.slabs))

    @property
    def device_bytes(self) -> int:
        """The peak."""
        live = max(group.activation_bytes for group in self.groups)
        return self.fixed_bytes + sum(self.slot_bytes) + sum(self.slab_bytes) + live

    @property
    def count(self) -> int:
        return len(self.groups)


Live = Callable[
    [int, int], int
]  # units from, up to -> bytes that one microbatch takes while it runs through them and back


def plan(sizes: Sizes, live: Live, *, limit: int, fixed_bytes: int = 0) -> Plan:
    """The fewest groups that fit `limit` bytes of device memory (0 = no limit), their parameters as even as can be; with one
    slab of sums only where two do not fit: then each group's first slice waits until the sums of the one before are away.

    ValueError: the largest unit does not fit."""
    seen: dict[tuple[int, int], int] = {}

    def measured(start: int, stop: int) -> int:
        if (start, stop) not in seen:
            seen[start, stop] = live(start, stop)
        return seen[start, stop]

    *coarser, finest = _partitions(sizes)
    for slabs in (2, 1):
        for spans in (*coarser, finest):
            if limit and _plan(sizes, spans, lambda start, stop: 0, fixed_bytes, slabs).device_bytes > limit:
                continue  # measuring is what takes time
            made = _plan(sizes, spans, measured, fixed_bytes, slabs)
            if not limit or made.device_bytes <= limit:
                return made
    return _kept(_plan(sizes, finest, measured, fixed_bytes, slabs=1), limit, sizes)


def refuse(sizes: Sizes, live: Live, *, limit: int, fixed_bytes: int = 0) -> None:
    """ValueError: no `plan` fits. Only the largest groups that any of them needs are measured."""
    *_, finest = _partitions(sizes)
    _kept(_plan(sizes, finest, live, fixed_bytes, slabs=1), limit, sizes)


def _kept(made: Plan, limit: int, sizes: Sizes) -> Plan:
    if limit and made.device_bytes > limit:
        largest = max(made.groups, key=lambda group: group.parameter_bytes)
        weights = sum(made.slot_bytes) + sum(made.slab_bytes)
        raise ValueError(
            f"device.memory_bytes = {limit:,} is too little for this stage's largest unit, that of"
            f" {sizes.units[largest.start][0]}: at least {made.device_bytes:,} bytes are needed, {weights:,} of them for parameters"
            f" and gradients on their way; try device.memory_bytes={made.device_bytes} or more, device.sequences=1, or a smaller"
            " train.microbatch"
        )
    return made


def _plan(sizes: Sizes, spans: Sequence[tuple[int, int]], live: Live, fixed_bytes: int, slabs: int) -> Plan:
    copies = 2 * 4 + (0 if sizes.itemsize == 4 else sizes.itemsize)
    host_bytes = sizes.optimizer_bytes(sizes.values) + copies * sum(sizes.values.values())
    groups = tuple(_group(sizes, start, stop, live(start, stop)) for start, stop in spans)
    return Plan(groups, fixed_bytes, min(slabs, len(groups)), host_bytes=host_bytes)


def _group(sizes: Sizes, start: int, stop: int, live_bytes: int) -> Group:
    own = sizes.own(start, stop)
    return Group(
        start,
        stop,
        parameter_bytes=sizes.slot_bytes(start, stop),
        gradient_bytes=4 * sum(sizes.values[name] for name in own),
        optimizer_bytes=sizes.optimizer_bytes(own),
        activation_bytes=live_bytes,
    )


def _partitions(sizes: Sizes) -> Iterator[list[tuple[int, int]]]:
    """Cuts into ever more groups, each with the smallest largest group that so many groups allow."""
    units = range(len(sizes.units))
    caps = sorted({sizes.slot_bytes(start, stop + 1) for start in units for stop in units[start:]})
    found: dict[int, list[tuple[int, int]]] = {}
    for cap in caps:  # from small to large: the first cut into so many groups is the most even one
        spans = _filled(sizes, cap)
        if spans:
            found.setdefault(len(spans), spans)
    for count in sorted(found):
        yield found[count]


def _filled(sizes: Sizes, cap: int) -> list[tuple[int, int]]:
    """Groups filled up to `cap` bytes one after another; none when a unit alone is above it."""
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


# ------------------------------------------------------------------------------------------------ kept by the allocator


def spare_bytes(device: str, limit: int) -> int:
    """Device memory that no plan fills: what PyTorch's allocator takes beside tensors where it is held to the limit itself."""
    return CUDA_SPARE if device == "cuda" and limit >= CUDA_CAPPED else 0


def cap_(device: str, limit: int) -> None:
    """Have the allocator refuse what passes `limit`, in this process: a plan that is wrong ends in an error, not above it."""
    if spare_bytes(device, limit):
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))


# --------------------------------------------------------------------------------------------------- seen while it runs

_ON_HOST: ContextVar[bool] = ContextVar("on_host", default=False)


@contextmanager
def host() -> Iterator[None]:
    """What is allocated inside belongs to the host. Only a device that is the CPU itself needs to be told."""
    token = _ON_HOST.set(True)
    try:
        yield
    finally:
        _ON_HOST.reset(token)


class Watch(TorchDispatchMode):
    """Counts the device's memory that comes and goes inside: `now`, and `peak`, in bytes. Every operator is slower for it."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
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
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **kwargs)
        if not _ON_HOST.get():
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                    self._count(leaf.untyped_storage(), given)
        return made

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if self._device == "cuda":
            nbytes = -(-nbytes // CUDA_BLOCK) * CUDA_BLOCK
        if key in given or key in self._alive:
            return

        def gone(_: object) -> None:
            self._alive.pop(key, None)
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
