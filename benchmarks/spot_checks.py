"""By how much do honest hops differ from machine to machine? What an audit has to tolerate.

    python benchmarks/spot_checks.py [--steps 60]

A Llama of four stages is trained for some steps, then processes of other vector units and numbers of threads compute the same hops from
the same bytes: the output of each stage, the gradient of its input and that of its weights.
`tf32`: with every factor of a matrix product rounded
to the 10 bits of TF32, as cards do with device.tf32. Printed of each: the largest distance from the first machine (the norm of the
difference over the norm), as they are and through each code; and that of small lies. The last line is one JSON object: the largest distance
of float32 without TF32. Weight gradients are not encoded here; `parts`: by how much what a replica brings into a round differs from the
sum of its gradients, through each code of averaging with its error feedback, from one step to the next.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from report import Target, parse, report
from shoal import config as configuration
from shoal.config import Config
from shoal.executor import create
from shoal.executor.base import Executor, prepare_thread
from shoal.executor.resident import Resident
from shoal.runtime.tasks import coding

STAGES = 4
CODES = ("none", "bf16", "int8", "int4")
MODEL = (
    "model.hidden_size=256 model.layers=8 model.heads=8 model.kv_heads=8 model.intermediate_size=768 data.sequence=128 "
    f"run.stages={STAGES} run.peers={STAGES} train.batch=8 train.microbatch=8 train.learning_rate=1e-3 train.warmup=5"
).split()


def distance(own: Tensor, theirs: Tensor) -> float:
    """Norm of the difference, as a share of the norm of `own`."""
    return float((theirs.double() - own.double()).norm() / own.double().norm())


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
MACHINES = {  # dtype -> name -> capability, threads
    "float32": {"default": ("default", 1), "avx2": ("avx2", 1), "avx512": ("avx512", 2), "tf32": ("avx2", 1)},
    "bfloat16": {"default": ("default", 1), "avx2": ("avx2", 1), "avx512": ("avx512", 2)},
}


LIBRARIES = {  # Intel's and oneDNN's own choices
    "default": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {},
}


class Tf32(TorchDispatchMode):
    """Every factor of a matrix product is rounded to 10 bits of mantissa."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            args = tuple(_rounded(one) if isinstance(one, Tensor) else one for one in args)
        return func(*args, **(kwargs or {}))


def _rounded(values: Tensor) -> Tensor:
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def config_of(dtype: str, threads: int) -> Config:
    return configuration.load(None, [*MODEL, f"train.dtype={dtype}", f"device.threads={threads}", "device.kind=cpu"])


