"""Which data-parallel cost is right: peers served one after another (DT-FM's formula) or side by side (its own test bed)?

Six replicas of one stage average on the real runtime over modelled links, and the seconds from the first part that is cut to the
last sum that is gathered are set beside both formulas and beside what the planner plays (planner/prediction/step.py).
t(d, e, c) is delay plus
size over bandwidth of a pair, c the gradient, n the replicas:

    one after another   max over d of  sum over e of  2 t(d, e, c / n)        DT-FM, section 2
    side by side        max over d and e of           2 t(d, e, c / n)

Where the own lines are unlike, the same is measured with even owners and with owners that follow the lines (core/allreduce/layout.py).

    python benchmarks/averaging.py [--steps 6] [--only WORDS]
    python benchmarks/averaging.py --played    # the table of docs/design/2026-11-22-weighted-owners.md, by the planner alone
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from predict import CONFIG, LINES, SHAPE, WORK, link, machine, play
from report import at_most, parse, report
from shoal import trace
from shoal.core.allreduce.layout import owned
from shoal.core.messages import Cut, Do, Done, Gather
from shoal.planner.costs.communication import transfer_s
from shoal.planner.inputs import cluster
from shoal.planner.prediction import step
from shoal.planner.prediction.seats import Seats
from shoal.planner.strategy import plan
from shoal.planner.strategy.pricing import placed
from shoal.planner.strategy.problem import Problem

PEERS = 6
FAST = 100.0  # GFLOP/s: hops take next to nothing, so that everybody averages at once


def machines(line_mbit: float) -> str:
    return LINES + "".join(machine(f"m{n}", FAST, line_mbit, line_mbit) for n in range(PEERS))


def pairs(seed: int) -> str:
    """Each pair's delay and share of a long way drawn at random, as between regions of the world."""
    rng = np.random.default_rng(seed)
    text = machines(100)
    for one in range(PEERS):
        for other in range(one):
            delay_ms, mbit = rng.uniform(5, 120), np.exp(rng.uniform(np.log(0.5), np.log(4.0)))
            text += link(f"m{one}", f"m{other}", round(delay_ms, 1), round(mbit, 3))
    return text


def unlike(*lines_mbit: float) -> str:
    return LINES + "".join(machine(f"m{n}", FAST, mbit, mbit) for n, mbit in enumerate(lines_mbit))


CASES = {
    "own lines of 5 Mbit/s, wide pairs": machines(5),
    "pairs of 1 Mbit/s, own lines of 100": machines(100)
    + "".join(link(f"m{a}", f"m{b}", 40, 1) for a in range(PEERS) for b in range(a)),
    "pairs of 0.5 to 4 Mbit/s, 5 to 120 ms": pairs(0),
    "the same from another seed": pairs(1),
    "own lines: five of 10 Mbit/s, one of 5": unlike(10, 10, 10, 10, 10, 5),
    "own lines of 5 to 50 Mbit/s": unlike(5, 8, 12, 20, 32, 50),
}


PLAYED = ((200, 200, 200, 100), (200, 100, 100, 100), (*[200] * 15, 100), (*[100, 200, 400, 1000] * 4,))  # Mbit/s


