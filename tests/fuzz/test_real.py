"""Real processes, attacked by somebody with a valid invite (benchmarks/strangers.py): nobody dies, and the account balances."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def attacked(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/strangers.py", "--quiet", "4", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_questions_harm_nobody_and_a_joiner_is_let_in() -> None:
    """The instrument itself: who only asks breaks nothing."""
    done = attacked("--seconds", "8", "--rate", "50", "--steps", "500", "--kinds", "StandingRequest,StateRequest")
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert [one["name"] for one in line["setting"]["phases"]] == ["before", "outsider", "joiner", "member", "after"]
    assert all(one["sent"] > 50 for one in line["setting"]["phases"][1:4])


def test_every_attack_on_every_peer_of_a_real_run() -> None:
    done = attacked("--seconds", "40", "--rate", "600", "--steps", "800")
    assert done.returncode == 0, done.stdout + done.stderr
