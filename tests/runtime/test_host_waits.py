"""How often the host waits for its device in a hop: every wait leaves the device idle for a round trip. The figures may not grow.

One wait of each pass through a group of layers is in transformers, which looks at the positions for packed sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.runtime import test_task_runner
from tests.runtime.test_task_runner import TINY, Maker, done
from torch.overrides import TorchFunctionMode

from shoal.config import Config, Device, Network
from shoal.core import messages as m
from shoal.executor.streams import NoStreams
from shoal.numerics import compress
from shoal.runtime.tasks.lane import Lane

a_runner, text = test_task_runner.a_runner, test_task_runner.text  # fixtures
NUMBERS = ("item", "tolist", "numpy", "cpu", "nonzero", "equal", "__bool__", "__float__", "__int__", "__index__")
SWAPPING = msgspec.structs.replace(TINY, device=Device(executor="swapping", threads=0))
CODED = msgspec.structs.replace(TINY, network=Network(activations="int8", gradients="int8"))


class HostWaits(TorchFunctionMode):
    """Counts the calls that bring a device's values to the host, and those that wait for its streams."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in NUMBERS or (name == "to" and "cpu" in args[1:] and not kwargs.get("non_blocking")):
            self._calls[name] += 1
        return func(*args, **kwargs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    construct = Lane.__init__

    def counting(self: Lane, name: str, begin: Callable[[], None]) -> None:
        def entered() -> None:
            HostWaits(counted).__enter__()  # for as long as the thread lives
            begin()

        construct(self, name, entered)

    monkeypatch.setattr(Lane, "__init__", counting)
    monkeypatch.setattr(compress, "_has_loops", lambda tensor: False)  # as on a card
    monkeypatch.setattr(NoStreams, "settle", lambda self: counted.update(["settle"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: counted.update(["synchronize"]))
    return counted


@pytest.mark.parametrize(
    ("config", "stage", "forward", "backward"),
    [
        (TINY, 0, 4, 3),
        (TINY, 1, 3, 3),
        (TINY, 2, 3, 5),
        (SWAPPING, 0, 6, 6),
        (SWAPPING, 1, 5, 6),
        (SWAPPING, 2, 5, 8),
        (CODED, 1, 5, 5),
    ],
)
def test_a_hop_waits_for_its_device_no_more_often_than_it_did(
    config: Config, stage: int, forward: int, backward: int, a_runner: Maker, calls: Counter[str]
) -> None:
    held = a_runner(config, stage)
    done(held, m.Fetch("f", 0, 0, "tokens"))
    hidden = torch.randn(2, 8, 16)
    for name in ("x", "grad"):
        held.put(name, hidden)
    calls.clear()
    done(held, m.RunForward("f", 0, 0, stage, "tokens" if stage == 0 else "x", "y"))
    held.blob("y")  # encoded by now
    waits = [calls.copy()]
    calls.clear()
    x, grad = "tokens" if stage == 0 else "x", "tokens" if stage == 2 else "grad"
    done(held, m.RunBackward("b", 0, 0, stage, x, grad, "" if stage == 0 else "g"))
    if stage:
        held.blob("g")
    waits.append(calls)
    assert [each.total() for each in waits] == [forward, backward], waits
