"""The pages keep to their length, name files that exist, and the protocol's tables are those of the messages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PATH = re.compile(r"`([A-Za-z0-9_./-]+/[A-Za-z0-9_./-]*|[a-z_]+\.(?:py|md|toml))`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_MADE = ("runs/", "step-N/", "texts/", "checkpoints/", "logs/", "optimizer/", "traces/")  # by a run, not by the project


@pytest.mark.parametrize(("name", "limit"), [("README.md", 150), ("ARCHITECTURE.md", 200)])
def test_a_page_that_everybody_reads_stays_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= limit


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    named = {path for path in _PATH.findall(text) if not path.startswith(_MADE)}
    places = (ROOT, ROOT / "src", ROOT / "src" / "shoal", page.parent)
    missing = [path for path in named if "/" in path and not any((place / path).exists() for place in places)]
    missing += [path for path in _LINK.findall(text) if not (page.parent / path).exists()]
    assert sorted(missing) == []


@pytest.mark.parametrize("name", ["protocol", "view"])
def test_pages_made_from_the_code_are_up_to_date(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.PAGE.read_text() == made.page(), "the code has changed: run `make protocol`"
