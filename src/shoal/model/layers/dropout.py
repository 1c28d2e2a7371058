"""Dropout of what adapters take in, with masks that depend on (seed, step, microbatch, row, layer) alone.

So a hop that is computed again, by whom and in whatever slices, drops the same values. Drawn as weights are (draws.py): by NumPy's Philox
on the CPU, whose integers are the same everywhere. A row's values share a key; the counter says step, microbatch and row.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DRAWS = 1 << 16  # a value is dropped where a number below this is less than the rate's share of it


class Masks:
    """Whose masks are drawn now, for all adapters of a stage. `sample`: (step, microbatch); None: nothing is dropped."""

    def __init__(self, seed: int, rate: float) -> None:
        self.seed, self.rate = seed, rate
        self.sample: tuple[int, int] | None = None
        self.first_row = 0  # of the microbatch, in what passes

    def at(self, slice_number: int, rows: int) -> None:
        """The slice of that many rows passes next."""
        self.first_row = slice_number * rows


class Dropout(nn.Module):
    """In place of nn.Dropout within a LoRA layer. `name`: of the layer, in the whole model."""

    def __init__(self, masks: Masks, name: str) -> None:
        super().__init__()
        self.masks, self._name = masks, name

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D)."""
        if self.masks.sample is None:
            return x
        y: Tensor = _Dropped.apply(x, self._kept(x), 1 / (1 - self.masks.rate))  # type: ignore[no-untyped-call]
        return y

    def _kept(self, x: Tensor) -> Tensor:
        """(B, L, D) bool."""
        if x.device.type == "meta":
            return torch.empty(x.shape, dtype=torch.bool, device="meta")
        first = self.masks.first_row
        rows = [self._row(row, x[0].numel()) for row in range(first, first + len(x))]
        return torch.from_numpy(np.stack(rows)).view(x.shape).to(x.device)

    def _row(self, row: int, values: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        masks = self.masks
        assert masks.sample is not None
        step, index = masks.sample
        key = int.from_bytes(hashlib.sha256(f"dropout/{masks.seed}/{self._name}".encode()).digest()[:16], "little")
        counter = np.array([0, row, index, step], dtype=np.uint64)  # the first word counts within the row
        words = np.random.Philox(key=key, counter=counter).random_raw(-(-values // 4))
        return words.astype("<u8", copy=False).view("<u2")[:values] >= round(masks.rate * DRAWS)


def masks_of(model: nn.Module) -> Masks | None:
    """None: there is no dropout."""
    return next((module.masks for module in model.modules() if isinstance(module, Dropout)), None)


class _Dropped(torch.autograd.Function):
    """Saves the mask, a byte for each value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return x * scale * kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return grad * ctx.scale * kept, None, None
