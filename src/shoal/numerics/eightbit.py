"""AdamW whose two moments take one byte per value: codes of values over the largest of their block of 256, with that one in fp32.

Paper: 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861). Claim: training goes as with fp32 moments, which take four
times the memory. Format and code book are torchao's (`torchao.optim`, as of its AdamW8bit): dynamic codes, signed for the first
moment; parameters of fewer than 4,096 values, or that do not fall into whole blocks, keep fp32 moments.

What we changed: torchao's step is one function per parameter that it compiles, and a peer may have no compiler; run without one it
does 8 million values a second on a core. Here a parameter goes in pieces that stay in the cache: decoded, stepped by torch's
fused AdamW, encoded by a table over the upper bits of a value: 170 million (docs/results.md). A value within 2^-12 of the
middle between two codes may take the other one: one in a thousand does.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as functional

from shoal.config import Train
from shoal.numerics.optimizer import FUSED, AdamW, decays

BLOCK = 256  # values that share a scale: torchao's
SMALLEST = 4096  # values of a parameter whose moments are coded: torchao's
PIECE = 1 << 20  # values decoded at once: 16 MiB beside the moments
UPPER_BITS = 20  # of an fp32 value, that choose its code: sign, exponent, 11 of the fraction
LEAST = 1e-12  # scale of a block of zeros: torchao's


def coded(values: int) -> bool:
    """Whether the moments of a parameter of so many values are codes."""
    return values >= SMALLEST and values % BLOCK == 0


def nbytes(values: int, moments: str) -> int:
    """Of both moments of a parameter of so many values, as train.moments says."""
    return 2 * (values + 4 * values // BLOCK) if moments == "8bit" and coded(values) else 8 * values


def require() -> None:
    """ValueError: torchao is not there."""
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            "train.moments = '8bit' needs torchao, which is not here; try pip install 'shoal[torchao]', or train.moments=float32"
        )


class Book(NamedTuple):
    """The values that codes stand for, (256,) fp32, and the code of each upper part of an fp32 value, (2^UPPER_BITS,) uint8."""

    values: Tensor
    codes: Tensor


@functools.cache
def book(signed: bool, device: str = "cpu") -> Book:
    """See `require`."""
    require()
    from torchao.optim.quant_utils import create_dynamic_map

    values = torch.tensor(create_dynamic_map(signed=signed), dtype=torch.float32)
    shift = 32 - UPPER_BITS
    bits = (torch.arange(1 << UPPER_BITS) << shift) + (1 << (shift - 1))  # the middle of what has these upper bits
    of_bits = bits.to(torch.int32).view(torch.float32).nan_to_num(0.0).clamp(-1.0, 1.0)
    codes = torch.bucketize(of_bits, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return Book(values.to(device), codes.to(device))


def decode(codes: Tensor, scales: Tensor, book: Book) -> Tensor:
    """`codes` (n,) uint8, `scales` (n / 256,) fp32 -> (n,) fp32."""
    values = torch.index_select(book.values, 0, codes.to(torch.int32))
    values.view(-1, BLOCK).mul_(scales[:, None])
    return values


def encode_(codes: Tensor, scales: Tensor, values: Tensor, book: Book) -> None:
    """Into `codes` (n,) uint8 and `scales` (n / 256,) fp32, from `values` (n,) fp32."""
    blocks = values.view(-1, BLOCK)
    torch.amax(blocks.abs(), dim=-1, out=scales).clamp_(min=LEAST)
    upper = (blocks / scales[:, None]).view(torch.int32)
    upper.bitwise_right_shift_(32 - UPPER_BITS).bitwise_and_((1 << UPPER_BITS) - 1)
    torch.index_select(book.codes, 0, upper.view(-1), out=codes)


class Moment(NamedTuple):
    """Of one parameter. `codes` (n,), `scales` (n / 256,)."""

    codes: Tensor
    scales: Tensor
    book: Book

    def piece(self, start: int, stop: int) -> Moment:
        return Moment(self.codes[start:stop], self.scales[start // BLOCK : stop // BLOCK], self.book)


class EightBit:
    """See optimizer.Optimizer."""

    def __init__(self, parameters: Mapping[str, Tensor], train: Train) -> None:
        self._train = train
        self._coded = {name: value for name, value in parameters.items() if coded(value.numel())}
        self._small = AdamW({name: value for name, value in parameters.items() if name not in self._coded}, train)
        self._names = tuple(parameters)
        books = {
            value.device.type: (book(True, value.device.type), book(False, value.device.type))
            for value in parameters.values()
        }
        self._moments = {
            name: tuple(
                Moment(
                    torch.zeros(value.numel(), dtype=torch.uint8, device=value.device),
                    torch.zeros(value.numel() // BLOCK, device=value.device),
                    which,
                )
                for which in books[value.device.type]
            )
            for name, value in self._coded.items()
        }

    def step_(self, lr: float, step: int) -> None:
        self._small.step_(lr, step)
        for name, parameter in self._coded.items():
            assert parameter.grad is not None
            flat, gradient = parameter.detach().view(-1), parameter.grad.reshape(-1)
            for start in range(0, flat.numel(), PIECE):
                stop = min(start + PIECE, flat.numel())
                moments = [moment.piece(start, stop) for moment in self._moments[name]]
                self._piece_(flat[start:stop], gradient[start:stop], moments, lr, step, decays(parameter))

    def _piece_(
        self, values: Tensor, gradient: Tensor, moments: list[Moment], lr: float, step: int, decay: bool
    ) -> None:
        first, second = (decode(*moment) for moment in moments)
        functional(
            [values],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(float(step), device=values.device)],
            fused=values.device.type in FUSED,
            amsgrad=False,
            beta1=self._train.betas[0],
            beta2=self._train.betas[1],
            lr=lr,
            weight_decay=self._train.weight_decay if decay else 0.0,
            eps=self._train.epsilon,
            maximize=False,
        )
        for moment, new in zip(moments, (first, second), strict=True):
            encode_(moment.codes, moment.scales, new, moment.book)

    def moments(self) -> dict[str, Tensor]:
        """`exp_avg/NAME`, `exp_avg_sq/NAME`: codes in the parameter's shape, or fp32; then the scales of the coded ones."""
        small = self._small.moments()
        found: dict[str, Tensor] = {}
        for place, kind in enumerate(("exp_avg", "exp_avg_sq")):
            for name in self._names:
                at = f"{kind}/{name}"
                found[at] = (
                    self._moments[name][place].codes.view(self._coded[name].shape) if name in self._coded else small[at]
                )
        for place, kind in enumerate(("exp_avg_scale", "exp_avg_sq_scale")):
            found |= {f"{kind}/{name}": self._moments[name][place].scales for name in self._coded}
        return found
