"""The memory that a stage was planned to take, and the memory that it takes, of shapes drawn from a seed.

For tests/planner/test_memory.py and benchmarks/memory.py. What it takes comes from torch's profiler, which sees each block that torch's
allocator gives out and takes back: workspaces inside kernels too, which no dispatch mode sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from torch._C._profiler import _EventType, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.config import Config, Data, Device, Model, Run, Train, Tune, boundary_rows, token_rows
from shoal.executor import create
from shoal.executor.base import DTYPES, Executor
from shoal.executor.delayed import Delayed
from shoal.executor.swap import memory as swap_memory
from shoal.executor.swap.swapping import Swapping
from shoal.model import analysis, stages
from shoal.model.cut import cut, inputs
from shoal.numerics import eightbit
from shoal.planner.inputs import cluster, memory
from shoal.planner.inputs.memory import Optimizer
from shoal.planner.inputs.profile import StageProfile

SEEDS = 100
ABOVE = 0.05  # of what is measured, at most
HOST, MARK = "shoal host memory", "shoal from here"


class Phase(NamedTuple):
    before: int
    peak: int


class Allocations:
    """Bytes that torch's CPU allocator has given out inside and not taken back: `now` at the end, `peak`, and the peak of each `phase_`,
    with what was given out when it began. Those inside of swap.memory.host() do not count."""

    now: int
    phases: list[Phase]

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases)

    def __enter__(self) -> Allocations:
        self._host = patch.object(swap_memory, "host", _host)
        self._host.start()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def phase_(self) -> None:
        with record_function(MARK):
            pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        self._host.stop()
        assert self._profile.profiler is not None
        tree = self._profile.profiler.kineto_results.experimental_event_tree()
        events = sorted(_changes(tree, False), key=lambda change: change.at)
        live: dict[int, int] = {}
        self.now = 0
        self.phases = [Phase(0, 0)]
        for change in events:
            if change.nbytes is None:
                self.phases.append(Phase(self.now, self.now))
            elif change.nbytes > 0:
                if not change.host:
                    live[change.pointer] = change.nbytes
                    self.now += change.nbytes
                    begin, peak = self.phases[-1]
                    self.phases[-1] = Phase(begin, max(peak, self.now))
            else:
                self.now -= live.pop(change.pointer, 0)


class _Change(NamedTuple):
    at: int
    nbytes: int | None  # None: the mark
    pointer: int
    host: bool


def _changes(events: list[_ProfilerEvent], host: bool) -> Iterator[_Change]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield _Change(event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, host)
        elif event.name == MARK:
            yield _Change(event.start_time_ns, None, 0, host)
        yield from _changes(event.children, host or event.name == HOST)


@contextmanager
def _host() -> Iterator[None]:
    with record_function(HOST):
        yield


# ------------------------------------------------------------------------------------------------------------- shapes


def drawn(seed: int) -> Config:
    """Families, sizes, dtypes, slices, cuts, tied embeddings, packed documents, experts, checkpointing, kept activations, moments and
    delayed updates or local steps at random."""
    draw = random.Random(seed)
    family = draw.choice(["llama", "qwen3", "gemma2", "mistral", "mixtral"])
    heads, stages, microbatch = draw.choice([2, 4]), draw.randint(1, 3), draw.choice([4, 8])
    width, sequence = 64 * heads, draw.choice([128, 256])
    dtype = draw.choice(["float32", "bfloat16"])
    steps = draw.choice(["at once"] * 3 + ["delayed", "local"])
    resident = draw.random() < 0.6
    checkpointing = resident and draw.random() < 0.3
    local = steps == "local" and stages == 1
    return Config(
        run=Run(stages=stages, seed=3),
        model=Model(
            family=family,
            hidden_size=width,
            layers=draw.randint(3, 8),
            heads=heads,
            kv_heads=draw.choice([1, heads]),
            intermediate_size=width * draw.choice([1, 3]),
            vocab_size=draw.choice([256, 2000]),
            tied_embeddings=stages == 1 and draw.random() < 0.5,
            extra={"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {},
        ),
        data=Data(sequence=sequence, document_end=draw.choice([-1, -1, -1, 0])),
        train=Train(
            batch=2 * microbatch,
            microbatch=microbatch,
            dtype=dtype,
            moments=draw.choice(["float32", "float32", "8bit"]),
            staleness=int(steps == "delayed"),
            local_steps=2 if local else 1,
            local_batch=2 * microbatch if local else 0,
        ),
        device=Device(
            kind="cpu",
            executor="resident" if resident else "swapping",
            sequences=draw.choice([0, 0, microbatch // 2]),
            checkpointing=checkpointing,
            kept_activations=draw.choice([0, 0, 2]) if resident else 0,
        ),
    )


def adapted(
    config: Config,
    seed: int,
    base: Path,
    quantize: Literal["none", "nf4"] = "none",
    executor: Literal["resident", "swapping"] = "resident",
) -> Config:
    """The same shape, with LoRA adapters beside its weights, which are written to `base`."""
    whole = stages.whole(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, stages=1)))
    whole.save_pretrained(base)
    fused = config.model.family == "mixtral"  # experts in one tensor get none
    tune = Tune(
        method="lora",
        rank=random.Random(seed).choice([4, 16, 64]),
        targets=("q_proj", "v_proj") if fused else (),
        quantize=quantize,
    )
    only_resident = {"checkpointing": False, "kept_activations": 0} if executor == "swapping" else {}
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=str(base)),
        device=msgspec.structs.replace(config.device, executor=executor, **only_resident),
        tune=tune,
    )


def preferring(config: Config) -> Config:
    """The same shape, which is adapted, with preference pairs as samples."""
    changed, experts = msgspec.structs.replace, config.model.family == "mixtral"
    return changed(
        config,
        data=Data(source="jsonl", format="preference", path="-", sequence=config.data.sequence),
        train=changed(config.train, local_steps=1, local_batch=0),
        model=changed(config.model, extra=config.model.extra | {"router_aux_loss_coef": 0.0} if experts else {}),
    )


def inputs_of(config: Config, stage: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Input, gradient and tokens of a backward pass."""
    shape = (token_rows(config), config.data.sequence)
    tokens = torch.randint(1, config.model.vocab_size, (shape[0], shape[1] + 1))
    tokens[:, shape[1] // 2] = max(0, config.data.document_end)  # two documents
    width = config.model.hidden_size + (config.data.document_end >= 0)
    hidden = torch.randn(boundary_rows(config), shape[1], width, dtype=DTYPES[config.train.dtype])
    if config.data.document_end >= 0:
        hidden[..., -1] = torch.arange(shape[1]) == shape[1] // 2
    last = stage == config.run.stages - 1
    return (
        inputs(tokens) if stage == 0 else hidden,
        None if last else torch.randn_like(hidden[: shape[0]]),
        tokens if last else None,
    )


# --------------------------------------------------------------------------------------------------- planned and measured


class Figure(NamedTuple):
    what: str
    planned: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.planned / self.measured


def figures(config: Config) -> Iterator[Figure]:
    """Of each stage."""
    counted = analysis.count(config)
    optimizer = Optimizer(config.train.moments, config.train.staleness, config.train.local_steps > 1)
    value_bytes = DTYPES[config.train.dtype].itemsize
    for stage, span in enumerate(cut(config.run, config.model.layers)):
        profile = counted.stage(span)
        of = profile, counted.boundary_bytes, value_bytes, optimizer
        yield from (_resident if config.device.executor == "resident" else _swapping)(config, stage, *of)


def _resident(config: Config, stage: int, profile: StageProfile, *rest: Any) -> Iterator[Figure]:
    need, checkpointing = memory.resident(profile, *rest), config.device.checkpointing
    if checkpointing and need.checkpointed_bytes:
        need = msgspec.structs.replace(need, device_bytes=need.checkpointed_bytes)
    kept = 0 if profile.last else config.device.kept_activations
    planned = memory.peak(need, cluster.Device(name="cpu", flops=1.0))
    planned += kept * memory.graph_bytes(profile, *rest[:2], checkpointing=checkpointing)
    eightbit.codebook.cache_clear()
    ends, others = inputs_of(config, stage), [inputs_of(config, stage)[0] for _ in range(kept)]
    with Allocations() as allocations:
        executor = create(config, stage)
        given = [None if value is None else value.clone() for value in ends]
        kept_inputs = [value.clone() for value in others]
        allocations.phase_()
        _train(executor, given, kept_inputs, allocations)
    _, hops, step = allocations.phases
    # With delayed updates the step runs beside hops.
    measured = hops.peak + step.peak - step.before if config.train.staleness else max(hops.peak, step.peak)
    yield Figure(f"stage {stage} of {config.run.stages}, resident", int(planned), measured)


def _train(executor: Executor, ends: Sequence[Tensor | None], kept: Sequence[Tensor], allocations: Allocations) -> None:
    """Two microbatches forward and back, and an optimizer step; with delayed updates hops of the next step before."""
    for x in kept and [ends[0], *kept]:  # the first one is measured, and not kept
        executor.forward(x)
    for _ in range(2):
        executor.backward(*ends)
    if not isinstance(executor, Delayed):
        allocations.phase_()
        executor.apply(executor.contribution(), 1.0, 0)
        return
    gradient = executor.contribution()
    executor.at(1)
    for x in kept:
        executor.forward(x)
    executor.backward(*ends)
    executor.begin(0)
    allocations.phase_()
    executor.finish(gradient, 1.0, 0)


def _swapping(config: Config, stage: int, profile: StageProfile, *rest: Any) -> Iterator[Figure]:
    least = int(memory.swapping(profile, *rest).device_bytes)
    least += swap_memory.unseen_bytes("cpu", DTYPES[config.train.dtype], least)
    whole = int(memory.resident(profile, *rest).device_bytes)
    ends = inputs_of(config, stage)
    for what, limit in (("least", least), ("half", (least + whole) // 2), ("all", 0)):
        device = msgspec.structs.replace(config.device, memory_bytes=limit)
        executor = create(msgspec.structs.replace(config, device=device), stage)
        inner = executor
        while not isinstance(inner, Swapping):
            inner = inner._inner
        with Allocations() as allocations:
            executor.backward(*ends)
        measured = inner.resident_bytes + allocations.peak
        where = f"stage {stage} of {config.run.stages}, swapping, {inner.plan.count} groups"
        if what == "least":
            yield Figure(f"{where}, by the planner", least, measured)
        yield Figure(f"{where}, {what}", inner.plan.device_bytes, measured)
