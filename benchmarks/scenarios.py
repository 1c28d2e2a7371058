"""DT-FM's five scenarios: predicted seconds per iteration of GPT3 on 64 devices, 8 stages of 8, laid out and run in four ways.

scheduled   the placement that our search finds for the paper's cost (communication.py), with its matchings and its path
random      uniform placements, devices of a pipeline in the order of the draw; the mean of 20
neighbours  ranks in the order of the machines, as Megatron lays them out: a stage's replicas on neighbouring machines, stages in order
Megatron    the same layout run as Megatron runs it: one forward, one backward; a transfer holds both of its ends up until it is
            over, with the forward and the backward of a boundary side by side; then each stage averages round a ring

The first three run as the authors' program: microbatches of one sequence flow forward through each pipeline, all wait for all, they
flow back, then each stage averages, through a sharded server. A link carries one microbatch after the other, a stage
computes one at a time. Averaging both ways: peers served one after another, as in the cost, and side by side, as on the
authors' shaped links. First with the scheduler's own batch of a million tokens and 50 TFLOP/s (14.4 ms for the forward of three
layers, three times that for a backward that recomputes), then with a batch that the paper measured, 1,024 sequences, with 24
and 40 layers, at three speeds: the paper says neither seconds nor FLOP/s.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from report import Target, parse, report
from shoal.planner.costs import communication
from shoal.planner.costs.arrays import Floats, Ints
from shoal.planner.costs.communication import GPT3_XL, Model
from shoal.planner.inputs.cluster import network, read_matrices
from shoal.planner.search import anneal

CASES = {  # scheduled against Megatron, as the paper states it: worldwide 3.8 to 4.8, the other four 1.2 to 2.5
    "datacenter": "1.2-2.5",
    "spot": "1.2-2.5",
    "universities": "1.2-2.5",
    "regional": "1.2-2.5",
    "worldwide": "3.8-4.8",
}
SEQUENCE_BYTES = GPT3_XL.activation_bytes / (1e6 / 2048 / 8)
LAYER_S = 0.0144 / 3  # of one sequence forward, at 50 TFLOP/s
DRAWS = 20


def pipelines(model: Model, groups: Ints) -> Ints:
    """(n, S): the devices of each pipeline along the cheapest path, hop by hop by the matching with the least worst link."""
    order = model.cost(groups).order
    columns = [groups[order[0]]]
    for stage in order[1:]:
        match = communication.matched(model.hop[np.ix_(columns[-1], groups[stage])])[1]
        columns.append(groups[stage][list(match)])
    return np.array(columns).T


class Load(NamedTuple):
    layers: int
    sequences: int  # of an iteration
    tflops: float  # sustained

    @property
    def microbatches(self) -> int:
        return self.sequences // 8

    @property
    def forward_s(self) -> float:
        return LAYER_S * self.layers / 8 * 50 / self.tflops

    @property
    def backward_s(self) -> float:
        return 3 * self.forward_s

    @property
    def gradient_bytes(self) -> float:
        return GPT3_XL.gradient_bytes * self.layers / 24


PUBLISHED = Load(24, 488, 50.0)
MEASURED = [Load(layers, 1024, tflops) for tflops in (25.0, 35.0, 50.0) for layers in (24, 40)]


class Net(NamedTuple):
    delay_s: Floats
    bandwidth_Bps: Floats

    def transfer_s(self, one: int, two: int) -> float:
        """Of one microbatch's boundary tensor."""
        return float(self.delay_s[one, two] + SEQUENCE_BYTES / self.bandwidth_Bps[one, two])


def flow_s(line: Ints, count: int, compute_s: float, net: Net) -> float:
    """`count` microbatches once through the devices of `line`."""
    turn = np.arange(count)
    there = np.zeros(count)  # when each is at the device
    for source, target in pairwise(line):
        done = passed(there, turn, compute_s)
        there = passed(done, turn, SEQUENCE_BYTES / net.bandwidth_Bps[source, target]) + net.delay_s[source, target]
    return float(passed(there, turn, compute_s)[-1])


