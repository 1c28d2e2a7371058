"""Encodes tensors for the network, with error feedback in averaging. For task_runner.py.

A boundary tensor is encoded once, where it was computed, and stored encoded: both ends, a repeated hop and the replica that
recomputes from it decode the same values. So are the chunks of reduce-scatter and all-gather: the owner of a chunk decodes its
own total as the others do, so replicas stay equal bit for bit. The residual, what encoding lost of a replica's chunks and of the
totals that it owns (with several rows: of its row's and of the group's), is added to its gradient of the next step (error
feedback). It takes effect once that round's gradient was applied, and is dropped with the replica or when it moves.
"""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise

import msgspec
import torch

from shoal.config import Config
from shoal.numerics import compress
from shoal.numerics.compress import Code
from shoal.runtime.state import raw
from shoal.transport.base import Blob


class Pending(Future[Blob]):
    """A blob of `nbytes` that is on its way from the device (outgoing.py)."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes


Held = torch.Tensor | Blob | Pending  # a plain tensor, or an encoded one


def packed(tensor: torch.Tensor, how: str) -> torch.Tensor | Blob:
    """Encode a tensor on its device; the result is on the CPU. ValueError: values are not finite."""
    if compress.lossless(how):
        return tensor.detach().to("cpu").contiguous()
    return blob_of(compress.encode(tensor, how))


def blob_of(code: Code) -> Blob:
    return Blob(code.dtype, code.shape, raw(code.data), code.codec)


def ready(held: Held) -> torch.Tensor | Blob:
    """Waits for what is pending."""
    return held.result() if isinstance(held, Pending) else held


def code_of(blob: Blob) -> Code:
    """The blob as a Code, sharing its memory. The size was checked on receipt."""
    data = memoryview(blob.data).cast("B")
    if data.readonly:
        data = memoryview(bytearray(data))
    values = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return Code(blob.dtype, tuple(blob.shape), blob.codec, values)


def plain(held: Held, device: str = "cpu") -> torch.Tensor:
    """The values on `device`. ValueError: an invalid code."""
    held = ready(held)
    if isinstance(held, torch.Tensor):
        return held
    code = code_of(held)
    if device != "cpu":  # copy the code, not the values
        code = msgspec.structs.replace(code, data=code.data.to(device))
    return compress.decode(code)


def nbytes(held: Held) -> int:
    return memoryview(held.data).nbytes if isinstance(held, Blob) else held.nbytes


class _Cut(msgspec.Struct):
    """The present round's chunks. `left`: residual (length,) fp32 of this replica's chunks and totals."""

    spans: dict[str, tuple[int, int]]  # by blob name
    left: torch.Tensor | None


class Averaging:
    """Encodes the chunks and totals of one stage's rounds, in the order of the compute thread."""

    def __init__(self, config: Config) -> None:
        self._how = config.network.averaging
        self._residual: torch.Tensor | None = None  # of the applied steps
        self._cut: _Cut | None = None

    def fed_back_(self, piece: torch.Tensor, low: int) -> torch.Tensor:
        """`piece` fp32, a copy of values of the step's sum from `low` on, with what encoding has lost before."""
        if self._residual is not None:
            piece += self._residual[low : low + len(piece)]
        return piece

    def parts(
        self, piece: torch.Tensor, bounds: tuple[int, ...], outs: tuple[str, ...], length: int = 0, scale: float = 1.0
    ) -> list[Held]:
        """`piece` fp32, a copy of values bounds[0] to bounds[-1] of the step's sum, cut at `bounds` into blobs to be named
        `outs`. `length`: of the sum, where the piece is not all of it; `scale`: by which all is shortened. Pieces come in order."""
        low, high, length = bounds[0], bounds[-1], length or bounds[-1]
        self.fed_back_(piece, low)
        if scale != 1.0:
            piece *= scale
        slices = [piece[start - low : end - low] for start, end in pairwise(bounds)]
        whole = high - low == length
        if low == 0 or self._cut is None:
            self._cut = _Cut({}, None)
        if compress.lossless(self._how) or (whole and len(outs) == 1):  # a single replica sends its sum to no other
            return list(slices)
        encoded: list[Held] = [packed(part, self._how) for part in slices]
        for part, value in zip(slices, encoded, strict=True):
            part -= plain(value)
        if whole:
            self._cut.left = piece
        else:
            self._cut.left = torch.zeros(length) if self._cut.left is None else self._cut.left
            self._cut.left[low:high] = piece
        self._cut.spans.update(zip(outs, pairwise(bounds), strict=True))
        return encoded

    def row_parts(
        self, total: torch.Tensor, parts: tuple[str, ...], bounds: tuple[int, ...], outs: tuple[str, ...]
    ) -> list[Held]:
        """`total` (n,) fp32, my row's sum of the chunk that I own there, added up from `parts`, of which one is mine: values
        bounds[0] to bounds[-1] of the gradient, cut at `bounds` into what those who add up the rows get, to be named `outs`."""
        cut, slices = self._cut, list(torch.split(total, [high - low for low, high in pairwise(bounds)]))
        if (
            compress.lossless(self._how)
            or cut is None
            or cut.left is None
            or not any(name in cut.spans for name in parts)
        ):
            return list(slices)  # not encoded, or no longer needed
        encoded: list[Held] = [packed(part, self._how) for part in slices]
        for part, value, span in zip(slices, encoded, pairwise(bounds), strict=True):
            cut.left[slice(*span)] += part.sub_(plain(value))
        cut.spans.update(zip(outs, pairwise(bounds), strict=True))
        return encoded

    def sum(self, total: torch.Tensor, parts: tuple[str, ...]) -> Held:
        """`total` (n,) fp32 of the chunk that I own, added up from `parts`, of which one is mine."""
        cut = self._cut
        mine = [cut.spans[name] for name in parts if name in cut.spans] if cut is not None else []
        if compress.lossless(self._how) or cut is None or cut.left is None or not mine:  # no longer needed
            return total
        held = packed(total, self._how)
        left = cut.left[slice(*mine[0])]
        left += total.sub_(plain(held))
        return held

    def left(self) -> torch.Tensor | None:
        """The residual of the round being gathered."""
        return self._cut.left if self._cut is not None else None

    def applied(self, left: torch.Tensor | None) -> None:
        self._residual, self._cut = left, None

    def void(self, seat: bool) -> None:
        """Drop the present round; with `seat`, which says that the stage changed, the residual too."""
        self._cut = None
        if seat:
            self._residual = None
