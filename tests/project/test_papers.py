"""The generated parts of the papers' pages and of docs/internet-tax.md are those of the recorded figures, and what differs says why."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from shoal.codec import Travel
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.strategy.problem import Problem

ROOT = Path(__file__).parents[2]


def of_papers(monkeypatch: pytest.MonkeyPatch, name: str, *others: str) -> ModuleType:
    """A module of benchmarks/papers, imported anew with the `others` that it imports."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "papers"))
    for each in (name, *others):
        monkeypatch.delitem(sys.modules, each, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return of_papers(monkeypatch, "pages", "rows")


@pytest.fixture
def remains(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return of_papers(monkeypatch, "remains", "tax")


def test_the_pages_hold_what_is_recorded(pages: ModuleType) -> None:
    parts = pages.parts(pages.recorded())
    assert len(parts) == 4
    for path, part in parts.items():
        assert part in path.read_text(encoding="utf-8"), f"{path.name}: run `python benchmarks/papers --pages`"


def test_a_row_that_differs_by_more_than_a_fifth_says_why(pages: ModuleType) -> None:
    known = pages.recorded()
    for paper in pages.PAPERS:
        for row in msgspec.convert(known[paper], list[pages.Row]):
            assert row.why or not pages.rows.differs(row), row


def test_a_difference_is_that_from_the_nearest_value_claimed(pages: ModuleType) -> None:
    row = pages.Row(table="", case="", claimed=(2.0, 4.0), ours=3.0, unit="x")
    assert row.difference == 0.0
    assert msgspec.structs.replace(row, ours=1.0).difference == -0.5
    assert msgspec.structs.replace(row, ours=5.0).difference == 0.25
    assert msgspec.structs.replace(row, claimed=None).difference is None


def test_the_parts_of_each_tax_add_up_to_it(pages: ModuleType) -> None:
    ways = [way for shape in pages.SHAPES for way in pages.recorded().get(f"remains-{shape}", {}).get("ways", [])]
    assert ways
    for way in ways:
        assert sum(way["parts"].values()) == pytest.approx(way["tax"], abs=0.01), way["way"]
        assert set(way["parts"]) <= {name for names in pages.COLUMNS.values() for name in names}


def machines(kinds: list[float]) -> Cluster:
    """Of these FLOP/s, on lines of 1 Gbit/s."""
    devices = tuple(Device(name=f"m{at}", flops=each, up_Bps=125e6, down_Bps=125e6) for at, each in enumerate(kinds))
    return Cluster(devices, np.zeros((len(kinds), len(kinds))), np.full((len(kinds), len(kinds)), 125e6))


def problem_of(count: int) -> Problem:
    """1.3 billion parameters, 1.05 million tokens a step."""
    shape = Shape(hidden=2048, layers=24, heads=16, kv_heads=16, head_dim=128, intermediate=5504, vocabulary=32000)
    work = Work(microbatches=512, sequences=1, tokens=2048, value_bytes=2)
    return Problem(shape=shape, work=work, cluster=machines([35e12] * count), travel=Travel("int8", "int8", "int8"))


def test_half_of_the_machines_has_half_of_each_kind_in_whatever_order(remains: ModuleType) -> None:
    for kinds in ([35.0, 82.5] * 4, [35.0] * 4 + [82.5] * 4):
        half = [kinds[at] for at in remains.tax.half_of(machines(kinds))]
        assert sorted(half) == [35.0, 35.0, 82.5, 82.5]


def test_the_bound_is_met_by_the_lines_and_by_the_batch_that_it_asks_for(remains: ModuleType) -> None:
    problem = problem_of(16)
    for stages in (6, 7):  # what is short: averaging; hops beside it
        cost = remains.seconds(problem, 16, 12.0, stages)
        assert cost.exact > remains.tax.AIM
        wider, longer = cost.needs_line, cost.needs_batch
        by_lines = cost._replace(hops=cost.hops / wider, averaging=cost.averaging / wider)
        by_batch = cost._replace(compute=cost.compute * longer, hops=cost.hops * longer)
        for met in (by_lines, by_batch):
            assert met.exact == pytest.approx(remains.tax.AIM, rel=1e-6)
    assert remains.seconds(problem, 16, 12.0, 3).late == 1.0  # all of it hides behind compute
    far = remains.seconds(problem, 16, 12.0, 12)  # hops alone take longer than 1.15 of compute
    assert far.needs_batch == float("inf")
    bound = remains.bound(problem, 16, 12.0, 3)
    assert bound.exact == min(remains.seconds(problem, 16, 12.0, stages).exact for stages in range(1, 9))
    assert bound.planned == remains.seconds(problem, 16, 12.0, 3).exact >= bound.exact


def test_a_line_carries_the_bytes_that_hops_and_averaging_have(remains: ModuleType) -> None:
    """By hand: 512 microbatches of 2,048 tokens of 2,048 values there and back over each of two cuts, and 2/3 of a gradient twice."""
    problem = problem_of(9)
    cost, code = remains.seconds(problem, 9, 12.0, 3), 1 + 4 / 1024
    assert cost.hops == pytest.approx(512 * 2048 * 2048 * 2 * 2 * code / 9 / 125e6)
    assert cost.averaging == pytest.approx(2 * (2 / 3) * problem.profile.parameters / 3 * code / 125e6)