def passed(there: Floats, turn: Ints, seconds: float) -> Floats:
    """When each has passed what takes so long and serves one after the other."""
    return np.asarray(np.maximum.accumulate(there - turn * seconds) + (turn + 1) * seconds)


def iteration_s(lines: Ints, load: Load, net: Net) -> tuple[float, float]:
    """With averaging one peer after another, and side by side."""
    forward = max(flow_s(line, load.microbatches, load.forward_s, net) for line in lines)
    backward = max(flow_s(line[::-1], load.microbatches, load.backward_s, net) for line in lines)
    each = 2 * communication.transfer_s(net.delay_s, net.bandwidth_Bps, load.gradient_bytes / len(lines))
    shares = [each[np.ix_(stage, stage)] for stage in lines.T]
    serial = max(float(share.sum(axis=1).max()) for share in shares)
    parallel = max(float(share.max()) for share in shares)
    return forward + backward + serial, forward + backward + parallel


def megatron_s(lines: Ints, load: Load, net: Net) -> float:
    alike = {tuple(net.transfer_s(*pair) for pair in pairwise(line)): line for line in lines}
    ring = max(ring_s(stage, load.gradient_bytes, net) for stage in lines.T)
    return max(blocking_s(line, load, net) for line in alike.values()) + ring


def ring_s(group: Ints, nbytes: float, net: Net) -> float:
    """2 (n - 1) turns, each as long as its slowest link."""
    following = np.roll(group, -1)
    turn_s = (net.delay_s[group, following] + nbytes / len(group) / net.bandwidth_Bps[group, following]).max()
    return float(2 * (len(group) - 1) * turn_s)


FORTH, BACK = 0, 1
Moved = tuple[int, int, int]  # a boundary, a direction, a microbatch


def schedule(stage: int, stages: int, count: int) -> list[tuple[str, list[Moved]]]:
    """One forward, one backward: what a stage does in order. "move" holds it up until all that it names has passed."""

    def came(k: int) -> list[Moved]:
        return [(stage - 1, FORTH, k)] if stage else []

    def went(k: int) -> list[Moved]:
        return [(stage, FORTH, k)] if stage < stages - 1 else []

    def came_back(k: int) -> list[Moved]:
        return [(stage, BACK, k)] if stage < stages - 1 else []

    def went_back(k: int) -> list[Moved]:
        return [(stage - 1, BACK, k)] if stage else []

    first = min(stages - stage - 1, count)
    acts: list[tuple[str, list[Moved]]] = []
    for k in range(first):
        acts += [("move", came(k)), ("forward", []), ("move", went(k))]
    if count > first:
        acts.append(("move", came(first)))
    for k in range(count - first):
        more = came(first + k + 1) if k < count - first - 1 else []
        acts += [("forward", []), ("move", went(first + k) + came_back(k)), ("backward", [])]
        acts.append(("move", went_back(k) + more))
    for k in range(count - first, count):
        acts += [("move", came_back(k)), ("backward", []), ("move", went_back(k))]
    return acts


def blocking_s(line: Ints, load: Load, net: Net) -> float:
    """A pipeline by that schedule. A transfer begins when both ends have come to it, and both wait for its end."""
    stages = len(line)
    seconds = [net.transfer_s(*pair) for pair in pairwise(line)]
    compute_s = {"forward": load.forward_s, "backward": load.backward_s}
    todo = [schedule(stage, stages, load.microbatches) for stage in range(stages)]
    at, now = [0] * stages, [0.0] * stages
    posted: dict[Moved, dict[int, float]] = {}

    def over(moved: Moved) -> float | None:
        ends = posted[moved]
        return max(ends.values()) + seconds[moved[0]] if len(ends) == 2 else None

    while any(at[stage] < len(todo[stage]) for stage in range(stages)):
        before = list(at)
        for stage in range(stages):
            while at[stage] < len(todo[stage]):
                act, moves = todo[stage][at[stage]]
                for moved in moves:
                    posted.setdefault(moved, {}).setdefault(stage, now[stage])
                ends = [over(moved) for moved in moves]
                if any(end is None for end in ends):
                    break
                now[stage] = max([now[stage] + compute_s.get(act, 0.0), *(end for end in ends if end is not None)])
                at[stage] += 1
        assert at != before, "the schedule waits for itself"
    return max(now)


