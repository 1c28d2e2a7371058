"""How fast a GPU trains a model that it cannot hold: layers that pass through a limit, beside PyTorch's and DeepSpeed's offload.

    python benchmarks/swap_gpu.py [--shapes 7b 14b] [--limits "12 GiB" "24 GiB"] [--systems shoal fsdp2 deepspeed resident]

For every shape and limit a process of its own, in which PyTorch's allocator refuses what passes the limit, makes steps of C
microbatches of one sequence, forward and back, then the optimizer on the host. C = 0 takes as many as hide the loads:
ceil(T* / sequence), with T* of ATOM's formula from the matrix product rate and the link that were measured first. A model for
which the host's memory is too small loses layers until it fits: a layer's work and bytes are the same, and how many there were is
told. Reported:

    tokens/s        of passes, and of steps with the optimizer
    utilisation     4 forwards of every block and 3 of the head (ATOM's convention) over a pass's time, of the measured matmul rate
    overlap         share of the time of copies between host and device during which a kernel ran (torch.profiler); beside it what
                    this machine reaches with one large copy each way beside products of matrices
    card            share of a pass in which a kernel ran, and in which neither a kernel nor a copy did: more than a little of the
                    latter says that the host is too slow to start kernels
    peak            of the allocator, allocated and reserved, against the limit

`resident` is the same model without a limit, with as many layers as the device holds. A system that is not installed, or does not
fit, says so in its line. Without a CUDA device there is nothing to measure; `--device cpu --shapes tiny` runs the same code on the
CPU, to test it. The last line is one JSON object: tokens/s of Shoal's first case;
`utilisation` of a case is its share of a device that does nothing but those products.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.launcher import devices

os.environ.update(devices.allocator(os.environ))  # before torch is imported

import torch
from torch import Tensor

from report import Target, parse, report
from shoal import units
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor import fit
from shoal.executor.probe import device_name, link_Bps, memory_bytes
from shoal.executor.resident import Resident
from shoal.executor.swap import memory
from shoal.executor.swap.swapping import Swapping
from shoal.model import analysis, stages
from shoal.model.cut import inputs
from shoal.planner.inputs.profile import Profile

SHAPES = {  # of published models: Llama 2 7B, Qwen2.5 14B
    "7b": Model(hidden_size=4096, layers=32, heads=32, kv_heads=32, intermediate_size=11008, vocab_size=32000),
    "14b": Model(hidden_size=5120, layers=48, heads=40, kv_heads=8, intermediate_size=13824, vocab_size=152064),
    "tiny": Model(hidden_size=64, layers=4, heads=2, kv_heads=2, intermediate_size=96, vocab_size=256),
}
SYSTEMS = ("shoal", "fsdp2", "deepspeed", "resident")
PASS_FORWARDS, HEAD_FORWARDS = 4, 3  # forward, recompute, and two in backward; the head is not recomputed
BASELINE_BYTES = 18  # host bytes per parameter of either baseline: fp32 value, two moments, gradient, a 2-byte copy
MATMUL = {"cuda": 8192, "cpu": 256}
WARM_UP = 1  # steps that are not counted


class Case(msgspec.Struct, frozen=True):
    """What one process measures."""

    system: str
    shape: str
    limit_bytes: int
    microbatches: int
    sequence: int
    steps: int
    device: str
    moments: str
    layers: int = 0  # at most; 0: all


class Found(msgspec.Struct, frozen=True):
    """What it found, or why it did not."""

    why_not: str = ""
    layers: int = 0
    parameters: int = 0
    groups: int = 0
    tokens: int = 0  # of a step
    pass_s: float = 0.0
    optimizer_s: float = 0.0
    peak_bytes: int | None = None  # None: not measured on this device
    reserved_bytes: int | None = None
    planned_bytes: int = 0
    overlap: float | None = None
    kernels: float | None = None  # share of the pass in which one ran
    idle: float | None = None  # share in which neither a kernel nor a copy ran


class Machine(msgspec.Struct, frozen=True):
    """What the device sustains."""

    name: str
    matmul_flops: float  # per second
    link_Bps: float
    overlap: float | None = None  # of one large copy each way beside products


# ----------------------------------------------------------------------------------------------------------- the whole


def main() -> None:
    given = arguments()
    if given.case:
        print(msgspec.json.encode(measured(msgspec.json.decode(given.case, type=Case))).decode(), flush=True)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        print("PyTorch finds no CUDA device here, and this benchmark measures one: nothing was measured")
        return
    device = torch.device(given.device)
    most = copies_beside_products() if given.device == "cuda" else None
    machine = Machine(device_name(device), matmul_flops(given.device), link_Bps(device), most)
    rates = f"{machine.matmul_flops / 1e12:.1f} TFLOP/s of bf16 products, {machine.link_Bps / 1e9:.1f} GB/s to the host"
    print(f"{machine.name}: {rates}, large copies overlapped with products {share(most)}")
    told: list[dict[str, Any]] = []
    for shape in given.shapes:
        profile = analysis.count(a_config(Case("shoal", shape, 0, 1, given.sequence, 1, given.device, given.moments)))
        count = given.microbatches or microbatches(profile, machine, given.sequence)
        for limit in given.limits:
            for system in given.systems:
                limit_bytes = int(units.parse(limit, "_bytes"))
                what = (system, shape, limit_bytes, count, given.sequence, given.steps)
                case = Case(*what, given.device, given.moments, given.layers)
                found = apart(case)
                told.append(line(case, found, profile, machine))
                print(words(told[-1]), flush=True)
    first = next((one for one in told if one["system"] == "shoal" and "tokens_per_s" in one), None)
    if first is None:
        print("no case of Shoal's could be measured")
        return
    setting = {
        "device": machine.name,
        "link_GBps": round(machine.link_Bps / 1e9, 1),
        "torch": str(torch.__version__),
        "cases": told,
    }
    unit = f"tokens/s, {first['shape']} in {first['limit']}"
    report("swapping on a GPU", first["tokens_per_s"], unit, Target(None, "higher"), setting, given.record)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["7b", "14b"])
    parser.add_argument("--limits", nargs="+", default=["12 GiB", "24 GiB"], help="of device memory")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS[:3]))
    parser.add_argument("--microbatches", type=int, default=0, help="C; 0: as many as hide the loads")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument(
        "--layers", type=int, default=0, help="of a shape at most; 0: all of those for which the host has room"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--moments", choices=("float32", "8bit"), default="float32", help="of Shoal's optimizer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)  # one case in this process, as JSON
    return parse(parser)


def apart(case: Case) -> Found:
    """Measured in a process of its own: what it allocates, and how it fails, is its own affair."""
    ran = subprocess.run(
        [sys.executable, __file__, "--case", msgspec.json.encode(case).decode()],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return Found(why_not=f"its process ended with {ran.returncode}")
    return msgspec.json.decode(lines[-1], type=Found)


def measured(case: Case) -> Found:
    try:
        if case.device == "cuda" and case.limit_bytes and case.system != "resident":
            memory.cap_("cuda", case.limit_bytes)
        systems = {"shoal": shoal, "fsdp2": fsdp2, "deepspeed": deepspeed, "resident": resident}
        return systems[case.system](case)
    except torch.OutOfMemoryError as error:
        return Found(why_not=f"out of device memory: {str(error).splitlines()[0]}")
    except ValueError as error:  # a limit or a host that is too small, in the words of whoever found out
        return Found(why_not=str(error))


def line(case: Case, found: Found, profile: Profile, machine: Machine) -> dict[str, Any]:
    """One row: what is told of a case."""
    told: dict[str, Any] = {"system": case.system, "shape": case.shape, "limit": units.size(case.limit_bytes)}
    if found.why_not:
        return told | {"why_not": found.why_not}
    flops = pass_flops(profile, found.layers) * case.microbatches
    return told | {
        "layers": f"{found.layers} of {profile.blocks}",
        "parameters": found.parameters,
        "groups": found.groups,
        "microbatches": case.microbatches,
        "tokens_per_s": round(found.tokens / found.pass_s, 1),
        "with_optimizer": round(found.tokens / (found.pass_s + found.optimizer_s), 1),
        "utilisation": round(flops / found.pass_s / machine.matmul_flops, 4),
        "overlap": None if found.overlap is None else round(found.overlap, 3),
        "kernels": None if found.kernels is None else round(found.kernels, 3),
        "idle": None if found.idle is None else round(found.idle, 3),
        "peak_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes,
        "planned_bytes": found.planned_bytes,
        "within_limit": case.system == "resident"
        or max(found.peak_bytes or 0, found.reserved_bytes or 0) <= case.limit_bytes,
    }


def words(told: dict[str, Any]) -> str:
    head = f"{told['system']:<10} {told['shape']:<5} {told['limit']:>9}"
    if "why_not" in told:
        return f"{head}  {told['why_not']}"
    peak = "not measured" if told["peak_bytes"] is None else units.size(told["peak_bytes"])
    above = "" if told["within_limit"] else ", ABOVE THE LIMIT"
    return (
        f"{head}  {told['layers']} layers, {told['groups']} groups, C = {told['microbatches']}: {told['tokens_per_s']:,} tokens/s,"
        f" {told['with_optimizer']:,} with the optimizer; utilisation {told['utilisation']:.3f}; copies overlapped"
        f" {share(told['overlap'])}; kernels ran {share(told['kernels'])} of the pass, nothing {share(told['idle'])}; peak {peak}{above}"
    )


def share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.0f} %"


# ------------------------------------------------------------------------------------------------------------- figures


def pass_flops(profile: Profile, layers: int) -> float:
    """Of one microbatch through so many of the model's blocks, recompute included, and its head."""
    embedding, *blocks, head = profile.parts
    return PASS_FORWARDS * sum(block.flops for block in blocks[:layers]) + HEAD_FORWARDS * (
        head.flops + embedding.flops
    )


