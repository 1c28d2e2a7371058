"""The leader's rules are functions of their arguments: asking one changes nothing, and asking it again gives the same answer."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from shoal.core.consensus.phases import TRANSITIONS, Transition, transition
from shoal.core.leader.facts import Facts
from shoal.core.leader.rules import order, proposal
from shoal.core.leader.rules.order import Rule
from shoal.core.messages import Phase, Settings, View
from shoal.sim.scenarios.catalogue import SCENARIOS
from shoal.sim.scenarios.drawing import draw
from shoal.sim.swarm import Swarm

SEEDS = 40
EVERY = 53  # calls of a function, of which one is looked at


def pure(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    """The same function; fails if it changes the facts or answers differently the next time."""

    def watched(view: View, facts: Facts, settings: Settings, now: float) -> Any:
        calls[function.__name__] += 1
        if calls[function.__name__] % EVERY:
            return function(view, facts, settings, now)
        before = pickle.dumps(facts)
        answers = [function(view, facts, settings, now) for _ in range(2)]
        assert answers[0] == answers[1], function.__name__
        assert pickle.dumps(facts) == before, f"{function.__name__} changes the facts"
        return answers[0]

    watched.__name__ = function.__name__
    return watched


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [("leader_dies", 0), pytest.param("lost", 1, marks=pytest.mark.slow), ("strangers/member/norm", 0)],
)
def test_asking_a_rule_changes_nothing(scenario: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def watch(entry: order.Rule | order.Check) -> order.Rule | order.Check:
        changes = {name: pure(value, calls) for name, value in msgspec.structs.asdict(entry).items() if callable(value)}
        return msgspec.structs.replace(entry, **changes)

    monkeypatch.setattr(order, "RULES", tuple(watch(entry) for entry in order.RULES))
    assert not Swarm(draw(SCENARIOS[scenario], seed)).run().violations
    assert calls["remove"] > EVERY and calls["commit"] > EVERY and calls["admit"]


def test_a_rule_that_changes_the_facts_would_be_seen() -> None:
    def forgets(view: View, facts: Facts, settings: Settings, now: float) -> None:
        facts.heartbeats.clear()
        facts.rounds.count += 1

    watched = pure(forgets, Counter({"forgets": EVERY - 1}))
    settings = Settings(stages=1, microbatches=1, steps=1)
    with pytest.raises(AssertionError, match="forgets changes the facts"):
        watched(View(1, 0, ()), Facts("a", settings, Random(1).random), settings, 0.0)


def test_every_rule_and_check_stands_in_the_list_once() -> None:
    names = [entry.propose.__name__ if isinstance(entry, Rule) else entry.find.__name__ for entry in order.RULES]
    assert len(set(names)) == len(names)


def test_the_scenarios_go_through_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transition between two phases within an epoch, but for those of runs that begin at their end, save nothing or fail."""
    seen: set[Transition | None] = set()
    successor = proposal.successor

    def watched(view: View, reasons: Any, **changes: Any) -> View:
        after = successor(view, reasons, **changes)
        seen.add(transition(view, after))
        return after

    for name in ("commit", "start", "overlap", "removal", "recovery"):
        monkeypatch.setattr(f"shoal.core.leader.rules.{name}.successor", watched)
    within = {one for one in TRANSITIONS if not one.new_epoch and one.before is not one.after}
    rare = {
        (Phase.GATHERING, Phase.SAVING),
        (Phase.GATHERING, Phase.FINISHED),
        (Phase.GATHERING, Phase.FAILED),  # tests/core/test_leader.py has it
        (Phase.TRAINING, Phase.FAILED),  # tests/core/test_divergence.py has it
        (Phase.REOPENED, Phase.FAILED),
        (Phase.TRAINING, Phase.FINISHED),  # without a last checkpoint
    }
    for seed in range(SEEDS):
        Swarm(draw(msgspec.structs.replace(SCENARIOS["killed"], staleness=1), seed)).run()
        if {(one.before, one.after) for one in within - seen} <= rare:
            return
    pytest.fail(f"not seen: {within - seen}")
