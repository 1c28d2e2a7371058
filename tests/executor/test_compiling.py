"""device.compile: compiled blocks compute what eager ones do, within rounding, and what is missing is said before a start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal import executor
from shoal.config import Config, Data, Device, Model, Run, Train, validate
from shoal.executor.answers import known_answers
from shoal.launcher import devices
from shoal.model.cut import inputs

TOKENS = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(1))


def a_config(**device: Any) -> Config:
    return Config(
        run=Run(stages=2, steps=5, seed=2),
        model=Model(hidden_size=32, layers=4, heads=4, kv_heads=2, intermediate_size=48, vocab_size=64),
        data=Data(sequence=12),
        train=Train(batch=8, microbatch=2),
        device=Device(kind="cpu", **device),
    )


@pytest.mark.slow  # compiling takes a minute
@pytest.mark.timeout(900)
def test_a_compiled_stage_stands_beside_an_eager_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for stage in range(2):
            eager, compiled = (executor.create(a_config(compile=each), stage) for each in (False, True))
            assert not compiled.sum.any(), "compiling leaves no gradient"
            x = inputs(TOKENS) if stage == 0 else torch.randn(2, 12, 32)
            grad = torch.randn(2, 12, 32) if stage == 0 else None
            if stage == 0:
                assert torch.allclose(compiled.forward(x), eager.forward(x), rtol=1e-5, atol=1e-6)
            results = [each.backward(x, grad, TOKENS if stage else None) for each in (eager, compiled)]
            if stage:
                assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
            assert torch.allclose(compiled.sum, eager.sum, rtol=1e-4, atol=1e-5)
            for each in (eager, compiled):  # as replicas do: the same averaged gradient
                each.apply(eager.contribution(), 1.0, 0)
            assert compiled.digest() == eager.digest()
    assert sum("torch.compile of the stage's blocks took" in line for line in caplog.messages) == 2
    assert known_answers(a_config(compile=True)) == known_answers(a_config())


def test_a_machine_that_cannot_compile_is_refused_with_what_is_missing() -> None:
    settings = a_config(compile=True).device
    with pytest.raises(ValueError, match=r"the C\+\+ compiler no-such-compiler"):
        devices.refuse_uncompilable(settings, {"CXX": "no-such-compiler"})
    devices.refuse_uncompilable(a_config().device, {"CXX": "no-such-compiler"})


def test_missing_headers_of_python_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"Python's headers"):
        devices.refuse_uncompilable(a_config(compile=True).device, {})


def test_swapping_does_not_compile() -> None:
    swapping = msgspec.structs.replace(
        a_config(), device=Device(executor="swapping", compile=True, memory_bytes=1 << 20)
    )
    with pytest.raises(ValueError, match=r"device\.compile = true with device\.executor = 'swapping'"):
        validate(swapping)
