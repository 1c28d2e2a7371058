"""Linear layers by oneDNN: torch's values and gradients but for the last bits, where that is faster, and torch's own elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.model.layers import linear
from shoal.model.saved import saved_by_autograd

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever processor the tests run on."""
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)
    yield


def a_layer(bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """One by oneDNN, and torch's with the same weights."""
    torch.manual_seed(0)
    ours = nn.Linear(128, 384, bias=bias)
    plain = copy.deepcopy(ours)
    linear.prefer(ours)
    return ours, plain


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y: Tensor = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 128, 128), (512, 128), (1, 2, 3, 128)])
def test_values_and_gradients_are_torchs_but_for_rounding(bias: bool, shape: tuple[int, ...]) -> None:
    ours, plain = a_layer(bias)
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 384)
    for value, wanted in zip(gradients(ours, x, grad), gradients(plain, x, grad), strict=True):
        assert value.shape == wanted.shape
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


def test_a_repeated_pass_gives_the_same_bits() -> None:
    ours, _ = a_layer(bias=True)
    x, grad = torch.randn(4, 128, 128), torch.randn(4, 128, 384)
    for one, other in zip(gradients(ours, x, grad), gradients(ours, x, grad), strict=True):
        assert torch.equal(one, other)


def test_a_large_product_is_onednns_and_a_small_one_or_another_type_is_torchs() -> None:
    ours, plain = a_layer(bias=False)

    def operations(layer: nn.Module, x: Tensor) -> set[str]:
        with torch.profiler.profile() as profile:
            layer(x)
        return {event.key for event in profile.key_averages()}

    large, small = torch.randn(4, 128, 128), torch.randn(1, 8, 128)
    assert "mkldnn::_linear_pointwise" in operations(ours, large)
    assert "mkldnn::_linear_pointwise" not in operations(ours, small) | operations(plain, large)
    assert "mkldnn::_linear_pointwise" not in operations(ours.bfloat16(), large.bfloat16())


@pytest.mark.parametrize("frozen", [False, True])
def test_autograd_keeps_what_it_keeps_for_torchs(frozen: bool) -> None:
    """A frozen weight needs no input, which a layer with adapters and the head would keep else."""
    x = torch.randn(4, 128, 128, requires_grad=True)
    kept = []
    for layer in a_layer(bias=False):
        layer.weight.requires_grad_(not frozen)
        with saved_by_autograd(set()) as sizes:
            layer(x)
        kept.append(sum(sizes.values()))
    assert kept[0] == kept[1] > 0


@pytest.mark.parametrize(("vendor", "slow"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_intels_processors_stay_with_mkl(
    vendor: str, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    assert linear.mkl_is_slow.__wrapped__() == slow
