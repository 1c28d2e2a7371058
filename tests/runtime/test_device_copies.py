"""Where nothing is averaged gradients stay on their device: `shoal train` and local steps bring single numbers to the host, no tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.races import watch_optimizer
from torch.overrides import TorchFunctionMode

from shoal import executor
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.model.cut import inputs
from shoal.numerics import pieces
from shoal.runtime.alone import Alone
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.data.dataset import open_dataset

CONFIG = Config(
    run=Run(name="alone", stages=1, peers=1, steps=3, seed=5),
    model=Model(hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24),
    data=Data(source="text", path="a.txt", sequence=8),
    train=Train(batch=4, microbatch=2, warmup=0),
    device=Device(threads=0),
)
LATE = msgspec.structs.replace(CONFIG, train=msgspec.structs.replace(CONFIG.train, staleness=1))
LOCAL = msgspec.structs.replace(
    CONFIG, train=msgspec.structs.replace(CONFIG.train, batch=8, local_batch=4, local_steps=2)
)


class ToHost(TorchFunctionMode):
    """Collects the sizes of tensors that a device would have to copy to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        to_host = any(isinstance(each, str) and each == "cpu" for each in args[1:])  # a torch.device is the played one
        if name in ("cpu", "numpy", "tolist", "item") or (name == "to" and to_host):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToHost:
    """The CPU plays the device: the optimizer and the norm are torch operations, as on a card."""
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(2000)))
    monkeypatch.chdir(tmp_path)
    watch_optimizer(monkeypatch)
    mode, copied = ToHost(), pieces.copied

    def counted(source: torch.Tensor) -> torch.Tensor:
        mode.sizes.append(source.numel())
        return copied(source)

    monkeypatch.setattr(pieces, "copied", counted)
    return mode


@pytest.mark.parametrize("config", [CONFIG, LATE], ids=["in time", "delayed"])
def test_a_machine_alone_brings_no_tensor_to_the_host(config: Config, copies: ToHost) -> None:
    alone = Alone(config, open_dataset(config), Store("checkpoints"))
    assert alone.executor.length < pieces.PIECE  # beyond, a CPU has loops of its own
    with copies:
        for _ in range(3):
            alone.step()
    assert max(copies.sizes) == 1


def one_round(one: executor.Executor) -> None:
    for seed in range(3):  # a local step of two microbatches, and one more
        tokens = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
        one.backward(inputs(tokens), None, tokens)


def ended(one: executor.Executor) -> None:
    one_round(one)
    one.contribution()


@pytest.mark.parametrize(("drive", "tensors"), [(one_round, 0), (ended, 1)], ids=["steps", "with the end of a round"])
def test_local_steps_bring_tensors_to_the_host_at_the_end_of_a_round_alone(
    drive: Callable[[executor.Executor], None], tensors: int, copies: ToHost
) -> None:
    one = executor.create(LOCAL, 0)
    with copies:
        drive(one)
    parameters = len([name for name in one.state() if name.startswith("model/")])
    assert len([size for size in copies.sizes if size > 1]) == tensors * parameters  # the changed parameters
