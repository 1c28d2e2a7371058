"""The aggregated forecast against the simulator of every message, on fleets drawn from seeds.

    python benchmarks/forecast_check.py [--fleets 60] [--steps 60] [--plays 3] [--shifts 4] [--calm] [--aggregated]

A fleet has 4 to 16 peers, 1 to 4 stages, speeds within a factor of 2, lines of 2 to 50 MB/s, one delay of 2 to 120 ms, and in two of three
fleets deaths and returns at given moments, which spare a replica of every stage. sim/ plays it with every message and the machines of core;
forecast/ gets the same seconds, bytes and moments, and of the simulator only the constants that a real run would measure: what the
tasks of a round take, how soon a death is noticed, what a join takes beside its download. Compared are the seconds from the beginning
to the last commit. Both are simulated.

With --plays N each fleet is played N times with every message, with other delays of messages and the same deaths and returns, and the
forecast is compared with the median. How far each play is from the median of the others stands beside it: a message that comes later can
make a leader move another peer, and no forecast can be nearer to one play than that.

The model was mended by seeds 0 to 29; the figures of the others are held out. --aggregated: sums over stages instead of played steps, as
large fleets have them. The last line is one JSON object: the median of the held-out fleets, 2 % its target.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np

from report import at_most, parse, report
from shoal.core.messages import Add, Apply, Cut, Fetch, Gather, Settings
from shoal.forecasting.churn import Presence
from shoal.forecasting.forecaster import Run
from shoal.forecasting.job import Job, Patience
from shoal.forecasting.machines import grouped
from shoal.forecasting.models.choice import corrected
from shoal.forecasting.models.played import Played
from shoal.forecasting.models.step_time import MEAN_LATE, StepModel
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.prediction.seats import Seats
from shoal.sim.lines import FP32, STATE, TOKENS, LineRates, Wire
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm
from shoal.sim.tasks.pace import SECONDS
from shoal.sim.tasks.storage import CHUNKS

WORST_PERCENT, MEDIAN_PERCENT = 5.0, 2.0
BACKWARD, HEARTBEAT_S = 2.0, 0.5
DETECTION_S, ENTRY_S = 2.2, 1.2  # what the even ones of the fleets seen take on average, without delays of messages
ROUND_S = sum(SECONDS[kind] for kind in (Fetch, Cut, Add, Gather, Apply))
SAVE_EVERY = 4  # steps
MOST_EVENTS = 1_000_000  # of a play; usual ones have some 100,000
SEEN = 30  # fleets that the model was mended by
Changes = list[tuple[float, int, bool]]  # seconds, peer, joins


def between(low: float, high: float, rng: Random) -> float:
    return float(low * (high / low) ** rng.random())


def drawn(seed: int, steps: int) -> tuple[SeatedCase, float]:
    """A fleet, and its links' delay."""
    rng = Random(f"forecast/{seed}")
    stages = rng.randint(1, 4)
    peers = rng.randint(max(4, 2 * stages), 16)
    ups = [between(2e6, 5e7, rng) for _ in range(peers)]
    middle_Bps, forward_s, delay_s = sorted(ups)[peers // 2], between(0.1, 0.6, rng), between(0.002, 0.12, rng)
    stage_of = tuple(peer % stages for peer in range(peers))
    settings = Settings(
        stages=stages,
        microbatches=rng.randint(2 * peers, 6 * peers),
        steps=steps,
        peers=peers,
        inflight=rng.choice((2, 4)),
        save_every=SAVE_EVERY,
        home=stages == 1,
        save_last=False,
        heartbeat_s=HEARTBEAT_S,
        heartbeat_timeout_s=8 * HEARTBEAT_S,
        seats=tuple(sorted(stage_of)),
    )
    speeds = tuple(2 ** rng.uniform(-0.5, 0.5) for _ in range(peers))
    # As a plan says it: of the slowest replica; a last stage runs no forward of its own
    hop_s = [max(speeds[stage::stages]) * forward_s * (BACKWARD + (stage < stages - 1)) for stage in range(stages)]
    settings = msgspec.structs.replace(settings, stage_seconds=tuple(hop_s))
    case = SeatedCase(
        stage_of=stage_of,
        scenario=Scenario(
            name="fleet",
            delay_s=(delay_s, delay_s),
            backward=BACKWARD,
            finish_s=1e6,
            progress_s=1e5,
            events=MOST_EVENTS,
        ),
        seed=seed,
        settings=settings,
        peers=peers,
        speeds=speeds,
        forward_s=forward_s,
        messages=Messages(),
        happenings=Happenings(),
        wire=Wire(
            lines=tuple(LineRates(up, up * between(1, 4, rng)) for up in ups),
            boundary_values=int(middle_Bps * forward_s * between(0.05, 1.0, rng) / FP32),
            gradient_values=int(middle_Bps * between(0.05, 3.0, rng) / FP32),
        ),
    )
    return case, delay_s


def job_of(case: SeatedCase, delay_s: float) -> Job:
    assert case.wire is not None
    settings, wire, peers = case.settings, case.wire, case.peers
    devices = tuple(
        Device(name=f"p{n}", flops=1 / speed, up_Bps=line.up_Bps, down_Bps=line.down_Bps)
        for n, (speed, line) in enumerate(zip(case.speeds, wire.lines, strict=True))
    )
    machines = grouped(Cluster(devices, np.full((peers, peers), delay_s * MEAN_LATE), np.full((peers, peers), 1e12)))
    forward = tuple(case.forward_s * speed for speed in case.speeds)
    backward = tuple(BACKWARD * seconds for seconds in forward)
    values, stages = wire.gradient_values, settings.stages
    tables = [np.empty((len(machines.kinds), stages)) for _ in range(2)]
    for table, seconds in zip(tables, (forward, backward), strict=True):
        for slot, kind in enumerate(machines.kind_of):
            table[kind, :] = seconds[slot]
    seats = Seats(
        case.stage_of,
        forward,
        backward,
        (float(FP32 * values),) * stages,
        float(FP32 * wire.boundary_values),
        float(TOKENS),
        settings.microbatches,
        settings.inflight,
    )
    return Job(
        machines=machines,
        stage_of=case.stage_of,
        forward_s=tables[0],
        backward_s=tables[1],
        seats=seats,
        state_bytes=(float(STATE * FP32 * values),) * stages,
        tokens=1,
        steps=settings.steps,
        save_every=SAVE_EVERY,
        patience=Patience(HEARTBEAT_S, 8 * HEARTBEAT_S, DETECTION_S, entry_s=ENTRY_S),
        round_s=ROUND_S,
        chunks=CHUNKS,
    )


def moments(case: Case, step_s: float) -> Changes:
    """Deaths and returns, apart by a step or more, each death of a stage with two replicas left."""
    rng = Random(f"forecast/{case.seed}/churn")
    stages, there = case.settings.stages, set(range(case.peers))
    changes: Changes = []
    now, end_s = 0.0, step_s * (case.settings.steps - 2)
    away: list[int] = []
    while case.seed % 3 and (now := now + step_s * rng.uniform(1.2, 2.5)) < end_s:
        spare = [one for one in sorted(there) if sum(other % stages == one % stages for other in there) > 1]
        if away and rng.random() < 0.5:
            peer = away.pop(0)
            there.add(peer)
            changes.append((now, peer, True))
        elif len(there) > case.peers // 2 + 1 and spare:
            peer = rng.choice(spare)
            there.discard(peer)
            away.append(peer)
            changes.append((now, peer, False))
    return changes


class SeatedCase(Case, frozen=True, kw_only=True):
    """A case whose peers have the seats that a plan gives them: in the order of stages (`Seats.seated`), as forecast/ takes them to be."""

    stage_of: tuple[int, ...]  # by peer

    def settings_of(self, key: int) -> Settings:
        seated = sorted(range(self.peers), key=lambda peer: (self.stage_of[peer], peer))
        return msgspec.structs.replace(super().settings_of(key), seat=seated.index(key))


class Scheduled(Swarm):
    """A simulation in which these peers die and return, and nothing else happens."""

    changes: Changes = []

    def _begin_faults(self) -> None:
        super()._begin_faults()
        self.context.timeline.healed_s = None
        for at_s, peer, joins in self.changes:
            self.kernel.after(at_s, self._change, (peer, joins))

    def _change(self, change: tuple[int, bool]) -> None:
        peer, joins = change
        if joins:
            self.boot((peer, 1 + self.processes.booted))
        for node in list(self.nodes.values()):
            if not joins and node.process.key == peer:
                self.kill(node)


class StoppedError(Exception):
    """A fleet cannot go on by every message, so that there are no seconds to compare: a death leaves no majority while those who came
    after the deaths before still download."""


def exact_s(case: Case, changes: Changes, play: int = 0) -> float:
    """`play`: which of several with other delays of messages."""
    if play:
        renamed = msgspec.structs.replace(case.scenario, name=f"{case.scenario.name}/{play}")
        case = msgspec.structs.replace(case, scenario=renamed)
    swarm = Scheduled(case)
    swarm.changes = changes
    outcome = swarm.run()
    stops = [one for one in outcome.violations if one.checker == "progress"]
    if len(outcome.violations) > len(stops):
        raise SystemExit(f"fleet {case.seed}: {outcome.committed} steps, {outcome.violations[:2]}, {outcome.stuck}")
    if stops or outcome.committed < case.settings.steps:
        raise StoppedError(f"after {outcome.committed} steps, {stops[0].text if stops else outcome.stuck}"[:240])
    began_s = swarm.context.timeline.began_s
    assert began_s is not None
    return swarm.watch.commits.times_s[-1] - began_s


@dataclass(frozen=True)
class Compared:
    """A fleet by every message and as forecast, one of each for every shift of its changes."""

    case: Case
    changes: int
    exact_s: Sequence[float]
    forecast_s: Sequence[float]

    @property
    def percent(self) -> float:
        """By which the forecasts' sum is more."""
        return 100 * (sum(self.forecast_s) / sum(self.exact_s) - 1)

    @property
    def by_shift(self) -> list[float]:
        return [100 * (one / other - 1) for one, other in zip(self.forecast_s, self.exact_s, strict=True)]

    def __str__(self) -> str:
        settings, count = self.case.settings, len(self.exact_s)
        line = (
            f"{self.case.peers:>2} peers, {settings.stages} stages, {settings.microbatches:>2} microbatches, {self.changes} changes:"
            f" by message {sum(self.exact_s) / count:7.1f} s, forecast {sum(self.forecast_s) / count:7.1f} s, {self.percent:+.1f} %"
        )
        return line + (f" ({', '.join(f'{one:+.1f}' for one in self.by_shift)})" if count > 1 else "")


def from_others(plays: Sequence[float]) -> list[float]:
    """By how many percent each differs from the median of the others; none of one."""
    rest = [statistics.median([*plays[:at], *plays[at + 1 :]]) for at in range(len(plays))] if len(plays) > 1 else []
    return [abs(100 * (one / other - 1)) for one, other in zip(plays, rest, strict=False)]


def spread(apart: Sequence[float]) -> list[float]:
    """The median and the worst of those percents, for a report."""
    return [round(statistics.median(apart), 2), round(max(apart), 2)] if apart else []


def print_spread(apart: Sequence[float]) -> None:
    if apart:
        middle, worst = statistics.median(apart), max(apart)
        print(f"one play from the median of the others: median {middle:.1f} %, worst {worst:.1f} %")


def history_of(job: Job, changes: Changes) -> list[Presence]:
    first = [Presence(0.0, slot, True) for slot in range(len(job.stage_of))]
    return [*first, *(Presence(*one) for one in changes)]


def forecast_s(job: Job, model: StepModel, changes: Changes, steps: int) -> float:
    run = Run(job, model, history_of(job, changes), 0.0)
    horizon_s = 100.0
    while run.progress.step < steps:
        run.play(horizon_s, steps=steps)
        horizon_s *= 2
    return float(run.progress.began_s)


def compared(seed: int, args: argparse.Namespace, apart: list[float]) -> Compared:
    """Both ways, for each shift; how far single plays are from the others goes into `apart`. Raises StoppedError."""
    case, delay_s = drawn(seed, args.steps)
    job = job_of(case, delay_s)
    planned = Played(job)(np.array(job.stage_of))
    assert planned is not None
    changes = [] if args.calm else moments(case, planned.step_s)
    exact, forecast = list[float](), list[float]()
    shifts = [
        [(at + planned.step_s * shift / args.shifts, peer, joins) for at, peer, joins in changes]
        for shift in range(args.shifts if changes else 1)
    ]
    model: StepModel = Played(job)
    if args.aggregated:
        model = corrected(job, [history_of(job, moved) for moved in shifts], 0.0, args.steps * planned.step_s)
    for moved in shifts:
        plays = [exact_s(case, moved, play) for play in range(args.plays)]
        apart += from_others(plays)
        exact.append(statistics.median(plays))
        forecast.append(forecast_s(job, model, moved, args.steps))
    return Compared(case, len(changes), exact, forecast)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fleets", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plays", type=int, default=1, help="of every fleet with every message")
    parser.add_argument("--shifts", type=int, default=1, help="moments of every fleet's changes")
    parser.add_argument("--calm", action="store_true", help="nobody dies")
    parser.add_argument("--aggregated", action="store_true", help="sums over stages instead of played steps")
    args = parse(parser)
    errors: dict[int, float] = {}
    shifts: dict[int, list[float]] = {}
    apart: list[float] = []  # of single plays from the others
    for seed in range(args.first, args.first + args.fleets):
        try:
            fleet = compared(seed, args, apart)
        except StoppedError as why:
            print(f"fleet {seed:>3}: left out, it stops {why}", flush=True)
            continue
        errors[seed] = fleet.percent
        shifts[seed] = [round(one, 2) for one in fleet.by_shift]
        print(f"fleet {seed:>3}: {fleet}", flush=True)
    if not errors:
        raise SystemExit("every fleet was left out")
    parts = [[abs(error) for seed, error in errors.items() if (seed >= SEEN) == held_out] for held_out in (False, True)]
    for name, part in zip(("seen", "held out"), parts, strict=True):
        if part:
            print(f"{name}: median {statistics.median(part):.1f} %, worst {max(part):.1f} % of {len(part)} fleets")
    print_spread(apart)
    seen, held_out = parts
    report(
        "forecast_check",
        statistics.median(held_out or seen),
        "% median difference from the simulation of every message, held-out fleets",
        at_most(MEDIAN_PERCENT),
        {
            "worst_percent": round(max(held_out or seen), 2),
            "worst_target": WORST_PERCENT,
            "plays": args.plays,
            "plays_apart": spread(apart),
            "seen": [round(statistics.median(seen), 2), round(max(seen), 2)] if seen else [],
            "fleets": {str(seed): round(error, 2) for seed, error in errors.items()},
            **({"shifts": {str(seed): percents for seed, percents in shifts.items()}} if args.shifts > 1 else {}),
        },
        args.record,
    )


if __name__ == "__main__":
    main()
