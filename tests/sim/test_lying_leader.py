"""A leader that lies is replaced by those who follow it, and the run goes on; an honest one is doubted by nobody for what it proposes."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from shoal.core import messages as m
from shoal.core.member.judge import FEW, LeaderJudge
from shoal.sim.faults.hostile import LEADS, Hostile
from shoal.sim.node import Node
from shoal.sim.scenarios.catalogue import SCENARIOS
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case, Happenings, Messages
from shoal.sim.swarm import Swarm

QUIET = {"messages": Messages(), "happenings": Happenings(), "save_every": (4, 4)}
SMALL = {
    "stages": (3, 3),
    "steps": (24, 24),
    "microbatches": (9, 9),
    "step_s": 1.0,
    "spot_checks": (0.0,),
    "staleness": 0,
}
QUICK = ("pad", "forge")  # seen at once; the others take longer


def a_case(kind: str) -> Case:
    """Three replicas of each stage; the founder leads, and lies from the sixth second on."""
    scenario = msgspec.structs.replace(SCENARIOS["strangers"], peers=(9, 9), **QUIET, **SMALL)
    case = draw(scenario, 0)
    settings = msgspec.structs.replace(case.settings, heartbeat_timeout_s=4.0, min_request_timeout_s=2.0, robust="none")
    return msgspec.structs.replace(case, settings=settings, hostile=(Hostile(0, "leader", (kind,), 6.0),))


class Watched(Swarm):
    """Keeps every view, and who led when an honest peer adopted it."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.views: dict[int, m.View] = {}
        self.leaders: list[str] = []

    def agreed(self, node: Node, view: m.View) -> None:
        self.views.setdefault(view.number, view)
        if node.machine.leader is not None and node.machine.leader not in self.leaders:
            self.leaders.append(node.machine.leader)
        super().agreed(node, view)


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in LEADS])
def test_a_lying_leader_is_replaced_and_the_run_ends_as_it_should(kind: str) -> None:
    swarm = Watched(a_case(kind))
    outcome = swarm.run()
    assert swarm.context.struck.get(kind), "it did lie"
    assert not outcome.violations
    assert len(swarm.leaders) > 1 and max(view.step for view in swarm.views.values()) == 24
    assert len(outcome.wronged) <= (FEW + 1 if kind == "purge" else 0)
    assert not [one for one, after in pairwise(swarm.views.values()) if after.step < one.step], "nothing was undone"


@pytest.mark.parametrize("kind", ["forge", pytest.param("hoard", marks=pytest.mark.slow)])
def test_without_a_judge_it_leads_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaderJudge, "objection", lambda *_: "")
    monkeypatch.setattr(LeaderJudge, "doubts", lambda *_: "")
    swarm = Watched(a_case(kind))
    outcome = swarm.run()
    most = max(
        max(map(view.owners.count, set(view.owners))) / len(view.owners) for view in swarm.views.values() if view.owners
    )
    assert outcome.violations if kind == "forge" else most == 1.0