def play_unlike(megabytes: float = 100.0, delay_s: float = 0.05) -> None:
    """Rounds on unlike lines of 50 ms as the planner plays them: even owners, owners by lines, and what the busiest line needs."""
    for lines in PLAYED:
        peers, own = len(lines), [mbit * 1e6 / 8 for mbit in lines]
        devices = tuple(cluster.Device(name=f"m{n}", flops=1.0, up_Bps=Bps, down_Bps=Bps) for n, Bps in enumerate(own))
        delays = np.full((peers, peers), delay_s)
        np.fill_diagonal(delays, 0.0)
        known = cluster.Cluster(devices, delays, np.full((peers, peers), 1e15))
        none = (0.0,) * peers
        even = Seats((0,) * peers, none, none, (megabytes * 1e6,), 0.0, 0.0, 1, 1)
        by_lines = step.weighted(even, known)
        played_s = [step.predict(seats, known, np.random.default_rng(0)).averaging_s for seats in (even, by_lines)]
        shares = owned(by_lines.line_rates)
        carried = [megabytes * 1e6 * (1 + (peers - 2) * share / sum(shares)) for share in shares]
        least_s = max(nbytes / Bps for nbytes, Bps in zip(carried, own, strict=True))
        print(f"{lines}: even {played_s[0]:.2f} s, by lines {played_s[1]:.2f} s, bound {least_s:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="", help="cases whose names have these words")
    parser.add_argument("--played", action="store_true", help="nothing real: unlike lines in the planner's model")
    args = parse(parser)
    if args.played:
        return play_unlike()
    told, worst = {}, 0.0
    wanted = [(name, text, way) for name, text in CASES.items() if args.only in name for way in ways(text)]
    for case, text, by_lines in wanted:
        name = f"{case}, owners by lines" if by_lines else case
        with tempfile.TemporaryDirectory() as folder:
            measured_s, (serial_s, parallel_s, played_s) = measured(Path(folder), text, args.steps, by_lines)
        told[name] = {
            "measured_s": round(measured_s, 3),
            "one_after_another_s": round(serial_s, 3),
            "side_by_side_s": round(parallel_s, 3),
            "played_s": round(played_s, 3),
        }
        worst = max(worst, abs(measured_s / played_s - 1))
        print(
            f"{name:<56} measured {measured_s:6.2f} s; one after another {serial_s:6.2f}, side by side {parallel_s:6.2f},"
            f" played {played_s:6.2f} ({measured_s / played_s - 1:+.1%})",
            flush=True,
        )
    report(
        "averaging",
        100 * worst,
        "% largest difference of measured from played averaging time",
        at_most(10),
        {"cases": told},
        args.record,
    )


def seated(known: cluster.Cluster) -> Seats:
    problem = Problem(shape=SHAPE, work=WORK, cluster=known)
    return placed(problem, (range(SHAPE.layers),), (0,) * PEERS).seats


def ways(text: str) -> tuple[bool, ...]:
    """Even owners, and where the planner would take them owners by lines."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cluster.toml").write_text(text)
        known = cluster.read(Path(folder) / "cluster.toml")
    return (False, True) if step.weighted(seated(known), known).line_rates else (False,)


def measured(there: Path, text: str, steps: int, by_lines: bool = False) -> tuple[float, tuple[float, float, float]]:
    (there / "cluster.toml").write_text(text)
    (there / "run.toml").write_text(CONFIG.format(steps=steps))
    known = cluster.read(there / "cluster.toml")
    seats = step.weighted(seated(known), known) if by_lines else seated(known)
    names, gradient_bytes = tuple(device.name for device in known.devices), seats.gradient_bytes[0]
    stage = plan.StagePlan(0, SHAPE.layers, names, microbatch_s=seats.backward_s[0], gradient_bytes=gradient_bytes)
    peers = tuple(plan.PeerPlan(name, seats.forward_s[n], seats.backward_s[n]) for n, name in enumerate(names))
    made = plan.Plan(
        SHAPE.layers, (stage,), peers=peers, boundary_bytes=seats.boundary_bytes, line_rates=seats.line_rates
    )
    play(there, made)
    spans = averagings(trace.find(there / "runs" / "predict"))
    return sorted(spans)[len(spans) // 2], formulas(known, gradient_bytes, seats)


def averagings(path: Path) -> list[float]:
    """Of every step but the first: from the first Cut asked for to the last Gather that is done."""
    found = spans(path)
    return [over - begun for begun, over in (found[at] for at in sorted(found)[1:])]


def spans(path: Path) -> dict[int, tuple[float, float]]:
    """By step: when the first Cut was asked for, of whatever round, and when the last Gather was done."""
    begun: dict[int, float] = {}
    over: dict[int, float] = {}
    doing: dict[tuple[str, str], int] = {}
    for record in trace.read(path):
        if not isinstance(record, trace.TraceRecord):
            continue
        for command in record.commands:
            if isinstance(command, Do) and isinstance(command.task, Cut):
                begun[command.task.step] = min(begun.get(command.task.step, record.time_s), record.time_s)
            if isinstance(command, Do) and isinstance(command.task, Gather):
                doing[record.peer, command.task.id] = command.task.step
        at = doing.get((record.peer, record.event.id)) if isinstance(record.event, Done) else None
        if at is not None:
            over[at] = max(over.get(at, record.time_s), record.time_s)
    return {at: (begun[at], over[at]) for at in over}


def formulas(known: cluster.Cluster, gradient_bytes: float, seats: Seats) -> tuple[float, float, float]:
    lines = [min(device.up_Bps, device.down_Bps) for device in known.devices]
    width = np.minimum(known.bandwidth_Bps, np.minimum.outer(lines, lines))
    turn_s = 2 * transfer_s(known.delay_s, width, gradient_bytes / PEERS)
    np.fill_diagonal(turn_s, 0.0)
    played_s = step.predict(seats, known, np.random.default_rng(0)).averaging_s
    return float(turn_s.sum(axis=1).max()), float(turn_s.max()), played_s


if __name__ == "__main__":
    main()
