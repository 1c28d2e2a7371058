"""How fast the machines decide: microseconds per decision, and simulated events per second, at 10, 100 and 1000 peers.

    python benchmarks/decide.py [--peers 10,100] [--steps 2] [--profile]

A decision is one call of PeerMachine.handle: one event in, its commands out. A swarm is simulated and every event noted; then
fresh machines are told the same events in the same order, and nothing else is timed. The work per peer is the same at every
size: every peer books 20 microbatches a step, in groups of up to 20 replicas, so 10, 100 and 1000 peers serve 5, 5 and 50
stages. Nothing fails: it is hops, heartbeats, rounds and views, as all day long. What comes before the first commit is counted
apart: a thousand peers that join within two seconds and meet one another for the first time are not what happens all day.
Times are CPU seconds of this process, so other programs on the machine hardly count; the garbage collector rests while machines
are timed, since it would walk over all peers of the swarm where a real process holds one.

The last line is one JSON object. Its value is microseconds per decision at the largest size; its target is at most what that is if a
decision grows as the logarithm of the swarm: the smallest size's times log(largest) / log(smallest).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import pstats
import time
from collections import Counter
from random import Random
from typing import Any

from report import at_most, parse, report
from shoal.core.messages import Command, Event, Peer, Received, Settings, View
from shoal.core.peer import PeerMachine
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm

LEAST_STAGES = 5
REPLICAS = 20  # of a stage, where there are more peers than the least stages need
BOOKINGS = 20  # of each peer in a step
PASS_S = 1.0  # forwards of one microbatch through all stages


def case(peers: int, steps: int) -> Case:
    stages = max(LEAST_STAGES, peers // REPLICAS)
    settings = Settings(
        stages=stages, microbatches=BOOKINGS * peers // stages, steps=steps, peers=peers, save_last=False
    )
    return Case(
        scenario=Scenario(name="decide", start_s=1e9, finish_s=1e9, progress_s=1e9),
        seed=0,
        settings=settings,
        peers=peers,
        speeds=tuple(1.0 + 0.1 * (key % 5) for key in range(peers)),
        forward_s=PASS_S / stages,
        messages=Messages(),
        happenings=Happenings(),
    )


class History:
    """A simulated run: who was told what when. `began` of the events came before the first step was committed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.told: list[tuple[Peer, float, Event]] = []
        self.began = 0
        swarm = Swarm(case, self._note)
        self._agreed, swarm.agreed = swarm.agreed, self._look  # type: ignore[method-assign]
        before = time.process_time()
        outcome = swarm.run()
        self.spent_s = time.process_time() - before
        assert not outcome.violations, outcome.violations[0]
        assert outcome.committed == case.settings.steps, outcome

    def _note(self, time_s: float, peer: Peer, event: Event, commands: list[Command]) -> None:
        self.told.append((peer, time_s, event))

    def _look(self, peer: Peer, view: View) -> None:
        if view.last is not None and not self.began:
            self.began = len(self.told)
        self._agreed(peer, view)

    def machines(self) -> dict[Peer, PeerMachine]:
        case = self.case
        names = dict.fromkeys(peer for peer, _, _ in self.told)
        return {
            name: PeerMachine(name, case.settings, Random(case.stream(name)), found=name == "p0.0") for name in names
        }


def measure(peers: int, steps: int) -> tuple[dict[str, float], History]:
    history = History(case(peers, steps))
    machines = history.machines()
    gc.collect()
    gc.disable()
    first_s = tell(machines, history.told[: history.began])
    steps_s = tell(machines, history.told[history.began :])
    gc.enable()
    events = len(history.told) - history.began
    return {
        "us_per_decision": round(1e6 * steps_s / events, 2),
        "simulated_events_per_s": round(len(history.told) / history.spent_s),
        "events": events,
        "first_step_us_per_decision": round(1e6 * first_s / history.began, 2),
        "first_step_events": history.began,
    }, history


def tell(machines: dict[Peer, PeerMachine], events: list[tuple[Peer, float, Event]]) -> float:
    began = time.process_time()
    for peer, time_s, event in events:
        machines[peer].handle(event, time_s)
    return time.process_time() - began


def explain(history: History) -> None:
    """Which functions, and which kinds of events, the steps spend their time with."""
    machines = history.machines()
    tell(machines, history.told[: history.began])
    profile = cProfile.Profile()
    spent_ns: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for peer, time_s, event in history.told[history.began :]:
        kind = type(event.message if isinstance(event, Received) else event).__name__
        handle = machines[peer].handle
        began = time.perf_counter_ns()
        profile.enable()
        handle(event, time_s)
        profile.disable()
        spent_ns[kind] += time.perf_counter_ns() - began
        count[kind] += 1
    whole = spent_ns.total()
    for kind, spent in spent_ns.most_common(8):
        print(
            f"  {kind:10} {100 * spent / whole:5.1f} %  {count[kind]:8} x {spent / 1000 / count[kind]:7.1f} us (profiled)"
        )
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="10,100,1000")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="say where the largest size's time goes")
    asked = parse(parser)
    sizes = sorted(int(size) for size in asked.peers.split(","))
    results: dict[str, Any] = {"steps": asked.steps}
    for peers in sizes:
        results[f"{peers}_peers"], history = measure(peers, asked.steps)
        print(f"{peers} peers:", results[f"{peers}_peers"], flush=True)
    if asked.profile:
        explain(history)
    first, last = (results[f"{size}_peers"]["us_per_decision"] for size in (sizes[0], sizes[-1]))
    most = first * math.log(sizes[-1]) / math.log(sizes[0])
    report("decide", last, "us per decision", at_most(most), results, asked.record)


if __name__ == "__main__":
    main()
