"""How fast a stage trains that passes through a tenth of its memory, beside the same stage held whole, in the same run.

    python benchmarks/swapping.py [--hidden 512] [--layers 12] [--microbatches 8] [--repeats 3] [--times 10] [--device cpu]
    python benchmarks/swapping.py --modelled 35.5:25 --times 10 --layers 24 --sequence 256 --dtype bfloat16

A model of one stage runs passes of some microbatches forward and back: resident one by one, swapping one by one, and swapping
layer by layer (`backward_many`), each with as little device memory as its plan allows, or with so many times less than the training
state takes (--times). On a CPU the copies are real and do not overlap with the work, so that the ratio is a floor. The peak is measured
in a pass of its own and checked against the plan. The last line is one JSON object; its value is tokens/s layer by layer, its
target 0.85 of the resident executor's.

With --modelled TFLOPS:GB/s that executor passes the same microbatches over a device that takes time
(executor/swap/modelled.py): each group's
operations as PyTorch counts them, at so many a second, and its bytes over a link of so many a second each way; 35.5:25 is an RTX 3090
on PCIe 4 at half its peak. Then the value is the speed of that pass over the same device's when all is resident and recomputes, as a
stage of a pipeline does; `of_plain` is over one that keeps all activations instead, which computes a quarter less, so 0.75 is
about the most.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from report import at_least, parse, report
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.base import Executor, check_device
from shoal.executor.resident import Resident
from shoal.executor.streams import NoStreams
from shoal.executor.swap import memory
from shoal.executor.swap.modelled import ModelledStreams, Seconds
from shoal.executor.swap.swapping import Swapping
from shoal.model import stages
from shoal.model.cut import inputs

WANTED = 0.85  # of the resident executor's speed
TRAINING_BYTES = 16  # per parameter: fp32 parameter, two moments and gradient


def main() -> None:
    given = arguments()
    config = a_config(given)
    check_device(config)
    torch.set_num_threads(given.threads)
    draw = torch.Generator().manual_seed(0)
    shape = (config.train.microbatch, config.data.sequence + 1)
    batch = [torch.randint(0, config.model.vocab_size, shape, generator=draw) for _ in range(given.microbatches)]
    tokens = len(batch) * config.train.microbatch * config.data.sequence

    resident = Resident(stages.build(config, 0, device=given.device), config)
    swapping = within(config, int(TRAINING_BYTES * resident.length / given.times)) if given.times else smallest(config)
    if given.modelled:
        told(modelled(given, swapping, batch), swapping, batch, given.record)
        return
    passes: dict[str, Callable[[], None]] = {
        "resident": lambda: one_by_one(resident, batch),
        "swapping one by one": lambda: one_by_one(swapping, batch),
        "swapping layer by layer": lambda: layer_by_layer(swapping, batch),
    }
    speeds: dict[str, list[float]] = {name: [] for name in passes}
    for repeat in range(given.repeats + 1):  # the first one warms up
        for name, run in passes.items():
            seconds = timed(run, given.device)
            if repeat:
                speeds[name].append(tokens / seconds)
    found = {name: statistics.median(values) for name, values in speeds.items()}
    peak = measured_peak(swapping, batch, given.device)
    for name, speed in found.items():
        print(f"{name:24} {speed:10,.0f} tokens/s")
    state_bytes = TRAINING_BYTES * swapping.length
    print(f"peak {peak:,} bytes of {swapping.plan.device_bytes:,} planned; training state {state_bytes:,}")
    report(
        "swapping",
        found["swapping layer by layer"],
        "tokens/s",
        at_least(WANTED * found["resident"]),
        {
            "resident": round(found["resident"], 1),
            "device": given.device,
            "parameters": swapping.length,
            "groups": swapping.plan.count,
            "microbatches": len(batch),
            "tokens_per_microbatch": tokens // len(batch),
            "one_by_one": round(found["swapping one by one"], 1),
            "peak_bytes": peak,
            "planned_bytes": swapping.plan.device_bytes,
            "state_over_peak": round(state_bytes / peak, 2),
            "threads": given.threads,
        },
        given.record,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--times", type=float, default=0.0, help="training state over the limit; default: as the plan allows"
    )
    parser.add_argument("--modelled", metavar="TFLOPS:GB/s", help="a device that takes time, such as 35.5:25")
    return parse(parser)


def a_config(given: argparse.Namespace) -> Config:
    return Config(
        run=Run(stages=1, steps=10),
        model=Model(
            hidden_size=given.hidden,
            layers=given.layers,
            heads=given.hidden // 64,
            kv_heads=given.hidden // 64,
            intermediate_size=3 * given.hidden,
        ),
        data=Data(sequence=given.sequence),
        train=Train(batch=given.microbatch * given.microbatches, microbatch=given.microbatch, dtype=given.dtype),
        device=Device(kind=given.device, executor="swapping", memory_bytes=1),
    )


def smallest(config: Config) -> Swapping:
    """The executor with the smallest limit that its plan allows, which the refusal of a smaller one names."""
    try:
        return Swapping(stages.build(config, 0), config)
    except ValueError as error:
        found = re.search(r"try device\.memory_bytes=(\d+)", str(error))
        if found is None:
            raise
        return within(config, int(found[1]))


class Counted(NoStreams):
    """How many operations a slice takes in each group, one way."""

    def __init__(self) -> None:
        self.flops: list[int] = []
        self.counter = FlopCounterMode(display=False)

    def computed(self, group: int, back: bool) -> None:
        self.flops.append(self.counter.get_total_flops() - sum(self.flops))


def modelled(given: argparse.Namespace, swapping: Swapping, batch: list[Tensor]) -> tuple[ModelledStreams, float]:
    """One pass over that device, and the seconds that a slice's forwards take on it."""
    rate, link_Bps = (float(part) * scale for part, scale in zip(given.modelled.split(":"), (1e12, 1e9), strict=True))
    config, plan = a_config(given), swapping.plan
    device = msgspec.structs.replace(config.device, memory_bytes=plan.device_bytes)
    config = msgspec.structs.replace(config, device=device)
    streams = Counted()
    counting = Swapping(stages.build(config, 0), config, streams)
    with streams.counter:
        counting.run_many([inputs(batch[0])])
    ways = [flops / rate for flops in streams.flops]
    seconds = [
        Seconds(group.parameter_bytes / link_Bps, group.gradient_bytes / link_Bps, way, 3 * way)
        for group, way in zip(plan.groups, ways, strict=True)
    ]
    found = ModelledStreams(seconds)
    layer_by_layer(Swapping(stages.build(config, 0), config, found), batch)
    return found, sum(ways)


