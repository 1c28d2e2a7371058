"""What replicas of a stage must agree on has the same bits with every vector unit and number of threads: child processes compute it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.backends import cpu

ROOT = Path(__file__).resolve().parents[2]
UNITS = {"default": "generic", "avx2": "haswell", "avx512": "skylake-avx512"}  # what torch may use, and numba
ORDER = list(UNITS)


def environments() -> list[tuple[str, int]]:
    best = cpu.get_cpu_capability().lower()
    units = ORDER[: ORDER.index(best) + 1] if best in ORDER else ORDER[:1]
    return [(unit, threads) for unit in units for threads in (1, 2)]


@functools.cache
def hashes(unit: str, threads: int) -> dict[str, str]:
    plainest = {
        "NUMBA_CPU_FEATURES": "",
        "MKL_CBWR": "COMPATIBLE",
    }  # the latter has matrix products of MKL's plainest code
    compiled = {"NUMBA_CPU_NAME": UNITS[unit]} | (plainest if unit == "default" else {})
    result = subprocess.run(
        [sys.executable, "tests/same_bits.py", str(threads)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "ATEN_CPU_CAPABILITY": unit, **compiled},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(line.split() for line in result.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "threads"), environments()[1:])
def test_what_replicas_agree_on_has_the_same_bits(unit: str, threads: int) -> None:
    ours = hashes(*environments()[0])
    assert len(ours) == 17 and hashes(unit, threads) == ours
