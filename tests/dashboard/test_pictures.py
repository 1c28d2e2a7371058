"""Pictures of a plan: both files of each are there and not empty, and the trace holds every hop that the step has."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from shoal.cli import main as program
from shoal.dashboard import pictures
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.prediction import timed
from shoal.planner.prediction.play import Bar
from shoal.planner.strategy import strategy
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.pricing import as_planned
from shoal.planner.strategy.problem import Problem

SHAPE = Shape(hidden=256, layers=4, heads=4, kv_heads=4, head_dim=64, intermediate=512, vocabulary=256)
WORK = Work(microbatches=12, sequences=1, tokens=64, value_bytes=4)


@pytest.fixture
def drawn() -> tuple[Plan, Cluster, tuple[Bar, ...]]:
    devices = tuple(Device(name=f"p{i}", flops=1e11, up_Bps=1e7, down_Bps=1e7) for i in range(5))
    cluster = Cluster(devices, np.full((5, 5), 0.01), np.full((5, 5), 1e8))
    problem = Problem(shape=SHAPE, work=WORK, cluster=cluster)
    plan = strategy.decide(problem, np.random.default_rng(0), 0, 2)
    return plan, cluster, timed.timeline(as_planned(problem, plan), cluster, np.random.default_rng(0))


def test_a_timeline_has_every_hop_once_and_no_peer_computes_two_at_a_time(
    drawn: tuple[Plan, Cluster, tuple[Bar, ...]],
) -> None:
    plan, _, bars = drawn
    hops = [(bar.microbatch, bar.stage, bar.forward) for bar in bars]
    wanted = [(m, 0, True) for m in range(12)] + [(m, s, False) for m in range(12) for s in (0, 1)]
    assert sorted(hops) == sorted(wanted)
    for device in {bar.device for bar in bars}:
        own = sorted((bar.start_s, bar.end_s) for bar in bars if bar.device == device)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))
    assert plan.predicted is not None and 0 <= min(bar.start_s for bar in bars)


def test_perfetto_is_told_of_every_hop_and_of_what_follows(drawn: tuple[Plan, Cluster, tuple[Bar, ...]]) -> None:
    plan, cluster, bars = drawn
    events = json.loads(pictures.perfetto(bars, plan, cluster))["traceEvents"]
    hops = [event for event in events if event["ph"] == "X" and event["name"].split()[0] in ("forward", "backward")]
    assert len(hops) == len(bars)
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in hops)
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {"stage 0", "stage 1", *(f"p{i}" for i in range(5))}
    assert any(event["name"] == "averaging" for event in events)


def test_each_picture_is_a_png_and_an_svg(tmp_path: Path, drawn: tuple[Plan, Cluster, tuple[Bar, ...]]) -> None:
    plan, cluster, bars = drawn
    written = pictures.plan_map(plan, cluster, tmp_path / "map") + pictures.gantt(
        bars, plan, cluster, tmp_path / "time"
    )
    written += pictures.convergence({"ours": [(1, 9.0), (40, 5.0)], "other": [(3, 8.0)]}, 4.0, tmp_path / "search")
    assert [path.suffix for path in written] == [".png", ".svg"] * 3
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in data


@pytest.mark.slow
def test_a_search_is_drawn_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--dtfm",
        "regional",
        "evaluations=40",
        "--search",
        "random",
        "--pictures",
        str(tmp_path / "new"),
        "--json",
    ]
    assert program.main(words) == 0
    assert json.loads(capsys.readouterr().out)["evaluations"] == 40
    assert (tmp_path / "new" / "convergence.svg").exists()
