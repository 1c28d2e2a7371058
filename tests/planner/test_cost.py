"""DT-FM's cost: equal to the published program's on its own assignments, and what any cost of communication must obey."""

from __future__ import annotations

import json
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

from shoal.planner.costs import communication, matching, paths
from shoal.planner.costs.communication import PUBLISHED, Model
from shoal.planner.inputs.cluster import network, read_matrices

CASES = json.loads((Path(__file__).parent / "data" / "dtfm_costs.json").read_text())  # DS3Lab/DT-FM at cda948f


def published(name: str, stages: int = 8) -> Model:
    delay_s, bandwidth_Bps, _ = read_matrices(network(name))
    return Model(delay_s, bandwidth_Bps, stages, PUBLISHED)


def random_model(rng: np.random.Generator, stages: int, size: int, bandwidth: float = 1.0) -> Model:
    devices = stages * size
    delay_s, bandwidth_Bps = rng.uniform(0.001, 0.2, (devices, devices)), rng.uniform(1e7, 1e9, (devices, devices))
    return Model(delay_s, bandwidth_Bps * bandwidth, stages, PUBLISHED)


@pytest.mark.parametrize("name", sorted({case["network"] for case in CASES}))
def test_every_published_assignment_costs_what_the_published_program_says(name: str) -> None:
    cases = [case for case in CASES if case["network"] == name]
    assert len(cases) == 20
    model = published(name)
    for case in cases:
        cost = model.cost(np.array(case["assignment"]))
        assert cost.total_s == pytest.approx(case["total_s"], rel=1e-9)
        assert cost.data_parallel_s == pytest.approx(case["data_parallel_s"], rel=1e-9)
        assert cost.pipeline_s == pytest.approx(case["pipeline_s"], rel=1e-9)


def test_a_batch_of_placements_costs_what_each_of_them_does() -> None:
    rng = np.random.default_rng(0)
    for stages, size in ((1, 5), (2, 3), (5, 1), (4, 4)):
        model = random_model(rng, stages, size)
        drawn = np.stack([rng.permutation(stages * size).reshape(stages, size) for _ in range(5)])
        each = [model.cost(groups).total_s for groups in drawn]
        assert model.totals_s(drawn) == pytest.approx(each, rel=1e-12)


def test_the_published_slips_make_hops_eight_percent_too_cheap() -> None:
    assert PUBLISHED.activation_bytes / communication.GPT3_XL.activation_bytes == pytest.approx(0.9204, abs=1e-4)
    assert communication.GPT3_XL.activation_bytes == pytest.approx(0.512e9)


def test_more_bandwidth_or_less_delay_never_costs_more() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        delay_s, bandwidth_Bps = rng.uniform(0.001, 0.2, (12, 12)), rng.uniform(1e7, 1e9, (12, 12))
        groups = rng.permutation(12).reshape(3, 4)
        base = Model(delay_s, bandwidth_Bps, 3, PUBLISHED).cost(groups).total_s
        wider = bandwidth_Bps * rng.uniform(1, 3, (12, 12))
        assert Model(delay_s, wider, 3, PUBLISHED).cost(groups).total_s <= base
        nearer = delay_s * rng.uniform(0, 1, (12, 12))
        assert Model(nearer, bandwidth_Bps, 3, PUBLISHED).cost(groups).total_s <= base


def test_the_cost_does_not_depend_on_the_order_of_stages_or_of_devices_within_one() -> None:
    rng = np.random.default_rng(1)
    model = random_model(rng, 4, 3)
    groups = rng.permutation(12).reshape(4, 3)
    shuffled = rng.permuted(groups[rng.permutation(4)], axis=1)
    assert model.cost(shuffled).total_s == pytest.approx(model.cost(groups).total_s, rel=1e-12)


def test_permuting_identical_devices_costs_the_same() -> None:
    model = published("worldwide")
    rng = np.random.default_rng(2)
    groups = rng.permutation(64).reshape(8, 8)
    renamed = np.arange(64).reshape(8, 8)  # eight alike in each region
    renamed = rng.permuted(renamed, axis=1).ravel()
    assert model.cost(renamed[groups]).total_s == pytest.approx(model.cost(groups).total_s, rel=1e-12)


def test_the_matching_is_perfect_and_no_other_has_a_smaller_largest_entry() -> None:
    rng = np.random.default_rng(3)
    for n in (1, 2, 3, 5):
        for _ in range(20):
            matrix = rng.integers(0, 6, (n, n)).astype(float)  # many ties
            least = min(max(matrix[i, p[i]] for i in range(n)) for p in permutations(range(n)))
            threshold, columns = communication.matched(matrix)
            assert threshold == least == matching.matched(matrix, np.arange(n), np.arange(n), 0.0, np.inf)
            assert sorted(columns) == list(range(n))
            assert max(matrix[i, column] for i, column in enumerate(columns)) == least


def test_both_ways_to_match_agree_on_matrices_of_any_size() -> None:
    rng = np.random.default_rng(4)
    for n in (2, 8, 14):
        model = random_model(rng, 4, n)
        groups = rng.permutation(4 * n).reshape(4, n)
        cost = model.hops(groups)
        for i, j in permutations(range(4), 2):
            assert cost[i, j] == communication.bottleneck(model.hop[np.ix_(groups[i], groups[j])])


def test_the_path_is_the_cheapest_of_all() -> None:
    rng = np.random.default_rng(5)
    for nodes in (1, 2, 3, 6):
        weights = rng.random((nodes, nodes))
        weights += weights.T
        least = min(sum(weights[a, b] for a, b in pairwise(order)) for order in permutations(range(nodes)))
        length, order = communication.path(weights)
        assert length == pytest.approx(least)
        assert sum(weights[a, b] for a, b in pairwise(order)) == pytest.approx(least)
        assert communication.path_length(weights) == length


@pytest.mark.slow
def test_a_long_path_visits_every_node_once_and_is_near_the_exact_one() -> None:
    rng = np.random.default_rng(6)
    points = rng.random((12, 2))
    weights = np.linalg.norm(points[:, None] - points, axis=2)
    exact, _ = communication.path(weights)
    order = paths.improved(weights).tolist()
    assert sorted(order) == list(range(12))
    assert sum(weights[a, b] for a, b in pairwise(order)) <= 1.15 * exact
    many = rng.random((30, 30))
    assert sorted(communication.path(many + many.T)[1]) == list(range(30))


def test_stages_that_do_not_divide_the_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="64 devices do not divide into 7 stages"):
        published("worldwide", 7)
