"""Does the host's optimizer hide behind the next step? A machine alone whose layers take turns, with updates in time and one step late.

    python benchmarks/beside.py [--hidden 1024] [--layers 8] [--sequence 32] [--steps 9] [--dtype float32] [--device-s 0.5]

`shoal train` in this process, on the CPU as the device, one thread for compute and one for the optimizer, with as little device
memory as the plan allows. Sequences are short, so that the optimizer takes a good part of a step:

    in time     train.staleness = 0: compute, then clip and AdamW; how long these two take is measured in the same run
    late        train.staleness = 1: clip and AdamW on a thread of their own, while the next step is computed

Times are medians. With --device-s the passes of a step take so long on a device of their own, which needs no processor: nothing is
computed, and all the rest is real; so it is on a GPU, and on a machine that is busy.
The last line is one JSON object: what a late step takes over the larger of compute and optimizer, which it would take if one
hid the other entirely; `hidden` is the part of the smaller one that does not show. Both threads share the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from report import at_most, parse, report
from shoal.config import Checkpoint, Config, Data, Device, Model, Run, Train
from shoal.executor.swap.swapping import Swapping
from shoal.runtime.alone import Alone
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.data.dataset import open_dataset
from swapping import smallest

MOST = 1.1  # of the larger of the two


class Timed(Alone):
    """Knows how long its newest step and the optimizer in it took."""

    step_s = optimizer_s = device_s = 0.0

    def timed_step(self) -> None:
        begun = time.perf_counter()
        self.step()
        self.step_s = time.perf_counter() - begun

    def _backward(self, batch: list[torch.Tensor]) -> list[float]:
        if not self.device_s:
            return super()._backward(batch)
        time.sleep(self.device_s * len(batch) / self._count)
        return [0.0] * len(batch)

    def _apply(self, reduced: torch.Tensor, norm: float) -> None:
        begun = time.perf_counter()
        super()._apply(reduced, norm)
        self.optimizer_s = time.perf_counter() - begun


def a_config(given: argparse.Namespace, text: Path) -> Config:
    heads = given.hidden // 64
    return Config(
        run=Run(stages=1, peers=1, steps=10**6, dir=str(text.parent)),
        model=Model(
            hidden_size=given.hidden,
            layers=given.layers,
            heads=heads,
            kv_heads=heads,
            intermediate_size=3 * given.hidden,
        ),
        data=Data(source="text", path=str(text), sequence=given.sequence),
        train=Train(batch=given.microbatches, microbatch=1, dtype=given.dtype),
        device=Device(executor="swapping", memory_bytes=1, threads=1),
        checkpoint=Checkpoint(every=0, at_end=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument(
        "--device-s", type=float, default=0.0, help="of a step's passes; default: they are computed here"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "a.txt"
        text.write_bytes(bytes(32 + (i * i) % 90 for i in range(100_000)))
        config = a_config(given, text)
        torch.set_num_threads(1)
        plan = smallest(config).plan
        device = msgspec.structs.replace(config.device, memory_bytes=plan.device_bytes)
        config = msgspec.structs.replace(config, device=device)
        late_config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, staleness=1))
        dataset, store = open_dataset(config), Store(str(Path(folder) / "checkpoints"))
        in_time, late = Timed(config, dataset, store), Timed(late_config, dataset, store)
        in_time.device_s = late.device_s = given.device_s
        rows = timed(in_time, given.steps)
        late_s = statistics.median(step_s for step_s, _ in timed(late, given.steps))
        rows += timed(in_time, given.steps)  # once more, so that what else the machine did meets both
    assert isinstance(in_time.executor, Swapping)
    in_time_s, optimizer_s = map(statistics.median, zip(*rows, strict=True))
    compute_s = in_time_s - optimizer_s
    larger_s, smaller_s = max(compute_s, optimizer_s), min(compute_s, optimizer_s)
    print(f"compute {compute_s:.3f} s, optimizer {optimizer_s:.3f} s: in time {in_time_s:.3f} s, late {late_s:.3f} s")
    setting = {
        "parameters": in_time.executor.length,
        "dtype": given.dtype,
        "device_s": given.device_s,
        "tokens": given.microbatches * given.sequence,
        "compute_s": round(compute_s, 4),
        "optimizer_s": round(optimizer_s, 4),
        "in_time_s": round(in_time_s, 4),
        "late_s": round(late_s, 4),
        "hidden": round((in_time_s - late_s) / smaller_s, 3),
        "device_bytes": plan.device_bytes,
        "groups": plan.count,
    }
    report(
        "optimizer beside",
        late_s / larger_s,
        "of the larger of compute and optimizer",
        at_most(MOST),
        setting,
        given.record,
    )


def timed(alone: Timed, steps: int) -> list[tuple[float, float]]:
    """Seconds of steps and of the optimizer in them, one step right after the other; the first two are not counted."""
    found = []
    for _ in range(steps):
        alone.timed_step()
        found.append((alone.step_s, alone.optimizer_s))
    return found[2:]


if __name__ == "__main__":
    main()
