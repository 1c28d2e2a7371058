"""A wheel, as others install it: into an empty environment, run from a directory that holds no checkout. `make wheel` calls this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy of what git has: an earlier build's leftovers must not be in it."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    (folder / "source").mkdir()
    subprocess.run(
        ["tar", "-c", "--null", "-T", "-", "-f", str(folder / "all.tar")],
        cwd=ROOT,
        input=b"\0".join(filter(None, files)),
        check=True,
    )
    subprocess.run(["tar", "-x", "-f", "../all.tar"], cwd=folder / "source", check=True)
    timed(
        "build",
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), "."],
        folder / "source",
    )
    (built,) = folder.glob("shoal-*.whl")
    return built


def timed(name: str, words: Sequence[str], cwd: Path) -> str:
    """The command's output; how long it took is printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    before = time.monotonic()
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    print(f"{name}: {time.monotonic() - before:.1f} s")
    assert done.returncode == 0, f"{name}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = ROOT / "src"
    needed = [path for kind in ("*.py", "*.npz", "*.toml", "py.typed") for path in (sources / "shoal").rglob(kind)]
    needed += [path for path in (sources / "shoal/dashboard/page/assets").rglob("*") if path.is_file()]
    assert {str(path.relative_to(sources)) for path in needed} == {name for name in names if name.startswith("shoal/")}
    assert {name.partition("/")[0].rpartition(".")[2] for name in names} == {"shoal", "dist-info"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_installed_program_trains_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    timed("venv", [sys.executable, "-m", "venv", "empty"], tmp_path)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    timed("pip install", [str(tmp_path / "empty/bin/pip"), "install", "-q", *constraints, str(wheel)], tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shoal = str(tmp_path / "empty/bin/shoal")
    assert timed("shoal --version", [shoal, "--version"], elsewhere).startswith("shoal ")
    assert "\n  demo " in timed("shoal --help", [shoal, "--help"], elsewhere)
    assert "_shtab_shoal" in timed("shoal completion", [shoal, "completion", "bash"], elsewhere)
    assert "good     packages" in timed("shoal doctor", [shoal, "doctor"], elsewhere)
    timed("shoal demo", [shoal, "demo", f"run.steps={STEPS}"], elsewhere)
    summary = json.loads((elsewhere / "runs/quickstart/summary.json").read_text())
    assert summary["steps"] == STEPS
    assert "quickstart" in timed("shoal status", [shoal, "status"], elsewhere)
