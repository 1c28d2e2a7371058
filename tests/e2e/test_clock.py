"""A wall clock that jumps, in the processes of a real run. What peers decide follows the monotonic clock; the wall clock dates invites,
passes and records of the directory, and none of these may put out a member whose clock, or whose partner's, is wrong.

A process of ours cannot set the machine's clock for itself alone, so its `time.time` is shifted from inside, by a `sitecustomize` that
reads the shift of that process from a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.test_run import CONFIG, LONG_S, NO_MODEL, SOURCE, summary, wait_for

from shoal.launcher.files import rundir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DAY_S = 86400.0
SHIFT = """
import json, os, time
_true, _path = time.time, os.environ["SHIFTS"]
def shifted():
    try:
        with open(_path) as file:
            return _true() + json.load(file).get(str(os.getpid()), 0.0)
    except (OSError, ValueError):
        return _true()
time.time = shifted
"""


def test_members_whose_clocks_jump_by_a_day_go_on_training_together(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    (tmp_path / "sitecustomize.py").write_text(SHIFT)
    shifts = tmp_path / "shifts.json"
    with open(tmp_path / "run.log", "w") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", "run", "tiny.toml", "run.peers=6", "run.steps=100000", *NO_MODEL],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}", "SHIFTS": str(shifts)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        commits, places = tmp_path / "runs/tiny/commits.jsonl", tmp_path / "runs/tiny"

        def trained(steps: int) -> None:
            seen = len(commits.read_bytes().splitlines()) if commits.exists() else 0
            wait_for(
                lambda: (
                    launcher.poll() is not None
                    or (commits.exists() and len(commits.read_bytes().splitlines()) >= seen + steps)
                )
            )
            assert launcher.poll() is None, (tmp_path / "run.log").read_text()[-3000:]

        trained(2)
        peers = rundir.locals_of(places).peers
        leader = next(peer for peer in peers if peer.leads)
        others = [peer for peer in peers if not peer.leads]
        jumped: dict[str, float] = {}
        for peer, shift_s in ((others[0], DAY_S), (others[1], -DAY_S), (leader, DAY_S)):
            jumped[str(peer.process.pid)] = shift_s
            shifts.write_text(json.dumps(jumped))
            trained(5)
        members = {seat.label for seat in rundir.locals_of(places).members}
        assert members == {peer.label for peer in peers}
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(LONG_S) == 130
        account = summary(tmp_path)
        assert (account["redone"], account["killed"], account["lost"], account["counted_twice"]) == (0, 0, 0, 0)
        assert "put out" not in (tmp_path / "run.log").read_text()
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
