"""Machines that are all alike: how many serve each stage, against every other numbers."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.strategy import pricing, seating
from shoal.planner.strategy.problem import Problem

SHAPE = Shape(hidden=1024, layers=10, heads=16, kv_heads=4, head_dim=64, intermediate=2816, vocabulary=32000)
WORK = Work(microbatches=64, sequences=4, tokens=1024, value_bytes=2)
STAGES, BUDGET = 3, 400


@pytest.mark.parametrize("kept_activations", [0, -1])
@pytest.mark.parametrize("bandwidth_Bps", [25e6, 1e9])
@pytest.mark.parametrize("count", [7, 9])
def test_no_other_numbers_of_replicas_are_quicker(count: int, bandwidth_Bps: float, kept_activations: int) -> None:
    """A last stage computes no forward twice, one in the middle sends twice, and what is kept depends on the numbers themselves."""
    devices = tuple(
        Device(name=f"p{i}", flops=10e12, memory_bytes=24e9, up_Bps=bandwidth_Bps, down_Bps=bandwidth_Bps)
        for i in range(count)
    )
    alike = Cluster(devices, np.full((count, count), 0.02), np.full((count, count), 1e12))
    given = Problem(shape=SHAPE, work=WORK, cluster=alike, kept_activations=kept_activations)
    first = seating.seated(given, STAGES, tuple(range(count)))
    assert isinstance(first, pricing.Option)
    best = seating.improved(given, first, np.random.default_rng(0), BUDGET)
    counts = [each for each in itertools.product(range(1, count), repeat=STAGES) if sum(each) == count]
    seated = [tuple(stage for stage, replicas in enumerate(each) for _ in range(replicas)) for each in counts]
    rough_s = [pricing.placed(given, first.cut, who).rough_s for who in seated]
    assert best.rough_s <= min(rough_s) * 1.000001, best
    relaxed = msgspec.structs.replace(given, uneven=True)
    assert seating.improved(relaxed, best, np.random.default_rng(0), BUDGET).rough_s <= best.rough_s
