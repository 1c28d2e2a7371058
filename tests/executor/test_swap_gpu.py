"""benchmarks/swap_gpu.py where there is no GPU: its figures, its cases on the CPU, and that it says so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from shoal.model import analysis

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("swap_gpu", BENCHMARKS / "swap_gpu.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["swap_gpu"] = module  # msgspec looks its annotations up there
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


def ran(*words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "swap_gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


def a_case(bench: ModuleType, **given: object) -> object:
    case = bench.Case("shoal", "tiny", 1 << 20, microbatches=3, sequence=16, steps=1, device="cpu", moments="float32")
    return msgspec.structs.replace(case, **given)


def test_overlap_is_the_share_of_copies_beside_which_a_kernel_runs(bench: ModuleType) -> None:
    assert bench.overlapped([(0, 4), (10, 12)], [(1, 3), (2, 3.5), (11, 20)]) == (2.5 + 1) / 6
    assert bench.overlapped([(0, 4), (2, 6)], [(0, 3), (3, 6)]) == 1.0  # copies side by side are not counted twice
    assert bench.overlapped([(0, 1)], []) == 0.0
    assert bench.overlapped([], [(0, 1)]) is None


def test_a_trace_of_the_profiler_is_read_for_copies_and_kernels_alone(bench: ModuleType) -> None:
    def event(cat: str, name: str, start: float, seconds: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": seconds}

    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 10),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 40, 10),
        event("kernel", "gemm", 5, 20),
        event("cpu_op", "aten::mm", 0, 100),
        {"ph": "M", "name": "process_name"},
    ]
    overlap, kernels, idle = bench.shares(events)
    assert overlap == 0.5
    assert kernels == pytest.approx(20 / 30) and idle == pytest.approx(0.0)
    assert bench.shares([events[0], event("kernel", "gemm", 30, 10)]) == (0.0, 0.25, 0.5)
    assert bench.shares([]) == (None, 0.0, 1.0)


@pytest.mark.slow
def test_shapes_are_the_published_ones_and_enough_microbatches_hide_the_loads(bench: ModuleType) -> None:
    for shape, parameters in (("7b", 6.74e9), ("14b", 14.77e9)):
        measured = analysis.count(bench.a_config(a_case(bench, shape=shape, sequence=2048)))
        assert measured.parameters == pytest.approx(parameters, rel=0.01)
        flops = bench.pass_flops(measured, measured.blocks)
        assert 1.0 < flops / (8 * (measured.parameters - measured.parts[0].parameters) * 2048) < 1.2  # and attention
        assert flops - bench.pass_flops(measured, measured.blocks - 1) == 4 * measured.parts[1].flops
        counts = [
            bench.microbatches(measured, bench.Machine("", flops, 25e9), 2048) for flops in (71e12, 312e12, 989e12)
        ]
        assert counts[0] <= 2 < counts[1] < counts[2]


def test_a_case_on_the_cpu_is_measured_and_one_that_cannot_be_says_why(bench: ModuleType) -> None:
    case = a_case(bench)
    measured = bench.measured(case)
    assert not measured.why_not and measured.layers == 4 and measured.groups > 1 and measured.tokens == 48
    assert 0 < measured.peak_bytes <= measured.planned_bytes <= 1 << 20
    profile = analysis.count(bench.a_config(case))
    line = bench.line(case, measured, profile, bench.Machine("cpu", 1e9, 1e9))
    assert line["within_limit"] and line["layers"] == "4 of 4" and 0 < line["with_optimizer"] < line["tokens_per_s"]
    assert line["utilisation"] == pytest.approx(3 * bench.pass_flops(profile, 4) / measured.pass_s / 1e9, rel=1e-2)
    assert "4 of 4 layers" in bench.words(line) and "ABOVE" not in bench.words(line)
    over = bench.line(
        case, msgspec.structs.replace(measured, reserved_bytes=2 << 20), profile, bench.Machine("", 1e9, 1e9)
    )
    assert "ABOVE THE LIMIT" in bench.words(over)
    assert "largest unit" in bench.words(
        bench.line(case, bench.measured(a_case(bench, limit_bytes=1000)), profile, None)
    )
    assert bench.measured(a_case(bench, system="deepspeed")).why_not == "runs on a CUDA device only"


def test_a_model_loses_layers_until_the_host_has_room(bench: ModuleType) -> None:
    case = a_case(bench, shape="7b")
    assert [
        bench.layers_that_fit(case, lambda config, most=most: config.model.layers <= most) for most in (40, 32, 7, 1)
    ] == [32, 32, 7, 1]
    with pytest.raises(ValueError, match="too small for one layer of 7b"):
        bench.layers_that_fit(case, lambda config: False)


def test_deepspeeds_settings_add_up_the_microbatches_of_a_step(bench: ModuleType) -> None:
    measured = bench.zero3(a_case(bench))
    assert measured["gradient_accumulation_steps"] == 3 and measured["zero_optimization"]["stage"] == 3
    assert json.loads(json.dumps(measured)) == measured


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_device_it_says_so_and_ends_well() -> None:
    measured = ran()
    assert measured.returncode == 0
    assert (
        measured.stdout == "PyTorch finds no CUDA device here, and this benchmark measures one: nothing was measured\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_systems_run_in_processes_of_their_own() -> None:
    words = (
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--limits",
        "1 MiB",
        "--microbatches",
        "2",
        "--sequence",
        "16",
        "--steps",
        "1",
    )
    measured = ran(*words)
    assert measured.returncode == 0, measured.stderr
    *_, last = measured.stdout.splitlines()
    cases = json.loads(last)["setting"]["cases"]
    assert [case["system"] for case in cases] == ["shoal", "fsdp2", "deepspeed"]
    assert all(case["tokens_per_s"] > 0 and case["parameters"] == 172_608 for case in cases[:2])
    assert "why_not" in cases[2]
