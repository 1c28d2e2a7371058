"""Where nobody lies, no peer is convicted that no fault has touched: lost messages, slow machines and narrow lines are no crime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest

from shoal.core.leader.evictions import Dispute
from shoal.core.leader.facts import Facts
from shoal.core.leader.progress import RoundWatch
from shoal.core.leader.rules import checks
from shoal.core.messages import Peer, RoundWaits, Settings, View
from shoal.core.transfer.donor import Donor
from shoal.sim.faults.removals import Removed, WatchedSwarm
from shoal.sim.scenarios.catalogue import load
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Scenario

ONCE = (  # honest peers were convicted there, for what the words say
    (
        "slowed",
        3,
        "a part and what asked for it were lost: its owner said so once, and the leader judged after it had come",
    ),
    ("lines", 6, "the same, of twelve replicas"),
    ("counted", 6, "it waited for another's part itself, and its own report was lost"),
    ("unlike", 0, "it waited for a sum of the piece before, the others for its part of this one"),
    ("unlike", 23, "rounds in which something was lost made the usual one longer and longer"),
    ("lines", 1, "its line was full of copies of 20 MB"),
    ("unlike", 29, "of the first two that reported different parameters the leader's were believed"),
    ("many differ", 8, "the same"),
    ("unlike", 40, "two joiners waited for one another to be done with a donor's copy"),
    ("many join", 10, "the same"),
    ("unlike", 17, "it could make its sum only when its own part had come, and the others had waited for 8 s by then"),
    ("unlike", 156, "its state was copied for a joiner, for eight seconds, before it cut its gradient"),
    ("unlike", 215, "the same"),
    (
        "unlike",
        415,
        "a request to it was lost, and another 90 s later: it had got neither, said the leader, before their owners asked",
    ),
    (
        "unlike",
        468,
        "a sum was lost; it had asked for that so often that it asked again only after two seconds, and was judged by then",
    ),
    (
        "unlike",
        218,
        "a part that it had lacked came 20 ms before; it had lacked one of another piece, and been given time, once before",
    ),
    (
        "unlike_lines",
        301,
        "a line of 2 MB/s had to send half of all sums to five, and copies of them; its next parts stood behind those for a minute",
    ),
    ("fleet", 14, "it accused two that had vanished, and then one that lied"),
)


def _scenario(name: str) -> Scenario:
    """Of the catalogue, or of these two, in which it happens often. "many differ": six times a peer comes to other parameters, and reports
    are lost and late: two are often the first to report them. "many join": several peers read a donor's copies at a time."""
    unlike, replace = load("unlike"), msgspec.structs.replace
    if name == "many differ":
        return replace(
            unlike,
            peers=(4, 5),
            messages=replace(unlike.messages, drop=0.06, delay=0.3),
            happenings=replace(unlike.happenings, unlikes=6, restarts=0),
        )
    if name == "many join":
        return replace(
            unlike,
            peers=(5, 6),
            messages=replace(unlike.messages, drop=0.05),
            happenings=replace(unlike.happenings, unlikes=3, restarts=3, joiners=3),
        )
    return load(name)


def convicted(scenario: str, seed: int) -> list[Removed]:
    swarm = WatchedSwarm(draw(_scenario(scenario), seed))
    swarm.run()
    return [one for one in swarm.removed if one.convicted and not one.disturbed]


QUICK = (0, 4, 6)  # the others are longer


@pytest.mark.parametrize(
    ("scenario", "seed", "why"),
    [pytest.param(*one, marks=() if at in QUICK else pytest.mark.slow) for at, one in enumerate(ONCE)],
)
def test_no_honest_peer_is_convicted_where_one_was(scenario: str, seed: int, why: str) -> None:
    assert convicted(scenario, seed) == [], f"scenario {scenario}, seed {seed}; before: {why}"


def _judged_by_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said once counts, whatever comes."""
    hear = RoundWatch.on_waits

    def on_waits(self: RoundWatch, peer: Peer, waits: RoundWaits, now: float) -> None:
        if waits.parts or waits.sums:
            hear(self, peer, waits, now)

    monkeypatch.setattr(RoundWatch, "on_waits", on_waits)
    monkeypatch.setattr(RoundWatch, "_fresh_s", float("inf"))


def _judged_by_the_first_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage whose other replicas have not reported; HEARD_BEATS alone is no more than a usual step there."""
    look = checks.different_states

    def different_states(view: View, facts: Facts, settings: Settings, now: float) -> Iterable[Dispute]:
        facts.rounds.differing.update(dict.fromkeys(range(settings.stages), float("-inf")))
        return look(view, facts, settings, now)

    monkeypatch.setattr(checks, "different_states", different_states)


def _copy_kept_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader for whom the copy is too old still counts as one."""
    ask = Donor.on_state_request

    def on_state_request(self: Donor, *given: Any) -> Any:
        before = set(self._takers)
        commands = ask(self, *given)
        self._takers |= before
        return commands

    monkeypatch.setattr(Donor, "on_state_request", on_state_request)


@pytest.mark.parametrize(
    ("broken", "seeds"),
    [
        (_judged_by_the_first_word, (("unlike", range(40, 60)),)),
        (_judged_by_the_first_two, (("many differ", range(30, 80)),)),
        (_copy_kept_for_all, (("many join", range(10, 15)),)),
    ],
)
@pytest.mark.slow
def test_a_broken_rule_convicts_honest_peers(
    broken: Callable[[pytest.MonkeyPatch], None],
    seeds: tuple[tuple[str, Sequence[int]], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    assert any(convicted(scenario, seed) for scenario, of in seeds for seed in of)
