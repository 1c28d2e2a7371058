"""The contract of every executor: run a stage, add up the step's gradient, apply it. For the task runner.

One thread calls an executor. Attempts, peers and rounds are unknown to it; the caller of `backward` ensures exactly-once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.config import Config, boundary_rows, token_rows
from shoal.core.messages import Rewards
from shoal.model import sequential
from shoal.model.cut import Stage
from shoal.model.families import hf_config
from shoal.model.layers.boundary import MODEL_TYPE, parse
from shoal.numerics import pieces

MIXED_BYTES = 1 << 16  # of a tensor whose digest is worth a compiled loop
DIGEST_VALUES = 1 << 20  # of a part of a tensor whose digest is made apart, on any thread
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NotFinite(ValueError):
    """A result holds an infinity or NaN; the sum is unchanged."""


class DeviceLost(RuntimeError):
    """The executor cannot go on, and its peer ends with it."""


class Executor(Protocol):
    """One stage on one device. Arguments may be on any device; results are on the executor's.

    To save device memory a microbatch runs in slices of `device.sequences` sequences, one after another."""

    length: int  # values in `sum`

    @property
    def base(self) -> str:
        """Digest of the weights that are not trained, the same at every replica; '' if there are none."""
        ...

    @property
    def sum(self) -> Tensor:
        """(length,) fp32: gradients of this step so far, parameters in order."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """Boundary tensor for the next stage. `x`: tokens (B, L) int64 at stage 0, else a boundary tensor; of preference pairs the rows of
        the reference follow those that are trained."""
        ...

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        """Run the stage on `x` again, or use the activations that `forward` kept of the same bits; differentiate from `grad` (last
        stage: from the loss against `tokens` (B, L+1)); add to `sum`.

        Returns the gradient of `x` (None at stage 0; of preference pairs without the reference's rows) and the microbatch's mean loss (None
        before the last stage), which is 0 for tokens that do not count. The loss is divided by the microbatches of a step, so that a
        step's sum is the gradient of the batch's mean. A ValueError, NotFinite included, leaves `sum` unchanged."""
        ...

    def zero(self, step: int = 0) -> None:
        """Empty the sum; later gradients belong to version `step`."""
        ...

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        """This replica's input to a round: a copy of values `start` up to `stop` of (length,) fp32, on the CPU."""
        ...

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        """Optimizer step number `step`, from `scale` times `reduced`, the stage's averaged gradient (length,) fp32; `norm`: of the
        whole model's gradient, with `scale`."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Parameters (`model/NAME`, fp32), then moments (`exp_avg/NAME`, `exp_avg_sq/NAME`; with train.moments = "8bit" also their
        scales), always in the same order: the live tensors, which the next `apply` changes."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy in the `state` of another executor of the same stage."""
        ...

    def digest(self) -> str:
        """`digest_of` the parameters in order, and of what is not trained."""
        ...

    def refresh(self) -> None:
        """Call after writing to the parameters of `state`: compute with their new values."""
        ...


@runtime_checkable
class Inferring(Protocol):
    """An executor that serves texts, too."""

    def infer(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """See cut.Stage.infer; with the parameters that hops are computed with now."""
        ...


def infer(executor: Executor, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """ValueError: this executor serves none."""
    if not isinstance(executor, Inferring):
        raise ValueError("this peer serves no texts: only a resident stage on one device keeps keys and values")
    return executor.infer(x, cache)


@runtime_checkable
class Dropping(Protocol):
    """An executor whose adapters drop values."""

    def draw(self, sample: tuple[int, int] | None) -> None:
        """Passes that follow drop the values of that (step, microbatch); None: none."""
        ...


def draw(executor: Executor, sample: tuple[int, int] | None) -> None:
    if isinstance(executor, Dropping):
        executor.draw(sample)


@runtime_checkable
class Lending(Protocol):
    """An executor that other machines get frozen weights from."""

    def frozen(self) -> Mapping[str, Tensor]:
        """The weights that are not trained, by their names in the model and in its order, on any device. Nobody ever changes them."""
        ...


def frozen(executor: Executor) -> Mapping[str, Tensor]:
    """ValueError: this executor lends none."""
    if not isinstance(executor, Lending):
        raise ValueError("this peer lends no frozen weights: it keeps them on several devices, or none")
    return executor.frozen()


@runtime_checkable
class Evaluating(Protocol):
    """An executor that measures held-out samples, too."""

    def evaluate(self, x: Tensor, tokens: Tensor | None) -> Tensor | float:
        """Forwards only, and nothing is kept: the boundary tensor for the next stage; at the last stage, given the `tokens` (B, L+1), the
        mean loss of those that count, tokens or preference pairs, 0 if none does. ValueError: NotFinite."""
        ...


def evaluate(executor: Executor, x: Tensor, tokens: Tensor | None) -> Tensor | float:
    """ValueError: this executor measures none."""
    if not isinstance(executor, Evaluating):
        raise ValueError("this peer measures no held-out samples: only a resident stage on one device does")
    return executor.evaluate(x, tokens)


@runtime_checkable
class Comparing(Protocol):
    """An executor whose last stage compares preference pairs."""

    def rewards(self) -> Rewards | None:
        """Of the pairs of the newest microbatch that ran back or was evaluated; None: there were none."""
        ...


def rewards(executor: Executor) -> Rewards | None:
    return executor.rewards() if isinstance(executor, Comparing) else None


@runtime_checkable
class Recomputing(Protocol):
    """An executor that computes another replica's backward again."""

    def recompute(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        """What `backward` returns. Nothing is added to `sum`, and gradients of parameters are not computed."""
        ...


def recompute(
    executor: Executor, x: Tensor, grad: Tensor | None, tokens: Tensor | None
) -> tuple[Tensor | None, float | None]:
    """ValueError: this executor cannot."""
    if not isinstance(executor, Recomputing):
        raise ValueError("this peer checks no backwards: only a resident stage on one device does")
    return executor.recompute(x, grad, tokens)


class BoundaryShape(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def boundary(config: Config) -> BoundaryShape:
    """Shape and type of the tensors between stages, of whole microbatches."""
    if config.device.executor == "emulated":
        return BoundaryShape((config.device.emulated_values,), torch.float32)
    width = hidden_size(config) // parse(config.model.boundary)[1]
    return BoundaryShape((boundary_rows(config), config.data.sequence, width), DTYPES[config.train.dtype])


def boundary_gradient(config: Config) -> BoundaryShape:
    """The same of their gradients: the rows of preference pairs' references have none."""
    (whole, *rest), dtype = boundary(config)
    passes = boundary_rows(config) // token_rows(config)
    return BoundaryShape((-(-whole // passes), *rest), dtype)


def hidden_size(config: Config) -> int:
    """Width of the model; a model directory overrides the settings."""
    if config.model.factory:
        own = sequential.own_sequential(config)
        return sequential.width(config, own) if own is not None else int(hf_config(config).hidden_size)
    hidden = config.model.extra.get("hidden_size")
    if isinstance(hidden, int | float):
        return int(hidden)
    if config.model.path:
        fields = json.loads((Path(config.model.path) / "config.json").read_text())
        width = (fields["model"] if fields.get("model_type") == MODEL_TYPE else fields).get("hidden_size")
        return int(hf_config(config).hidden_size if width is None else width)  # families such as gpt2 call it otherwise
    return config.model.hidden_size


def device_of(config: Config) -> torch.device:
    """What this peer computes on. Without a number it is the current card, of those that the launcher lets this process see."""
    if config.device.kind != "auto":
        return torch.device(config.device.kind)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or (accelerator.type != "cuda" and config.device.executor == "swapping"):
        return torch.device("cpu")
    return torch.device(accelerator.type)


def check_device(config: Config) -> None:
    """ValueError: this machine has no such device."""
    device = device_of(config)
    count = torch.accelerator.device_count()
    if config.device.count > max(count, 1) and config.device.kind != "cpu":
        raise ValueError(
            f"device.count = {config.device.count}, but PyTorch finds {count} accelerators here; try device.count={max(count, 1)}"
        )
    accelerator = torch.accelerator.current_accelerator() if count else None
    cards = [f"{accelerator.type}:{n}" for n in range(count)] if accelerator is not None else []
    if device.type != "cpu" and (not cards or str(device) not in (*cards, cards[0].partition(":")[0])):
        there = ", ".join(["cpu", *cards])
        raise ValueError(
            f"device.kind = {config.device.kind!r}, but PyTorch finds only {there} here; try device.kind=auto"
        )


def emulates_bf16(device: torch.device) -> bool:
    """A T4 or an older card: products of bfloat16 take as long as those of float32."""
    return device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)


def check_memory(config: Config) -> None:
    """ValueError: `device.memory_bytes` is more than the device has free."""
    free, limit = free_bytes(device_of(config)), config.device.memory_bytes
    if free is not None and limit > free:
        there = f"{device_of(config)} has {free:,} free"
        raise ValueError(f"device.memory_bytes = {limit:,}, but {there}; try device.memory_bytes={free}")


def free_bytes(device: torch.device) -> int | None:
    """Device memory that this process can still take, its own cache included; None: the host's, or not known."""
    if device.type not in ("cuda", "xpu"):
        return None
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device))


def memory_limit(config: Config) -> int:
    """Device bytes that a stage may take: `device.memory_bytes`, and never more than is free; 0: no limit."""
    free, limit = free_bytes(device_of(config)), config.device.memory_bytes
    return limit if free is None else min(limit or free, free)


def alive(config: Config) -> bool:
    """Whether the device still adds two numbers. After most GPU faults nothing works until the process ends; running out of
    memory does no harm."""
    if config.device.executor == "emulated":
        return True
    try:
        return bool(torch.ones(1, device=device_of(config)).add_(1).item() == 2)
    except RuntimeError as error:
        return out_of_memory(error)


def out_of_memory(error: Exception) -> bool:
    """Whether memory of the device or the host ran out. PyTorch's allocators of the CPU and of mps raise a plain RuntimeError."""
    text = str(error).lower()
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "defaultcpuallocator" in text
        or "out of memory" in text
    )


def prepare_thread(config: Config) -> None:
    """For the thread that calls: its share of the cores, its card, and the rounding of products there."""
    if config.device.threads:
        torch.set_num_threads(max(1, config.device.threads // config.device.count))
    if config.device.executor == "emulated":
        return
    device = device_of(config)
    if device.index is not None and device.index < torch.accelerator.device_count():
        torch.accelerator.set_device_index(device.index)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.device.tf32


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Of the bytes of all tensors, the same on every machine. For replicas that compare their states after every step: it finds every
    honest difference, and is no defence against a peer that lies, which could repeat another's digest anyway."""
    whole_hash = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        whole_hash.update(flat.data if len(flat) < MIXED_BYTES else _mixed(flat))
    return whole_hash.hexdigest()


def base_of(stage: Stage) -> str:
    """Executor.base of a stage."""
    frozen = stage.frozen()
    return digest_of(value.view(torch.uint8) for value in frozen) if frozen else ""


def with_base(digest: str, base: str) -> str:
    """The digest of trained values and of the frozen weights beside them."""
    return hashlib.sha256(f"{base}{digest}".encode()).hexdigest() if base else digest


def _mixed(flat: NDArray[np.uint8]) -> bytes:
    """All that SHA-256, which takes seven times as long, still has to see of large tensors."""
    from shoal.numerics.loops import LANES, mix  # numba: half a second that only those who train pay

    whole = len(flat) - len(flat) % (4 * LANES)
    words = flat[:whole].view(np.uint32)
    parts = [words[at : at + DIGEST_VALUES] for at in range(0, len(words), DIGEST_VALUES)]
    lanes = [np.arange(LANES, dtype=np.uint64) for _ in parts]
    pieces.each(mix, lanes, parts)
    return b"".join([*(part.tobytes() for part in lanes), flat[whole:].tobytes()])


def copy_state_(into: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the tensors of the same names. ValueError, before any copy: it is of another stage or model."""
    if list(into) != list(state):
        odd = next((name for name in [*state, *into] if (name in state) != (name in into)), "in another order")
        raise ValueError(f"state of another stage: {len(state)} tensors where {len(into)} belong ({odd})")
    for name, value in into.items():
        if value.shape != state[name].shape or value.dtype != state[name].dtype:
            actual = (tuple(state[name].shape), state[name].dtype)
            raise ValueError(f"state of another model: {name} is {actual}, not {(tuple(value.shape), value.dtype)}")
    with torch.no_grad():
        for name, value in into.items():
            value.copy_(state[name])
