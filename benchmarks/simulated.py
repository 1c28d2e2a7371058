"""The simulator's lines against real processes: seconds of a step of the same run, simulated and measured.

    python benchmarks/simulated.py [--links 200:50,100:20] [--batch 48] [--steps 4] [--no-real] [a.b=c ...]

The run is configs/lab.toml as benchmarks/hops.py plays it: six processes, real TLS behind modelled lines
(transport/emulated/shaped.py), executors
that sleep, tensors of 8 MB; and the same in sim/, whose machines have the run's own settings, whose lines (sim/lines.py) are as wide and as
long, and whose hops take what the executors sleep. Both are measured from the first commit to the last. The simulation is played with
several seeds, since who is asked first is drawn; the real run once.

The last line is one JSON object: the largest difference of a measured step from the middle one simulated, in per cent; 10 is its target.
"""

from __future__ import annotations

import argparse
import sys

import hops
import overhead
from report import at_most, parse, report
from shoal import config as configuration
from shoal.codec import Travel
from shoal.config import Config
from shoal.sim.lines import LineRates, Wire
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm


def words(link: str, batch: int, steps: int, settings: list[str]) -> list[str]:
    mbit, _, ms = link.partition(":")
    return [
        f"train.batch={batch}",
        f"run.steps={steps}",
        f"device.emulated_values={overhead.VALUES}",
        f"network.bandwidth_Bps={mbit} Mbit/s",
        f"network.delay_s={ms} ms",
        *settings,
    ]


def case(config: Config, seed: int, speeds: tuple[float, ...] = ()) -> Case:
    """That run, with nothing going wrong. `speeds[i]`: how much longer peer i computes than the configuration says."""
    width, delay_s, forward_s = config.network.bandwidth_Bps, config.network.delay_s, config.device.emulated_s
    backward_s = config.device.emulated_backward_s or 2 * forward_s
    peers = config.run.peers
    return Case(
        scenario=Scenario(
            name="lab", delay_s=(delay_s, delay_s), backward=backward_s / forward_s, finish_s=1e6, progress_s=1e5
        ),
        seed=seed,
        settings=configuration.settings(config),
        peers=peers,
        speeds=speeds or (1.0,) * peers,
        forward_s=forward_s,
        messages=Messages(),
        happenings=Happenings(),
        wire=Wire(
            lines=(LineRates(width, width),) * peers,
            boundary_values=config.device.emulated_values,
            gradient_values=config.device.emulated_gradient,
            travel=Travel(config.network.activations, config.network.gradients, config.network.averaging),
        ),
    )


def simulated(played: Case) -> float:
    """Seconds of a step, after the first."""
    swarm = Swarm(played)
    outcome = swarm.run()
    if outcome.violations or outcome.committed < played.settings.steps:
        raise SystemExit(f"seed {played.seed}: {outcome.committed} steps, {outcome.violations[:3]}")
    times = swarm.watch.commits.times_s
    return (times[-1] - times[0]) / (len(times) - 1)


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--links", default="200:50,100:20", metavar="MBIT:MS,...")
    parser.add_argument("--batch", type=int, default=48, help="microbatches per step")
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-real", action="store_true", help="simulate only")
    asked = parse(parser)
    rows: dict[str, dict[str, float]] = {}
    for link in asked.links.split(","):
        chosen = words(link, asked.batch, asked.steps, asked.settings)
        config = configuration.load(overhead.LAB, chosen)
        found = [simulated(case(config, seed)) for seed in range(asked.seeds)]
        row = {"simulated_s": middle(found), "least_s": min(found), "most_s": max(found)}
        if not asked.no_real:
            row["measured_s"] = asked.batch / hops.measure(chosen, planned=False)[0]
        rows[link] = row = {name: round(value, 3) for name, value in row.items()}
        print(f"{link:>8} {row}", file=sys.stderr, flush=True)
    if not asked.no_real:
        worst = max(abs(row["measured_s"] / row["simulated_s"] - 1) for row in rows.values())
        setting = {"batch": asked.batch, "steps": asked.steps, "seeds": asked.seeds, "runs": rows}
        unit = "% largest difference of measured from simulated step time"
        report("simulated", 100 * worst, unit, at_most(10), setting, asked.record)


if __name__ == "__main__":
    main()
