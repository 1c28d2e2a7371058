"""How long the swapping executor's own schedule takes on a modelled device: the formula's time, whatever binds."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager
from functools import cache
from random import Random

import pytest
import torch
from tests import atom
from tests.executor.test_swapping import a_config, limited
from tests.planner.test_atom import DEVICES as GPUS
from tests.planner.test_atom import MODELS as GPTS
from torch import nn

from shoal.executor.swap import link, memory
from shoal.executor.swap.groups import Runner
from shoal.executor.swap.modelled import ModelledStreams, Seconds, pass_s
from shoal.executor.swap.swapping import Swapping
from shoal.model import sequential
from shoal.model.cut import inputs

TABLE = {  # of papers: ATOM at C = ceil(T* / s), for 1.3B, 6.7B, 13B and 175B
    "RTX 3090 PCIe4": (0.988, 0.990, 0.992, 0.996),
    "A100-80 PCIe4": (0.983, 0.986, 0.988, 0.995),
    "H200 PCIe5": (0.984, 0.986, 0.989, 0.995),
}

WIDTH = 16


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(64, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(count - 2)), nn.Linear(WIDTH, 64)
    )


def finest(runner: Runner) -> memory.SwapPlan:
    """Every unit a group of its own, whatever the memory."""
    spans = [(unit, unit + 1) for unit in range(len(runner.row.units))]
    return memory._plan(runner.sizes, spans, lambda start, stop: 0, runner.fixed_bytes, slabs=2)


def by_unit(count: int, seconds: list[Seconds]) -> tuple[Swapping, ModelledStreams]:
    """A model of so many units, each of which is a group."""
    streams = ModelledStreams(seconds)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Runner, "plan", finest)
        one = Swapping(sequential.build(lambda: blocks(count), (0, 1), seed=1), a_config(hidden_size=WIDTH), streams)
    assert (one.plan.count, one.plan.slabs) == (count, 2)
    return one, streams


@cache
def of_blocks(count: int) -> Swapping:
    """For tests that bring streams of their own."""
    return by_unit(count, [Seconds(0.0, 0.0, 0.0, 0.0)] * count)[0]


def rewire(one: Swapping, streams: ModelledStreams) -> None:
    """On other streams, whose clocks begin at 0; its sum is empty, or it would come back with its group."""
    one.zero()
    link = one._link
    link._streams = streams
    link._loaded, link._filled, link._stored = [None] * 2, [None] * 2, [None] * 2
    link.forget()


def run(one: Swapping, slices: int) -> None:
    tokens = [torch.zeros(1, 9, dtype=torch.int64)] * slices
    one.backward_many([inputs(part) for part in tokens], [None] * slices, tokens)


def drawn(rng: Random, count: int) -> list[Seconds]:
    """Where loads, stores or compute bind by turns."""
    scale = [10 ** rng.uniform(-1.0, 1.0) for _ in range(3)]
    cases = []
    for _ in range(count):
        forward = scale[0] * rng.uniform(0.5, 2.0)
        cases.append(
            Seconds(
                load=scale[1] * rng.uniform(0.5, 2.0),
                store=scale[2] * rng.uniform(0.5, 2.0),
                forward=forward,
                back=forward * rng.uniform(2.0, 4.0),
            )
        )
    return cases


@pytest.mark.parametrize("seed", range(40))
def test_a_pass_takes_what_the_formula_says(seed: int) -> None:
    rng = Random(seed)
    count, slices = rng.randint(3, 6), rng.randint(1, 8)
    seconds = drawn(rng, count)
    one, streams = by_unit(count, seconds)
    run(one, slices)
    assert streams.now_s == pytest.approx(pass_s(seconds, slices), rel=0.05)
    assert one.loads == 2 * count - 2


MODELS = {"1.3B": (0, 24), "6.7B": (1, 32), "13B": (2, 40), "175B": (3, 96)}


@pytest.mark.parametrize("name", MODELS)
def test_utilisation_where_the_swap_begins_to_hide_is_that_of_the_table(name: str) -> None:
    """Embedding and head stay on the device there: they take no load here. The table lets the last block's activations stay
    between forward and back; here it is the head that does."""
    place, layers = MODELS[name]
    model = list(GPTS.values())[place]
    one = of_blocks(layers + 2)
    for device, wanted in TABLE.items():
        gpu = GPUS[device]
        slices = math.ceil(atom.swap_tokens(model, gpu) / model.tokens)
        forward_s = model.tokens * model.block_flops / gpu.flops
        moved_s = model.block_parameters * 2 / gpu.host_Bps  # bf16 both ways
        head_s = model.tokens * 6.0 * model.vocabulary * model.hidden / gpu.flops
        block = Seconds(load=moved_s, store=moved_s, forward=forward_s, back=3 * forward_s)
        streams = ModelledStreams([Seconds(0.0, 0.0, 0.0, 0.0), *[block] * layers, Seconds(0.0, 0.0, 0.0, head_s)])
        rewire(one, streams)
        run(one, slices)
        assert streams.busy_s / streams.now_s == pytest.approx(wanted[place], abs=0.01)


def test_a_state_of_ten_times_the_limit_trains_at_85_percent_of_the_resident_speed() -> None:
    """A stage of a pipeline, forward and back; link and compute as of an RTX 3090 on PCIe 4, slices of 2048 tokens."""
    gpu, tokens, width, count, slices = GPUS["RTX 3090 PCIe4"], 2048, 48, 60, 3
    make = lambda: nn.Sequential(nn.Embedding(64, width), *(nn.Linear(width, width) for _ in range(count - 1)))  # noqa: E731
    config = a_config(2, hidden_size=width)
    built = sequential.build(lambda: nn.Sequential(*make(), *make()), (0, 2), seed=1)
    limit = 16 * sum(value.numel() for _, value in built.named_parameters()) // 10
    streams = ModelledStreams([])
    one = Swapping(built, limited(config, limit), streams)
    assert one.plan.device_bytes <= limit
    values = [group.optimizer_bytes // 12 for group in one.plan.groups]
    forward_s = [2.0 * tokens * number / gpu.flops for number in values]
    streams.groups = tuple(
        Seconds(4 * number / gpu.host_Bps, 4 * number / gpu.host_Bps, took, 3 * took)
        for number, took in zip(values, forward_s, strict=True)
    )
    xs = [torch.full((1, 8), index) for index in range(slices)]
    ys = one.run_many(xs)
    one.backward_many(xs, [torch.ones_like(y) for y in ys], [None] * slices)
    resident_s = slices * 4 * sum(forward_s)
    assert streams.busy_s == pytest.approx(resident_s)
    assert resident_s / streams.now_s >= 0.85


class Shares(ModelledStreams):
    """Notes what is issued, in its order."""

    def __init__(self) -> None:
        super().__init__([Seconds(0.0, 0.0, 0.0, 0.0)] * 4)
        self.issued: list[tuple[str, str, int, float]] = []

    def on(self, stream: str, group: int = 0, what: str = "", share: float = 1.0) -> AbstractContextManager[object]:
        self.issued.append((stream, what, group, share))
        return super().on(stream, group, what, share)

    def computed(self, group: int, back: bool) -> None:
        self.issued.append(("compute", "", group, 0.0))


def test_a_groups_copies_are_shared_among_the_slices_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slice's own inputs and outputs, which use the same engine of the device, wait for gigabytes."""
    monkeypatch.setattr(link, "PIECE_BYTES", 64)
    one, streams, slices = of_blocks(4), Shares(), 4
    rewire(one, streams)
    run(one, slices)
    moved = Counter[tuple[str, str, int]]()
    for *copies, share in streams.issued:
        moved[tuple(copies)] += share
    assert all(moved["stores", "sums", group] == pytest.approx(1.0) for group in range(4))
    assert moved["loads", "parameters", 1] == pytest.approx(2.0)  # on the way there and on the way back
    beside = [issued for issued in streams.issued if issued[0] != "compute" and issued[2] in (1, 2)]
    assert len(beside) >= 2 * slices and all(share <= 1.5 / slices for *_, share in beside if share < 1.0)
    assert [share for *_, share in beside if share == 1.0] == []
