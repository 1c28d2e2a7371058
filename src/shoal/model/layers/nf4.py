"""Frozen linear layers in 4 bits (NF4, QLoRA, arXiv 2305.14314), by the kernels of bitsandbytes.

64 values share a scale in fp32: 4.5 bits for each value. The scales are not encoded again as in QLoRA: their mean would depend on the
machine, and replicas compare the bits of what they hold. A pass decodes one matrix at a time, and its backward decodes it again.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64  # values with one scale
MOST_PLAIN = 0.1  # of the blocks' values that stay as they are: norms, routers and convolutions are fewer


@cache
def library() -> ModuleType:
    """bitsandbytes. ValueError: it is not installed, or not made for this machine."""
    try:
        import bitsandbytes.functional as functional
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"tune.quantize = 'nf4' needs bitsandbytes, which does not load here ({error}); try pip install 'shoal[tune]', or"
            " tune.quantize=none"
        ) from None
    return functional


class Nf4Linear(nn.Linear):
    """y = x W^T + b with W (out, in) in NF4: `weight` (ceil(out * in / 2), 1) uint8, `scales` (ceil(out * in / 64),), fp32 seen as
    int32: neither is cast with a model, nor taken for its dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        """Encodes on the CPU, where every machine gives the same bits; on the meta device, its shapes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        values = linear.weight.numel()
        if linear.weight.is_meta:
            library()
            packed = torch.empty(((values + 1) // 2, 1), dtype=torch.uint8, device="meta")
            scales = torch.empty(-(-values // BLOCK), dtype=torch.int32, device="meta")
        else:
            packed, state = library().quantize_4bit(
                linear.weight.detach().cpu().contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
            )
            scales = state.absmax.view(torch.int32)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Linear.apply(x, self.weight, self.scales, self.bias, self.out_features)  # type: ignore[no-untyped-call]
        return y


def refuse(model: nn.Module, head: nn.Module | None) -> None:
    """ValueError: much of the whole `model` is not in linear layers, such as experts in one tensor, and would stay as large as it is."""
    encoded, largest, rest = 0, ("", 0), 0
    for name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding):
            continue
        for own, value in module.named_parameters(recurse=False):
            if type(module) is nn.Linear:
                encoded += value.numel()
            else:
                rest += value.numel()
                largest = max(largest, (f"{name}.{own}", value.numel()), key=lambda one: one[1])
    if encoded and rest > MOST_PLAIN * (encoded + rest):
        raise ValueError(
            f"tune.quantize = 'nf4' encodes linear layers, and {rest / (encoded + rest):.0%} of the values in this model's blocks are"
            f" elsewhere, such as {largest[0]}, and would stay in train.dtype; try tune.quantize=none"
        )


def encode(model: nn.Module, head: nn.Module | None) -> None:
    """Every linear layer but the `head`, from its weights. ValueError: there is none."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    if not names and next(model.parameters(), None) is not None:
        raise ValueError(
            "tune.quantize = 'nf4': this model's family has no plain linear layers; try tune.quantize=none, or another family"
        )
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, Nf4Linear(model.get_submodule(name)))  # type: ignore[arg-type]


def decoded(packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    functional = library()
    state = functional.QuantState(
        scales.view(torch.float32), torch.Size(shape), blocksize=BLOCK, quant_type="nf4", dtype=dtype
    )
    values: Tensor = functional.dequantize_4bit(packed, state)
    return values


class _Linear(torch.autograd.Function):
    """Saves the encoded matrix alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.rows, ctx.columns = rows, x.shape[-1]
        return nn.functional.linear(x, decoded(packed, scales, (rows, x.shape[-1]), x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, scales = ctx.saved_tensors
        columns = None
        if ctx.needs_input_grad[0]:
            columns = grad @ decoded(packed, scales, (ctx.rows, ctx.columns), grad.dtype)
        return columns, None, None, None, None
