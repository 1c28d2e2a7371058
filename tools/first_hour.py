"""The first hour on a card, as one command (`make gpu`): what only a GPU can show, each with the bound that it must keep.

    python tools/first_hour.py [PART ...]

Every part runs in processes of its own and prints one line: what it asks, whether that held, and the figures. Without a CUDA device a
part that can be rehearsed runs on the CPU, to test its code; the others are skipped by name. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.launcher import devices

ROOT = Path(__file__).parents[1]
TESTS = (sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout", "600")
TAIL_LINES = 30  # of a failed part's output


class Judged(NamedTuple):
    kept: bool
    figures: str


class Part(NamedTuple):
    """`judge` reads the output of a part that ended well; without it ending well is all."""

    name: str
    bound: str
    on_card: Sequence[str]
    rehearsal: Sequence[str] = ()  # on the CPU; (): there is none
    environment: dict[str, str] = {}  # on the card
    judge: Callable[[str], Judged] | None = None
    cards: int = 1  # that it needs


def last_object(output: str) -> dict[str, Any]:
    """The JSON object that a benchmark prints last."""
    return json.loads(output.strip().splitlines()[-1])  # type: ignore[no-any-return]


def judge_swapping(output: str) -> Judged:
    cases = last_object(output)["setting"]["cases"]
    rates = {(case["system"], case["limit"]): case["tokens_per_s"] for case in cases if "tokens_per_s" in case}
    figures = [f"{system} {rate:,} tokens/s in {limit}" for (system, limit), rate in rates.items()]
    figures += [f"{case['system']} not measured: {case['why_not']}" for case in cases if "why_not" in case]
    faster = all(rates[limited] >= rates.get(("fsdp2", limited[1]), 0.0) for limited in rates if limited[0] == "shoal")
    within = all(case["within_limit"] for case in cases if case["system"] == "shoal" and "within_limit" in case)
    return Judged(faster and within and any(system == "shoal" for system, _ in rates), "; ".join(figures))


def judge_codecs(output: str) -> Judged:
    setting = last_object(output)["setting"]
    card = setting["cuda"]
    if isinstance(card, str):
        return Judged(True, card)
    rates = {f"{how} {way}": row[f"{way}_GBps"] for how, row in card.items() for way in ("encode", "decode")}
    figures = ", ".join(f"{name} {rate:g} GB/s" for name, rate in rates.items())
    return Judged(min(rates.values()) >= LINK_GBps, figures)


LINK_GBps = (
    25.0  # of a card's link to its host (PCIe 4, 16 lanes): a code that is slower holds up the copy that it shortens
)
SWAP = (sys.executable, "benchmarks/swap_gpu.py")
PARTS = (
    Part(
        "identity",
        "swapping equals resident within 1e-5 in fp32 and 2e-2 in bf16; every executor keeps its contract",
        (*TESTS, "-m", "gpu or not slow", "tests/executor/test_cuda.py", "tests/contract/test_executor.py"),
        (*TESTS, "-m", "not slow and not gpu", "tests/contract/test_executor.py"),
    ),
    Part(
        "sanitizer",
        "no access to memory on another stream without a wait",
        (*TESTS, "-m", "gpu", "-k", "sums_and_parameters", "tests/executor/test_cuda.py"),
        (*TESTS, "-m", "not slow", "tests/executor/test_races.py"),  # vector clocks instead of the card's
        {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part(
        "memory",
        "peak <= plan <= limit, and the allocator refuses more",
        (*TESTS, "-m", "gpu", "-k", "limit", "tests/executor/test_cuda.py"),
    ),
    Part(
        "mixed",
        "replicas on CPU and CUDA: sums within 1e-5, and equal digests after every commit",
        (*TESTS, "-m", "gpu", "tests/runtime/test_mixed.py"),
        (*TESTS, "-m", "not gpu", "tests/runtime/test_mixed.py"),  # two replicas on the CPU
    ),
    Part(
        "run",
        "an ordinary run whose peers share the card: losses of the CPU within 1e-4, and a joiner without a card keeps its bits",
        (*TESTS, "-m", "gpu", "tests/e2e/test_card.py"),
        (*TESTS, "-m", "not gpu", "tests/e2e/test_card.py"),
    ),
    Part(
        "serving",
        "a stage on the card adds the tokens that the CPU adds, with adapters and NF4 too",
        (*TESTS, "-m", "gpu", "tests/executor/test_serving.py"),
        (*TESTS, "-m", "not slow and not gpu", "tests/executor/test_serving.py"),
    ),
    Part(
        "sharded",
        "a stage over two cards (device.count=2, NCCL): the digest of a resident replica after every update",
        (*TESTS, "-m", "gpu", "tests/executor/test_sharded.py"),
        (*TESTS, "-m", "not gpu", "-k", "resident_one", "tests/executor/test_sharded.py"),  # two processes, gloo
        cards=2,
    ),
    Part(
        "swapping",
        "not slower than FSDP2 with CPU offload in the same limit, and within it; a resident model beside it",
        (*SWAP, "--shapes", "7b", "--limits", "12 GiB", "--systems", "shoal", "fsdp2", "resident"),
        (*SWAP, *"--device cpu --shapes tiny --microbatches 2 --sequence 16 --steps 1".split(), "--limits", "1 MiB",
         "--systems", "shoal", "resident"),
        judge=judge_swapping,
    ),
    Part(
        "codecs",
        f"each code at {LINK_GBps:g} GB/s of fp32 or more, as fast as the link to the host",
        (sys.executable, "benchmarks/codecs.py"),
        (sys.executable, "benchmarks/codecs.py", "--values", "65536", "--seconds", "0.01"),
        judge=judge_codecs,
    ),
)  # fmt: skip


def run(parts: Sequence[Part], missing: str) -> int:
    """`missing`: why there is no card; '': there is one. Returns the number of parts that failed."""
    failed = 0
    for part in parts:
        command = part.rehearsal if missing else part.on_card
        too_few = not missing and part.cards > max(1, torch.cuda.device_count())
        lacking = f"it needs {part.cards} cards" if too_few else ""
        if lacking or not command:
            print(f"SKIPPED  {part.name}: {lacking or missing}. It asks: {part.bound}", flush=True)
            continue
        began = time.monotonic()
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        allocator = devices.allocator(os.environ)  # as every peer has it
        environment = {**os.environ, **allocator, "PYTHONPATH": path, **({} if missing else part.environment)}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        judged = Judged(ended.returncode == 0, "")
        if judged.kept and part.judge is not None:
            judged = part.judge(ended.stdout)
        verdict = "FAILED " if not judged.kept else "CPU    " if missing else "KEPT   "
        figures = f" Measured: {judged.figures}." if judged.figures else ""
        print(f"{verdict}  {part.name} ({time.monotonic() - began:.0f} s). It asks: {part.bound}.{figures}", flush=True)
        if not judged.kept:
            failed += 1
            print("\n".join(ended.stdout.splitlines()[-TAIL_LINES:]), flush=True)
    return failed


def main() -> int:
    names = [part.name for part in PARTS]
    unknown = [name for name in sys.argv[1:] if name not in names]
    if unknown:
        print(f"no part is called {unknown[0]}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    missing = "" if torch.cuda.is_available() else "PyTorch finds no CUDA device here"
    device = torch.cuda.get_device_name() if not missing else f"{missing}: a rehearsal on the CPU"
    print(f"{device}, torch {torch.__version__}", flush=True)
    return 1 if run([part for part in PARTS if part.name in (sys.argv[1:] or names)], missing) else 0


if __name__ == "__main__":
    sys.exit(main())
