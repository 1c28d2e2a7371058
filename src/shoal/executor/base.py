"""What every executor does, for the driver that hands it tasks: run a stage, keep the step's gradient sum, apply it.

One thread calls it. It knows nothing of attempts, peers or rounds; exactly-once is decided by whoever calls backward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.config import Config
from shoal.model.boundary import MODEL_TYPE, parse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NotFinite(ValueError):
    """An infinity or NaN came out; nothing was added to the sum."""


class Executor(Protocol):
    """One stage on one device. Tensors may come from any device; those returned are on the executor's own.

    A microbatch may be cut into slices of `device.sequences` sequences, which run one after another: less is on the device."""

    length: int  # values in `sum`

    @property
    def sum(self) -> Tensor:
        """(length,) fp32: gradients of this step so far, parameters in order."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """Boundary tensor for the next stage. `x`: tokens (B, L) int64 at stage 0, else a boundary tensor."""
        ...

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        """Recompute the stage on `x`, go back from `grad` (last stage: from the loss against `tokens` (B, L+1)), add to `sum`.

        Returns the gradient of `x` (none at stage 0) and, at the last stage, the microbatch's mean loss. Gradients are those of
        that loss over the microbatches of a step, so that a step's sum is the gradient of the batch's mean. On a ValueError,
        NotFinite included, `sum` is as it was."""
        ...

    def zero(self, step: int = 0) -> None:
        """Empty the sum: what is added from now on belongs to version `step`."""
        ...

    def brought(self, start: int = 0, stop: int | None = None) -> Tensor:
        """What this replica brings into a round, values `start` up to `stop` of (length,) fp32, in the CPU's memory: a copy."""
        ...

    def apply(self, reduced: Tensor, norm: float, step: int) -> None:
        """The optimizer step that follows `step` others, from a stage's reduced gradient (length,) fp32; `norm`: the whole model's."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Parameters (`model/NAME`, fp32), then moments (`exp_avg/NAME`, `exp_avg_sq/NAME`; with train.moments = "8bit" also their
        scales), in an order that is always the same: the live tensors, which the next `apply` changes."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy in what `state` of the same stage gave elsewhere."""
        ...

    def digest(self) -> str:
        """SHA-256 of the parameters in order."""
        ...

    def refresh(self) -> None:
        """The parameters that `state` gives were written to: compute with what they hold now."""
        ...


class Boundary(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def boundary(config: Config) -> Boundary:
    """Shape and type of the tensors between stages, forwards and backwards, of whole microbatches."""
    if config.device.executor == "emulated":
        return Boundary((config.device.emulated_values,), torch.float32)
    width = hidden_size(config) // parse(config.model.boundary)[1]
    return Boundary((config.train.microbatch, config.data.sequence, width), DTYPES[config.train.dtype])


def hidden_size(config: Config) -> int:
    """Width of the model, which a model directory knows better than the settings."""
    if "hidden_size" in config.model.extra:
        return int(config.model.extra["hidden_size"])
    if config.model.path:
        fields = json.loads((Path(config.model.path) / "config.json").read_text())
        return int((fields["model"] if fields.get("model_type") == MODEL_TYPE else fields)["hidden_size"])
    return config.model.hidden_size


def check_device(config: Config) -> None:
    """Raise ValueError when this machine has no device of the configured kind."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind = config.device.kind
    if not there.get(kind, False):
        found = [name for name, is_there in there.items() if is_there]
        raise ValueError(f"device.kind = {kind!r}, but PyTorch finds only {found} here; try device.kind={found[-1]}")


def alive(config: Config) -> bool:
    """Whether the device still does the simplest thing. After most faults of a GPU nothing works until the process ends; a
    microbatch for which memory was too small leaves it as it was."""
    if config.device.executor == "emulated":
        return True
    try:
        return bool(torch.ones(1, device=config.device.kind).add_(1).item() == 2)
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False


def digest_of(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        found.update(flat.numpy().data)
    return found.hexdigest()


def copy_state_(into: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the tensors of the same names; ValueError, and nothing copied, when it is of another stage or model."""
    if list(into) != list(state):
        odd = next((name for name in [*state, *into] if (name in state) != (name in into)), "in another order")
        raise ValueError(f"state of another stage: {len(state)} tensors where {len(into)} belong ({odd})")
    for name, value in into.items():
        if value.shape != state[name].shape or value.dtype != state[name].dtype:
            found = (tuple(state[name].shape), state[name].dtype)
            raise ValueError(f"state of another model: {name} is {found}, not {(tuple(value.shape), value.dtype)}")
    with torch.no_grad():
        for name, value in into.items():
            value.copy_(state[name])
