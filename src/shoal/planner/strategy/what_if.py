"""`shoal plan --what-if TEXT`: the same problem with other lines, machines or numbers of microbatches."""

from __future__ import annotations

import msgspec

from shoal import units
from shoal.planner.inputs import cluster
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy.problem import Problem

QUANTITIES = ("bandwidth", "delay", "speed", "memory", "peers", "inflight", "microbatches")


def what_if(problem: Problem, text: str) -> Problem:
    """The problem with changes such as "bandwidth=500 Mbit/s, delay=2x, peers=64"."""
    for change in text.split(","):
        name, sign, value = (word.strip() for word in change.partition("="))
        if not sign or name not in QUANTITIES:
            raise ValueError(
                f"--what-if: {change.strip()!r} is no change; bandwidth, delay, speed, memory, peers, inflight or"
                ' microbatches = a value or a factor, such as "bandwidth=500 Mbit/s, peers=2x"'
            )
        try:
            problem = _changed(problem, name, value)
        except ValueError as error:
            raise ValueError(f"--what-if {name}: {error}") from None
    return problem


def _changed(problem: Problem, name: str, value: str) -> Problem:
    factor = float(value[:-1]) if value.endswith("x") else None
    if factor is not None and not factor > 0:
        raise ValueError(f"{value!r} must be above 0")
    if name in ("peers", "inflight", "microbatches"):
        return _with_count(problem, name, value, factor)
    change = {"bandwidth": _bandwidth, "delay": _delay, "speed": _speed, "memory": _memory}[name]
    return msgspec.structs.replace(problem, cluster=change(problem.cluster, value, factor))


def _with_count(problem: Problem, name: str, value: str, factor: float | None) -> Problem:
    current = len(problem.cluster.devices) if name == "peers" else getattr(problem.work, name)
    count = round(current * factor) if factor is not None else int(value)
    if count < 1:
        raise ValueError(f"{count} must be at least 1")
    if name == "peers":
        return msgspec.structs.replace(problem, cluster=problem.cluster.of_size(count))
    return msgspec.structs.replace(problem, work=msgspec.structs.replace(problem.work, **{name: count}))


def _bandwidth(machines: Cluster, value: str, factor: float | None) -> Cluster:
    return machines.scaled(bandwidth=factor) if factor else machines.with_lines(bandwidth_Bps=_above(value, "_Bps"))


def _delay(machines: Cluster, value: str, factor: float | None) -> Cluster:
    return machines.scaled(delay=factor) if factor else machines.with_lines(delay_s=units.parse(value, "_s"))


def _speed(machines: Cluster, value: str, factor: float | None) -> Cluster:
    devices = (
        msgspec.structs.replace(device, flops=device.flops * factor if factor else cluster.flops(value))
        for device in machines.devices
    )
    return msgspec.structs.replace(machines, devices=tuple(devices))


def _memory(machines: Cluster, value: str, factor: float | None) -> Cluster:
    size_bytes = 0.0 if factor else _above(value, "_bytes")
    devices = (
        msgspec.structs.replace(device, memory_bytes=device.memory_bytes * factor if factor else size_bytes)
        for device in machines.devices
    )
    return msgspec.structs.replace(machines, devices=tuple(devices))


def _above(text: str, ending: str) -> float:
    value = units.parse(text, ending)
    if value <= 0:
        raise ValueError(f"{text!r} must be above 0")
    return value
