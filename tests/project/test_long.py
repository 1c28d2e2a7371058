"""The list of tests that `make check` leaves to `make test`."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "tools/long_tests.py"))
LISTED, LONG_S = SCRIPT["LISTED"], SCRIPT["LONG_S"]
TESTS = LISTED.read_text().split()


@pytest.mark.parametrize("file", sorted({test.partition("::")[0] for test in TESTS}))
def test_every_test_that_is_listed_is_there(file: str) -> None:
    """Renamed, it would come back into `make check`: `make long` writes the list anew."""
    tree = ast.parse((ROOT / file).read_text())
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {test.partition("::")[2] for test in TESTS if test.startswith(f"{file}::")} <= there


def test_a_function_is_listed_with_its_longest_case(tmp_path: Path) -> None:
    case = '<testcase classname="tests.sim.test_seeds{}" name="{}" time="{}"/>'
    times = [("", "test_b[1]", LONG_S / 2), ("", "test_b[2-x]", LONG_S * 2), ("", "test_a", LONG_S * 3)]
    times += [("", "test_c", LONG_S), (".TestPlay", "runTest", LONG_S * 9)]
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(case.format(*one) for one in times)}</testsuite></testsuites>")
    assert SCRIPT["long_tests"](report) == ["tests/sim/test_seeds.py::test_a", "tests/sim/test_seeds.py::test_b"]
