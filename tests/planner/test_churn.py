"""Expected losses: none without hazards, in proportion to them, and worse where a stage has one replica."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.planner.costs.churn import Churn, expected
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.strategy.plan import Plan, Prediction, StagePlan

TOLD = Prediction(10.0, 100.0, 8.0, 1.5, 0.5, 1e6, "compute of stage 0")


def priced(rates: tuple[float, ...], *stages: tuple[str, ...], every: int = 50) -> Churn:
    devices = tuple(Device(name=f"p{i}", flops=1.0, losses_per_h=rate) for i, rate in enumerate(rates))
    count = len(devices)
    cluster = Cluster(devices, np.zeros((count, count)), np.ones((count, count)))
    plan = Plan(len(stages), tuple(StagePlan(i, i + 1, peers) for i, peers in enumerate(stages)), predicted=TOLD)
    return expected(plan, cluster, 4.0, every)


def test_machines_that_stay_cost_nothing() -> None:
    assert priced((0.0, 0.0), ("p0", "p1")) == Churn(0.0, 0.0, 0.0)


def test_twice_the_hazard_costs_twice_as_much() -> None:
    one, two = (priced((rate, rate, rate), ("p0", "p1", "p2")) for rate in (0.1, 0.2))
    assert two.lost_s == pytest.approx(2 * one.lost_s) and two.losses_per_h == pytest.approx(0.6)
    # 0.3 losses of: patience 4 s, half of a share done again by two others 2 s, a step with a replica less 8/3 s
    assert one.lost_s == pytest.approx(0.3 * (4 + 2 + 8 / 3))


def test_a_stages_only_replica_undoes_half_of_what_lies_between_two_checkpoints() -> None:
    predicted = priced((0.1, 0.1, 0.1), ("p0", "p1"), ("p2",))
    assert predicted.fatal_per_h == pytest.approx(0.1)
    assert predicted.worst == "stage 1, whose only replica's loss undoes steps"
    safe = priced((0.1, 0.1, 0.0), ("p0", "p1"), ("p2",))
    assert predicted.lost_s - safe.lost_s == pytest.approx(0.1 * (4 + 25 * 10))
    assert priced((0.1, 0.1, 0.1), ("p0", "p1"), ("p2",), every=10).lost_s < predicted.lost_s


def test_more_replicas_make_a_loss_cheaper() -> None:
    few, many = priced((0.1,) * 2, ("p0", "p1")), priced((0.1,) * 4, ("p0", "p1", "p2", "p3"))
    assert many.lost_s / many.losses_per_h < few.lost_s / few.losses_per_h
