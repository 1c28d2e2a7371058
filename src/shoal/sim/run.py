"""Runs many seeds of a scenario and says which failed: `python -m shoal.sim.run --scenario chaos --seeds 0:100`.

Each failure prints the command that reruns it. Wall time is measured here, outside of everything repeatable.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal import trace
from shoal.core import messages as m
from shoal.sim.scenario import Case, Scenario, draw, load
from shoal.sim.swarm import Outcome, Swarm


class Line(msgspec.Struct, frozen=True):
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
    violations: tuple[str, ...]
    rerun: str


def rerun(scenario: str, seed: int, hops: str = "drawn") -> str:
    """The command that plays this history again."""
    return f"shoal simulate {scenario} seed={seed}" + (f" --hops {hops}" if hops != "drawn" else "")


def play(name: str, scenario: Scenario, seed: int, swarm: Swarm | None = None) -> Line:
    """One seed, timed. `name` is what the user called the scenario, for the rerun line."""
    began = time.perf_counter()
    outcome: Outcome = (swarm or Swarm(draw(scenario, seed))).run()
    took_s = time.perf_counter() - began
    return Line(
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
        violations=tuple(str(violation) for violation in outcome.violations),
        rerun=rerun(name, seed, scenario.hops),
    )


def describe(line: Line) -> str:
    verdict = "ok" if line.ok else "FAILED"
    stuck = f", waits by right: {line.stuck}" if line.stuck else ""
    text = (
        f"seed {line.seed}: {verdict}, {line.committed} steps committed, {line.redone} bookings redone, "
        f"{line.virtual_s:.0f} virtual s, {line.events} events, {line.events_per_s:.0f} events/s{stuck}"
    )
    return "\n".join([text, *(f"  {violation}" for violation in line.violations[:10])])


class Tracer:
    """Writes a simulation's trace (trace.py), as a real run's recorder does."""

    def __init__(self, case: Case, path: Path) -> None:
        self._case, self._file = case, path.open("wb")
        self._known: set[m.Peer] = set()

    def __call__(self, time_s: float, peer: m.Peer, event: m.Event, commands: list[m.Command]) -> None:
        if peer not in self._known:
            self._known.add(peer)
            header = trace.Header(
                protocol=m.PROTOCOL,
                peer=peer,
                settings=self._case.settings_of(int(peer[1:].partition(".")[0])),
                seed=self._case.stream(peer),
                found=peer == "p0.0",
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
        return Swarm(case, tracer).run()
    finally:
        tracer.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.sim.run", description="Run many seeds of a scenario.")
    parser.add_argument("--scenario", default="chaos", help="a built-in name or a TOML file")
    parser.add_argument("--seeds", default="0:100", help="FIRST:END or one seed")
    parser.add_argument("--hops", default="", choices=("", "owner", "direct"), help="instead of what the seed draws")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--json", action="store_true", help="one JSON line per seed")
    parser.add_argument("--notes", action="store_true", help="print what the peers decided, with virtual times")
    parser.add_argument("--trace", default="", help="write the trace of the last seed here")
    given = parser.parse_args(arguments)
    try:
        scenario, seeds = load(given.scenario), _seeds(given.seeds)
    except ValueError as error:
        parser.error(str(error))
    if given.hops:
        scenario = msgspec.structs.replace(scenario, hops=given.hops)
    failed: list[Line] = []
    events, began = 0, time.perf_counter()
    for seed in seeds:
        case = draw(scenario, seed)
        tracer = Tracer(case, Path(given.trace)) if given.trace else None
        swarm = Swarm(case, tracer)
        if given.notes:
            swarm.notes = []
        line = play(given.scenario, scenario, seed, swarm)
        if tracer is not None:
            tracer.close()
        events += line.events
        if swarm.notes:
            print("\n".join(swarm.notes))
        if given.json:
            print(msgspec.json.encode(line).decode(), flush=True)
        elif not line.ok or len(seeds) <= 20:
            print(describe(line), flush=True)
        if not line.ok:
            failed.append(line)
            print(f"rerun: {line.rerun}", file=sys.stderr, flush=True)
            if not given.keep_going:
                break
    took_s = time.perf_counter() - began
    if not given.json:
        print(f"{len(seeds)} seeds, {len(failed)} failed, {events} events in {took_s:.1f} s: {events / took_s:.0f}/s")
    return 1 if failed else 0


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        return range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        raise ValueError(f"--seeds {text}: wanted FIRST:END, as in 0:100") from None


if __name__ == "__main__":
    sys.exit(main())
