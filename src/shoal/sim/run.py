"""Runs many seeds of a scenario and says which failed: `python -m shoal.sim.run --scenario chaos --seeds 0:100`.

`--scenario all` plays one scenario for every way of failing, all of them at once, and days of machines that come and go, and adds up the
simulated node-hours. Each failure prints the command that reruns it. Wall time is measured here, outside of everything repeatable.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from shoal import trace
from shoal.core import messages as m
from shoal.sim.scenarios.catalogue import suite
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case, Scenario
from shoal.sim.swarm import Outcome, Swarm

PROGRESS_S = 30.0  # between lines of progress


class SeedResult(msgspec.Struct, frozen=True):
    """One seed's result, as `--json` prints it."""

    scenario: str
    seed: int
    ok: bool
    digest: str
    committed: int
    redone: int
    virtual_s: float
    events: int
    events_per_s: float
    stuck: str
    node_hours: float
    struck: dict[str, int]
    hostile: tuple[str, ...]  # who, and what they did
    wronged: tuple[str, ...]
    evicted: dict[str, list[float]]
    violations: tuple[str, ...]
    rerun: str


def rerun(scenario: str, seed: int, staleness: int = -1) -> str:
    """The command that plays this history again."""
    option = f" --staleness {staleness}" if staleness >= 0 else ""
    return f"shoal simulate {scenario} seed={seed}{option}"


def play(name: str, scenario: Scenario, seed: int, swarm: Swarm | None = None) -> SeedResult:
    """One seed, timed. `name` is what the user called the scenario, for the rerun line."""
    began = time.perf_counter()
    swarm = swarm or Swarm(draw(scenario, seed))
    outcome: Outcome = swarm.run()
    took_s = time.perf_counter() - began
    return SeedResult(
        scenario=scenario.name,
        seed=seed,
        ok=not outcome.violations,
        digest=outcome.digest,
        committed=outcome.committed,
        redone=outcome.redone,
        virtual_s=round(outcome.virtual_s, 3),
        events=outcome.events,
        events_per_s=round(outcome.events / took_s),
        stuck=outcome.stuck,
        node_hours=round(outcome.node_hours, 4),
        struck=outcome.struck,
        hostile=tuple(map(str, swarm.case.hostile)),
        wronged=outcome.wronged,
        evicted=outcome.evicted,
        violations=tuple(str(violation) for violation in outcome.violations),
        rerun=rerun(name, seed, scenario.staleness),
    )


def describe(line: SeedResult) -> str:
    verdict = "ok" if line.ok else "FAILED"
    stuck = f", waits by right: {line.stuck}" if line.stuck else ""
    text = (
        f"seed {line.seed}: {verdict}, {line.committed} steps committed, {line.redone} bookings redone, "
        f"{line.virtual_s:.0f} virtual s, {line.events} events, {line.events_per_s:.0f} events/s{stuck}"
    )
    lines = [f"  hostile: {', '.join(line.hostile)}"] if line.hostile else []
    lines += [
        f"  evicted: {who} after {', '.join(f'{one:.0f}' for one in after)} s" for who, after in line.evicted.items()
    ]
    lines += [f"  wronged: {who}" for who in line.wronged]
    return "\n".join([text, *lines, *(f"  {violation}" for violation in line.violations[:10])])


class Tracer:
    """Writes a simulation's trace (trace.py), as a real run's recorder does."""

    def __init__(self, case: Case, path: Path) -> None:
        self._case, self._file = case, path.open("wb")
        self._known: set[m.Peer] = set()
        self.swarm: Swarm | None = None  # knows who founded the run again after a wipe

    def __call__(self, time_s: float, peer: m.Peer, event: m.Event, commands: list[m.Command]) -> None:
        if peer not in self._known:
            self._known.add(peer)
            header = trace.Header(
                protocol=m.PROTOCOL,
                peer=peer,
                settings=(self.swarm.context if self.swarm else self._case).settings_of(
                    int(peer[1:].partition(".")[0])
                ),
                seed=self._case.stream(peer),
                found=peer in {f"p{key}.{life}" for key, life in self.swarm.processes.founders}
                if self.swarm
                else peer == "p0.0",
            )
            self._file.write(trace.line(header))
        self._file.write(trace.line_of(time_s, peer, event, commands))

    def close(self) -> None:
        self._file.close()


def record(scenario: Scenario, seed: int, path: Path) -> Outcome:
    """Run one seed and write its trace."""
    case = draw(scenario, seed)
    tracer = Tracer(case, path)
    try:
        tracer.swarm = Swarm(case, tracer)
        return tracer.swarm.run()
    finally:
        tracer.close()


