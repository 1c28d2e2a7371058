"""Preference pairs in a plan: the forward of the reference, four rows of a boundary tensor for each pair, two of its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests import memory_shapes
from tests.executor.test_pairs import PAIRS, SEQUENCE, a_config, moved, tokens_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shoal.config import Config, Data, Network
from shoal.executor import create
from shoal.executor.base import boundary, boundary_gradient
from shoal.launcher.planning import problem as planning
from shoal.model import analysis
from shoal.model.cut import cut, inputs
from shoal.planner.inputs import cluster
from shoal.planner.inputs.profile import Profile, profile
from shoal.planner.strategy.problem import Problem


class Flops(TorchDispatchMode):
    """torch's FlopCounterMode, which follows modules, does not count within autograd.grad of parameters."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def counted(config: Config) -> list[tuple[int, int]]:
    """FLOPs of each stage's forward and backward, as they are computed."""
    executors = [create(config, stage) for stage in range(config.run.stages)]
    tokens = tokens_of(config)
    xs, flops = [inputs(tokens)], []
    for executor in executors:
        moved(executor)
    if config.device.kept_activations:  # the first forward is measured, and not kept
        x = xs[0]
        for executor in executors[:-1]:
            x = executor.forward(x)
    for executor in executors[:-1]:
        with Flops() as counter:
            xs.append(executor.forward(xs[-1]))
        flops.append(counter.total)
    grad, backs = None, []
    for stage in reversed(range(len(executors))):
        last = stage == len(executors) - 1
        with Flops() as counter:
            grad, _ = executors[stage].backward(xs[stage], grad, tokens if last else None)
        backs.append(counter.total)
    return list(zip([*flops, 0], reversed(backs), strict=True))


@pytest.mark.parametrize("kept", [0, 2])
def test_the_plan_counts_the_flops_that_stages_compute(tmp_path: Path, kept: int) -> None:
    config = a_config(tmp_path, 3, kept_activations=kept)
    model = analysis.count(config)
    stages = [model.stage(span) for span in cut(config.run, 3)]
    with sdpa_kernel(SDPBackend.MATH):  # the kernel of CPUs is not counted
        computed = counted(config)
    for number, (stage, (forward, backward)) in enumerate(zip(stages, computed, strict=True)):
        if not stage.last:
            assert stage.flops == forward
        # A kept forward is not computed again; a fused kernel's backward computes its scores again, and this one's does not.
        again = 0.0 if kept and not stage.last else stage.again_flops
        if not stage.first:  # which needs no gradient of its input, and is planned as if it did
            assert stage.back_flops + again == pytest.approx(backward, rel=0.05), number
    plain = analysis.count(msgspec.structs.replace(config, data=Data(sequence=SEQUENCE)))
    assert model.flops == pytest.approx(4 * plain.flops, rel=0.1)  # two rows of each pair, twice; once without adapters


def a_problem(config: Config, counted: Profile | None) -> Problem:
    devices = tuple(cluster.Device(name=f"p{number}", flops=1e9) for number in range(2))
    machines = cluster.from_matrices(devices, np.zeros((2, 2)), np.full((2, 2), 1e6))
    return Problem(
        shape=planning.shape(config),
        work=planning.work(config),
        cluster=machines,
        travel=planning.travel(config),
        counted=counted,
        counted_sequences=config.train.microbatch,
    )


@pytest.mark.parametrize("by_formula", [False, True])
def test_the_plan_sends_what_stages_exchange(tmp_path: Path, by_formula: bool) -> None:
    config = a_config(tmp_path, 2)
    problem = a_problem(config, None if by_formula else analysis.count(config))
    there, back = boundary(config), boundary_gradient(config)
    assert problem.profile.boundary_bytes == 4 * there.shape[0] * there.shape[1] * there.shape[2]
    assert problem.returned_bytes == problem.profile.boundary_bytes / 2
    assert problem.returned_bytes == 4 * back.shape[0] * back.shape[1] * back.shape[2]
    assert problem.profile.tokens_bytes == tokens_of(config).nbytes
    assert problem.work.step_tokens == 2 * PAIRS * 2 * SEQUENCE
    assert planning.tensor_bytes(config) == problem.profile.boundary_bytes
    halved = msgspec.structs.replace(config, network=Network(gradients="bf16"))
    assert a_problem(halved, None).returned_bytes == problem.returned_bytes / 2


def test_the_formula_agrees_with_what_is_counted(tmp_path: Path) -> None:
    config = a_config(tmp_path, 2)
    of_formula = profile(planning.shape(config), planning.work(config))
    model = analysis.count(config)
    assert of_formula.flops == pytest.approx(model.flops, rel=0.1)
    for one in (of_formula, model):
        stage = one.stage(range(2))
        assert stage.again_flops == pytest.approx(stage.flops / 2, rel=0.1)
        assert one.stage(range(2, 3)).again_flops == one.stage(range(2, 3)).flops
        larger = one.of_size(2.0).stage(range(2))
        assert larger.again_flops == 2 * stage.again_flops


# 24 is tied; 7 packs documents in two stages; the others have seven blocks, or experts in three stages.
@pytest.mark.parametrize("seed", [24, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (7, 2, 5))])
def test_a_stage_takes_the_memory_that_is_planned(tmp_path: Path, seed: int) -> None:
    config = memory_shapes.adapted(memory_shapes.drawn(seed), seed, tmp_path)
    for figure in memory_shapes.figures(memory_shapes.preferring(config)):
        assert figure.measured <= figure.planned <= (1 + memory_shapes.ABOVE) * figure.measured, figure
