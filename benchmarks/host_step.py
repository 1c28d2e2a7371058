"""Seconds that a step costs the host of a stage: copies, sums, norm, digests, finite checks, the optimizer.

    python benchmarks/host_step.py [--threads 1,2] [--repeats 5]

One of two replicas: the task runner's own Cut, Add, Gather and Apply for a stage of fp32 on the CPU, with the other replica's chunk as it
comes off the network. No hops. For each number of threads a process of its own, in the environment that the launcher gives a peer; each
task's times are the best of all steps. The value is the wall time of 1.75 billion parameters on 8 cores, extrapolated by Amdahl's law from
the wall times of the fewest and the most threads measured: what did not get faster by more threads is taken not to get faster by still
more. Beside it stands the time that memory alone takes, whatever the cores: the bytes that the tasks must move at the rate at which this
machine copies. Give it an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from typing import Any

from report import Target, parse, report
from shoal.launcher import devices

SETTINGS = (
    "run.stages=1",
    "run.peers=2",
    "device.kind=cpu",
    "model.hidden_size=1024",
    "model.layers=4",
    "model.heads=8",
    "model.intermediate_size=4096",
    "data.source=text",
    "data.path=unread",
)
STAGE = 1.75e9  # parameters of the target: 2 s on 8 cores
TARGET_S, CORES = 2.0, 8
# Bytes of a parameter that no code of fp32 can leave in place: Cut copies 8, Add of half of them reads and writes 6, Gather copies 8 and
# reads them for the norm and the digest (8), AdamW reads 16 and writes 12.
MOVED_BYTES = 8 + 6 + 16 + 28
COPIED_VALUES = 1 << 28  # 1 GiB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)
    given = parse(parser)
    if given.one:
        return print(json.dumps(measured(given.one, given.repeats)))
    rows: dict[str, Any] = {}
    copied: dict[str, float] = {}  # bytes read and written, GB/s
    for threads in given.threads.split(","):
        command = [sys.executable, __file__, "--one", threads, "--repeats", str(given.repeats)]
        variables = {**os.environ, "OMP_NUM_THREADS": threads}
        variables |= devices.allocator(variables)
        row = json.loads(subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout)
        copied[threads] = row.pop("copy")[0]
        rows[threads] = row
        cells = "  ".join(f"{name} {wall:.2f} ({cpu:.2f})" for name, (wall, cpu) in row.items())
        print(
            f"{threads} threads, copies {copied[threads]:.1f} GB/s, s per billion parameters (of processor time): {cells}",
            flush=True,
        )
    walls = {threads: round(sum(wall for wall, _ in row.values()), 3) for threads, row in rows.items()}
    most = max(walls, key=int)
    few = min(walls, key=int)
    parallel_s = (walls[few] - walls[most]) / (1 / int(few) - 1 / int(most)) if few != most else 0.0
    value = STAGE / 1e9 * (walls[few] - parallel_s / int(few) + parallel_s / CORES)
    memory_s = STAGE * MOVED_BYTES / max(copied.values()) / 1e9
    print(f"memory alone, at the fastest copy: {memory_s:.2f} s; extrapolated: {value:.2f} s")
    setting = {"threads": rows, "wall_s": walls, "copied_gb_s": copied, "memory_alone_s": round(memory_s, 2)}
    target = Target(TARGET_S, "lower")
    unit = f"s per step of {STAGE / 1e9} billion parameters, extrapolated to {CORES} cores"
    report("host_step", value, unit, target, setting, given.record)


def measured(threads: int, repeats: int) -> dict[str, tuple[float, float]]:
    """By task: seconds per billion parameters, and those of processor time; for "copy" GB/s of bytes read and written, twice."""
    import torch

    from shoal import config as configuration
    from shoal.core import messages as m
    from shoal.numerics import pieces
    from shoal.runtime.tasks.task_runner import TaskRunner

    runner = TaskRunner(configuration.load(None, [*SETTINGS, f"device.threads={threads}"]))
    best: dict[str, tuple[float, float]] = {}

    def carry_out(task: m.Task, length: int = 0) -> m.Result:
        answers: queue.Queue[m.Done | m.Failed] = queue.Queue()
        before = time.process_time()
        runner.submit(task, answers.put)
        answer = answers.get()
        assert isinstance(answer, m.Done), answer
        if length:
            figures = answer.seconds / length * 1e9, (time.process_time() - before) / length * 1e9
            name = type(task).__name__
            wall, cpu = best.get(name, figures)
            best[name] = min(wall, figures[0]), min(cpu, figures[1])
        return answer.result

    length = carry_out(m.Init("s/i", 0, 0)).length
    half = length // 2
    runner.put("theirs", torch.randn(half))
    runner.put("their sum", torch.randn(length - half))
    for step in range(repeats):
        names = (f"mine{step}", f"rest{step}")
        carry_out(m.Cut("s/c", step, (0, half, length), names), length)
        carry_out(m.Add("s/a", (names[0], "theirs"), f"sum{step}"), length)
        gathered = carry_out(m.Gather("s/g", step, step, (f"sum{step}", "their sum")), length)
        carry_out(m.Apply("s/y", step, step, gathered.norm_sq**0.5, False), length)
        for name in (*names, f"sum{step}"):
            runner.drop(name)
    runner.close()
    source, target = torch.zeros(COPIED_VALUES), torch.zeros(COPIED_VALUES)  # written once, so that no page is missing
    for _ in range(repeats):
        before = time.perf_counter()
        pieces.copy_(target, source)
        rate = 8 * COPIED_VALUES / (time.perf_counter() - before) / 1e9
        best["copy"] = (max(rate, best.get("copy", (0.0, 0.0))[0]),) * 2
    return {name: (round(wall, 3), round(cpu, 3)) for name, (wall, cpu) in best.items()}


if __name__ == "__main__":
    main()
