"""Retired words stay retired: tools/retired_words.txt lists them, with the word that replaces each."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = ROOT / "tools" / "retired_words.txt"
PARTICIPLES = {"found", "made", "told", "came", "brought", "gone"}  # how a value arrived; a name says what it is
FREE_OF_THEM = [
    *(ROOT / "src" / "shoal" / name for name in ("cli", "config", "dashboard", "launcher", "sim", "transport")),
    ROOT / "tests",
]


def retired() -> dict[str, str]:
    """Each retired word with its replacement."""
    lines = (line.partition("#") for line in WORDS.read_text().splitlines())
    return {word.strip(): note.partition("->")[2].strip() for word, _, note in lines if word.strip()}


def spaced(text: str) -> str:
    """Names as their words: `TheHeir_of` becomes `the heir of`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


@functools.cache
def sources() -> dict[Path, str]:
    return {path: spaced(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "src").rglob("*.py"))}


def occurrences(word: str) -> list[str]:
    """`file:line` of each place in src where a name, a comment or a string has the word, also over the end of a line."""
    pattern = re.compile(r"\b" + r"[\s#]+".join(map(re.escape, spaced(word).split())) + r"s?\b")
    return [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path, text in sources().items()
        for match in pattern.finditer(text)
    ]


@pytest.mark.parametrize("word", retired())
def test_no_source_uses_a_retired_word(word: str) -> None:
    assert occurrences(word) == [], f"say {retired()[word]!r} instead of {word!r}"


def test_every_retired_word_has_a_replacement() -> None:
    assert [word for word, instead in retired().items() if not instead] == []


def test_a_word_is_found_as_a_part_of_a_name_and_over_the_end_of_a_line() -> None:
    assert occurrences("task runner") and occurrences("Task") and not occurrences("no such word in any source")


@pytest.mark.parametrize("folder", FREE_OF_THEM, ids=lambda folder: folder.name)
def test_variables_and_parameters_are_nouns_of_what_they_hold(folder: Path) -> None:
    named = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # Parsing takes long, and most files have none of the words.
        for node in ast.walk(ast.parse(text)) if PARTICIPLES & set(re.findall(r"\w+", text)) else ():
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
            if name in PARTICIPLES:
                named.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}")
    assert named == []
