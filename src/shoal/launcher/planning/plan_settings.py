"""A plan as settings: of the run, and of each local peer. For `shoal run --plan PLAN`.

A plan's seats are taken by the local peers in their order; peers elsewhere take theirs with `shoal join INVITE device.machine=NAME`.
With `--cluster FILE` each local peer also gets the lines and links of its machine, modelled, and, where the executor is emulated
and device.emulated_s = 0, the seconds and sizes that the plan predicts for it: a rehearsal of the plan on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from shoal import codec
from shoal import config as configuration
from shoal.config import Config
from shoal.model import remote
from shoal.planner.inputs import cluster as clusters
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy.plan import Plan
from shoal.runtime.records.account import CommittedStep

HOSTS = 250  # of one 127.0.X.0/24
Tree = dict[str, dict[str, Any]]


def load(path: str | None, settings: Sequence[str], plan: Plan, where: str) -> Config:
    """The run's configuration with what the plan decides; ValueError for a plan of another model or run."""
    whole = ["run.stages=1", "run.peers=1", "run.layers=[]", "run.stage_seconds=[]"]  # its model, whatever its cut was
    given = remote.local(configuration.load(path, [*settings, *whole]))
    refuse_other_model(plan, given, where)
    if given.run.inflight != "auto":  # whoever names a number keeps it
        plan = msgspec.structs.replace(plan, inflight=0)
    return remote.local(configuration.load(path, [*settings, *decided(plan, where), *as_long(plan, given)]))


def as_long(plan: Plan, given: Config) -> list[str]:
    """Settings that keep the run as long, and its checkpoints as far apart, when the plan has other local steps: a step of the
    run is all that lead to one averaging."""
    now = given.train.local_steps
    if plan.local_steps in (0, now):
        return []
    steps, every = (math.ceil(count * now / plan.local_steps) for count in (given.run.steps, given.checkpoint.every))
    return [f"run.steps={steps}", f"checkpoint.every={every}"]


def decided(plan: Plan, where: str) -> list[str]:
    """What a plan decides, as settings: stages, blocks, peers, seats, routes and the expected costs."""
    if not plan.stages:
        raise ValueError(
            f"{where}: the plan has no stages; make one with `shoal plan CONFIG --cluster FILE --out {where}`"
        )
    seconds = [stage.microbatch_s for stage in plan.stages]
    known = seconds if min(seconds) > 0 else []
    settings = [
        f"run.stages={len(plan.stages)}",
        f"run.layers={[stage.end - stage.first for stage in plan.stages]}",
        f"run.peers={len(plan.seats)}",
        f"run.stage_seconds={known}",
        f"run.placement={_toml(plan.seats)}",
        f"run.line_rates={list(plan.line_rates)}",
        f"run.routes={[[list(turns) for turns in directions] for directions in plan.routes]}",
    ]
    settings += [f"train.microbatch={plan.microbatch}"] if plan.microbatch else []
    settings += [f"run.inflight={plan.inflight}"] if plan.inflight else []
    settings += [f"train.local_steps={plan.local_steps}"] if plan.local_steps else []
    travel = {"activations": plan.activations, "gradients": plan.gradients, "averaging": plan.averaging}
    return settings + [f"network.{what}={how}" for what, how in travel.items() if how]


def refuse_other_model(plan: Plan, config: Config, where: str) -> None:
    if config.device.executor == "emulated":
        return  # has no blocks
    if not config.model.path and plan.layers != config.model.layers:
        raise ValueError(
            f"{where} is for a model of {plan.layers} blocks; model.layers = {config.model.layers}; plan anew"
        )


def of_seat(config: Config, plan: Plan, number: int, cluster: Cluster | None) -> Config:
    """The configuration of the local peer on that seat; for a number beyond the plan's seats: the run's own."""
    names = list(plan.seats)
    if number >= len(names):
        return config
    tree = configuration.to_tree(config)
    name = tree["device"]["machine"] = names[number]
    stage = plan.stages[plan.seats[name]]
    if config.device.executor != "emulated":
        cards = plan.peers[number].cards if plan.peers else 1
        count = cards if cards > 1 else config.device.count
        shared_out = {"count": count, "executor": "resident", "checkpointing": stage.checkpointing}
        alone = {"executor": stage.executor, "kept_activations": stage.kept_activations}
        tree["device"] |= shared_out if count > 1 else shared_out | alone
    elif config.device.emulated_s == 0 and plan.peers:
        _rehearse(tree, plan, number)
    if cluster is not None:
        _shape(tree, names, number, cluster)
    return configuration.from_tree(tree)


def read_cluster(path: str, plan: Plan, config: Config) -> Cluster:
    """The machines whose lines the local peers get."""
    if config.network.transport != "tls":
        raise ValueError("--cluster models links by host, which network.transport = 'libp2p' does not know; try tls")
    cluster = clusters.read(path)
    unknown = set(plan.seats) - {device.name for device in cluster.devices}
    if unknown:
        raise ValueError(f"{path} does not have {min(unknown)}, which the plan names; plan with this cluster")
    return cluster


def against(plan: Plan, steps: tuple[CommittedStep, ...]) -> str:
    """Predicted against measured seconds per step: the median time between commits."""
    commit_times_s = [step.heard_s for step in steps]
    intervals_s = sorted(later - earlier for earlier, later in pairwise(commit_times_s))
    if plan.predicted is None or not intervals_s:
        return ""
    predicted_s, measured_s = plan.predicted.step_s, intervals_s[len(intervals_s) // 2]
    off = measured_s / predicted_s - 1
    return f"the plan predicted {predicted_s:.2f} s a step; measured {measured_s:.2f} s ({off:+.0%}), median of {len(intervals_s)}"


def _rehearse(tree: Tree, plan: Plan, number: int) -> None:
    device, peer = tree["device"], plan.peers[number]
    device["emulated_s"], device["emulated_backward_s"] = peer.forward_s, peer.backward_s
    value_bytes, sum_bytes = (
        codec.bytes_per_value(tree["network"][codec_of], 4) for codec_of in ("activations", "averaging")
    )
    device["emulated_values"] = max(1, round(plan.boundary_bytes / value_bytes))
    device["emulated_gradient"] = max(1, round(plan.stages[plan.seats[peer.name]].gradient_bytes / sum_bytes))


def _shape(tree: Tree, names: list[str], number: int, cluster: Cluster) -> None:
    """Every seat listens on its own loopback address, which identifies the link to it."""
    at = {device.name: index for index, device in enumerate(cluster.devices)}
    mine, network = at[names[number]], tree["network"]
    machine = cluster.devices[mine]
    network["host"] = host(number)
    network["delay_s"] = network["bandwidth_Bps"] = 0.0
    network["up_Bps"], network["down_Bps"] = machine.up_Bps, machine.down_Bps
    network["links"] = {
        host(other): (float(cluster.delay_s[mine, at[name]]), float(cluster.bandwidth_Bps[mine, at[name]]))
        for other, name in enumerate(names)
        if other != number
    }


def host(seat: int) -> str:
    return f"127.0.{1 + seat // HOSTS}.{2 + seat % HOSTS}"


def _toml(table: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{configuration.quoted(name)} = {value}" for name, value in table.items()) + "}"


def plan_file(directory: Path) -> Path:
    """Where a run keeps the plan that it follows."""
    return directory / "plan.json"
