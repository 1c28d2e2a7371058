"""Each way of failing that a run must survive is a scenario, it strikes, and the run stays safe and goes on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core import messages as m
from shoal.core.names import key_of
from shoal.sim import run
from shoal.sim.faults import strikes
from shoal.sim.network import FAR_S, NEAR_S, Network, region
from shoal.sim.node import Clock
from shoal.sim.scenarios.catalogue import FAULTS, LONG, SCENARIOS, suite
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Happenings, Scenario, Strikes
from shoal.sim.swarm import HAPPEN, Swarm

SEEDS = 12  # of a scenario, in which each of its strikes must have happened
AIMED = [scenario for scenario in FAULTS if scenario.strikes != Strikes()]
LATE = {"copies", "dies_copying", "dies_averaging", "dies_saving"}  # strike in few of the seeds, or late in a run


def played(scenario: Scenario, seed: int) -> Swarm:
    swarm = Swarm(draw(scenario, seed))
    outcome = swarm.run()
    assert not outcome.violations, f"{outcome.violations[0]}\nrerun: {run.rerun(scenario.name, seed)}"
    return swarm


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, marks=pytest.mark.slow if one.name in LATE else (), id=one.name) for one in AIMED],
)
def test_what_is_aimed_strikes_and_the_run_goes_on(scenario: Scenario) -> None:
    struck: dict[str, int] = {}
    for seed in range(SEEDS):
        struck |= played(scenario, seed).context.struck
        if all(kind in struck for kind in Strikes.__struct_fields__ if getattr(scenario.strikes, kind)):
            return
    pytest.fail(f"{scenario.strikes}: only {struck} in {SEEDS} seeds")


def test_a_large_group_is_struck_in_each_of_its_exchanges() -> None:
    quick = {"stages": (1, 1), "peers": (17, 19), "steps": (4, 5), "microbatches": (19, 19), "faults_s": 15.0}
    scenario = msgspec.structs.replace(SCENARIOS["large_group"], happenings=Happenings(), **quick)
    struck = dict[str, int]()
    for seed in range(5):
        struck |= played(scenario, seed).context.struck
        if set(struck) == {"rows", "columns", "tellings"}:
            return
    pytest.fail(f"only {struck}")


@pytest.mark.slow
def test_twenty_seeds_of_large_groups() -> None:
    for seed in range(100, 120):
        played(SCENARIOS["large_group"], seed)


@pytest.mark.slow
@pytest.mark.timeout(600)  # peers that are stopped for minutes make long runs
@pytest.mark.parametrize("scenario", FAULTS, ids=lambda scenario: scenario.name)
def test_twenty_seeds_of_every_fault(scenario: Scenario) -> None:
    for seed in range(100, 120):
        played(scenario, seed)


@pytest.mark.slow
def test_hours_of_machines_that_come_and_go() -> None:
    spot = msgspec.structs.replace(LONG[0], copies=1, peers=(12, 14), stages=(4, 4), microbatches=(16, 16))
    swarm = played(spot, 0)
    assert swarm.kernel.now > 5 * 3600 and swarm.processes.booted > 40


def test_every_fault_that_is_named_is_drawn_at_least_once() -> None:
    for scenario in FAULTS:
        for seed in range(5):
            case = draw(scenario, seed)
            for limits, drawn in ((scenario.happenings, case.happenings), (scenario.strikes, case.strikes)):
                for kind in limits.__struct_fields__:
                    assert (getattr(drawn, kind) > 0) == (getattr(limits, kind) > 0), (scenario.name, seed, kind)


def test_a_suite_has_every_fault_and_the_long_ones() -> None:
    assert suite("chaos") == (SCENARIOS["chaos"],)
    names = [scenario.name for scenario in suite("all")]
    assert len(names) == len(set(names)) and {one.name for one in (*FAULTS, *LONG)} < set(names)


class Caught(Swarm):
    """Remembers what the victim had been asked to do and did not any more."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.last: dict[str, m.Event] = {}
        self.context.record = lambda time_s, peer, event, commands: self.last.__setitem__(peer, event)


def test_who_dies_applying_never_tells_that_it_applied() -> None:
    for seed in range(4):
        swarm = Caught(draw(SCENARIOS["dies_applying"], seed))
        assert not swarm.run().violations
        dead = [name for name in swarm.last if name not in swarm.nodes and name not in swarm.processes.finished]
        if swarm.context.struck.get("applying"):
            assert len(dead) >= swarm.context.struck["applying"]
            return
    pytest.fail("nobody died applying in four seeds")


