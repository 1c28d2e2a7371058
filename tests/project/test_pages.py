"""The pages keep to their length, name files that exist, and those made from the source are up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from shoal.config.describe import keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
PAGES = [
    *TOP,
    *sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "design"),
]  # design notes keep their day's names
SOURCES = {path.name for folder in ("src", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")}
CELL = 200  # characters that a cell of a table may have
_PATH = re.compile(r"`([A-Za-z0-9_./-]+/[A-Za-z0-9_./-]*|[a-z_]+\.(?:py|md|toml))`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_MADE = (
    "build/",
    ".venv/",
    "build/",
    "runs/",
    "tensorboard/",
    "wandb/",
    "step-N/",
    "texts/",
    "checkpoints/",
    "logs/",
    "optimizer/",
    "traces/",
)  # by a run or a tool, not by the project


@pytest.mark.parametrize(("name", "limit"), [("README.md", 150), ("ARCHITECTURE.md", 200)])
def test_a_page_that_everybody_reads_stays_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= limit


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    named = {path for path in _PATH.findall(text) if not path.startswith(_MADE)}
    places = (ROOT, ROOT / "src", ROOT / "src" / "shoal", page.parent)
    missing = [path for path in named if "/" in path and not any((place / path).exists() for place in places)]
    missing += [path for path in named if path.endswith(".py") and "/" not in path and path not in SOURCES]
    missing += [path for path in _LINK.findall(text) if not (page.parent / path).exists()]
    assert sorted(missing) == []


def test_newcomers_questions_name_files_below_the_source_and_what_is_in_them() -> None:
    rows = [line for line in (DOCS / "questions.md").read_text().splitlines() if line.startswith("| ")]
    answered = [row for row in rows if "`" in row]
    assert len(answered) >= 18
    for row in answered:
        paths = [ROOT / "src" / "shoal" / path for path in re.findall(r"`([a-z_/]+(?:\.py|/))`", row)]
        assert [path for path in paths if not path.exists()] == [], row
        for name, member in re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", row):
            sources = [path.read_text() for path in paths if path.is_file()]
            assert any(f"class {name}" in text and f"def {member}" in text + "def " for text in sources), name


@pytest.mark.parametrize("page", [*TOP, *sorted(DOCS.rglob("*.md"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_cell_of_a_table_is_an_essay(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell) > CELL] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_stand_apart_from_the_paragraph_before(page: Path) -> None:
    """The site's Markdown takes them for text of the paragraph otherwise."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    joined = re.findall(r"^(?![-|#`\s]|\d+\. ).+\n(?:- |1\. |\|).*$", text, re.M)
    assert joined == []


def test_operations_quotes_only_messages_that_the_code_prints() -> None:
    """Three words of four of a quoted message are literal text of the code; names and numbers are not looked for."""
    table = (DOCS / "operations.md").read_text().split("## What the events mean")[1].split("\n## ")[0]
    known = _messages(ROOT / "src" / "shoal")
    quoted = [
        quote for row in re.findall(r"^\| \w+ \| (.*?) \|", table, re.M) for quote in re.findall(r"`([^`]+)`", row)
    ]
    assert len(quoted) > 40
    assert [quote for quote in quoted if _literal(quote, known) < 0.75] == []


def _messages(source: Path) -> set[tuple[str, ...]]:
    """The literal parts of every text in the code, formatted or not, in their order."""
    texts = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            parts = [one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if sum(len(part.strip()) for part in parts) >= 5:
                texts.add(tuple(parts))
    return texts


def _literal(quote: str, known: set[tuple[str, ...]]) -> float:
    # A pattern for each text of the code would be thousands to compile.
    patterns = [
        ".*?".join(f"({re.escape(part)})" for part in parts) for parts in known if all(part in quote for part in parts)
    ]
    matches = [match for pattern in patterns if (match := re.search(pattern, quote))]
    spans = [span for match in matches for span in match.regs[1:]]
    words = [word.span() for word in re.finditer(r"[A-Za-z]{2,}", quote)]
    return sum(any(begin <= word[0] and word[1] <= end for begin, end in spans) for word in words) / len(words)


@pytest.mark.parametrize("name", ["protocol", "view", "configuration"])
def test_a_page_that_is_made_from_the_source_is_up_to_date(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), f"its source has changed: run `make {name}`"


def test_the_cells_of_the_configurations_tables_are_short() -> None:
    lines = (ROOT / "docs" / "configuration.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(keys())
    assert max(len(cell) for row in rows for cell in row.split(" | ")) < 200
