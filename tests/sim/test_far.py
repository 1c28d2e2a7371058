"""A joiner whose round trip is longer than a step, and one whose only donor has a line full of work, simulated: they catch up with what is
committed while they download, and train."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from shoal.core import messages as m
from shoal.core import replica_state
from shoal.core.consensus import agreed
from shoal.core.leader import facts
from shoal.sim.lines import LineRates, Wire
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm

MB = 1_000_000
FAR_S = 0.65  # from it to the others, one way
COMES_S = 10.0
JOINER = "p4.0"


class Far(Wire, frozen=True, kw_only=True):
    """Four neighbours, and the joiner far from them."""

    def link(self, source: m.Peer, target: m.Peer) -> tuple[float, float]:
        return FAR_S if JOINER in (source, target) else 0.002, 100.0 * MB


def joined() -> tuple[list[str], bool, float]:
    """What the joiner said of its state, whether it became a member, and what a step took before it came."""
    settings = m.Settings(stages=1, microbatches=4, steps=150, peers=4, inflight=8, save_last=False)
    lines = (LineRates(100.0 * MB, 100.0 * MB),) * 4 + (LineRates(1.5 * MB, 1.5 * MB),)
    case = Case(
        scenario=Scenario(name="plain", delay_s=(0.002, 0.002), backward=2.0), seed=1, settings=settings, peers=4,
        speeds=(1.0,) * 5, forward_s=0.005, messages=Messages(), happenings=Happenings(),
        wire=Far(lines=lines, boundary_values=1000, gradient_values=20_000),
    )  # fmt: skip
    said, views = list[str](), list[m.View]()

    def look(now: float, peer: m.Peer, event: m.Event, commands: list[m.Command]) -> None:
        sent = [each.message for each in commands if isinstance(each, m.Send)]
        views.extend(each.entry.view for each in sent if isinstance(each, m.Propose))
        if peer == JOINER:
            said.extend(each.text for each in commands if isinstance(each, m.Note) and each.kind == "state")

    swarm = Swarm(case, look)
    swarm.kernel.after(COMES_S, lambda _: swarm.boot((4, 0)))
    violations = swarm.run().violations
    assert not violations, violations
    times = [at for at in swarm.watch.commits.times_s if at < COMES_S]
    trains = any(member.peer == JOINER for view in views for member in view.members)
    return said, trains, median(later - earlier for earlier, later in pairwise(times))


@pytest.mark.slow
def test_a_far_joiner_of_a_run_with_quick_steps_trains() -> None:
    said, trains, step_s = joined()
    assert step_s < FAR_S / 2, "else the case shows nothing"
    assert trains
    assert sum("begins anew" in each for each in said) <= 1, said


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (agreed, "COMMITS", 1),  # only the newest view reaches it
        (facts, "NEAR_BEATS", 0),  # nobody waits for one whose reports are some steps old
    ],
)
def test_else_it_never_does(monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: int) -> None:
    monkeypatch.setattr(module, name, value)
    assert not joined()[1]


def joins_on_full_lines() -> float | None:
    """Two peers with lines of 5 MB/s that hops fill for 25 s of a step; a third one needs 300 MB of state and 100 MB of sums a step. When
    it is a member."""
    up = 5 * MB
    settings = m.Settings(
        stages=2, microbatches=48, steps=14, peers=2, inflight=8, save_last=False, piece_values=2_500_000
    )
    case = Case(
        scenario=Scenario(name="plain", delay_s=(0.05, 0.05), backward=2.0, finish_s=1e4, progress_s=1e4), seed=1,
        settings=settings, peers=2, speeds=(1.0,) * 3, forward_s=0.05, messages=Messages(), happenings=Happenings(),
        wire=Wire(lines=(LineRates(up, 4 * up),) * 3, boundary_values=up // 8, gradient_values=5 * up),
    )  # fmt: skip
    members = list[float]()

    def look(now: float, peer: m.Peer, event: m.Event, commands: list[m.Command]) -> None:
        sent = [each.message for each in commands if isinstance(each, m.Send)]
        views = [each.entry.view for each in sent if isinstance(each, m.Propose)]
        members.extend(now for view in views if any(member.peer == "p2.0" for member in view.members))

    swarm = Swarm(case, look)
    swarm.kernel.after(30.0, lambda _: swarm.boot((2, 0)))
    swarm.run()
    return members[0] if members else None


@pytest.mark.slow
def test_a_joiner_whose_only_donor_has_a_full_line_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    joined_s = joins_on_full_lines()
    assert joined_s is not None and joined_s < 300.0
    monkeypatch.setattr(replica_state, "HURRY_STEPS", 1000)
    assert joins_on_full_lines() is None, "else the case shows nothing"
