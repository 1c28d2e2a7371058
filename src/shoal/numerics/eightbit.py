"""AdamW with two moments of one byte per value: a code relative to the largest value of the block of 256, which is fp32.

Paper: 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861). Claim: training as with fp32 moments, at a quarter of the
memory. Format and codebook are torchao's (AdamW8bit of `torchao.optim`): dynamic codes, signed for the first moment; parameters
of fewer than 4,096 values, or not of whole blocks, have fp32 moments.

What we changed: torchao compiles one function per parameter, and a peer may have no compiler; uncompiled it updates 8 million
values/s on a core. Here a parameter is updated in pieces that fit the cache: decode, optimizer.adamw_, encode by a table over
the upper bits of a value (docs/results.md). A value within 2^-12 of the middle between two codes may get
the other code, which happens to one in a thousand.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Train
from shoal.numerics.optimizer import AdamW, Factors, adamw_, decays

BLOCK = 256  # values that share a scale: torchao's
SMALLEST = 4096  # values of a parameter whose moments are coded: torchao's
PIECE = 1 << 18  # values decoded at once: 4 MiB beside the moments; 219 million values/s, at 2^20 178, at 2^16 176
UPPER_BITS = 20  # of an fp32 value, that choose its code: sign, exponent, 11 of the fraction
LEAST = 1e-12  # scale of a block of zeros: torchao's


def is_encoded(values: int) -> bool:
    """Whether the moments of a parameter of `values` values are encoded."""
    return values >= SMALLEST and values % BLOCK == 0


def nbytes(values: int, moments: str) -> int:
    """Bytes of both moments of a parameter of `values` values; `moments`: train.moments."""
    return 2 * (values + 4 * values // BLOCK) if moments == "8bit" and is_encoded(values) else 8 * values


class Codebook(NamedTuple):
    """The value of each code, (256,) fp32, and the code for each upper part of an fp32 value, (2^UPPER_BITS,) uint8."""

    values: Tensor
    codes: Tensor


@functools.cache
def codebook(signed: bool, device: str = "cpu") -> Codebook:
    """The codebook of signed or unsigned values."""
    values = torch.tensor(_dynamic(signed), dtype=torch.float32)
    shift = 32 - UPPER_BITS
    # The middle of the values with these upper bits
    bits = (torch.arange(1 << UPPER_BITS) << shift) + (1 << (shift - 1))
    of_bits = bits.to(torch.int32).view(torch.float32).nan_to_num(0.0).clamp(-1.0, 1.0)
    codes = torch.bucketize(of_bits, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return Codebook(values.to(device), codes.to(device))


def _dynamic(signed: bool) -> list[float]:
    """torchao's `create_dynamic_map`, which takes its steps from torch.linspace, whose bits depend on the vector unit: seven decades,
    each with twice as many codes as the one below, in the middle of even steps from a tenth of its end to its end."""
    positive = []
    for decade in range(7):
        count = 2 ** (decade + (not signed))
        step = 0.9 / count
        positive += [(0.1 + step * (index + 0.5)) / 10 ** (6 - decade) for index in range(count)]
    return sorted([*(-value for value in positive if signed), 0.0, *positive, 1.0])


def decode(codes: Tensor, scales: Tensor, codebook: Codebook) -> Tensor:
    """`codes` (n,) uint8, `scales` (n / 256,) fp32 -> (n,) fp32."""
    values = torch.index_select(codebook.values, 0, codes.to(torch.int32))
    values.view(-1, BLOCK).mul_(scales[:, None])
    return values


def encode_(codes: Tensor, scales: Tensor, values: Tensor, codebook: Codebook) -> None:
    """Write `codes` (n,) uint8 and `scales` (n / 256,) fp32 from `values` (n,) fp32."""
    blocks = values.view(-1, BLOCK)
    torch.amax(blocks.abs(), dim=-1, out=scales).clamp_(min=LEAST)
    upper = (blocks / scales[:, None]).view(torch.int32)
    upper.bitwise_right_shift_(32 - UPPER_BITS).bitwise_and_((1 << UPPER_BITS) - 1)
    torch.index_select(codebook.codes, 0, upper.view(-1), out=codes)


class EncodedMoment(NamedTuple):
    """A moment of one parameter: `codes` (n,) uint8, `scales` (n / 256,) fp32."""

    codes: Tensor
    scales: Tensor
    codebook: Codebook

    def piece(self, start: int, stop: int) -> EncodedMoment:
        return EncodedMoment(self.codes[start:stop], self.scales[start // BLOCK : stop // BLOCK], self.codebook)


class EightBit:
    """See optimizer.Optimizer."""

    def __init__(self, parameters: Mapping[str, Tensor], train: Train) -> None:
        self._train = train
        self._coded = {name: value for name, value in parameters.items() if is_encoded(value.numel())}
        self._small = AdamW({name: value for name, value in parameters.items() if name not in self._coded}, train)
        self._names = tuple(parameters)
        books = {
            value.device.type: (codebook(True, value.device.type), codebook(False, value.device.type))
            for value in parameters.values()
        }
        self._moments = {
            name: tuple(
                EncodedMoment(
                    torch.zeros(value.numel(), dtype=torch.uint8, device=value.device),
                    torch.zeros(value.numel() // BLOCK, device=value.device),
                    which,
                )
                for which in books[value.device.type]
            )
            for name, value in self._coded.items()
        }

    def step_(self, gradients: Mapping[str, Tensor], clip: float, lr: float, step: int) -> None:
        self._small.step_(gradients, clip, lr, step)
        for name, parameter in self._coded.items():
            factors = Factors.of(self._train, clip, lr, step, decays(parameter))
            flat, gradient = parameter.detach().view(-1), gradients[name].reshape(-1)
            for start in range(0, flat.numel(), PIECE):
                stop = min(start + PIECE, flat.numel())
                moments = [moment.piece(start, stop) for moment in self._moments[name]]
                _step_piece_(flat[start:stop], gradient[start:stop], moments, factors)

    def moments(self) -> dict[str, Tensor]:
        """`exp_avg/NAME`, `exp_avg_sq/NAME`: codes in the parameter's shape, or fp32; then the scales of the encoded ones."""
        small = self._small.moments()
        tensors: dict[str, Tensor] = {}
        for at, kind in enumerate(("exp_avg", "exp_avg_sq")):
            for name in self._names:
                key = f"{kind}/{name}"
                tensors[key] = (
                    self._moments[name][at].codes.view(self._coded[name].shape) if name in self._coded else small[key]
                )
        for at, kind in enumerate(("exp_avg_scale", "exp_avg_sq_scale")):
            tensors |= {f"{kind}/{name}": self._moments[name][at].scales for name in self._coded}
        return tensors


def _step_piece_(values: Tensor, gradient: Tensor, moments: Sequence[EncodedMoment], factors: Factors) -> None:
    """A function, so that the decoded moments of one piece are freed before those of the next exist."""
    first, second = (decode(*moment) for moment in moments)
    adamw_(values, gradient, (first, second), factors)
    for moment, new in zip(moments, (first, second), strict=True):
        encode_(moment.codes, moment.scales, new, moment.codebook)
