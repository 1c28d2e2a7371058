"""Moments to strike at: found in a trace when they begin, once, and in nothing else."""

from __future__ import annotations

from pathlib import Path

from shoal import trace
from shoal.core.messages import Apply, Cut, Do, Note, Tick
from shoal.launcher.chaos.injection_points import INJECTION_POINTS, TraceTail


def a_line(*commands: Do | Note) -> bytes:
    return trace.line_of(1.5, "p", Tick(), list(commands))


def test_a_moment_is_the_command_that_begins_its_task_and_no_word_about_it() -> None:
    begins = a_line(Do(Apply(id="s/1", step=3, round=1, norm=0.5, save=False)))
    assert INJECTION_POINTS["optimizer"].tag in begins
    assert INJECTION_POINTS["averaging"].tag not in begins
    assert INJECTION_POINTS["averaging"].tag in a_line(Do(Cut(id="s/2", step=3, bounds=(0, 1), outs=("x",))))
    assert INJECTION_POINTS["optimizer"].tag not in a_line(Note("commit", 'somebody says "type":"Apply" here'))


def test_only_whole_lines_are_news_and_each_once(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    path = tmp_path / "traces/p1.jsonl"
    path.write_bytes(a_line(Note("commit", "old")))
    traces = TraceTail(tmp_path)
    traces.skip()
    line = a_line(Note("commit", "new"))
    with open(path, "ab", buffering=0) as file:
        file.write(line[:-4])
        assert traces.new_lines(["p1", "p2"]) == {"p1": b"", "p2": b""}
        file.write(line[-4:])
    assert traces.new_lines(["p1"]) == {"p1": line}
    assert traces.new_lines(["p1"]) == {"p1": b""}
    (tmp_path / "traces/p2.jsonl").write_bytes(line)  # a peer that came later: all of it is news
    assert traces.new_lines(["p2"]) == {"p2": line}
