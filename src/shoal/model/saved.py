"""Bytes that autograd saves for a backward pass. For analysis.py, which counts a model, and the executor that keeps activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_by_autograd(own: set[int]) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves inside, by storage, without the storages `own`, such as parameters."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage address is reused

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(value)
        return value.detach()  # an output would hold its own node, which then holds it: never freed

    with saved_tensors_hooks(pack, lambda value: value):
        yield sizes
    alive.clear()  # the hooks stay with the graph, and a backward pass frees what it has used