def microbatches(profile: Profile, machine: Machine, sequence: int) -> int:
    """C = ceil(T* / sequence): as many as compute for as long as their block's bf16 parameters travel."""
    block = max(profile.parts[1:-1], key=lambda part: part.parameters)
    load_s = 2.0 * block.parameters / machine.link_Bps
    return max(1, math.ceil(load_s * machine.matmul_flops / block.flops))


Span = tuple[float, float]


def overlapped(copies: Iterable[Span], kernels: Iterable[Span]) -> float | None:
    """Share of the time that copies take during which a kernel runs; None: there were no copies."""
    moved, ran = joined(copies), joined(kernels)
    total = sum(end - start for start, end in moved)
    shared = sum(
        max(0.0, min(end, stop) - max(start, begun))
        for start, end in moved
        for begun, stop in ran
        if begun < end and stop > start
    )
    return shared / total if total else None


def joined(spans: Iterable[Span]) -> list[Span]:
    """In order, those that touch as one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def matmul_flops(device: str) -> float:
    """FLOP/s of bf16 products of large square matrices."""
    size = MATMUL[device]
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = []
    for _ in range(12):
        settle(device)
        before = time.perf_counter()
        a @ b
        settle(device)
        seconds.append(time.perf_counter() - before)
    return 2.0 * size**3 / statistics.median(seconds[2:])


def copies_beside_products() -> float | None:
    """Share of a gigabyte's copies, there and back on streams of their own, during which the card multiplies."""
    size, streams = MATMUL["cuda"], [torch.cuda.Stream() for _ in range(2)]
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    there = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in streams]
    here = [torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in streams]

    def work() -> None:
        for stream, (into, source) in zip(streams, ((there[0], here[0]), (here[1], there[1])), strict=True):
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
        for _ in range(32):
            a @ b

    work()
    torch.cuda.synchronize()
    return profiled(work)[0]


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------- systems


