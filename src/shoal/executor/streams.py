"""Streams of a device beside the one that computes: each runs its work in order, and waits for another only where it is told to.

For the swapping executor's copies, the optimizer beside the hops, and boundary tensors on their way to the host. CUDA has them (ROCm under
the same name); elsewhere all work is done in the order in which it is issued, by the same code.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Streams(Protocol):
    """`compute` and some others, by name."""

    def on(self, stream: str, group: int = 0, what: str = "", share: float = 1.0) -> AbstractContextManager[object]:
        """Issue work to that stream inside. Of a swapping stage's copies: `what` they copy, a group's `parameters` or `sums`, and the
        share of it."""
        ...

    def computed(self, group: int, back: bool) -> None:
        """Call once per slice of a swapping stage after work was issued to `compute`."""
        ...

    def mark(self, stream: str) -> object:
        """The point after all work issued to that stream so far."""
        ...

    def wait(self, stream: str, mark: object) -> None:
        """Later work of that stream starts after the mark; None: at once."""
        ...

    def reached(self, mark: object) -> None:
        """The calling thread waits for the mark."""
        ...

    def settle(self) -> None:
        """The calling thread waits until all streams are done."""
        ...


class NoStreams:
    """Synchronous copies."""

    def on(self, stream: str, group: int = 0, what: str = "", share: float = 1.0) -> AbstractContextManager[object]:
        return nullcontext()

    def computed(self, group: int, back: bool) -> None: ...

    def mark(self, stream: str) -> object:
        return None

    def wait(self, stream: str, mark: object) -> None: ...

    def reached(self, mark: object) -> None: ...

    def settle(self) -> None: ...


class CudaStreams:
    """Streams live as long as the stage: the allocator's pools grow with every new stream."""

    def __init__(self, *names: str) -> None:
        self._streams = {"compute": torch.cuda.current_stream(), **{name: torch.cuda.Stream() for name in names}}

    def on(self, stream: str, group: int = 0, what: str = "", share: float = 1.0) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[stream])

    def computed(self, group: int, back: bool) -> None: ...

    def mark(self, stream: str) -> object:
        return self._streams[stream].record_event()

    def wait(self, stream: str, mark: object) -> None:
        if mark is not None:
            assert isinstance(mark, torch.cuda.Event)
            self._streams[stream].wait_event(mark)

    def reached(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def settle(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def streams_of(device: str, *names: str) -> Streams:
    return CudaStreams(*names) if device.startswith("cuda") else NoStreams()
