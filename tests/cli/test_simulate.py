"""`shoal simulate` and `shoal replay`: one seed is one history, and a recorded one can be told from another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import main as program


def line(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert program.main(["simulate", "calm", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


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
    lines[at] = lines[at].replace(b'["Join",null,-1]', b'["Leave","why"]', 1)
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
