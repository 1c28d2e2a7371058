"""What more or faster machines would give: `--what-if` and `--sensitivity`, by the search that made the plan for the machines at hand.

Machines that are at least as many, fast, large and near can do whatever those at hand can, so the plan for them is no slower than the
plan at hand: the search begins with that plan as well, once with what it has chosen (sizes, codecs, local steps) and once with all
that may be chosen, and keeps it with its prediction where nothing better turns up.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.strategy.choices import chosen, tokens_per_s
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem


class Decide(Protocol):
    """The search that made the plan, with its budget, seed and freedoms. `known`: a plan that is possible for the problem."""

    def __call__(self, given: Problem, known: Plan | None = None, /) -> Plan: ...


def decide_from(problem: Problem, plan: Plan, changed: Problem, decide: Decide) -> Plan:
    """The plan for the changed problem; no slower than `plan`, which `decide` made for `problem`, when the change only relaxes it."""
    if not relaxes(problem, changed):
        return decide(changed)
    alike = chosen(changed, plan)
    others = [decide(changed, plan)] + ([decide(alike, plan)] if alike != changed else [])
    best = max(others, key=tokens_per_s)
    if tokens_per_s(best) >= tokens_per_s(plan):
        return best
    known = {*plan.seats, *plan.left_out}
    more = (device.name for device in changed.cluster.devices if device.name not in known)
    return msgspec.structs.replace(plan, left_out=(*plan.left_out, *more))


def relaxes(problem: Problem, changed: Problem) -> bool:
    """Is everything that the changed problem asks the same, and its machines at least as many, fast, large and near?"""
    work = msgspec.structs.replace(changed.work, inflight=problem.work.inflight)
    alike = msgspec.structs.replace(changed, cluster=problem.cluster, work=work) == problem
    fixed = bool(problem.work.inflight) == bool(changed.work.inflight)
    return (
        alike and fixed and changed.work.inflight >= problem.work.inflight and _covers(problem.cluster, changed.cluster)
    )


def _covers(cluster: Cluster, other: Cluster) -> bool:
    at = {device.name: index for index, device in enumerate(other.devices)}
    if any(device.name not in at for device in cluster.devices):
        return False
    indices = [at[device.name] for device in cluster.devices]
    chosen = other.chosen(indices)
    off = ~np.eye(len(indices), dtype=bool)
    worse = (chosen.delay_s > cluster.delay_s) | (chosen.bandwidth_Bps < cluster.bandwidth_Bps)
    pairs = zip(cluster.devices, chosen.devices, strict=True)
    return not worse[off].any() and all(_at_least(device, other_device) for device, other_device in pairs)


def _at_least(device: Device, other: Device) -> bool:
    unlimited = ("memory_bytes", "up_Bps", "down_Bps")  # where it is 0
    return all(
        now >= before if before and now else not now
        for before, now in ((getattr(device, name), getattr(other, name)) for name in unlimited)
    ) and all(getattr(other, name) >= getattr(device, name) for name in ("flops", "host_memory_bytes", "host_Bps"))


def sensitivities(problem: Problem, plan: Plan, decide: Decide) -> list[tuple[str, Plan]]:
    """What doubling each resource would give: its name and the plan that `decide`, which made `plan`, makes then; the fastest first."""
    cluster, work = problem.cluster, problem.work
    replace = msgspec.structs.replace
    changes = {
        "bandwidth x2": replace(problem, cluster=cluster.scaled(bandwidth=2)),
        "delay / 2": replace(problem, cluster=cluster.scaled(delay=0.5)),
        "memory x2": replace(problem, cluster=cluster.scaled(memory=2)),
        "peers x2": replace(problem, cluster=cluster.of_size(2 * len(cluster.devices))),
    }
    if work.inflight:
        changes["inflight x2"] = replace(problem, work=replace(work, inflight=2 * work.inflight))
    if not problem.emulated_s:
        changes["speed x2"] = replace(problem, cluster=cluster.scaled(flops=2))
    rows = [(name, decide_from(problem, plan, changed, decide)) for name, changed in changes.items()]
    return sorted(rows, key=lambda row: (-tokens_per_s(row[1]), row[0]))
