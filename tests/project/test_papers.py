"""The generated parts of the papers' pages and of docs/internet-tax.md are those of the recorded figures, and what differs says why."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "papers"))
    for name in ("pages", "rows"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import pages  # type: ignore[import-not-found]

    return pages  # type: ignore[no-any-return]


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
