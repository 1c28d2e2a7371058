"""Hostile peers beside honest ones: nobody crashes, nothing is lost or counted twice, and the run goes on."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from shoal.core import messages as m
from shoal.sim import run
from shoal.sim.faults import lies, strangers
from shoal.sim.scenarios.catalogue import HOSTILE, SCENARIOS
from shoal.sim.scenarios.drawing import draw
from shoal.sim.swarm import Outcome, Swarm

# One seed of each, which failed before core asked for evidence.
SEEDS: dict[str, int] = {
    "outsider/fuzz": 0, "outsider/coup": 2, "outsider/complain": 0, "outsider/culprit": 1, "outsider/saved": 0,
    "joiner/fuzz": 0, "joiner/coup": 0, "joiner/complain": 2, "joiner/culprit": 5, "joiner/saved": 1,
    "joiner/hollow": 0, "joiner/frozen": 0, "joiner/books": 1, "joiner/digest": 0, "joiner/withhold": 1,
    "joiner/busy": 0, "joiner/linger": 0,
    "member/fuzz": 0, "member/coup": 1, "member/complain": 1, "member/culprit": 1, "member/saved": 0,
    "member/mute": 1, "member/frozen": 7, "member/books": 0, "member/gone": 1, "member/overflow": 0,
    "member/sums": 0, "member/norm": 13, "member/digest": 0, "member/withhold": 0,
    "member/busy": 0, "member/soon": 0, "member/missing": 0, "member/keep": 1,
    "member/waits": 0, "member/unable": 0, "member/nonfinite": 0, "member/refuse": 0, "member/held": 4, "member/coming": 0,
    "member/idle": 1, "member/far": 0, "member/loss": 0, "member/rate": 0, "member/wrong": 0, "member/long": 0,
    "member/noise": 0, "member/invent": 0, "member/poison": 0, "member/lazy": 0, "hole/in": 0, "hole/out": 0,
}  # fmt: skip


def played(name: str, seed: int) -> Outcome:
    outcome = Swarm(draw(SCENARIOS[name], seed)).run()
    assert not outcome.violations, f"{str(outcome.violations[0])[:1000]}\nrerun: {run.rerun(name, seed)}"
    return outcome


# Liars in long runs, found out late: tests/sim/test_audits.py has each of them quickly. And what is done quickly from another place.
LONG = {
    "member/noise", "member/invent", "member/poison", "member/lazy",
    "joiner/fuzz", "member/fuzz", "outsider/coup", "member/coup", "joiner/complain", "member/complain", "outsider/culprit",
    "joiner/culprit", "outsider/saved", "joiner/frozen", "joiner/books", "joiner/digest", "joiner/busy",
    "member/idle", "member/overflow", "member/coming", "member/long", "member/held", "member/sums",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(f"strangers/{act}", seed, marks=pytest.mark.slow if act in LONG else ())
        for act, seed in SEEDS.items()
    ],
)
def test_one_who_means_harm_does_what_it_is_to_do_and_no_harm(name: str, seed: int) -> None:
    place, act = name.removeprefix("strangers/").split("/")
    assert [(one.role, one.acts[0]) for one in draw(SCENARIOS[name], seed).hostile] == [(place, act)]
    assert played(name, seed).struck.keys() == {act}


@pytest.mark.parametrize("kind", lies.CHARGES)
def test_what_they_complain_of_is_what_a_message_can_say(kind: Literal["faulty", "unreachable", "stale"]) -> None:
    complaint = m.Complaint("p1", "its tensors are not finite", kind)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(complaint), type=m.Complaint) == complaint


# 3 is played where histories repeat.
@pytest.mark.parametrize("seed", (0, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 5, 6))))
def test_several_who_mean_harm_do_none(seed: int) -> None:
    played("strangers", seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_seeds_of_strangers() -> None:
    for seed in range(100, 200):
        played("strangers", seed)


def test_every_act_is_a_scenario() -> None:
    assert {scenario.name.partition("/")[2] for scenario in HOSTILE} == SEEDS.keys()


def test_the_honest_are_more_than_half_whoever_is_let_in() -> None:
    for seed in range(300):
        case = draw(SCENARIOS["strangers"], seed)
        inside = [one for one in case.hostile if one.role != "outsider"]
        there = {one.key for one in case.hostile if one.role in ("member", "hole")}
        assert case.hostile and 0 not in there and all(key < case.peers for key in there)
        honest = case.peers - len(there)
        assert 2 * honest > case.peers + len(inside) - len(there)


def test_at_least_half_go_on_after_everything_else_has_healed() -> None:
    cases = [draw(SCENARIOS["strangers"], seed) for seed in range(200)]
    assert sum(not any(one.stops for one in case.hostile) for case in cases) >= 100


def test_other_scenarios_have_no_strangers() -> None:
    for scenario in SCENARIOS.values():
        if not scenario.name.startswith("strangers") and scenario.name not in (
            "undone",
            "sybils",
        ):  # of liars, by design
            assert draw(scenario, 0).hostile == ()


def test_a_forged_view_that_an_honest_peer_holds_is_a_violation() -> None:
    case = draw(SCENARIOS["strangers/outsider/saved"], 0)
    swarm = Swarm(case)
    real = swarm.agreed

    def agreed(node, view):  # type: ignore[no-untyped-def]
        if view.started and node.name == "p2.0" and not node.machine.leading:
            view = msgspec.structs.replace(view, reason="another")
        real(node, view)

    swarm.agreed = agreed  # type: ignore[method-assign]
    assert any(one.checker == "forged" for one in swarm.run().violations)


def test_hostile_histories_repeat() -> None:
    first, second = (played("strangers", 3) for _ in range(2))
    assert first == second and (first.wronged or first.evicted or first.struck)


def test_coups_hold_what_ended_runs() -> None:
    from tests.fuzz.test_edges import FACTS

    coups = list(strangers.coups(FACTS))
    assert len(coups) == len({repr(one) for one in coups}) > 30
