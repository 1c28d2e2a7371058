"""The import contract holds, and it fails for what it is there to keep out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command as run; run(['--no-logo', '--no-cache'])"


def contract(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT], cwd=tree, env={"PYTHONPATH": str(tree / "src")}, capture_output=True, text=True
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The project's contract over a small tree of the same shape."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("core", "runtime", "cli"):
        (tmp_path / "src" / "shoal" / name).mkdir(parents=True)
        (tmp_path / "src" / "shoal" / name / "__init__.py").touch()
    (tmp_path / "src" / "shoal" / "__init__.py").touch()
    return tmp_path


def test_the_project_keeps_its_contract() -> None:
    done = contract(ROOT)
    assert done.returncode == 0, done.stdout


def test_an_innocent_tree_passes(tree: Path) -> None:
    (tree / "src/shoal/runtime/node.py").write_text("import time\nimport shoal.core\n")
    assert contract(tree).returncode == 0


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("core", "import time"),
        ("core", "from threading import Lock"),
        ("core", "import socket, torch, logging"),
        ("core", "import shoal.runtime"),
        ("runtime", "import shoal.cli"),
    ],
)
def test_an_import_that_is_not_allowed_is_found(tree: Path, place: str, line: str) -> None:
    (tree / "src/shoal" / place / "bad.py").write_text(f"{line}\n")
    done = contract(tree)
    assert done.returncode != 0
    assert "BROKEN" in done.stdout
