"""The Grafana dashboard asks for metrics that `/metrics` has, and docs/watch.md lists each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.recorded_run import RecordedRun

ROOT = Path(__file__).parents[2]


def test_every_metric_of_the_dashboard_and_of_the_page_exists(tmp_path: Path) -> None:
    metrics = pytest.importorskip(
        "shoal.dashboard.page.metrics", reason="the extra `page` is not installed", exc_type=ImportError
    )
    from shoal.dashboard.page.state import StateBuilder
    from shoal.launcher.watching.reader import RunReader

    with RecordedRun(tmp_path / "six") as run:
        run.tick(20.0)
        reader = RunReader(run.output.path)
        reading = reader.read()
    text = metrics.text(StateBuilder().state(reading), reader.series.figures[-1]).decode()
    served = set(re.findall(r"^(shoal_\w+)[ {]", text, re.M))
    served = {name for name in served if not name.endswith("_created")}
    dashboard = json.loads((ROOT / "configs" / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"shoal_\w+", target["expr"])
    }
    assert asked and asked <= served
    page = (ROOT / "docs" / "watch.md").read_text()
    listed = set(re.findall(r"shoal_\w+", page))
    others = {f"shoal_microbatches_{name}_total" for name in re.findall(r"`([a-z_]+)`", page)}
    assert served <= listed | others and listed <= served