def a_config(case: Case) -> Config:
    model = SHAPES[case.shape]
    return Config(
        run=Run(stages=1, peers=1, steps=case.steps + WARM_UP, queue_limit=max(16, case.microbatches)),
        model=msgspec.structs.replace(model, layers=case.layers or model.layers),
        data=Data(sequence=case.sequence),
        train=Train(batch=case.microbatches, microbatch=1, dtype="bfloat16", warmup=0, moments=case.moments),
        device=Device(kind=case.device, executor="swapping", memory_bytes=case.limit_bytes, threads=0),
    )


def layers_that_fit(case: Case, fits: Callable[[Config], bool]) -> int:
    """The most layers of the shape for which the host has room. ValueError: not even one."""
    low, high = 0, min(case.layers or sys.maxsize, SHAPES[case.shape].layers)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(a_config(msgspec.structs.replace(case, layers=middle))):
            low = middle
        else:
            high = middle - 1
    if not low:
        raise ValueError(f"the host's memory is too small for one layer of {case.shape}")
    return low


def a_batch(case: Case) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    vocabulary = SHAPES[case.shape].vocab_size
    return [torch.randint(0, vocabulary, (1, case.sequence + 1), generator=draw) for _ in range(case.microbatches)]


def shoal(case: Case) -> Found:
    def fits(config: Config) -> bool:
        try:
            fit.check_host(config, 0)
        except ValueError as error:
            if "host memory" in str(error):
                return False
            raise
        return True

    layers = layers_that_fit(case, fits)
    config = a_config(msgspec.structs.replace(case, layers=layers))
    executor = Swapping(stages.build(config, 0), config)
    batch = a_batch(case)

    def step(number: int) -> tuple[float, float]:
        before = time.perf_counter()
        executor.backward_batch(batch)
        settle(case.device)
        between = time.perf_counter()
        executor.apply(executor.contribution(), 1.0, number)
        executor.zero(number + 1)
        return between - before, time.perf_counter() - between

    found = timed(case, step, lambda: executor.backward_batch(batch))
    if case.device == "cpu":  # the device's memory is the host's: counted apart, in a pass of its own
        with memory.MemoryMeter("cpu") as watch:
            executor.backward_batch(batch)
        found = msgspec.structs.replace(found, peak_bytes=executor.resident_bytes + watch.peak)
    plan = executor.plan
    return msgspec.structs.replace(
        found, layers=layers, parameters=executor.length, groups=plan.count, planned_bytes=plan.device_bytes
    )


