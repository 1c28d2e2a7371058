"""`shoal simulate` and `shoal replay`: one seed is one history, and a recorded one can be told from another."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli import main as program
from shoal.launcher import process


def line(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert program.main(["simulate", "calm", *words, "--json"]) == 0
    record: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return record


def test_a_seed_gives_the_same_digest_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    first = line(capsys, "seed=1")
    assert {"digest", "violations", "committed", "redone", "virtual_s", "events_per_s"} <= first.keys()
    assert first["violations"] == []
    assert line(capsys, "seed=1")["digest"] == first["digest"]
    assert line(capsys, "seed=2")["digest"] != first["digest"]


def test_a_recorded_history_replays_and_a_changed_one_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    assert program.main(["simulate", "calm", "seed=1", "--trace", str(path)]) == 0
    capsys.readouterr()
    assert program.main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    assert program.main(["replay", str(tmp_path)]) == 0
    capsys.readouterr()

    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i, text in enumerate(lines) if b'"Join"' in text and b'"Send"' in text)
    lines[at] = re.sub(rb'\["Join",.*?\]\]\]', b'["Leave","why"]', lines[at], count=1)
    path.write_bytes(b"".join(lines))
    assert program.main(["replay", str(path)]) == 1
    assert "first: " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["calm", "seed=x"], ["calm", "8812"], ["nowhere"], ["calm", "seed=-1"]])
def test_what_names_no_scenario_or_seed_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["simulate", *words]) == 2
    assert capsys.readouterr().err.startswith("shoal: ")


def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("[1,2]\n")
    assert program.main(["replay", str(path)]) == 2
    assert f"{path}, line 1" in capsys.readouterr().err


@pytest.mark.slow
def test_seeds_played_at_once_print_what_they_print_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> list[dict[str, object]]:
        assert program.main(["simulate", "calm", "seeds=0:3", "--json", *words]) == 0
        lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        return [{key: value for key, value in line.items() if key != "events_per_s"} for line in lines]

    assert printed("--jobs", "2") == printed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_that_play_seeds_do_not_outlive_the_command(number: signal.Signals) -> None:
    words = [sys.executable, "-m", "shoal.cli.main", "simulate", "calm", "seeds=0:2000", "--json", "--jobs", "2"]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    command.stdout.readline()  # they play
    players = _children(command.pid)
    command.send_signal(number)
    command.communicate(timeout=60)
    assert command.returncode != 0
    assert len(players) >= 2
    deadline = time.monotonic() + 60
    while any(process.lives(player) for player in players):
        assert time.monotonic() < deadline, f"{players} still run"
        time.sleep(0.05)


def _children(pid: int) -> list[process.Process]:
    """Every process that descends from this one."""
    children: list[process.Process] = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        known = process.identify(child)
        children += [*([known] if known else []), *_children(child)]
    return children
