"""What Muon takes, as it is planned: one moment of each block's matrices, and what a step needs while it runs."""

from __future__ import annotations

import pytest
import torch
from tests.executor.test_muon import with_muon
from tests.memory_shapes import Allocations

from shoal import executor
from shoal.model import analysis
from shoal.numerics.muon import muon_
from shoal.planner.inputs.memory import MUON_BYTES, Optimizer, resident


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_state_has_the_bytes_that_are_planned(optimizer: str) -> None:
    config = with_muon(optimizer=optimizer)
    stage = analysis.count(config).stage(range(config.model.layers))
    held = sum(value.nbytes for value in executor.create(config, 0).state().values())
    planned = Optimizer(muon=optimizer == "muon").state_bytes(stage)
    norms = (
        4 * 2 * config.model.hidden_size * config.model.layers if optimizer == "muon" else 0
    )  # they have two moments
    assert planned == held - norms


def test_a_plan_counts_one_moment_less_and_a_step_that_takes_more() -> None:
    config = with_muon()
    counted = analysis.count(config)
    stage = counted.stage(range(config.model.layers))
    late = [resident(stage, counted.boundary_bytes, 4, Optimizer(staleness=1, muon=muon)) for muon in (False, True)]
    blocks = [part for part in stage.parts if part.input_bytes]
    more = MUON_BYTES * max(part.matrix for part in blocks) - 4 * sum(part.parameters for part in blocks)
    assert late[1].device_bytes - late[0].device_bytes == pytest.approx(1.015 * more)


@pytest.mark.parametrize(
    "shape", [(512, 512), (300, 2000), (2000, 300), pytest.param((1200, 1200), marks=pytest.mark.slow)]
)
def test_a_step_takes_what_is_planned_at_most(shape: tuple[int, int]) -> None:
    values, gradient, momentum = torch.randn(shape), torch.randn(shape), torch.zeros(shape)
    with Allocations() as allocations:
        muon_(values, gradient, momentum, 1.0, 0.01, 0.999)
    assert allocations.peak <= MUON_BYTES * values.numel()
    if shape[0] == shape[1]:
        assert allocations.peak > 0.8 * MUON_BYTES * values.numel()
