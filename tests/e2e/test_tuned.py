"""A model that Shoal has pretrained is chat-tuned by a swarm whose peers are killed, and in one process: both learn the task."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def tuned() -> ModuleType:
    """benchmarks/tuned.py, which has the task and both kinds of training."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("tuned", BENCHMARKS / "tuned.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_swarm_under_churn_learns_a_task_as_one_process_does(tmp_path: Path) -> None:
    benchmark = tuned()
    figures = benchmark.measured(tmp_path, benchmark.SMALL, 150, benchmark.Tuning(steps=300, kills=3))
    assert figures["before_percent"] < 50
    assert figures["swarm_percent"] >= 95 and figures["one_process_percent"] >= 95
    assert abs(figures["held_out_losses"][1] - figures["held_out_losses"][2]) < 0.1
    assert figures["killed"] == 3
    assert (figures["lost"], figures["counted_twice"]) == (0, 0)
