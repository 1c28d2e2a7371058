"""Plans run for real: six processes on modelled lines take about the seconds that the plan predicts, and follow its routes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shoal import trace
from shoal.core.messages import Backward, Forward, Note, Send

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def predict() -> ModuleType:
    """benchmarks/predict.py, which holds the shapes and prints the figures; here two of them are tests."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("predict", BENCHMARKS / "predict.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["pairs of 1 Mbit/s behind lines of 20, 1 stage", "two regions, 2 stages"])
def test_a_step_takes_what_the_plan_predicts(name: str) -> None:
    """Within 10 % on a quiet machine (benchmarks/predict.py); a busy one only makes it slower."""
    bench = predict()
    stages, machines = bench.SHAPES[name]
    predicted_s, measured_s, _ = bench.one(machines, stages, 6)
    assert 0.9 * predicted_s < measured_s < 1.2 * predicted_s


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hops_go_to_the_planned_seats_and_uneven_blocks_are_served(tmp_path: Path) -> None:
    """A real model in three stages of 2, 3 and 1 blocks, by a plan written by hand: every hop goes where it says."""
    stages = [
        {"first": 0, "end": 2, "peers": ["a", "b"]},
        {"first": 2, "end": 5, "peers": ["c", "d"]},
        {"first": 5, "end": 6, "peers": ["e", "f"]},
    ]
    left, right = [[0], [2], [4]], [[1], [3], [5]]
    plan = {"layers": 6, "stages": stages, "routes": [left, right, left, right, left, right]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "hand"\nsteps = 4\nheartbeat_timeout_s = 20.0\nmin_request_timeout_s = 30.0\n'
        "[train]\nbatch = 12\nmicrobatch = 1\n[data]\nsequence = 32\n"
        "[checkpoint]\nevery = 0\nat_end = false\n"
    )
    command = [sys.executable, "-m", "shoal.cli.main", "run", "run.toml", "--plan", "plan.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=predict().environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every sample counted once." in done.stdout
    seat: dict[str, int] = {}
    hops: list[tuple[str, str, int]] = []
    notes: list[str] = []
    for record in trace.read(tmp_path / "runs" / "hand" / "trace.jsonl"):
        if isinstance(record, trace.Header):
            seat[record.peer] = record.settings.seat
        if not isinstance(record, trace.TraceRecord):
            continue
        for command_ in record.commands:
            if isinstance(command_, Send) and isinstance(command_.message, Forward | Backward):
                hops.append((record.peer, command_.peer, command_.message.stage))
            if isinstance(command_, Note) and command_.kind == "route":
                notes.append(command_.text)
    assert sorted(seat.values()) == [0, 1, 2, 3, 4, 5]
    routes = plan["routes"]
    assert hops and notes == []
    assert all(seat[server] == routes[seat[owner]][stage][0] for owner, server, stage in hops)  # type: ignore[index]