@pytest.mark.slow
def test_a_wiped_run_goes_on_from_its_newest_checkpoint_and_commits_only_the_rest() -> None:
    for seed in range(24):
        swarm = played(SCENARIOS["wiped"], seed)
        if swarm.context.struck.get("wipes") and swarm.settings.first_step > 0:
            break
    else:
        pytest.fail("no seed was wiped after a checkpoint")
    view = swarm.watch.newest
    assert view is not None and view.finished
    first = swarm.settings.first_step
    assert sorted({step for _, step in swarm.watch.commits.known}) == list(range(first, swarm.settings.steps))
    assert all(node.process.incarnation > 1000 for node in swarm.liveness.veterans)


def test_links_within_a_region_are_fast_and_between_two_slow() -> None:
    case = draw(SCENARIOS["region_cut"], 1)
    network = Network(case.scenario, case.rng("network"), case.regions)
    assert region("p7.2", 3) == 1
    near = network.arrivals("p0.0", f"p{case.regions}.0", 0, 0.0)[0]
    far = network.arrivals("p0.0", "p1.0", 0, 0.0)[0]
    assert near <= 1.2 * NEAR_S[1] < FAR_S[0] <= far
    big_near = network.arrivals("p0.0", f"p{case.regions}.0", 10**7, 100.0)[0]
    assert network.arrivals("p0.0", "p1.0", 10**7, 200.0)[0] - 200.0 > big_near - 100.0 + 1.0


def test_a_region_dies_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(draw(SCENARIOS["region_dies"], 0))
    regions = swarm.case.regions
    died: list[set[str]] = []

    def looked(*arguments: Any) -> None:
        before = set(swarm.nodes)
        strikes.a_region(*arguments)
        if dead := before - set(swarm.nodes):
            died.append(dead)
            (number,) = {region(name, regions) for name in dead}
            assert not any(region(name, regions) == number for name in swarm.nodes)

    monkeypatch.setitem(HAPPEN, "regions", looked)
    assert not swarm.run().violations
    assert died


def test_a_clock_that_drifts_never_jumps_and_calls_when_it_reads_the_deadline() -> None:
    clock = Clock()
    clock.jump(7.0)
    clock.drift(1.1, 50.0)
    clock.drift(0.9, 60.0)
    assert [clock.reads(now) for now in (60.0, 70.0)] == pytest.approx([68.0, 77.0])
    assert clock.when(77.0) == pytest.approx(70.0)


def test_a_fast_clock_asks_earlier_for_its_next_call() -> None:
    """Heartbeats are sent by it, so that there are 10 % more of them."""
    sent = []
    for rate in (1.0, 1.1):
        swarm = Swarm(draw(SCENARIOS["calm"], 0))
        swarm.boot((1, 0))
        swarm.nodes["p1.0"].drift(rate)
        times: list[float] = []
        swarm.context.record = lambda time_s, *_, times=times: times.append(time_s)
        swarm.kernel.run(until=100.0, events=10**6)
        assert times[-1] == pytest.approx(100.0 * rate, rel=0.03)
        sent.append(len(times))
    assert sent[1] == pytest.approx(1.1 * sent[0], rel=0.05)


def test_what_is_sent_to_a_process_that_stands_still_for_long_is_lost() -> None:
    swarm = Swarm(draw(SCENARIOS["frozen"], 0))
    swarm.boot((1, 0))
    node, seen = swarm.nodes["p1.0"], list[m.Event]()
    swarm.context.record = lambda time_s, peer, event, commands: seen.append(event)
    words = [m.Received("p2.0", m.Dismissed(number=number)) for number in range(3)]
    node.stop()
    node.receive(words[0])
    node.deafen()
    node.receive(words[1])
    assert not seen
    node.resume()
    node.receive(words[2])
    assert [event for event in seen if isinstance(event, m.Received)] == [words[0], words[2]]


def test_two_processes_of_one_key_are_in_a_view_together() -> None:
    for seed in range(8):
        for view in played(SCENARIOS["twins"], seed).watch.views():
            keys = [key_of(one.peer) for one in view.members + view.joining]
            if max(map(keys.count, keys)) == 2:
                return
    pytest.fail("no view has two processes of one key in eight seeds")


def test_a_disk_is_full_while_a_checkpoint_is_written_and_the_last_one_is_saved_or_said_not_to_be() -> None:
    failed = 0
    for seed in range(3):
        swarm, reasons = Swarm(draw(SCENARIOS["disk_full"], seed)), list[str]()
        swarm.context.record = lambda time_s, peer, event, commands, reasons=reasons: (
            reasons.append(event.reason) if isinstance(event, m.Failed) else None
        )
        swarm.context.notes = []
        assert not swarm.run().violations
        failed += sum("no space" in reason for reason in reasons)
        last = swarm.settings.steps
        words = [note for note in swarm.context.notes if f"NOT saved at step {last}: " in note]
        assert (last in swarm.world.storage.published) is not bool(words)
    assert failed
