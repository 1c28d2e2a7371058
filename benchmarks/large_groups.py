"""What a group's rows cost and save: 100 MB averaged among 16 to 64 replicas, in rows and by all with all, on simulated lines.

    python benchmarks/large_groups.py [--replicas 16,17,32,64] [--megabytes 100] [--steps 3]

Real machines, a simulated network of 200 Mbit/s and 50 ms (`sim/lines.py`), executors that compute nothing. Measured: from the first part
that is asked for to the last sum that is gathered, the median of the steps but the first; how many others a replica exchanges its
gradient with; and what leaves its uplink, at most and at least. The bound on time is as for any way of averaging:

    bound = 2 (n - 1) / n * gradient / bandwidth

Exchanges one after another add delays to it: two of all with all, four in rows.

The last line is one JSON object, about 64 replicas in rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import msgspec

from report import at_least, parse, report
from shoal.core import messages as m
from shoal.core.allreduce import layout
from shoal.sim import checkers
from shoal.sim.lines import FP32, LineRates, Wire
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm

MBIT, DELAY_S = 200, 0.05
WIDTH_Bps = MBIT * 1e6 / 8
WANTED = 0.85  # of the bound
PLAIN = Scenario(name="large groups", delay_s=(DELAY_S, DELAY_S), events=100_000_000)


class Told(msgspec.Struct, frozen=True):
    measured_s: float
    bound_s: float
    connections: int  # of one replica, at most
    sent: tuple[float, float]  # of an uplink in a round, over 2 (n - 1) / n of the gradient: least and most


def a_case(replicas: int, megabytes: float, steps: int) -> Case:
    settings = m.Settings(stages=1, microbatches=replicas, steps=steps, peers=replicas, inflight=6, save_last=False)
    wire = Wire(
        lines=(LineRates(WIDTH_Bps, WIDTH_Bps),), boundary_values=256, gradient_values=int(megabytes * 1e6 / FP32)
    )
    return Case(
        scenario=PLAIN,
        seed=1,
        settings=settings,
        peers=replicas,
        speeds=(1.0,) * replicas,
        forward_s=0.01,
        messages=Messages(),
        happenings=Happenings(),
        wire=wire,
    )


def played(replicas: int, megabytes: float, steps: int) -> Told:
    case = a_case(replicas, megabytes, steps)
    assert case.wire is not None
    begun, over, doing = dict[int, float](), dict[int, float](), dict[tuple[m.Peer, str], int]()
    met, sent = defaultdict[m.Peer, set[m.Peer]](set), defaultdict[m.Peer, int](int)

    def look(now: float, peer: m.Peer, event: m.Event, commands: list[m.Command]) -> None:
        if isinstance(event, m.Done) and (peer, event.id) in doing:
            over[doing[peer, event.id]] = now
        for command in commands:
            if isinstance(command, m.Do) and isinstance(command.task, m.Gather):
                doing[peer, command.task.id] = command.task.step
            elif isinstance(command, m.Do) and isinstance(command.task, m.Cut):
                begun.setdefault(command.task.step, now)
            elif isinstance(command, m.Send) and isinstance(command.message, m.ReduceChunk | m.GatherChunk):
                met[peer].add(command.peer)
                met[command.peer].add(peer)
                runner = swarm.nodes[peer].runner
                sent[peer] += sum(case.wire.nbytes(runner.blobs[name], 1) for name in command.blobs)

    swarm = Swarm(case, look)
    outcome = swarm.run()
    if outcome.violations or len(over) != steps:
        raise SystemExit(f"{replicas} replicas: {outcome.violations[:1] or f'{len(over)} of {steps} steps'}")
    took = sorted(over[step] - begun[step] for step in range(1, steps))
    least = 2 * (replicas - 1) / replicas * megabytes * 1e6
    ratios = [each / (steps * least) for each in sent.values()]
    return Told(
        round(took[len(took) // 2], 3),
        round(least / WIDTH_Bps, 3),
        max(map(len, met.values())),
        (round(min(ratios), 4), round(max(ratios), 4)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="16,17,32,64")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    asked = parse(parser)
    told: dict[str, dict[str, Told]] = {}
    one_row = layout.ONE_ROW
    for replicas in map(int, asked.replicas.split(",")):
        ways = {"rows": one_row, "all with all": replicas} if replicas > one_row else {"all with all": replicas}
        for way, most in ways.items():
            layout.ONE_ROW = checkers.ALL_MEET = most
            one = told.setdefault(str(replicas), {})[way] = played(replicas, asked.megabytes, asked.steps)
            print(
                f"{replicas:3} replicas, {way:12}: {one.measured_s:6.2f} s, bound {one.bound_s:5.2f} s"
                f" ({one.bound_s / one.measured_s:.1%}), {one.connections} connections each,"
                f" uplinks {one.sent[0]} to {one.sent[1]} of the least",
                flush=True,
            )
    last = told[asked.replicas.split(",")[-1]]
    one = last.get("rows") or last["all with all"]
    rate, bound = asked.megabytes / one.measured_s, asked.megabytes / one.bound_s
    setting = {
        "megabytes": asked.megabytes,
        "Mbit_per_s": MBIT,
        "delay_ms": 1000 * DELAY_S,
        "groups": msgspec.to_builtins(told),
    }
    setting["bound"] = round(bound, 2)
    target = at_least(WANTED * bound)
    report("large groups", rate, "MB of gradient averaged per second", target, setting, asked.record)


if __name__ == "__main__":
    main()
