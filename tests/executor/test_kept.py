"""Kept activations: the same bits as recomputed ones, never of other parameters or another input, and bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import executor
from shoal.config import Config, Data, Device, Model, Network, Run, Train
from shoal.executor import graphs
from shoal.executor.delayed import Delayed
from shoal.executor.resident import Resident
from shoal.executor.swap.memory import MemoryMeter
from shoal.kept import STALE, Kept
from shoal.model.cut import inputs
from shoal.runtime.tasks import coding

BATCH = [torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def a_config(kept: int, kind: str = "resident", train: dict[str, Any] | None = None, **device: Any) -> Config:
    return Config(
        run=Run(stages=3, steps=10),
        model=Model(hidden_size=16, layers=3, heads=2, kv_heads=2, intermediate_size=24, vocab_size=64),
        data=Data(sequence=8),
        train=Train(**{"batch": 16, "microbatch": 4, "warmup": 0, "learning_rate": 0.01} | (train or {})),
        device=Device(executor=kind, kept_activations=kept if kind != "emulated" else -1, **device),
    )


def resident(one: object) -> Resident:
    inner = one._inner if isinstance(one, Delayed) else one
    assert isinstance(inner, Resident)
    return inner


def two_steps(config: Config, network: Network = Network()) -> tuple[list[Tensor], int]:
    """Sums, gradients of inputs, and parameters of two steps of the whole pipeline, tensors encoded as the network would, all
    forwards before all backwards. Also how often kept activations were used."""
    chain = [executor.create(config, stage) for stage in range(3)]
    bits: list[Tensor] = []
    for step in range(2):
        inputs_of: list[list[Tensor]] = []
        for tokens in BATCH:
            xs = [inputs(tokens)]
            for one in chain[:-1]:
                xs.append(coding.plain(coding.packed(one.forward(xs[-1]), network.activations)))
            inputs_of.append(xs)
        for tokens, xs in zip(BATCH, inputs_of, strict=True):
            grad: Tensor | None = None
            for stage in (2, 1, 0):
                # The input lies in the activation store: the same bits in another tensor.
                grad, _ = chain[stage].backward(xs[stage].clone(), grad, tokens if stage == 2 else None)
                if grad is not None:
                    bits.append(grad.clone())
                    grad = coding.plain(coding.packed(grad, network.gradients))
        for one in chain:
            bits.append(one.sum.clone())
            one.apply(one.contribution(), 1.0, step)
            one.zero(step + 1)
        bits += [value.clone() for one in chain for value in one.state().values()]
    used = sum(resident(one).graphs.kept.used for one in chain) if config.device.executor == "resident" else 0
    return bits, used


CASES: dict[str, tuple[dict[str, Any], Network]] = {
    "plain": ({}, Network()),
    "slices": ({"sequences": 2}, Network()),
    "bf16": ({"train": {"dtype": "bfloat16"}}, Network()),
    "delayed": ({"train": {"staleness": 1}}, Network()),
    "delayed bf16": ({"train": {"staleness": 1, "dtype": "bfloat16"}}, Network()),
    "8-bit moments": ({"train": {"moments": "8bit"}}, Network()),
    "bf16 tensors": ({}, Network(activations="bf16", gradients="bf16")),
    "int8 tensors": ({}, Network(activations="int8", gradients="int8")),
    "int4 tensors": ({}, Network(activations="int4", gradients="int8")),
    "swapping": ({"kind": "swapping"}, Network()),
}


LONG = {"delayed", "bf16 tensors", "int4 tensors"}  # others come near to them


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in LONG else ()) for one in CASES])
def test_kept_activations_give_the_bits_of_recomputed_ones(name: str) -> None:
    if "8-bit" in name:
        pytest.importorskip("torchao")
    given, network = CASES[name]
    recomputed, never = two_steps(a_config(0, **given), network)
    kept, used = two_steps(a_config(-1, **given), network)
    assert all(torch.equal(one, other) for one, other in zip(recomputed, kept, strict=True))
    # Of 2 stages, 2 steps and 4 microbatches all but the first of each stage, which is measured.
    assert (never, used) == (0, 14 if name != "swapping" else 0)


def keeping(train: dict[str, Any] | None = None) -> tuple[Resident, Tensor, Tensor]:
    """A first stage that has kept one forward; with its tokens and a gradient of its output."""
    config = a_config(-1, train=train)
    whole = executor.create(config, 0)
    one, x = resident(whole), inputs(BATCH[1])
    whole.forward(inputs(BATCH[0]))  # measured
    grad = torch.linspace(-1, 1, 4 * 8 * 16).view(4, 8, 16) + 0 * whole.forward(x).float()
    assert len(one.graphs.kept) == 1
    return one, x, grad


def recomputed(one: Resident, x: Tensor, grad: Tensor) -> Tensor:
    """The sum of that backward alone, without what is kept."""
    one.graphs.give_up()
    one.zero()
    one.backward(x, grad, None)
    return one.sum.clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("change", ["apply", "load_state", "refresh", "compute_with"])
def test_activations_of_other_parameters_are_never_used(change: str, staleness: int, dtype: str) -> None:
    one, x, grad = keeping({"dtype": dtype, "staleness": staleness})
    if change == "apply":
        one.apply(torch.linspace(-1, 1, one.length), 1.0, 0)
    elif change == "load_state":
        one.load_state({name: value + 1 for name, value in one.state().items()})
    elif change == "refresh":
        with torch.no_grad():
            for value in one.state().values():
                value += 1
        one.refresh()
    else:
        one.compute_with([value.detach() + 1 for value in one.computing])
    assert len(one.graphs.kept) == 0
    one.backward(x, grad, None)
    assert one.graphs.kept.used == 0
    assert torch.equal(one.sum, recomputed(one, x, grad))


def test_an_optimizer_step_beside_the_hops_leaves_what_is_kept_of_the_parameters_that_compute() -> None:
    one, x, grad = keeping({"staleness": 1})
    one.make(torch.linspace(-1, 1, one.length), 1.0, 0)
    one.backward(x, grad, None)
    assert one.graphs.kept.used == 1
    assert torch.equal(one.sum, recomputed(one, x, grad))


def test_activations_of_another_input_are_never_used_even_if_one_bit_differs() -> None:
    config = a_config(-1)
    one = resident(executor.create(config, 1))
    x, grad = torch.zeros(4, 8, 16), torch.ones(4, 8, 16)
    for _ in range(2):
        one.forward(x)
    other = x.clone()
    other[3, 7, 15] = -0.0  # equal, and not the same
    one.backward(other, grad, None)
    assert (one.graphs.kept.used, len(one.graphs.kept)) == (0, 1)
    one.backward(x, grad, None)
    assert one.graphs.kept.used == 1
    one.backward(x, grad, None)
    assert one.graphs.kept.used == 1, "a graph is used once"


def test_a_step_that_ends_or_is_void_leaves_nothing() -> None:
    one, _, _ = keeping()
    one.zero(1)
    assert (len(one.graphs.kept), one.graphs.kept.nbytes) == (0, 0)


def test_no_more_than_the_set_number_and_the_memory_left_are_kept() -> None:
    most = resident(executor.create(a_config(2), 0))
    for tokens in BATCH:
        most.forward(inputs(tokens))
    assert len(most.graphs.kept) == 2
    nbytes = most.graphs.kept.nbytes / 2
    assert nbytes > 4 * 8 * 16 * 4
    stage = sum(value.numel() for value in most.computing) * 16
    limited = resident(executor.create(a_config(-1, memory_bytes=int(stage + 3 * nbytes)), 0))
    for tokens in BATCH:
        limited.forward(inputs(tokens))
    assert len(limited.graphs.kept) == 2, "room for a third is needed by the backward that runs"


def test_the_first_forward_which_is_only_measured_leaves_nothing_in_memory() -> None:
    one = resident(executor.create(a_config(4), 0))
    with MemoryMeter("cpu") as meter:
        one.forward(inputs(BATCH[0]))
        assert meter.peak > 0
        assert meter.now == 0
        one.forward(inputs(BATCH[1]))
        assert meter.now > 0, "the second one is kept"


def test_nothing_is_kept_once_half_of_the_free_memory_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 1e9
    monkeypatch.setattr(graphs.host, "free_bytes", lambda: free_bytes)
    one = resident(executor.create(a_config(-1), 0))
    for tokens in BATCH[:2]:
        one.forward(inputs(tokens))
    free_bytes = 0.5e9
    for tokens in BATCH[2:]:
        one.forward(inputs(tokens))
    assert len(one.graphs.kept) == 1


def test_the_last_stage_which_runs_no_forward_of_its_own_keeps_nothing() -> None:
    one = resident(executor.create(a_config(-1), 2))
    for _ in range(3):
        one.forward(torch.zeros(4, 8, 16))
    assert len(one.graphs.kept) == 0


def test_a_device_without_memory_for_a_forward_keeps_no_more_and_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, _ = keeping()
    run = one.graphs._run

    def fails(xs: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(one.graphs, "_run", fails)
    y = one.forward(inputs(BATCH[2]))
    monkeypatch.setattr(one.graphs, "_run", run)
    assert torch.equal(y, one.forward(inputs(BATCH[2])))
    assert len(one.graphs.kept) == 0


def test_a_full_store_keeps_what_is_needed_first_and_evicts_what_nobody_comes_for() -> None:
    kept = Kept[int](2, 100.0)
    for number in range(6):
        if kept.has_room(10.0):
            kept.add(number, 10.0)
    assert [kept.take(lambda value, number=number: value == number) for number in range(6)] == [  # type: ignore[misc]
        0,
        1,
        None,
        None,
        None,
        None,
    ]
    kept.has_room(10.0)
    kept.add(7, 10.0)
    for number in range(8, 8 + STALE):
        if kept.has_room(10.0):
            kept.add(number, 10.0)
    assert kept.take(lambda value: value == 7) is None and kept.nbytes <= 20.0
    assert not Kept[int](9, 100.0).has_room(101.0)
