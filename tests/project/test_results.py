"""Measurements are kept in one file, benchmarks write it themselves, and docs/results.md is made from it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path for path in BENCHMARKS.glob("[a-z]*.py") if path.name != "report.py")


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # msgspec looks its annotations up there; docs/results.py imports `report`
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "report", raising=False)
    return loaded(BENCHMARKS / "report.py")


@pytest.fixture
def results(report: ModuleType) -> ModuleType:
    return loaded(ROOT / "docs" / "results.py")


def test_every_line_is_a_measurement_and_says_truly_whether_it_meets_its_target(report: ModuleType) -> None:
    measurements = report.read()
    assert len(measurements) >= 94
    for one in measurements:
        assert one.met == report.is_met(one.value, report.Target(one.target, one.direction)), one
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", one.date)
        assert one.hardware and one.commit and one.unit


def test_the_page_of_results_is_made_from_the_file(report: ModuleType, results: ModuleType) -> None:
    measurements = report.read()
    assert results.PAGE.read_text() == results.page(measurements), "results.jsonl has changed: run `make results`"
    assert {results.picture(name) for name in results.plotted(measurements)} == set(results.PLOTS.glob("*"))


def test_a_page_says_what_is_newest_and_what_is_not_met(report: ModuleType, results: ModuleType) -> None:
    def measured(value: float, unit: str = "s") -> object:
        return report.Measurement(
            "a pause", value, unit, 2.0, "lower", value <= 2.0, {}, "a machine", "abc", "2026-11-22"
        )

    page = results.page([measured(1.0), measured(7.0, unit="ms"), measured(3.0)])
    row = "| [a pause](#a-pause) | 3 | s | ≤ 2 | 2026-11-22 | abc |"
    assert row in page.split("## Targets not met")[1].split("## Targets met")[0]
    assert list(results.plotted([measured(1.0)] * 3)) == ["a pause"]
    assert not results.plotted([measured(1.0), measured(7.0, unit="ms"), measured(3.0)])  # not comparable


def test_a_recorded_measurement_has_its_command_hardware_commit_and_date(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(sys, "argv", ["/somewhere/pause.py", "--record"])
    given = report.parse(argparse.ArgumentParser())
    for value in (1.23456, 3.0):
        report.report("a pause", value, "s", report.at_most(2.0), {"peers": 3}, given.record)
    report.report("a pause", 1.0, "s", report.at_most(2.0), {"peers": 3}, record=False)
    first, second = report.read(tmp_path / "results.jsonl")
    assert (first.value, first.met, second.met) == (1.235, True, False)
    assert first.setting == {"command": "python benchmarks/pause.py --record", "peers": 3}
    assert first.hardware == report.hardware().split(";")[0] + first.hardware[first.hardware.index(";") :]
    assert first.commit == report.commit() and re.fullmatch(r"\d{4}-\d\d-\d\d", first.date)
    assert json.loads(capsys.readouterr().out.splitlines()[0])["name"] == "a pause"


def test_a_line_that_is_no_measurement_is_named(report: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes((BENCHMARKS / "results.jsonl").read_bytes().splitlines()[0] + b'\n{"name": "a pause"}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2: .*value"):
        report.read(path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_benchmark_can_be_recorded(script: Path) -> None:
    source = script.read_text()
    assert re.search(r"^from report import .*\bparse\b.*\breport\b", source, re.M)
    calls = re.findall(r"\breport\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", source)
    assert calls and all(re.search(r"\brecord,?\s*\)$", call) for call in calls), calls


def test_a_benchmark_says_what_record_does() -> None:
    command = [sys.executable, str(BENCHMARKS / "large_groups.py"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert "--record" in result