def fsdp2(case: Case) -> Found:
    """`fully_shard` with CPUOffloadPolicy on one device: every block's parameters are fetched for each microbatch."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    layers = layers_that_fit(case, baseline_fits)
    model = baseline_model(case, layers)
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            policies: dict[str, Any] = {
                "mesh": init_device_mesh(case.device, (1,)),
                "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
                "offload_policy": CPUOffloadPolicy(pin_memory=case.device == "cuda"),
            }
            for block in model.model.layers:
                fully_shard(block, **policies)
            fully_shard(model, **policies)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

            def step(number: int) -> tuple[float, float]:
                before = time.perf_counter()
                baseline_pass(model, case, lambda loss: loss.backward())
                between = time.perf_counter()
                optimizer.step()
                optimizer.zero_grad()
                return between - before, time.perf_counter() - between

            found = timed(case, step, lambda: baseline_pass(model, case, lambda loss: loss.backward()))
        finally:
            dist.destroy_process_group()
    parameters = sum(value.numel() for value in model.parameters())
    return msgspec.structs.replace(found, layers=layers, parameters=parameters, groups=layers + 1)


def resident(case: Case) -> Found:
    """The upper bound: the same layers without any limit, as many as the device holds with their optimizer."""

    def fits(config: Config) -> bool:
        parameters = sum(value.numel() for _, value in stages.hollow(config, 0).named_parameters())
        return (
            parameters * (fit.resident_bytes(config) + 8) <= 0.8 * memory_bytes(torch.device(case.device))[0]
        )  # the rest: activations

    layers = layers_that_fit(case, fits)
    config = a_config(msgspec.structs.replace(case, layers=layers, limit_bytes=0))
    executor = Resident(stages.build(config, 0, device=case.device), config)
    batch = a_batch(case)

    def one_pass() -> None:
        for tokens in batch:
            executor.backward(inputs(tokens), None, tokens)
        settle(case.device)

    def step(number: int) -> tuple[float, float]:
        before = time.perf_counter()
        one_pass()
        between = time.perf_counter()
        executor.apply(executor.sum, 1.0, number)
        executor.zero(number + 1)
        settle(case.device)
        return between - before, time.perf_counter() - between

    found = timed(case, step, one_pass)
    return msgspec.structs.replace(found, layers=layers, parameters=executor.length, groups=1)


def deepspeed(case: Case) -> Found:
    """ZeRO-3 with parameters and optimizer on the host (DeepSpeed's CPU Adam)."""
    if case.device != "cuda":
        return Found(why_not="runs on a CUDA device only")
    if importlib.util.find_spec("deepspeed") is None:
        return Found(why_not="deepspeed is not installed")
    import deepspeed as ds

    layers = layers_that_fit(case, baseline_fits)
    model = baseline_model(case, layers)
    parameters = sum(value.numel() for value in model.parameters())
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=zero3(case))

    def step(number: int) -> tuple[float, float]:
        # engine.step does nothing between the microbatches of a step, and the optimizer after the last one.
        before = time.perf_counter()
        spent = 0.0
        for tokens in a_batch(case):
            engine.backward(baseline_loss(engine, tokens.to(case.device)))
            settle(case.device)
            between = time.perf_counter()
            engine.step()
            settle(case.device)
            spent += time.perf_counter() - between
        return time.perf_counter() - before - spent, spent

    found = timed(case, step, lambda: step(0))
    return msgspec.structs.replace(found, layers=layers, parameters=parameters, groups=layers)


