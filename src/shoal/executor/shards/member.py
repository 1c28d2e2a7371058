"""What every process of a sharded stage does: it holds a part of each parameter, and computes its rows of each microbatch.

PyTorch's FSDP2 collects a block's parameters for as long as the block computes, and adds up the gradients of all rows.
A part is whole rows of a parameter (`Shard(0)`), so it is one interval of the stage's flat gradient, Shoal's layout. AdamW treats
each value apart: a part's update has the bits of the whole's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shoal.config import Config, microbatches
from shoal.executor import base
from shoal.executor.inputs import BackwardInput, outcome
from shoal.executor.master import Master
from shoal.executor.shards.commands import Build
from shoal.model import stages
from shoal.model.stages import HuggingFaceStage
from shoal.numerics.compress import finite


def connect(device: torch.device, rank: int, count: int, store: str, deadline_s: float) -> None:
    """Join the process group, over this machine's own loopback: nothing outside can take part."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
    backend = {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    timeout = timedelta(seconds=deadline_s)
    dist.init_process_group(backend, store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=timeout)


class Member:
    """Of `device.count` processes, that of `rank`. Every method but `zero` is called by all of them at once."""

    def __init__(self, build: Build, rank: int) -> None:
        config = build.config
        stage = stages.build(config, build.stage, source=build.source)
        assert isinstance(stage, stages.HuggingFaceStage)  # config refuses others
        self.stage, self._rank, self._count = stage, rank, config.device.count
        self._parts = microbatches(config.train)
        kind = base.device_of(config).type
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
        named = list(stage.named_parameters())
        self.names, self.shapes = [name for name, _ in named], [value.shape for _, value in named]
        self._spans = [_spans(self.shapes, each, self._count) for each in range(self._count)]
        self._module = _sharded(stage, config, self._count)
        self._parameters = [value for _, value in stage.named_parameters()]
        local = [value.to_local().detach() for value in self._parameters]  # type: ignore[attr-defined] # a DTensor
        self._master = Master(self.names, local, config)
        self._sum = torch.zeros(self._master.length, device=self.device)
        self._sums = self._master.views(self._sum)

    def forward(self, x: Tensor) -> Tensor | None:
        """Of this process's rows; the whole output at rank 0. NotFinite, at all: some output is not finite."""
        with torch.no_grad():
            y = self._module(x, None)
        self._module.reshard()  # type: ignore[operator] # the update must not find an old copy
        self._agree(y)
        return self.gather_rows(y)

    def backward(self, given: BackwardInput) -> tuple[Tensor | None, float | None]:
        """The gradient of all rows (at rank 0) and the loss, of which each process computes its rows."""
        for value in self._parameters:
            value.grad = None
        x = given.x if self.stage.first else given.x.requires_grad_()
        with torch.enable_grad():
            y, grad_y, loss = outcome(_Called(self.stage, self._module), given._replace(x=x))
            # FSDP divides sums of gradients by the number of processes, which is right for means of rows.
            y = y if loss is None else y / self._parts
            torch.autograd.backward(y, None if grad_y is None else grad_y * self._count)
        self._module.reshard()  # type: ignore[operator]
        gradients = [_local(value, part) for value, part in zip(self._parameters, self._sums, strict=True)]
        grad_x = None if self.stage.first else x.grad
        mean = self._agree(*gradients, *([] if grad_x is None else [grad_x]), loss=loss)
        torch._foreach_add_(self._sums, gradients)
        for value in self._parameters:
            value.grad = None
        return None if grad_x is None else self.gather_rows(grad_x / self._count), mean

    def zero(self) -> None:
        self._sum.zero_()

    def contribution(self, start: int, stop: int) -> Tensor:
        return self._gather(self._sum, start, stop)

    def apply(self, reduced: Tensor | None, norm: float, step: int, scale: float) -> None:
        """`reduced`: the stage's averaged gradient at rank 0, None elsewhere."""
        self._master.apply(self._scatter(reduced), norm, step, scale)

    def gather(self, kind: int) -> Tensor:
        """The parameters, or one of the moments, as one flat tensor at rank 0."""
        return self._gather(torch.cat([value.reshape(-1) for value in self._kind(kind)]), 0, self.length)

    def load(self, kind: int, flat: Tensor | None) -> None:
        own = self._scatter(flat)
        torch._foreach_copy_(self._kind(kind), self._master.views(own))

    @property
    def length(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    # ---------------------------------------------------------------------------------------------------- exchanges

    def scatter_rows(self, whole: Tensor | None, rows: Tensor) -> Tensor:
        """This process's rows of `whole`, which rank 0 has, received into `rows`."""
        pieces = None if whole is None else [part.contiguous() for part in whole.to(self.device).chunk(self._count)]
        dist.scatter(rows, pieces, src=0)
        return rows

    def gather_rows(self, rows: Tensor) -> Tensor | None:
        pieces = [torch.empty_like(rows) for _ in range(self._count)] if self._rank == 0 else None
        dist.gather(rows.contiguous(), pieces, dst=0)
        return None if pieces is None else torch.cat(pieces)

    def _agree(self, *tensors: Tensor, loss: Tensor | None = None) -> float | None:
        """The mean loss. NotFinite, at all processes: some tensor of one of them is not finite."""
        facts = torch.tensor(
            [0.0 if finite(*tensors) else 1.0, 0.0 if loss is None else float(loss)], device=self.device
        )
        dist.all_reduce(facts)
        faults, total = facts.tolist()
        if faults:
            raise base.NotFinite("the stage's output or gradient is not finite")
        return None if loss is None else total / self._count

    def _kind(self, kind: int) -> list[Tensor]:
        state = list(self._master.state().values())
        return state[kind * len(self.names) : (kind + 1) * len(self.names)]

    def _gather(self, own: Tensor, start: int, stop: int) -> Tensor:
        """Values `start` to `stop` of the stage's flat layout, on the CPU at rank 0; `own`: of this process's spans."""
        if self._rank:
            if len(piece := _between(own, self._spans[self._rank], start, stop)):
                dist.send(piece, 0)
            return piece
        flat = torch.empty(stop - start)
        for rank, spans in enumerate(self._spans):
            inside = [(max(a, start), min(b, stop)) for a, b in spans if max(a, start) < min(b, stop)]
            received = _between(own, spans, start, stop) if rank == 0 else own.new_empty(sum(b - a for a, b in inside))
            if rank and len(received):
                dist.recv(received, rank)
            for (a, b), part in zip(inside, torch.split(received.cpu(), [b - a for a, b in inside]), strict=True):
                flat[a - start : b - start] = part
        return flat

    def _scatter(self, flat: Tensor | None) -> Tensor:
        own = torch.empty_like(self._sum)
        if flat is None:
            if len(own):
                dist.recv(own, 0)
            return own
        for rank, spans in enumerate(self._spans):
            piece = torch.cat([flat[a:b] for a, b in spans]).to(self.device)
            if rank == 0:
                own = piece
            elif len(piece):
                dist.send(piece, rank)
        return own


class _Whole(nn.Module):
    """The stage as one module, since FSDP acts when a module is called."""

    def __init__(self, stage: HuggingFaceStage) -> None:
        super().__init__()
        self.model = stage.model
        object.__setattr__(self, "stage", stage)

    def forward(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        stage: HuggingFaceStage = self.stage  # type: ignore[assignment]
        return stage.forward(x) if tokens is None else stage.loss(x, tokens)


class _Called:
    """The stage whose forward and loss are calls of the sharded module."""

    def __init__(self, stage: HuggingFaceStage, module: nn.Module) -> None:
        self.first, self.last, self.vocabulary = stage.first, stage.last, stage.vocabulary
        self.named_parameters, self.named_frozen = stage.named_parameters, stage.named_frozen
        self.frozen, self.infer = stage.frozen, stage.infer
        self.paired, self.compared, self.reference = stage.paired, stage.compared, stage.reference
        self.masks = stage.masks
        self._module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._module(x, None)
        return y

    def loss(self, x: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Tensor:
        assert reference is None, "adapters are not shared out among devices"
        y: Tensor = self._module(x, tokens)
        return y


def _sharded(stage: HuggingFaceStage, config: Config, count: int) -> nn.Module:
    """The stage's module, cut up block by block: a block is whole on a device only while it is cut and while it computes."""
    dtype = None if config.train.dtype == "float32" else base.DTYPES[config.train.dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(base.device_of(config).type, (count,)),
        "mp_policy": policy,
        "reshard_after_forward": True,
    }
    module = _Whole(stage)
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    outer = [part for name, part in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    for block in (block for blocks in outer for block in blocks):
        if next(block.parameters(), None) is not None:
            fully_shard(block, **options)
    fully_shard(module, **options)
    return module


def _spans(shapes: Sequence[torch.Size], rank: int, count: int) -> list[tuple[int, int]]:
    """The intervals of the flat layout, one per parameter, that a process holds: rows as torch.chunk cuts them."""
    spans, offset = [], 0
    for shape in shapes:
        rows = shape[0] if shape else 1
        chunk, width = -(-rows // count), shape.numel() // max(rows, 1)
        first, last = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
        spans.append((offset + first * width, offset + last * width))
        offset += shape.numel()
    return spans


def _between(own: Tensor, spans: Sequence[tuple[int, int]], start: int, stop: int) -> Tensor:
    """Of the values in `own`, which lie at `spans` one after another, those from `start` to `stop`."""
    pieces, at = [own[:0]], 0
    for a, b in spans:
        first, last = max(a, start), min(b, stop)
        if first < last:
            pieces.append(own[at + first - a : at + last - a])
        at += b - a
    return torch.cat(pieces)


def _local(parameter: Tensor, like: Tensor) -> Tensor:
    """This process's part of the parameter's gradient."""
    if parameter.grad is None:
        return torch.zeros_like(like)
    part: Tensor = parameter.grad.to_local()  # type: ignore[attr-defined]
    return part.float()
