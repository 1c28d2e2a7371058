"""Peers that are asked to leave a swarm in which nothing else happens: each leaves in time, its stage is served on, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from shoal.core import messages as m
from shoal.core.leader.rules import commit, removal
from shoal.sim import run
from shoal.sim.leavers import Leavers
from shoal.sim.scenarios.catalogue import load
from shoal.sim.swarm import simulate

Patch = pytest.MonkeyPatch
_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [
        ("leaving_1s", 1),
        ("leaving_10s", 0),
        pytest.param("leaving_1s", 9, marks=_SLOW),
        pytest.param("leaving_10s", 4, marks=_SLOW),
        pytest.param("leaving_60s", 0, marks=_SLOW),
        pytest.param("leaving_60s", 3, marks=_SLOW),
    ],
)
def test_leavers_leave_in_time(scenario: str, seed: int) -> None:
    outcome = simulate(scenario, seed)
    assert not outcome.violations, f"{outcome.violations[0]}\nrerun: {run.rerun(scenario, seed)}"


def keeps_leavers_for_long(patch: Patch) -> None:
    patch.setattr(removal, "LEAVE_S", 60.0)


def lets_nobody_leave_at_the_end_of_a_step(patch: Patch) -> None:
    patch.setattr(commit, "_without", lambda leaving, members: (members, {}))


def lets_nobody_take_over(patch: Patch) -> None:
    for module in (removal, commit):
        patch.setattr(module, "takeovers_of_leavers", lambda *_: ())


def empties_stages(patch: Patch) -> None:
    def without(
        leaving: dict[m.Peer, str], members: tuple[m.Member, ...]
    ) -> tuple[tuple[m.Member, ...], dict[m.Peer, str]]:
        return tuple(one for one in members if one.peer not in leaving), leaving

    patch.setattr(commit, "_without", without)


@pytest.mark.parametrize(
    ("mutant", "scenario", "joiners", "known"),
    [
        (keeps_leavers_for_long, "leaving_60s", 2, (0,)),
        (lets_nobody_leave_at_the_end_of_a_step, "leaving_1s", 2, (1,)),
        (lets_nobody_take_over, "leaving_10s", 0, (0,)),  # else a newcomer does, sooner or later
        (empties_stages, "leaving_10s", 2, (0,)),
    ],
)
@_SLOW
def test_a_broken_rule_of_leaving_is_caught(
    mutant: Callable[[Patch], None], scenario: str, joiners: int, known: tuple[int, ...], monkeypatch: Patch
) -> None:
    of = load(scenario)
    of = msgspec.structs.replace(of, happenings=msgspec.structs.replace(of.happenings, joiners=joiners))
    for seed in (*known, *(seed for seed in range(20) if seed not in known)):
        with monkeypatch.context() as patch:
            mutant(patch)
            caught = simulate(of, seed).violations
        if caught:
            assert not simulate(of, seed).violations
            return
    pytest.fail(f"{mutant.__name__} survives")


class Rig:
    """Views of peers a and b at stage 0, c at stage 1, as time passes."""

    def __init__(self) -> None:
        self.now, self.said = 0.0, list[tuple[str, str]]()
        self.leavers = Leavers(lambda: self.now, lambda peer, checker, text: self.said.append((peer, text)))
        self.leavers.prompt = True
        members = (m.Member("a", 0), m.Member("b", 0), m.Member("c", 1))
        self.view = m.View(number=5, step=0, members=members, owners=(0, 1, 2), phase=m.Phase.TRAINING)

    def agree(self, **changes: object) -> None:
        before, self.view = self.view, msgspec.structs.replace(self.view, number=self.view.number + 1, **changes)
        self.leavers.agreed(before, self.view)

    def commit(self, step: int) -> None:
        self.agree(step=step + 1, last=m.Committed(step=step, round=1, norm=1.0, loss=1.0, digests=(), groups=()))


def test_who_stays_longer_than_20_s_or_past_the_end_of_a_step_is_reported() -> None:
    rig = Rig()
    rig.leavers.ask("b", rig.view)
    rig.now = 23.0
    rig.leavers.look(rig.view)
    assert not rig.said
    rig.now = 25.0
    rig.leavers.look(rig.view)
    assert rig.said == [("b", "was asked at 0.0 s and stays: 20 s have passed")]
    rig = Rig()
    rig.leavers.ask("b", rig.view)
    rig.now = 3.0
    rig.commit(0)
    assert not rig.said, "the request may not have reached the leader"
    rig.now = 6.0
    rig.commit(1)
    assert [peer for peer, _ in rig.said] == ["b"]


def test_a_stages_last_replica_stays_until_another_takes_over() -> None:
    rig = Rig()
    rig.leavers.ask("c", rig.view)
    rig.now = 80.0
    rig.leavers.look(rig.view)
    assert not rig.said
    rig.now = 100.0
    rig.leavers.look(rig.view)
    assert rig.said == [("c", "nobody takes over its stage since 0.0 s")]
    rig = Rig()
    rig.leavers.ask("c", rig.view)
    rig.agree(members=rig.view.members[:2], reason="c leaves: tired")
    assert [peer for peer, _ in rig.said] == ["c"] and "empties its stage 1" in rig.said[0][1]
    rig = Rig()
    rig.leavers.ask("c", rig.view)
    rig.agree(members=(m.Member("a", 0), m.Member("b", 1)), reason="c leaves: tired")
    assert not rig.said and not rig.leavers.waiting