class Tally:
    """What has been played so far, and a line of progress every now and then."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.seeds = self.events = 0
        self.node_hours = 0.0
        self.wronged = 0  # honest peers evicted or sent to begin anew, beside hostile ones
        self.evicted_s: list[float] = []  # after how long each hostile one was
        self.failed: list[SeedResult] = []
        self._began = self._reported = time.perf_counter()

    def add(self, line: SeedResult) -> None:
        self.seeds += 1
        self.events += line.events
        self.node_hours += line.node_hours
        self.wronged += len(line.wronged)
        self.evicted_s += [one for after in line.evicted.values() for one in after]
        if not line.ok:
            self.failed.append(line)
        if time.perf_counter() - self._reported > PROGRESS_S:
            self._reported = time.perf_counter()
            print(f"{line.scenario}: {self}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        took_s = time.perf_counter() - self._began
        hostile = ""
        if self.evicted_s:
            middle_s = statistics.median(self.evicted_s)
            hostile = f"hostile peers evicted {len(self.evicted_s)} times, after {middle_s:.0f} s in the median, "
        if self.evicted_s or self.wronged:
            hostile += f"honest ones {self.wronged} times, "
        return (
            f"{self.seeds} of {self.planned} seeds, {len(self.failed)} failed, {self.node_hours:.0f} node-hours, "
            f"{hostile}{self.events} events in {took_s:.1f} s: {self.events / took_s:.0f}/s"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.sim.run", description="Run many seeds of a scenario.")
    parser.add_argument("--scenario", default="chaos", help="a built-in name, a TOML file, or all")
    parser.add_argument("--seeds", default="0:100", help="FIRST:END or one seed; long scenarios take some of them")
    parser.add_argument("--staleness", default="", choices=("", "0", "1"), help="instead of what the seed draws")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--json", action="store_true", help="one JSON line per seed")
    parser.add_argument("--notes", action="store_true", help="print what the peers decided, with virtual times")
    parser.add_argument("--trace", default="", help="write the trace of the last seed here")
    parser.add_argument("--jobs", type=int, default=1, help="seeds played at once, one process each")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: at least one process plays; this machine has {os.cpu_count()} cores")
    if given.jobs > 1 and given.trace:
        parser.error("--trace writes one seed's trace; play that seed with --jobs 1")
    try:
        scenarios, seeds = suite(given.scenario), _seeds(given.seeds)
    except ValueError as error:
        parser.error(str(error))
    plan = _planned(scenarios, seeds, int(given.staleness or -1))
    many = len(scenarios) > 1
    try:
        with _players(given.jobs) as pool:
            failed = _all(given, plan, many, pool)
    except BrokenProcessPool:
        print("a process that played a seed was killed (out of memory?); try fewer --jobs", file=sys.stderr, flush=True)
        return 1
    return 1 if failed else 0


def results(scenario: str, seeds: Sequence[int], staleness: int = -1) -> Iterator[SeedResult]:
    """The result of each seed, played one after another. `staleness`: -1: as the seed draws it. ValueError: no such scenario."""
    for one, chosen in _planned(suite(scenario), seeds, staleness):
        for seed in chosen:
            yield play(scenario, one, seed)


def _planned(scenarios: Sequence[Scenario], seeds: Sequence[int], staleness: int) -> list[tuple[Scenario, list[int]]]:
    """Which seeds of each scenario are played: of several, long ones take some of them."""
    if staleness >= 0:
        scenarios = [msgspec.structs.replace(one, staleness=staleness) for one in scenarios]
    many = len(scenarios) > 1
    return [(one, [seed for seed in seeds if not many or seed % one.one_of == 0]) for one in scenarios]


def _all(
    given: argparse.Namespace, plan: list[tuple[Scenario, list[int]]], many: bool, pool: ProcessPoolExecutor | None
) -> bool:
    """Play and print; true when an invariant was broken."""
    tally = Tally(sum(len(chosen) for _, chosen in plan))
    for scenario, chosen in plan:
        before, struck = Tally(len(chosen)), dict[str, int]()
        play_all = pool.map if pool else map
        for line, notes in play_all(
            _one, itertools.repeat(given), itertools.repeat(scenario), chosen, itertools.repeat(many)
        ):
            for kind, count in line.struck.items():
                struck[kind] = struck.get(kind, 0) + count
            _show(line, notes, given.json, described=len(chosen) <= 20)
            before.add(line)
            tally.add(line)
            if not line.ok and not given.keep_going:
                break
        if many and not given.json:
            print(f"{scenario.name}: {before}{_struck(struck)}", flush=True)
        if tally.failed and not given.keep_going:
            break
    if not given.json:
        print(tally)
    return bool(tally.failed)


def _show(line: SeedResult, notes: list[str] | None, json: bool, described: bool) -> None:
    """Print one seed's result. `described`: in words, even if no invariant was broken."""
    if notes:
        print("\n".join(notes))
    if json:
        print(msgspec.json.encode(line).decode(), flush=True)
    elif not line.ok or described:
        print(describe(line), flush=True)
    if not line.ok:
        print(f"rerun: {line.rerun}", file=sys.stderr, flush=True)


@contextmanager
def _players(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that play seeds; none of them outlives this, however it ends."""
    if jobs == 1:
        yield None
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for player in multiprocessing.active_children():  # a long seed's result is not waited for
            player.terminate()


def _end_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is told once, by the parent
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _one(given: argparse.Namespace, scenario: Scenario, seed: int, many: bool) -> tuple[SeedResult, list[str] | None]:
    case = draw(scenario, seed)
    tracer = Tracer(case, Path(given.trace)) if given.trace else None
    swarm = Swarm(case, tracer)
    if tracer is not None:
        tracer.swarm = swarm
    if given.notes:
        swarm.context.notes = []
    line = play(scenario.name if many else given.scenario, scenario, seed, swarm)
    if tracer is not None:
        tracer.close()
    return line, swarm.context.notes


def _struck(struck: dict[str, int]) -> str:
    words = ", ".join(f"{count} {kind}" for kind, count in sorted(struck.items()))
    return f"; struck: {words}" if words else ""


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        return range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        raise ValueError(f"--seeds {text}: wanted FIRST:END, as in 0:100") from None


if __name__ == "__main__":
    sys.exit(main())
