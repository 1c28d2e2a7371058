"""Muon: matrices of blocks are stepped along their momentum's nearest orthogonal matrix, all else by AdamW.

Jordan and others, https://kellerjordan.github.io/posts/muon; the size of a step as in Muon is Scalable for LLM Training
(arXiv 2502.16982), so that AdamW's learning rate and decay fit. Claim: fewer steps than AdamW, with one moment instead of two. One-Step
Gradient Delay is Not a Barrier (arXiv 2606.30634) claims that gradients one step late hardly harm it: docs/papers/delayed-updates.md.

What we changed: replicas of a stage must hold the same bits, and the five iterations of Newton and Schulz are matrix products, whose
sums every library adds in an order of its own. Here factors are rounded to whole numbers of so few bits that fp64 holds every partial
sum exactly. So no order, thread, fused operation or device changes a bit, and rounding is finer than that of bfloat16, which
torch.optim.Muon iterates in. It costs fp64 products.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.config import Train
from shoal.numerics.optimizer import AdamW, norm_sq

MOMENTUM = 0.95  # these four as in torch.optim.Muon
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPSILON = 1e-7
SIZE = 0.2  # root mean square of an AdamW step over its learning rate: arXiv 2502.16982
BITS = 20  # of a rounded factor at most: products of two and their sums over 2^13 columns have 53
FP64_BITS = 53
COLUMNS = 1024  # that have an fp64 copy at a time
IN_A_BLOCK = re.compile(r"\.\d+\.")  # the module of a block has a number: model.layers.3.mlp.up_proj.weight


def orthogonalized(name: str, shape: torch.Size) -> bool:
    """Whether Muon steps this parameter: a matrix of a block, no embedding, head, norm or bias."""
    return len(shape) == 2 and IN_A_BLOCK.search(name) is not None


def single_moments(shapes: Mapping[str, torch.Size], train: Train) -> frozenset[str]:
    """Names of those that have one moment of fp32 and no second."""
    if train.optimizer != "muon":
        return frozenset()
    return frozenset(name for name, shape in shapes.items() if orthogonalized(name, shape))


class Muon:
    """See optimizer.Optimizer. ValueError: no parameter is a block's matrix."""

    def __init__(self, parameters: Mapping[str, Tensor], train: Train) -> None:
        self._train, self._names = train, tuple(parameters)
        self._matrices = {name: value for name, value in parameters.items() if orthogonalized(name, value.shape)}
        if not self._matrices:
            raise ValueError(
                f"train.optimizer = 'muon' finds no matrix of a numbered block among {', '.join(self._names[:3])}; "
                "try train.optimizer=adamw"
            )
        self._rest = AdamW({name: value for name, value in parameters.items() if name not in self._matrices}, train)
        self._momentum = {name: torch.zeros_like(value.detach()) for name, value in self._matrices.items()}

    def step_(self, gradients: Mapping[str, Tensor], clip: float, lr: float, step: int) -> None:
        self._rest.step_(gradients, clip, lr, step)
        for name, value in self._matrices.items():
            muon_(value.detach(), gradients[name], self._momentum[name], clip, lr, 1.0 - lr * self._train.weight_decay)

    def moments(self) -> dict[str, Tensor]:
        """`exp_avg/NAME` of every parameter, `exp_avg_sq/NAME` of those that AdamW steps."""
        rest = self._rest.moments()
        first = {f"exp_avg/{name}": self._momentum.get(name) for name in self._names}
        known = {key: rest[key] if momentum is None else momentum for key, momentum in first.items()}
        return known | {key: moment for key, moment in rest.items() if key not in known}


def muon_(values: Tensor, gradient: Tensor, momentum: Tensor, clip: float, lr: float, decay: float) -> None:
    """One step on tensors of one shape (rows, columns) and device."""
    clipped = (gradient * clip).mul_(1.0 - MOMENTUM)
    momentum.mul_(MOMENTUM).add_(clipped)
    direction = orthogonal(clipped.add_(momentum * MOMENTUM))  # Nesterov's: the momentum as if this gradient came again
    values.mul_(decay).sub_(direction.mul_(lr * SIZE * math.sqrt(max(values.shape))))


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of the singular values' decomposition U S V^T of `matrix` (rows, columns) fp32, the same bits everywhere."""
    if matrix.device.type == "mps":  # it has no fp64
        return orthogonal(matrix.to("cpu")).to(matrix.device)
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).clone(memory_format=torch.contiguous_format)
    x.mul_(1.0 / (math.sqrt(norm_sq(x.view(-1))) + EPSILON))  # no singular value above 1
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = exact_product(x, x.T)
        _advance_(x, exact_product(gram, gram).mul_(quintic).add_(gram.mul_(cubic)), linear)
    return x.T.contiguous() if tall else x


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of (rows, inner) and (inner, columns) fp32 rounded to whole numbers: each sum is exact, and rounded to fp32 once."""
    left_up, right_up = _up(left, left.shape[1]), _up(right, left.shape[1])
    sums = torch.zeros((left.shape[0], right.shape[1]), dtype=torch.float64, device=left.device)
    for at in range(0, left.shape[1], COLUMNS):
        sums += _whole(left[:, at : at + COLUMNS], left_up) @ _whole(right[at : at + COLUMNS], right_up)
    return sums.mul_(2.0 ** -(left_up + right_up)).float()


def _advance_(x: Tensor, factor: Tensor, linear: float) -> None:
    """x = linear x + factor @ x, some columns at a time, that product as above."""
    factor_up, up = _up(factor, len(x)), _up(x, len(x))
    whole = _whole(factor, factor_up)
    for columns in torch.split(x, COLUMNS, 1):
        sums = whole @ _whole(columns, up)
        columns.mul_(linear).add_(sums.mul_(2.0 ** -(factor_up + up)).float())


def _up(factor: Tensor, inner: int) -> int:
    """The power of two that makes `factor` whole numbers of as many bits as sums of `inner` products leave."""
    bits = min(BITS, (FP64_BITS - math.ceil(math.log2(inner))) // 2)
    return bits - math.frexp(float(factor.abs().max()))[1]


def _whole(factor: Tensor, up: int) -> Tensor:
    """`factor` times 2 to the power of `up`, rounded, in fp64."""
    return factor.double().mul_(2.0**up).round_()
