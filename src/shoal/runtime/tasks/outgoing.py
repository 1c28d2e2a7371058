"""Boundary tensors leave the device beside the next hop: encoded on a thread and a stream of their own, through a ring of pinned buffers.

For task_runner.py. A hop is done when it is computed; what it gives is `Pending` until its bytes are on the host, and whoever needs these
waits for them. The ring bounds how many are: a hop that finds no free buffer waits for one. A tensor on the CPU that is not
encoded is left as it is; one that is encoded takes the same way without a buffer.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from shoal.executor.base import NotFinite
from shoal.executor.streams import streams_of
from shoal.numerics import compress
from shoal.runtime.tasks.coding import Held, Pending, blob_of, packed
from shoal.runtime.tasks.lane import Lane

log = logging.getLogger(__name__)

BUFFERS = 2  # one is filled while the other's bytes are copied out


class Outgoing:
    """`put` and `check` are called on the compute thread. `device`: where stages compute, and what comes in is decoded: the code crosses
    the bus, not the values."""

    def __init__(self, device: str, begin: Callable[[], None]) -> None:
        self.device = device
        self._begin = begin
        self._lane: Lane | None = None
        self._ring: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._ring.put(torch.empty(0, dtype=torch.uint8))
        self._error: Exception | None = None

    def check(self) -> None:
        """NotFinite: an earlier hop's result could not be encoded. Other errors, such as no memory, are raised as they are."""
        error, self._error = self._error, None
        if isinstance(error, ValueError):
            raise NotFinite(f"what an earlier hop gave could not be sent: {error}") from error
        if error is not None:
            raise error

    def put(self, tensor: Tensor, how: str) -> Held:
        """`tensor` encoded as `how` says. It must not be written to any more."""
        staged = self.staged(tensor)
        if compress.lossless(how) and not staged:
            return packed(tensor, how)
        if self._lane is None:
            self._lane, self._streams = Lane("encode", self._begin), streams_of(self.device, "boundary")
        buffer, computed = self._ring.get(), self._streams.mark("compute")
        pending = Pending(compress.nbytes(tensor, how))
        self._lane.put(lambda: self._encode(tensor, how, computed, buffer, pending, staged))
        return pending

    def staged(self, tensor: Tensor) -> bool:
        """Whether it crosses to the host through a pinned buffer: of the devices that have streams."""
        return tensor.device.type == "cuda"

    def close(self, timeout_s: float) -> None:
        """After the threads that wait for pending tensors."""
        if self._lane is not None:
            self._lane.stop()
            self._lane.thread.join(timeout_s)

    def _encode(
        self, tensor: Tensor, how: str, computed: object, buffer: Tensor, pending: Pending, staged: bool
    ) -> None:
        streams = self._streams
        try:
            if staged and buffer.numel() < pending.nbytes:
                buffer = torch.empty(pending.nbytes, dtype=torch.uint8, pin_memory=self.device.startswith("cuda"))
            streams.wait("boundary", computed)
            with streams.on("boundary"):
                code = compress.encode(tensor, how)
                if staged:
                    data = buffer[: pending.nbytes].copy_(code.data, non_blocking=True)
            if staged:
                streams.reached(streams.mark("boundary"))
                code = msgspec.structs.replace(code, data=data.clone())
            pending.set_result(blob_of(code))
        except Exception as error:  # noqa: BLE001  # such as no memory: the thread outlives it, and whoever waits gets it
            log.error("a boundary tensor cannot be sent: %s", error)
            self._error = error
            pending.set_exception(error)
        finally:
            self._ring.put(buffer)
