"""Random first weights that depend on a seed alone: torch's own draws differ between vector units (normal_ and uniform_ give other bits
under AVX2 than without), and MKL's erfinv between processors.

NumPy's draws in fp64, rounded to fp32. What differs there in the last bit of fp64 differs after rounding in one value of 2^29.
Operations that a family applies to its draws (exp, log) are torch's own; parameters that come out otherwise on a machine are found
when it joins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PIECE = 1 << 20  # values drawn at once: 8 MiB
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Draws(TorchDispatchMode):
    """Within it torch's initialisers (normal_, uniform_, trunc_normal_, rand, randn) draw from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated by torch
        self._generator = np.random.Generator(np.random.Philox(seed))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in (aten.normal_.default, aten.uniform_.default):
            first, second = [*args[1:], 0.0, 1.0][:2] if len(args) != 2 else (args[1], 1.0)
            return self._fill(args[0], func is aten.normal_.default, first, second)
        if func in (aten.rand.default, aten.randn.default):
            return self._fill(aten.empty.memory_format(*args, **kwargs), func is aten.randn.default, 0.0, 1.0)
        if func is aten.erfinv_.default:
            from scipy.special import erfinv

            return _each(args[0], lambda part: erfinv(part.double().numpy()))
        return func(*args, **kwargs)

    def _fill(self, values: Tensor, normal: bool, first: float, second: float) -> Tensor:
        """Of mean and deviation, or between two bounds."""
        if normal:
            return _each(values, lambda part: self._generator.standard_normal(len(part)) * second + first)
        return _each(values, lambda part: self._generator.random(len(part)) * (second - first) + first)


def _each(values: Tensor, make: Callable[[Tensor], Floats]) -> Tensor:
    """Write `values` in their order, piece by piece."""
    flat = values.contiguous().view(-1)
    for part in torch.split(flat, PIECE):
        part.copy_(torch.from_numpy(make(part)))
    return values if values.is_contiguous() else values.copy_(flat.view(values.shape))