def trained(dtype: str, steps: int) -> dict[str, Any]:
    """States of all stages after so many steps on text, and one microbatch's boundary tensors."""
    config = config_of(dtype, 2)
    prepare_thread(config)
    executors = [create(config, stage) for stage in range(STAGES)]
    text = torch.frombuffer(bytearray(Path(__file__).with_name("liars.py").read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    for step in range(steps + 1):
        starts = torch.randint(0, len(text) - 129, (8,), generator=generator)
        tokens = torch.stack([text[start : start + 129] for start in starts])
        xs, grads = passed(executors, tokens)
        if step < steps:
            for executor in executors:
                norm = float(torch.stack([one.sum.norm() for one in executors]).norm())
                executor.apply(executor.contribution(), norm, step)
            for executor in executors:
                executor.zero(step + 1)
    states = [{name: value.clone() for name, value in one.state().items()} for one in executors]
    return {"states": states, "tokens": tokens, "xs": xs, "grads": grads}


def passed(executors: list[Executor], tokens: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """Input and gradient of the output of each stage."""
    xs = [tokens[:, :-1].contiguous()]
    for executor in executors[:-1]:
        xs.append(executor.forward(xs[-1]).detach())
    grads: list[Tensor | None] = [None] * STAGES
    for stage in reversed(range(STAGES)):
        grad, _ = executors[stage].backward(xs[stage], grads[stage], tokens if stage == STAGES - 1 else None)
        if stage:
            grads[stage - 1] = grad
    return xs, grads


def hops(path: Path, dtype: str, threads: int, tf32: bool) -> dict[str, Tensor]:
    """The result of every hop, as this process computes it."""
    given, config = torch.load(path, weights_only=True), config_of(dtype, threads)
    prepare_thread(config)
    results = {}
    for stage in range(STAGES):
        executor = create(config, stage)
        assert isinstance(executor, Resident)
        executor.load_state(given["states"][stage])
        x, tokens = given["xs"][stage], given["tokens"] if stage == STAGES - 1 else None
        into = torch.zeros_like(executor.sum)
        with Tf32() if tf32 else torch.enable_grad():
            made = executor.recompute(x, given["grads"][stage], tokens, into)
        found = {"output": made.output, "gradient": made.gradient, "weights": into}
        results |= {f"{what} {stage}": value for what, value in found.items() if value is not None}
    return results


def parts(states: dict[str, Any], steps: int = 20) -> dict[str, float]:
    """For each code: the largest distance of a part from the sum of gradients that it was made of, as owners decode it."""
    config, most = config_of("float32", 2), dict.fromkeys(CODES, 0.0)
    generator = torch.Generator().manual_seed(2)
    for stage in range(STAGES):
        executor = create(config, stage)
        executor.load_state(states["states"][stage])
        x, grad = states["xs"][stage], states["grads"][stage]
        executor.backward(x, grad, states["tokens"] if stage == STAGES - 1 else None)
        whole = executor.contribution()
        for code in CODES:
            averaging = coding.Averaging(configuration.load(None, [*MODEL, f"network.averaging={code}"]))
            for step in range(steps):
                noise = torch.randn(len(whole), generator=generator) * whole.norm() / len(whole) ** 0.5
                total = (whole + noise) * (1.0 - 0.5 * step / steps)  # as gradients change: others, and smaller
                bounds, outs = (0, len(whole) // 2, len(whole)), ("a", "b")
                held = averaging.parts(total.clone(), bounds, outs)
                sent = torch.cat([coding.plain(one) for one in held])
                averaging.applied(averaging.left())
                most[code] = max(most[code], distance(total, sent))
    return most


def measured(dtype: str, steps: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        states = trained(dtype, steps)
        torch.save(states, Path(folder) / "given.pt")
        if dtype == "float32":
            rows.append({"parts": parts(states)})
            print("parts", rows[-1]["parts"], flush=True)
        first: dict[str, Tensor] = {}
        for name, (capability, threads) in MACHINES[dtype].items():
            out = Path(folder) / f"{name}.pt"
            words = ["--child", folder, str(out), dtype, str(threads), name]
            unit = {"ATEN_CPU_CAPABILITY": capability, **LIBRARIES[capability]}
            subprocess.run([sys.executable, __file__, *words], env={**os.environ, **unit}, check=True)
            results = torch.load(out, weights_only=True)
            if not first:
                first = results
                rows += [shown(dtype, f"a lie of {size:.1%}", first, lied(first, size)) for size in (0.01, 0.05)]
            else:
                rows.append(shown(dtype, f"{name}, {threads} threads", first, results))
    return rows


def lied(results: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    """Noise of that share of the norm added."""
    torch.manual_seed(0)
    return {name: (y + size * y.float().std() * torch.randn(y.shape)).to(y.dtype) for name, y in results.items()}


def shown(dtype: str, what: str, first: dict[str, Tensor], results: dict[str, Tensor]) -> dict[str, Any]:
    row: dict[str, Any] = {"dtype": dtype, "machine": what}
    for code in CODES:
        pairs = [
            (coding.plain(coding.packed(of[name], code)) for of in (first, results))
            for name in first
            if "weights" not in name
        ]
        row[code] = max(distance(*pair) for pair in pairs)
    row["weights"] = max(distance(first[name], results[name]) for name in first if "weights" in name)
    print(f"{dtype:9} {what:20} " + " ".join(f"{code} {row[code]:.1e}" for code in (*CODES, "weights")), flush=True)
    return row


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        folder, out, dtype, threads, name = sys.argv[2:]
        torch.save(hops(Path(folder) / "given.pt", dtype, int(threads), name == "tf32"), out)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of training before the hops are compared")
    given = parse(parser)
    rows = [row for dtype in MACHINES for row in measured(dtype, given.steps)]
    honest = [row for row in rows if row.get("dtype") == "float32" and row["machine"].startswith("avx")]
    largest = max(row[code] for row in honest for code in CODES)
    report("distance of hops", largest, "of the norm", Target(0.01, "lower"), {"rows": rows}, given.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