def zero3(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.microbatches,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }


def baseline_fits(config: Config) -> bool:
    made = stages.hollow(config, 0)
    needed = BASELINE_BYTES * sum(value.numel() for _, value in made.named_parameters())
    return needed <= memory_bytes(torch.device("cpu"))[0]


def baseline_model(case: Case, layers: int) -> Any:
    """The whole model on the host, which recomputes every block in backward."""
    config = a_config(msgspec.structs.replace(case, layers=layers))
    model = stages.whole(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def baseline_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def baseline_pass(model: Any, case: Case, back: Callable[[Tensor], None]) -> None:
    for tokens in a_batch(case):
        back(baseline_loss(model, tokens.to(case.device)))
    settle(case.device)


# -------------------------------------------------------------------------------------------------------- how measured


def timed(case: Case, step: Callable[[int], tuple[float, float]], one_pass: Callable[[], object]) -> Found:
    """`step` gives seconds of its pass and of its optimizer; `one_pass` is made once more under the profiler."""
    for number in range(WARM_UP):
        step(number)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = [step(WARM_UP + number) for number in range(case.steps)]
    peak = reserved = overlap = kernels = idle = None
    if case.device == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        overlap, kernels, idle = profiled(one_pass)
    return Found(
        tokens=case.microbatches * case.sequence,
        pass_s=statistics.median(seconds for seconds, _ in taken),
        optimizer_s=statistics.median(seconds for _, seconds in taken),
        peak_bytes=peak,
        reserved_bytes=reserved,
        overlap=overlap,
        kernels=kernels,
        idle=idle,
    )


def profiled(one_pass: Callable[[], object]) -> tuple[float | None, float, float]:
    """Share of the copies beside which a kernel ran; shares of the pass in which one ran, and in which nothing did."""
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            one_pass()
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return shares(json.loads(path.read_text())["traceEvents"])


def shares(events: Sequence[dict[str, Any]]) -> tuple[float | None, float, float]:
    """Of a Chrome trace. See profiled."""

    def spans(wanted: Callable[[dict[str, Any]], bool]) -> list[Span]:
        return [
            (event["ts"], event["ts"] + event["dur"]) for event in events if event.get("ph") == "X" and wanted(event)
        ]

    copies = spans(
        lambda event: event.get("cat") == "gpu_memcpy" and ("HtoD" in event["name"] or "DtoH" in event["name"])
    )
    kernels = spans(lambda event: event.get("cat") == "kernel")
    whole = joined([*copies, *kernels])
    total = whole[-1][1] - whole[0][0] if whole else 0.0

    def part(found: Sequence[Span]) -> float:
        return sum(end - start for start, end in found) / total if total else 0.0

    return overlapped(copies, kernels), part(joined(kernels)), 1.0 - part(whole)


if __name__ == "__main__":
    main()
