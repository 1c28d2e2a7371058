"""The emulated executor: takes its time, loads no model, and shows a microbatch that was lost or counted twice."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from shoal import config as configuration
from shoal.config import Config, Device, Run, Train, microbatches
from shoal.executor import create
from shoal.executor.emulated import Emulated


def a_config() -> Config:
    device = Device(executor="emulated", emulated_s=0.2, emulated_values=2_097_152)
    return Config(run=Run(stages=2), train=Train(batch=8, microbatch=2), device=device)


def test_backward_takes_twice_the_time_of_forward() -> None:
    slept: list[float] = []
    one = Emulated(a_config(), 0, sleep=slept.append)
    y = one.forward(torch.zeros(2, 8, dtype=torch.int64))
    one.backward(torch.zeros(2, 8, dtype=torch.int64), y, None)
    assert slept == [0.2, 0.4]
    assert y.nbytes == 8 << 20


def test_the_sum_of_a_step_tells_how_many_microbatches_were_added() -> None:
    one = Emulated(a_config(), 1, sleep=lambda seconds: None)
    for count in (1, 2, 3, 4):
        assert one.backward(torch.zeros(1), None, torch.zeros(2, 9))[1] == 1.0
        assert torch.equal(one.sum, torch.full((one.length,), count / 4))


def test_a_backward_computed_again_has_its_shape_and_adds_nothing() -> None:
    """Of preference pairs, whose gradients have half the rows of what goes forwards."""
    config = a_config()
    data = msgspec.structs.replace(config.data, format="preference")
    one = Emulated(msgspec.structs.replace(config, data=data), 1, sleep=lambda seconds: None)
    into = torch.zeros(one.length)
    _, again, loss = one.recompute(torch.zeros(1), None, torch.zeros(4, 9), into)
    summed = bool(one.sum.any())
    first, first_loss = one.backward(torch.zeros(1), None, torch.zeros(4, 9))
    assert again is not None and first is not None and again.shape == first.shape
    assert loss == first_loss and not summed and torch.equal(into, one.sum)


def test_an_emulated_peer_loads_neither_transformers_nor_a_model() -> None:
    program = (
        "import sys; from shoal import executor; from shoal.config import Config, Device;"
        "executor.create(Config(device=Device(executor='emulated', emulated_values=8)), 0);"
        "assert 'transformers' not in sys.modules and 'shoal.model.stages' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": "src"}, timeout=60)


def test_with_local_steps_it_takes_the_time_of_the_microbatches_of_all_of_them() -> None:
    """It has no model to step: nothing wraps it, and each microbatch is a share of the whole round."""
    config = configuration.load(
        None, ["run.stages=1", "run.peers=4", "train.local_steps=20", "device.executor=emulated", "device.emulated_s=0"]
    )
    one = create(config, 0)
    assert isinstance(one, Emulated)
    for _ in range(microbatches(config.train)):
        one.backward(torch.zeros(1), None, torch.zeros(1))
    assert microbatches(config.train) == 20 * 64 // 4 and one.sum[0].item() == pytest.approx(1.0, rel=1e-4)
