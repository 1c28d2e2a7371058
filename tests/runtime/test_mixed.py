"""Replicas of one stage on unlike devices: they train one model, and agree on its bytes after every commit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.runtime import test_task_runner
from tests.runtime.test_task_runner import ONE, Maker, average, done

from shoal.config import Device
from shoal.core import messages as m

a_runner, text = test_task_runner.a_runner, test_task_runner.text  # fixtures
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])])
def test_replicas_on_a_cpu_and_another_device_agree_after_every_commit(kind: str, a_runner: Maker) -> None:
    group = [a_runner(msgspec.structs.replace(ONE, device=Device(kind=each, threads=0))) for each in ("cpu", kind)]
    for step in range(3):
        for replica in group:  # the same microbatch on both: their sums are to be near
            done(replica, m.Fetch("f", step, 0, f"tokens{step}"))
            done(replica, m.RunBackward("b", step, 0, 0, f"tokens{step}", "", ""))
        near, other = (replica._seated().executor.contribution() for replica in group)
        assert float((near - other).norm() / near.norm()) < 1e-5
        results = average(group, step, step)
        assert len({result.digest for result in results}) == 1
        norm = sum(result.norm_sq for result in results) ** 0.5
        applied = [done(replica, m.Apply("y", step, step, norm, False)).digest for replica in group]
        assert len(set(applied)) == 1
