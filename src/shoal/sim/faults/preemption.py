"""Reads records of spot instances that were added and removed: when, which node, and which of both.

Two public formats: lines of `milliseconds,add|remove,node` (Bamboo's), and JSON lines
`[milliseconds, "add"|"remove"|"no-op", {"nodes": [...]}]` (Parcae's). For `shoal chaos --trace` and benchmarks/rebalance.py; what is
made of a record is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec


class Change(msgspec.Struct, frozen=True):
    """`joins` false: the node was taken away."""

    at_s: float
    node: str
    joins: bool


class _Nodes(msgspec.Struct, frozen=True):
    nodes: list[str] = []


_Line = tuple[float, Literal["add", "remove", "no-op"], _Nodes]


def record_path(name: str) -> Path:
    """A record by its path, or by its name in configs/traces of this tree."""
    path = Path(name)
    beside = Path(__file__).parents[4] / "configs" / "traces" / name
    if not path.is_file() and not beside.is_file():
        raise ValueError(f"record {name!r}: neither {path.absolute()} nor {beside} is a file")
    return path if path.is_file() else beside


def read(path: str | Path) -> tuple[Change, ...]:
    """By time; of what happens at one moment, in the order of the file. ValueError names the line that makes no sense."""
    changes: list[Change] = []
    present: set[str] = set()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            changes_of_line = _json(line) if line.startswith("[") else _csv(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        for change in changes_of_line:
            if change.joins == (change.node in present):
                was = "is there already" if change.joins else "is not there"
                raise ValueError(f"{path}, line {number}: {change.node} {was}")
            (present.add if change.joins else present.discard)(change.node)
            changes.append(change)
    if not changes:
        raise ValueError(f"{path} holds no change; wanted lines such as 480000,add,node1")
    if any(a.at_s > b.at_s for a, b in pairwise(changes)):
        raise ValueError(f"{path}: its lines are not in order of time")
    return tuple(changes)


def _csv(line: str) -> list[Change]:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3 or fields[1] not in ("add", "remove") or not fields[2]:
        raise ValueError(f"{line!r}: wanted milliseconds,add|remove,node, such as 480000,add,node1")
    try:
        time_ms = float(fields[0])
    except ValueError:
        raise ValueError(f"{line!r}: {fields[0]!r} is no number of milliseconds, such as 480000,add,node1") from None
    return [Change(at_s=_seconds(time_ms), node=fields[2], joins=fields[1] == "add")]


def _json(line: str) -> list[Change]:
    time_ms, what, named = msgspec.json.decode(line, type=_Line)
    if what == "no-op":
        return []
    return [Change(at_s=_seconds(time_ms), node=node, joins=what == "add") for node in named.nodes]


def _seconds(time_ms: float) -> float:
    if not 0 <= time_ms < float("inf"):
        raise ValueError(f"{time_ms} milliseconds since the start: wanted 0 or more")
    return time_ms / 1000


def some(changes: Iterable[Change], one_of: int) -> tuple[Change, ...]:
    """The record of a smaller cluster: every `one_of`-th node, in the order in which they were first added."""
    order: dict[str, int] = {}
    kept = []
    for change in changes:
        number = order.setdefault(change.node, len(order))
        if number % one_of == 0:
            kept.append(change)
    return tuple(kept)


def most(changes: Iterable[Change]) -> int:
    """Nodes that were there at once, at most."""
    present = highest = 0
    for change in changes:
        present += 1 if change.joins else -1
        highest = max(highest, present)
    return highest
