"""Writes tests/long.txt: the test functions that take over LONG_S, which `make check` leaves to `make test`.

    make long    runs the quick tests on an idle machine and calls this with their times

A function is listed with its longest case, setup and teardown included. tests/conftest.py gives those that are listed the mark `long`; a
test that is in no list is run, so that a new one is never left out by mistake.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LISTED = ROOT / "tests/long.txt"
LONG_S = 0.2  # all that take less are a minute and a half of one core together


def long_tests(times: Path) -> list[str]:
    """Of a JUnit report, as pytest writes it: `tests/sim/test_seeds.py::test_name`, sorted."""
    longest: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(times).getroot().iter("testcase"):
        file, name = case.attrib["classname"].replace(".", "/"), case.attrib["name"].partition("[")[0]
        test = f"{file}.py::{name}"
        longest[test] = max(longest[test], float(case.attrib["time"]))
    functions = {
        test for test in longest if (ROOT / test.partition("::")[0]).is_file()
    }  # state machines are classes, and stay
    return sorted(test for test in functions if longest[test] > LONG_S)


def main(times: str) -> None:
    tests = long_tests(Path(times))
    LISTED.write_text("".join(f"{test}\n" for test in tests))
    print(f"{LISTED.relative_to(ROOT)}: {len(tests)} test functions take over {LONG_S} s")


if __name__ == "__main__":
    main(sys.argv[1])
