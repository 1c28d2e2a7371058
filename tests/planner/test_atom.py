"""ATOM's swap schedule against pipelines: the figures derived from its mechanism, case by case."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests import atom
from tests.atom import Gpt, Gpu, Swarm

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "atom_cases.json").read_text())
MODELS = {
    "GPT-3 1.3B": Gpt(2048, 24, 1.0e6),
    "GPT-3 6.7B": Gpt(4096, 32, 2.0e6),
    "GPT-3 13B": Gpt(5120, 40, 2.0e6),
    "GPT-3 175B": Gpt(12288, 96, 3.2e6),
}
DEVICES = {  # half of their fp16 peak is sustained
    "RTX 3090 PCIe4": Gpu(35.5e12, 25e9, 24e9),
    "A100-80 PCIe4": Gpu(156e12, 25e9, 80e9),
    "H200 PCIe5": Gpu(494.5e12, 50e9, 141e9),
}
MBPS = 125e3  # bytes per second


def pair(name: str) -> tuple[Gpt, Gpu]:
    device, model = name.split("|")
    return MODELS[model], DEVICES[device]


def test_parameters_are_those_of_gpt_3() -> None:
    assert [model.parameters for model in MODELS.values()] == [1315723264, 6658404352, 12853386240, 174604259328]


@pytest.mark.parametrize("name", CASES["T_fwd"])
def test_a_swap_hides_from_the_stated_number_of_tokens(name: str) -> None:
    model, gpu = pair(name)
    assert atom.swap_tokens(model, gpu) == pytest.approx(CASES["T_fwd"][name], rel=1e-3)


def test_twice_the_host_link_halves_the_tokens_and_depth_does_not_matter() -> None:
    model, gpu = MODELS["GPT-3 6.7B"], DEVICES["A100-80 PCIe4"]
    assert atom.swap_tokens(model, Gpu(gpu.flops, 2 * gpu.host_Bps, gpu.memory_bytes)) == pytest.approx(2880.8, abs=0.1)
    assert atom.swap_tokens(Gpt(4096, 64, 2e6), gpu) == atom.swap_tokens(model, gpu)


def test_utilisation_of_a_pass_never_falls_with_more_microbatches() -> None:
    for model, gpu in ((m, g) for m in MODELS.values() for g in DEVICES.values()):
        used = [atom.pass_utilisation(model, gpu, count) for count in range(1, 12)]
        assert used == sorted(used)
        assert used[-1] < 1


def test_utilisation_at_the_hiding_point_is_what_was_derived() -> None:
    wanted = {
        "RTX 3090 PCIe4": (0.988, 0.990, 0.992, 0.996),
        "A100-80 PCIe4": (0.983, 0.986, 0.988, 0.995),
        "H200 PCIe5": (0.984, 0.986, 0.989, 0.995),
    }
    for device, gpu in DEVICES.items():
        for model, value in zip(MODELS.values(), wanted[device], strict=True):
            count = math.ceil(atom.swap_tokens(model, gpu) / model.tokens)
            assert round(atom.pass_utilisation(model, gpu, count), 3) == value


def test_one_group_hides_neither_its_load_nor_its_store() -> None:
    model, gpu = MODELS["GPT-3 6.7B"], DEVICES["A100-80 PCIe4"]
    turn_s = model.tokens * (3 * model.layers * model.block_flops + 6 * model.vocabulary * model.hidden) / gpu.flops
    moved_s = 4 * model.layers * model.block_parameters / gpu.host_Bps
    assert atom.pass_utilisation(model, gpu, 1, blocks=32) == pytest.approx(turn_s / (turn_s + moved_s))
    assert 0 < atom.pass_utilisation(model, gpu, 1, blocks=5) < 1  # 32 blocks in groups of 5: the last has 2


@pytest.mark.parametrize("name", CASES["W_swarm"])
def test_a_resident_stage_hides_its_boundaries_from_the_stated_line(name: str) -> None:
    model, gpu = pair(name)
    for key, wanted in CASES["W_swarm"][name].items():
        blocks, value_bytes = (int(part) for part in key.removeprefix("k").split("a"))
        assert atom.pipeline_Bps(model, gpu, blocks, value_bytes) / MBPS == pytest.approx(wanted, abs=0.06)


@pytest.mark.parametrize("name", CASES["k_max"])
def test_what_stays_on_a_device_is_what_was_derived(name: str) -> None:
    model, gpu = pair(name)
    blocks = atom.blocks_most(model, gpu)
    assert [blocks, math.ceil(model.layers / blocks)] == CASES["k_max"][name]
    assert atom.borderline(model, gpu) == (name == "A100-80 PCIe4|GPT-3 13B")  # 80.1 GB with the embedding


@pytest.mark.parametrize("name", CASES["mem"])
def test_a_swapping_peer_needs_the_stated_memory(name: str) -> None:
    model, gpu = pair(name)
    count = math.ceil(atom.swap_tokens(model, gpu) / model.tokens)
    needed_gb = [atom.swap_bytes(model) / 1e9, atom.swap_bytes(model, microbatches=count) / 1e9]
    assert needed_gb == pytest.approx(CASES["mem"][name], abs=0.006)


def test_the_fewest_bytes_are_moved_next_to_the_formula() -> None:
    for name, wanted in (("GPT-3 6.7B", (5, 2, 1)), ("GPT-3 175B", (12, 4, 2))):
        model = MODELS[name]
        tokens = model.batch_tokens / 32
        for local_steps, stages in zip((1, 10, 50), wanted, strict=True):
            swarm = Swarm(32, 1.0, local_steps)
            moved = {s: atom.moved_bytes(model, s, tokens, swarm) for s in range(1, 97)}
            best = min(moved, key=lambda s: moved[s])
            near = atom.best_stages(model, tokens, swarm)
            assert best == stages
            assert best in (max(1, math.floor(near)), math.ceil(near))


def test_whole_models_move_fewer_bytes_from_the_crossover_on() -> None:
    model = MODELS["GPT-3 6.7B"]
    for tokens, whole_is_less in ((406_396, False), (406_397, True)):
        whole, cut = (atom.moved_bytes(model, stages, tokens, Swarm(32, 1.0)) for stages in (1, 4))
        assert (whole < cut) == whole_is_less
    for name, wanted in CASES["T_cross"].items():
        for stages, thousands in wanted.items():
            assert round(atom.crossover_tokens(MODELS[name], int(stages)) / 1e3) == thousands


@pytest.mark.parametrize("name", CASES["T_sync"])
def test_averaging_hides_from_the_stated_number_of_tokens(name: str) -> None:
    model, gpu = pair(name)
    for mbps, thousands in CASES["T_sync"][name].items():
        assert round(atom.sync_tokens(model, gpu, 32, float(mbps) * MBPS) / 1e3) == thousands


@pytest.mark.parametrize("name", CASES["regions"])
def test_the_crossovers_of_swap_pipeline_and_local_steps(name: str) -> None:
    peers, device, size, mbps = name.split("|")
    model, gpu = MODELS[size], DEVICES[device]
    often, seldom = (Swarm(int(peers[1:]), float(mbps) * MBPS, local_steps) for local_steps in (1, 50))
    priced = [atom.best_utilisation(model, gpu, often, resident) for resident in (True, False)]
    priced.append(atom.best_utilisation(model, gpu, seldom, True))
    best = [[round(used, 3), stages] for used, stages in priced]
    whole = [round(atom.utilisation(model, gpu, swarm, 1), 3) for swarm in (often, seldom)]
    assert [whole[0], best[0], best[1], whole[1], best[2]] == CASES["regions"][name]


def test_a_host_of_128_gb_never_makes_swapping_worth_it_on_an_h200() -> None:
    gpu = DEVICES["H200 PCIe5"]
    sizes = [Gpt(128 * k, layers, 1e6) for k in range(1, 100) for layers in (12, 32, 96)]
    assert not any(atom.swapping_helps(model, gpu, 128e9) for model in sizes)
    assert atom.swapping_helps(MODELS["GPT-3 6.7B"], DEVICES["RTX 3090 PCIe4"], 128e9)


def test_a_timeout_that_averaging_cannot_meet_is_refused_with_the_seconds_it_needs() -> None:
    model = MODELS["GPT-3 6.7B"]
    assert atom.averaging_s(model, 32, 1000 * MBPS) == pytest.approx(103.2, abs=0.05)
    assert "103.2 s, more than its timeout of 60 s" in atom.refuse_timeout(model, 32, 1000 * MBPS, 60)
    assert atom.refuse_timeout(model, 32, 1000 * MBPS, 120) == ""
