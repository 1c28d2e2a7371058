"""Which tensors of a run travel encoded, and what is left out of an average and fed back. For task_runner.py.

A boundary tensor is encoded once, where it was computed, and stays as those bytes until somebody computes with it: both ends,
the owner who keeps it for a repeated hop, and the replica that recomputes from it all decode the same values. Parts and
sums of a round likewise: the owner of a chunk decodes its own sum as the others do, so replicas stay equal bit for bit.
What a replica's codes leave out of its part, and as a chunk's owner out of the sum (in a group of several rows: of its row's, and of
the group's), is added to its part of the next step (error feedback). It counts only once that round's gradient was applied; it dies with
the replica, or when it moves.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import torch

from shoal.config import Config
from shoal.numerics import compress
from shoal.numerics.compress import Code
from shoal.runtime.state import raw
from shoal.transport.base import Blob

Held = torch.Tensor | Blob  # a tensor as it is, or encoded


def packed(tensor: torch.Tensor, how: str) -> Held:
    """A tensor, encoded on its own device; the bytes in the CPU's memory. ValueError: values that are not finite."""
    if compress.lossless(how):
        return tensor.detach().to("cpu").contiguous()
    code = compress.encode(tensor, how)
    return Blob(code.dtype, code.shape, raw(code.data), code.codec)


def code_of(blob: Blob) -> Code:
    """Shares the blob's memory. The blob's size was compared with its shape when it came."""
    data = memoryview(blob.data).cast("B")
    if data.readonly:
        data = memoryview(bytearray(data))
    values = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return Code(blob.dtype, tuple(blob.shape), blob.codec, values)


def plain(held: Held, device: str = "cpu") -> torch.Tensor:
    """The values. ValueError: no honest code."""
    if isinstance(held, torch.Tensor):
        return held
    code = code_of(held)
    if device != "cpu":  # the code travels, not the values
        code = msgspec.structs.replace(code, data=code.data.to(device))
    return compress.decode(code)


def nbytes(held: Held) -> int:
    return held.nbytes if isinstance(held, torch.Tensor) else memoryview(held.data).nbytes


class _Cut(msgspec.Struct):
    """The sum as it was last cut. `left` (length,) fp32 is what the codes of my parts, and of my sum, leave out."""

    spans: dict[str, tuple[int, int]]  # by name of the part
    left: torch.Tensor | None


class Averaging:
    """Parts and sums of the rounds of one stage, in the order in which the compute thread makes them."""

    def __init__(self, config: Config) -> None:
        self._how = config.network.averaging
        self._left: torch.Tensor | None = None  # of the steps that were applied
        self._cut: _Cut | None = None

    def parts(self, piece: torch.Tensor, bounds: tuple[int, ...], outs: tuple[str, ...], length: int = 0) -> list[Held]:
        """`piece` fp32, a copy of values bounds[0] to bounds[-1] of the step's sum, cut at `bounds` into blobs to be named
        `outs`. `length`: of the sum, where the piece is not all of it. Pieces come in order."""
        low, high, length = bounds[0], bounds[-1], length or bounds[-1]
        if self._left is not None:
            piece += self._left[low:high]
        slices = [piece[start - low : end - low] for start, end in pairwise(bounds)]
        whole = high - low == length
        if low == 0 or self._cut is None:
            self._cut = _Cut({}, None)
        if compress.lossless(self._how) or (whole and len(outs) == 1):  # a lone replica shares its sum with nobody
            return list(slices)
        made = [packed(part, self._how) for part in slices]
        for part, held in zip(slices, made, strict=True):
            part -= plain(held)
        if whole:
            self._cut.left = piece
        else:
            self._cut.left = torch.zeros(length) if self._cut.left is None else self._cut.left
            self._cut.left[low:high] = piece
        self._cut.spans.update(zip(outs, pairwise(bounds), strict=True))
        return made

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
            return list(slices)  # as it is, or for nobody any more
        made = [packed(part, self._how) for part in slices]
        for part, held, span in zip(slices, made, pairwise(bounds), strict=True):
            cut.left[slice(*span)] += part.sub_(plain(held))
        cut.spans.update(zip(outs, pairwise(bounds), strict=True))
        return made

    def sum(self, total: torch.Tensor, parts: tuple[str, ...]) -> Held:
        """`total` (n,) fp32 of the chunk that I own, added up from `parts`, of which one is mine."""
        cut = self._cut
        mine = [cut.spans[name] for name in parts if name in cut.spans] if cut is not None else []
        if compress.lossless(self._how) or cut is None or cut.left is None or not mine:  # nobody waits for it any more
            return total
        held = packed(total, self._how)
        left = cut.left[slice(*mine[0])]
        left += total.sub_(plain(held))
        return held

    def left(self) -> torch.Tensor | None:
        """What the round whose sums are being gathered leaves out here."""
        return self._cut.left if self._cut is not None else None

    def applied(self, left: torch.Tensor | None) -> None:
        self._left, self._cut = left, None

    def void(self, seat: bool) -> None:
        """The step's books are void; with `seat`, so is all that is held of the stage."""
        self._cut = None
        if seat:
            self._left = None
