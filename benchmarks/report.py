"""What a benchmark measured: the struct, its last printed line, and its row in benchmarks/results.jsonl.

A benchmark builds its parser, takes its arguments from `parse(parser)`, which adds `--record`, and ends with `report(...)`. That prints one
JSON object; with `--record` it also appends the object to `RESULTS`, from which `make results` writes docs/results.md. `report` finds the
hardware, the commit and the date by itself.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

RESULTS = Path(__file__).with_name("results.jsonl")
Direction = Literal["higher", "lower"]


class Target(NamedTuple):
    """What is asked of a value, in its unit; `direction` says which values are better. A target of None asks nothing."""

    value: float | None
    direction: Direction


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of results.jsonl."""

    name: str
    value: float
    unit: str
    target: float | None
    direction: Direction
    met: bool | None  # None: no target was set
    setting: dict[str, Any]  # the command, what it was given, and the other figures that it found
    hardware: str
    commit: str  # '+' at its end: the tree had changes that were not committed
    date: str
    note: str = ""


def at_least(value: float) -> Target:
    return Target(_short(value), "higher")


def at_most(value: float) -> Target:
    return Target(_short(value), "lower")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--record", action="store_true", help=f"append the result to benchmarks/{RESULTS.name}")
    return parser.parse_args()


def report(name: str, value: float, unit: str, target: Target, setting: dict[str, Any], record: bool) -> None:
    value = _short(value)
    measurement = Measurement(
        name=name,
        value=value,
        unit=unit,
        target=target.value,
        direction=target.direction,
        met=is_met(value, target),
        setting={"command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]), **setting},
        hardware=hardware(),
        commit=commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    print(msgspec.json.encode(measurement).decode(), flush=True)
    if record:
        append(measurement, RESULTS)


def is_met(value: float, target: Target) -> bool | None:
    if target.value is None:
        return None
    return value >= target.value if target.direction == "higher" else value <= target.value


def append(measurement: Measurement, path: Path) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(measurement) + b"\n")


def read(path: Path = RESULTS) -> list[Measurement]:
    """In the order of the file, oldest first. Raises ValueError naming the first line that is not a measurement."""
    return list(_decoded(path))


def _decoded(path: Path) -> Iterable[Measurement]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            yield msgspec.json.decode(line, type=Measurement)
        except msgspec.DecodeError as problem:
            raise ValueError(f"{path.name}, line {number}: {problem}") from None


def hardware() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} x {model}, {platform.system()}; load average {os.getloadavg()[0]:.0f}"


def commit() -> str:
    """Of the tree this was measured in; '+' when it had changes that are not committed."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        head = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return "unknown"
    return head.stdout.strip()


def _short(value: float) -> float:
    return float(f"{value:.4g}")
