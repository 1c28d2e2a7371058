"""AdamW with a byte per moment: torchao's codes, torch's step, and the memory that it is said to take."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from shoal.config import Train
from shoal.numerics import eightbit
from shoal.numerics.eightbit import EightBit, codebook, decode, encode_
from shoal.numerics.optimizer import AdamW
from shoal.planner.inputs.profile import MOMENTS_BYTES

# Found and not imported: that takes two seconds, which only those that compare with it pay
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")

VALUES = 256 * 40
TRAIN = Train(learning_rate=0.01, weight_decay=0.1)


def drawn(seed: int, *shape: int) -> Tensor:
    """Values over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def through(values: Tensor, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales = torch.zeros(len(values), dtype=torch.uint8), torch.zeros(len(values) // 256)
    encode_(codes, scales, values, codebook(signed))
    return codes, scales, decode(codes, scales, codebook(signed))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos_but_for_values_in_the_middle_between_two(signed: bool) -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    values = drawn(0, VALUES) if signed else drawn(0, VALUES).square()
    theirs = OptimState8bit.zeros((VALUES,), signed)
    theirs.copy_(values)
    codes, scales, back = through(values, signed)
    assert torch.equal(scales, theirs.scale)
    off = (codes.int() - theirs.codes.int()).abs()
    assert off.max() <= 1 and off.float().mean() < 0.003
    theirs.codes.copy_(codes)
    assert torch.allclose(back, theirs.dequantize(), rtol=1e-6, atol=0.0)


def test_what_comes_back_is_near_and_blocks_of_zeros_stay_zeros() -> None:
    values = drawn(1, VALUES)
    values[:512] = 0.0
    codes, scales, back = through(values, True)
    largest = values.view(-1, 256).abs().amax(-1, keepdim=True).expand(-1, 256).reshape(-1)
    assert ((back - values).abs() <= 0.0071 * largest).all()  # half of the widest step between two codes
    assert not back[:512].any() and torch.equal(back[512:].sign(), values[512:].sign() * (back[512:] != 0))
    assert not decode(torch.zeros_like(codes), torch.zeros_like(scales), codebook(True)).any()  # as an optimizer begins


def a_parameter() -> nn.Parameter:
    return nn.Parameter(drawn(2, 64, 160))


def test_steps_are_those_of_torchao_and_near_those_with_fp32_moments() -> None:
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    ours, plain, theirs = (a_parameter() for _ in range(3))
    eight, fp32 = EightBit({"a": ours}, TRAIN), AdamW({"a": plain}, TRAIN)
    moments = [OptimState8bit.zeros(theirs.shape, signed) for signed in (True, False)]
    start = theirs.detach().clone()
    for step in range(20):
        gradient = drawn(100 + step, 64, 160) * 0.1 + 0.02
        eight.step_({"a": gradient}, 1.0, 0.01, step)
        fp32.step_({"a": gradient}, 1.0, 0.01, step)
        single_param_adam(
            theirs.detach(), gradient, torch.tensor(step + 1.0), *moments, None, torch.tensor(0.01), 0.9, 0.95, 0.1, 1e-8, True, False
        )  # fmt: skip
    moved = (plain - start).norm()
    assert (ours - theirs).norm() < 0.01 * moved
    assert 0.0 < (ours - plain).norm() < 0.1 * moved


def test_pieces_of_a_parameter_are_stepped_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = a_parameter(), a_parameter()
    optimizers = [EightBit({"a": whole}, TRAIN), EightBit({"a": cut}, TRAIN)]
    for step in range(2):
        for piece, optimizer in zip((1 << 20, 256 * 7), optimizers, strict=True):
            monkeypatch.setattr(eightbit, "PIECE", piece)
            optimizer.step_({"a": drawn(3 + step, 64, 160)}, 1.0, 0.01, step)
    assert torch.equal(whole, cut)
    assert all(torch.equal(a, b) for a, b in zip(*(one.moments().values() for one in optimizers), strict=True))


def test_small_and_odd_parameters_keep_fp32_moments_and_their_bits() -> None:
    shapes = {"vector": (64,), "odd": (65, 65), "matrix": (64, 64)}
    parameters = [{name: nn.Parameter(drawn(4, *shape)) for name, shape in shapes.items()} for _ in range(2)]
    eight, fp32 = EightBit(parameters[0], TRAIN), AdamW(parameters[1], TRAIN)
    for optimizer in (eight, fp32):
        optimizer.step_({name: drawn(5, *shape) for name, shape in shapes.items()}, 1.0, 0.01, 0)
    same = [name for name in shapes if torch.equal(parameters[0][name], parameters[1][name])]
    assert "vector" in same and "odd" in same
    moments = eight.moments()
    assert list(moments) == [
        *(f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in shapes),
        "exp_avg_scale/matrix",
        "exp_avg_sq_scale/matrix",
    ]
    for name, value in parameters[0].items():
        held = [tensor for at, tensor in moments.items() if at.endswith(f"/{name}")]
        assert sum(tensor.nbytes for tensor in held) == eightbit.nbytes(value.numel(), "8bit")
    assert moments["exp_avg/matrix"].dtype == torch.uint8 and moments["exp_avg/matrix"].shape == (64, 64)


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_the_planner_counts_the_same_bytes(moments: str) -> None:
    assert eightbit.nbytes(1 << 20, moments) == MOMENTS_BYTES[moments] * (1 << 20)
