"""Linear layers by oneDNN, on x86 processors of other makers than Intel: MKL, which torch asks, does not use AVX-512 there.

fp32 on a CPU alone; everything else stays torch's own. Sums run in another order than MKL's, so results differ in their last bits, as
they do between machines (docs/design/2026-11-23-processor-time.md).
"""

from __future__ import annotations

import platform
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CPUINFO = Path("/proc/cpuinfo")
SMALLEST = 1 << 21  # products of a layer: oneDNN takes 10 us longer to begin, and catches up at about 2^20


def prefer(model: nn.Module) -> None:
    """Give the model's linear layers another forward where that is faster."""
    if mkl_is_slow():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_linear, module)  # type: ignore[method-assign]


@cache
def mkl_is_slow() -> bool:
    """False where it is not known."""
    onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # not annotated by torch
    if not onednn or platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        return "GenuineIntel" not in CPUINFO.read_text()
    except OSError:
        return False


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    weight = module.weight
    large = x.numel() * module.out_features >= SMALLEST
    if not large or not x.device.type == weight.device.type == "cpu" or not x.dtype == weight.dtype == torch.float32:
        return nn.functional.linear(x, weight, module.bias)
    y: Tensor = _Linear.apply(x, weight, module.bias)  # type: ignore[no-untyped-call]  # not annotated by torch
    return y


def _product(x: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), rows (N, K), bias (N,): (..., N)."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, rows, bias, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            x if needs_weight else None, weight if needs_x else None
        )  # as torch's own: no more than is used
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, _, needs_bias = ctx.needs_input_grad
        grads = grad.flatten(0, -2)
        return (
            None if weight is None else _product(grad, weight.t()),
            None if x is None else _product(grads.t(), x.flatten(0, -2).t()),
            grads.sum(0) if needs_bias else None,
        )