def measured() -> dict[str, list[list[float]]]:
    """Megatron over scheduled, averaging side by side, and random over scheduled: by scenario, for each of MEASURED."""
    found: dict[str, list[list[float]]] = {}
    for name in CASES:
        net, model, best = scheduled(name)
        rng = np.random.default_rng(0)
        draws = [rng.permutation(64).reshape(8, 8) for _ in range(DRAWS)]
        found[name] = []
        for load in MEASURED:
            ours = iteration_s(pipelines(model, best), load, net)[1]
            other = megatron_s(np.arange(64).reshape(8, 8).T, load, net)
            drawn = float(np.mean([iteration_s(draw.T, load, net)[1] for draw in draws]))
            found[name].append([round(other / ours, 2), round(drawn / ours, 2)])
    return found


def scheduled(name: str) -> tuple[Net, Model, Ints]:
    delay_s, bandwidth_Bps, _ = read_matrices(network(name))
    model = Model(delay_s, bandwidth_Bps, 8, GPT3_XL)
    return Net(delay_s, bandwidth_Bps), model, np.array(anneal.anneal(model, np.random.default_rng(0), 5000).groups)


def main() -> None:
    asked = parse(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    setting: dict[str, object] = {"devices": 64, "stages": 8, "evaluations": 5000, "batch": PUBLISHED.sequences}
    worst = 0.0
    centre: tuple[float, ...] | None = None
    plain = np.arange(64).reshape(8, 8)
    print("seconds per iteration: serial averaging / parallel averaging; cost of communication alone in brackets")
    for name, claimed in CASES.items():
        net, model, best = scheduled(name)
        rng = np.random.default_rng(0)
        draws = [rng.permutation(64).reshape(8, 8) for _ in range(DRAWS)]
        ours = iteration_s(pipelines(model, best), PUBLISHED, net)
        found: dict[str, tuple[float, ...]] = {
            "scheduled": ours,
            "random": tuple(np.mean([iteration_s(draw.T, PUBLISHED, net) for draw in draws], axis=0)),
            "neighbours": iteration_s(plain.T, PUBLISHED, net),
            "Megatron": (megatron_s(plain.T, PUBLISHED, net),) * 2,
        }
        centre = centre or found["Megatron"]
        ratios = {
            f"{other} / scheduled": [round(float(a / b), 2) for a, b in zip(found[other], ours, strict=True)]
            for other in ("random", "neighbours", "Megatron")
        }
        ratios["scheduled / Megatron in the data centre"] = [round(a / b, 2) for a, b in zip(ours, centre, strict=True)]
        told = ", ".join(f"{layout} {serial:.1f} / {parallel:.1f}" for layout, (serial, parallel) in found.items())
        print(f"{name:<13} {told} [{model.cost(best).total_s:.1f} and {model.cost(plain).total_s:.1f}]")
        print(f"{'':<13} {ratios}; paper: Megatron {claimed}" + ("; random up to 2.7" if name == "worldwide" else ""))
        setting[name] = {layout: [round(value, 2) for value in pair] for layout, pair in found.items()} | ratios
        if name == "worldwide":
            worst = found["Megatron"][1] / ours[1]
    print("1,024 sequences, parallel averaging: Megatron / scheduled (random / scheduled)")
    for name, values in measured().items():
        told = (
            f"{load.layers} layers at {load.tflops:.0f} TFLOP/s {ratio} ({drawn})"
            for load, (ratio, drawn) in zip(MEASURED, values, strict=True)
        )
        print(f"{name:<13} " + ", ".join(told), flush=True)
        setting[f"{name}, 1024 sequences"] = values
    setting["paper"] = CASES["worldwide"]
    unit = "x, Megatron worldwide over ours, parallel averaging"
    report("scenarios", worst, unit, Target(None, "higher"), setting, asked.record)


if __name__ == "__main__":
    main()
