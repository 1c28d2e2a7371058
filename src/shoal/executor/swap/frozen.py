"""The weights of a swapping stage that are not trained, in host memory: loaded into a slot with their group, and never stored back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.executor.swap import memory
from shoal.executor.swap.link import pinned


class FrozenWeights:
    """`flat`: their bytes, one after another, each at a multiple of memory.ALIGN. In float32, bfloat16 or the codes of four bits."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], device: str) -> None:
        """Takes the weights: what they lay in is freed one by one, so that the host holds them once."""
        self.kinds = {name: (value.shape, value.dtype) for name, value in named}
        sizes = {name: value.nbytes for name, value in named}
        starts = list(accumulate((memory.padded(size) for size in sizes.values()), initial=0))
        self._starts = dict(zip(sizes, starts, strict=False))
        self.sizes = sizes
        flat = torch.empty(starts[-1], dtype=torch.uint8)  # of pages that the system gives as they are written
        for name, value in named:
            self.shaped(flat[self._starts[name] :], name).copy_(value.detach())
            value.data = torch.empty(0, dtype=value.dtype)
        self.flat = pinned(flat, device) if named else flat

    def shaped(self, start: Tensor, name: str) -> Tensor:
        """The weight whose bytes are the first of `start`."""
        shape, dtype = self.kinds[name]
        return start[: self.sizes[name]].view(dtype).view(shape)

    def named(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.shaped(self.flat[start:], name) for name, start in self._starts.items()}

    def pieces(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Where each lies in `flat`, and how many bytes it takes with the gap behind it."""
        return [(self._starts[name], memory.padded(self.sizes[name])) for name in names]