def told(timed: tuple[ModelledStreams, float], swapping: Swapping, batch: list[Tensor], record: bool) -> None:
    streams, way_s = timed
    slices = len(batch)
    recomputing_s, plain_s = 4 * slices * way_s, 3 * slices * way_s
    setting = {
        "parameters": swapping.length,
        "groups": swapping.plan.count,
        "microbatches": slices,
        "state_over_limit": round(TRAINING_BYTES * swapping.length / swapping.plan.device_bytes, 2),
        "limit_bytes": swapping.plan.device_bytes,
        "peak_bytes": measured_peak(swapping, batch[:1], "cpu"),
        "pass_s": round(streams.now_s, 6),
        "busy": round(streams.busy_s / streams.now_s, 4),
        "of_plain": round(plain_s / streams.now_s, 4),
    }
    speed = recomputing_s / streams.now_s
    report("swapping, modelled", speed, "of the speed of all resident", at_least(WANTED), setting, record)


def within(config: Config, limit: int) -> Swapping:
    device = msgspec.structs.replace(config.device, memory_bytes=limit)
    return Swapping(stages.build(config, 0), msgspec.structs.replace(config, device=device))


def one_by_one(executor: Executor, batch: list[Tensor]) -> None:
    for tokens in batch:
        executor.backward(inputs(tokens), None, tokens)
    executor.zero()


def layer_by_layer(executor: Swapping, batch: list[Tensor]) -> None:
    executor.backward_many([inputs(tokens) for tokens in batch], [None] * len(batch), batch)
    executor.zero()


def timed(run: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured_peak(executor: Swapping, batch: list[Tensor], device: str) -> int:
    with memory.MemoryMeter(device) as watch:
        executor.backward_batch(batch)
    executor.zero()
    return executor.resident_bytes + watch.peak


if __name__ == "__main__":
    main()
