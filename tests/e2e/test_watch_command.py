"""`shoal run --page` and `shoal watch` as processes: the page comes with the run and ends with it, however that ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.tiny import DATA, tiny

from shoal.launcher.process import Process, identify, lives

pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
pytestmark = pytest.mark.slow
PATIENCE_S = 300.0


def a_run(tmp_path: Path, steps: int) -> tuple[subprocess.Popen[str], str]:
    """A run with a page, and the page's address."""
    (tmp_path / "a.txt").write_bytes(DATA)
    (tmp_path / "tiny.toml").write_text(tiny(steps=steps))
    command = [sys.executable, "-m", "shoal.cli.main", "run", "tiny.toml", "--page"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        if match := re.search(r"shown at (http://127\.0\.0\.1:\d+/)", line):
            return run, match[1]
    raise AssertionError("the page's address was not printed")


def metrics(address: str) -> str:
    with urllib.request.urlopen(f"{address}metrics", timeout=30) as answer:
        return str(answer.read().decode())


def server_of(run: subprocess.Popen[str]) -> Process:
    """The process that serves the page: the run's child that is no peer."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if b"watch" in words and str(run.pid).encode() in words:
            process = identify(int(path.parent.name))
            assert process is not None
            return process
    raise AssertionError("nobody serves the page")


def await_end(process: Process) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while lives(process) and time.monotonic() < end_s:
        time.sleep(0.2)
    assert not lives(process)


def test_the_page_comes_with_a_run_and_ends_with_it(tmp_path: Path) -> None:
    run, address = a_run(tmp_path, 40)
    server = server_of(run)
    assert "shoal_up 1.0" in metrics(address)
    output = run.communicate(timeout=PATIENCE_S)[0]
    assert run.returncode == 0, output
    await_end(server)
    with pytest.raises(urllib.error.URLError):
        metrics(address)


def test_the_page_of_a_launcher_that_is_killed_ends_too(tmp_path: Path) -> None:
    run, address = a_run(tmp_path, 100_000)
    server = server_of(run)
    assert "shoal_up 1.0" in metrics(address)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    await_end(server)
