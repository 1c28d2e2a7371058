"""A joiner with a narrow line among four peers, simulated: nobody's steps become longer for long, and it serves where it is of use."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from shoal.core import messages as m
from shoal.sim.lines import LineRates, Wire
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm

MB = 1_000_000
LINE = LineRates(2.5 * MB, 2.5 * MB)
NARROW = 0.625 * MB
SCENARIO = Scenario(name="plain", delay_s=(0.05, 0.05), backward=2.0)
COMES_S = 38.0  # in virtual time: some steps of each case are over
WANTED = 1.1  # of a step without it


def joined(
    line: LineRates, *, gradient: int, boundary: int, forward_s: float = 0.05, slowdown: float = 1.1, steps: int = 14
):
    """Steps' seconds before the joiner comes and afterwards, the notes about it, and in how many commits it booked."""
    settings = m.Settings(
        stages=2, microbatches=24, steps=steps, peers=4, inflight=8, save_last=False, join_slowdown=slowdown
    )
    wire = Wire(lines=(LINE,) * 4 + (line,), boundary_values=boundary, gradient_values=gradient)
    case = Case(
        scenario=SCENARIO, seed=1, settings=settings, peers=4, speeds=(1.0,) * 5, forward_s=forward_s, messages=Messages(),
        happenings=Happenings(), wire=wire,
    )  # fmt: skip
    said, served = list[str](), set[int]()

    def look(now: float, peer: m.Peer, event: m.Event, commands: list[m.Command]) -> None:
        said.extend(
            each.text for each in commands if isinstance(each, m.Note) and each.kind == "removed" and peer == "p4.0"
        )
        if peer == "p4.0" and any(isinstance(each, m.Do) and isinstance(each.task, m.RunBackward) for each in commands):
            served.add(int(now))

    swarm = Swarm(case, look)
    swarm.kernel.after(COMES_S, lambda _: swarm.boot((4, 0)))
    violations = swarm.run().violations
    assert {each.checker for each in violations} <= {"home"}, "at the end it may be barred, and nothing else is wrong"
    times = swarm.watch.commits.times_s
    took = [(later, later - earlier) for earlier, later in pairwise(times)]
    before = [seconds for at, seconds in took if at < COMES_S]
    after = [seconds for at, seconds in took if at > COMES_S]
    return before, after, said, served


def test_a_narrow_joiner_that_averaging_would_wait_for_is_left_out_in_words() -> None:
    before, after, said, served = joined(LineRates(NARROW, NARROW), gradient=1_250_000, boundary=25_000, steps=17)
    assert said and "its line carries 0.62 MB/s, the others' 2.5" in said[0] and not served
    assert median(after[-5:]) <= WANTED * median(before), after


def test_a_narrow_uplink_shows_in_one_step_and_costs_no_more() -> None:
    narrow = LineRates(NARROW, LINE.down_Bps)
    kept: dict[str, Any] = {"gradient": 1_250_000, "boundary": 25_000, "steps": 24}
    before, after, said, _ = joined(narrow, **kept)
    assert said
    assert sum(seconds > 1.3 * median(before) for seconds in after) <= 1, after
    _, unmended, _, _ = joined(narrow, **kept, slowdown=100.0)
    assert sum(seconds > 2 * median(before) for seconds in unmended) >= 3, "else the rule changes nothing"


def test_where_tensors_fill_the_lines_a_narrow_joiner_has_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"gradient": 50_000, "boundary": 250_000, "steps": 11}
    before, after, said, served = joined(LineRates(NARROW, NARROW), **kept)
    assert served and not said
    assert median(after) <= 1.2 * median(before), after
    monkeypatch.setattr("shoal.core.leader.rules.lines.turns_of", lambda lines, *_: dict.fromkeys(lines, m.TURNS))
    _, unmended, _, _ = joined(LineRates(NARROW, NARROW), **kept)
    assert median(unmended) > 2 * median(before), "else turns by line change nothing"


def test_where_computing_is_the_step_a_narrow_joiner_helps() -> None:
    before, after, said, served = joined(
        LineRates(NARROW, NARROW), gradient=50_000, boundary=25_000, forward_s=0.3, steps=9
    )
    assert served and not said
    assert median(after[-4:]) < 0.9 * median(before)


def test_a_joiner_with_a_line_like_the_others_is_let_in() -> None:
    _, _, said, served = joined(LINE, gradient=1_250_000, boundary=25_000)
    assert served and not said
