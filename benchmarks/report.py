"""The last line of every benchmark: one JSON object that says what was measured, where, and against which bound."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def report(benchmark: str, value: float, unit: str, bound: float, setting: dict[str, Any]) -> None:
    """`bound` is what the machine or the modelled line could do at best, in the same unit; `ratio` is value / bound."""
    line = {
        "benchmark": benchmark,
        "value": _short(value),
        "unit": unit,
        "bound": _short(bound),
        "ratio": _short(value / bound) if bound else None,
        "setting": setting,
        "hardware": hardware(),
        "commit": commit(),
    }
    print(json.dumps(line), flush=True)


def hardware() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} x {model}, {platform.system()}"


def commit() -> str:
    """Of the tree this was measured in; '+' when it had changes that are not committed."""
    try:
        head = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return "unknown"
    return head.stdout.strip()


def _short(value: float) -> float:
    return float(f"{value:.4g}")
