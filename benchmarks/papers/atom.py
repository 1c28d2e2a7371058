"""ATOM (arXiv 2403.10504): sizes, when swapping hides, and whole models against pipelines at 400 and 800 Mb/s.

The formulas are tests/atom.py's; the cases of `T*` are derived from the mechanism, since the paper has no such table. A chain without
microbatch pipelining is the paper's baseline as far as it is known; SWARM is the planner's step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from rows import Row, claim, differs
from tests import atom as formulas

from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import predict

CASES = json.loads((Path(__file__).parents[2] / "tests" / "planner" / "data" / "atom_cases.json").read_text())
MODELS = {
    "GPT-3 1.3B": formulas.Gpt(2048, 24, 1.0e6),
    "GPT-3 6.7B": formulas.Gpt(4096, 32, 2.0e6),
    "GPT-3 13B": formulas.Gpt(5120, 40, 2.0e6),
    "GPT-3 175B": formulas.Gpt(12288, 96, 3.2e6),
}
GPUS = {
    "RTX 3090 PCIe4": formulas.Gpu(35.5e12, 25e9, 24e9),
    "A100-80 PCIe4": formulas.Gpu(156e12, 25e9, 80e9),
    "H200 PCIe5": formulas.Gpu(494.5e12, 50e9, 141e9),
}
PEERS, FLOPS = 4, 62.5e12


def rows() -> Iterator[Row]:
    large = MODELS["GPT-3 175B"]
    for case, claimed, ours, unit in (
        ("parameters of a layer of 175B", 1_812_099_072, large.block_parameters, ""),
        ("state of 175B at 16 bytes a parameter", 2.8, 16 * large.parameters / 1e12, "TB"),
        ("its embedding, 40,960 rows", 1920, 12288 * 40960 * 4 / 2**20, "MiB"),
        ("its head, 65,536 rows", 3072, 12288 * 65536 * 4 / 2**20, "MiB"),
    ):
        yield Row(table="Sizes", case=case, claimed=claim(claimed), ours=ours, unit=unit, how="computed")
    for name, claimed in CASES["T_fwd"].items():
        gpu, model = name.split("|")
        tokens = formulas.swap_tokens(MODELS[model], GPUS[gpu])
        yield Row(table="When the swap hides: tokens per pass", case=name.replace("|", ", "), claimed=claim(claimed), ours=tokens,
                  unit="tokens", mark="derived", how="computed")  # fmt: skip
    for name, by_stages in CASES["T_cross"].items():
        for stages, thousands in by_stages.items():
            tokens = formulas.crossover_tokens(MODELS[name], int(stages)) / 1e3
            yield Row(table="Crossover: from here whole models move fewer bytes", case=f"{name}, {stages} stages",
                      claimed=claim(thousands), ours=tokens, unit="thousand tokens", mark="derived", how="computed")  # fmt: skip
    yield from against_pipelines()


def against_pipelines() -> Iterator[Row]:
    table = "Whole models against pipelines: 4 GPUs, averaging left out"
    best = 0.0
    for name in ("GPT-3 1.3B", "GPT-3 6.7B"):
        for mbit in (400, 800):
            ratio = over_chain(MODELS[name], mbit * 125e3)
            best = max(best, ratio)
            yield Row(
                table=table,
                case=f"{name} over a chain without microbatches, fp32, {mbit} Mb/s",
                claimed=None,
                ours=ratio,
                unit="x",
            )
    why = (
        "The chain that the paper measured is not known. In half precision the best case is"
        f" {over_chain(MODELS['GPT-3 1.3B'], 400 * 125e3, 2):.1f} x, with int8 {over_chain(MODELS['GPT-3 1.3B'], 400 * 125e3, 1):.1f} x."
    )
    row = Row(table=table, case="the best of these (the paper: up to 20)", claimed=claim(20), ours=best, unit="x")
    yield msgspec.structs.replace(row, why=why if differs(row) else "")
    for name in ("GPT-3 1.3B", "GPT-3 6.7B"):
        for mbit in (400, 800):
            claimed = claim(1.0, 1.8) if mbit == 400 and name == "GPT-3 1.3B" else None
            ratio, few = (over_swarm(MODELS[name], mbit * 125e3, inflight) for inflight in (8, 1))
            row = Row(table=table, case=f"{name} over SWARM with int8, {mbit} Mb/s", claimed=claimed, ours=ratio, unit="x",
                      mark="derived" if claimed else "")  # fmt: skip
            reason = f"The line limits it; with one microbatch of each peer on its way it is {few:.2f} x."
            yield msgspec.structs.replace(row, why=reason if differs(row) else "")


def compute_s(model: formulas.Gpt) -> float:
    """Of one sequence through everything."""
    return model.tokens * model.step_flops / FLOPS


def over_chain(model: formulas.Gpt, line_Bps: float, value_bytes: float = 4) -> float:
    moved_s = 2 * (PEERS - 1) * model.tokens * model.hidden * value_bytes / line_Bps
    return PEERS * (compute_s(model) + moved_s) / compute_s(model)


def over_swarm(model: formulas.Gpt, line_Bps: float, inflight: int) -> float:
    devices = tuple(Device(name=f"p{i}", flops=FLOPS, up_Bps=line_Bps, down_Bps=line_Bps) for i in range(PEERS))
    machines = Cluster(devices, np.full((PEERS, PEERS), 0.02), np.full((PEERS, PEERS), 1e12))
    own_s = compute_s(model) / PEERS
    forward, backward = (own_s / 4,) * PEERS, (*(own_s * 3 / 4,) * (PEERS - 1), own_s)
    tensor_bytes = float(model.tokens * model.hidden)
    seats = Seats(tuple(range(PEERS)), forward, backward, (0.0,) * PEERS, tensor_bytes, 0.0, 256, inflight)
    seconds = predict(seats, machines, np.random.default_rng(0)).microbatches_s
    return PEERS / compute_s(model) / (256 / seconds)
