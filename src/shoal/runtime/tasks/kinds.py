"""What the blobs of a message must be in this run, and tensors as blobs and back.

For task_runner.py: what does not fit is named for its sender before any task sees it, and before anything is decoded.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from shoal import codec
from shoal.config import Config
from shoal.core.messages import BULK, Backward, Boundary, Chunk, Forward, GatherChunk, Message, ReduceChunk
from shoal.executor.base import boundary
from shoal.numerics import compress
from shoal.runtime.data import vocabulary
from shoal.runtime.state import MAX_CHUNK_BYTES, raw
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.coding import Held
from shoal.transport.base import DTYPES, Blob

# Of what another peer computed. Beyond it the sums and squares that are made of a value overflow here, and this peer would be blamed;
# the activations and gradients of a model that trains lie 10^9 below.
MOST = 2.0**50
TOO_LARGE = f"beyond {MOST:.0e} what is made of them overflows"


class Kind(msgspec.Struct, frozen=True):
    """What a blob must be. An empty shape: one dimension of 1 to `most` values. `codecs`: names of those that may be used."""

    what: str  # in words
    dtype: str
    shape: tuple[int, ...] = ()
    most: int = 0
    codecs: tuple[str, ...] = (codec.RAW,)


class Kinds:
    """What each message's blobs must be in a run of this configuration."""

    def __init__(self, config: Config) -> None:
        shape, dtype = boundary(config)
        name = str(dtype).removeprefix("torch.")
        self._stages = config.run.stages
        self._vocabulary = vocabulary(config)
        network = config.network
        self._boundary = Kind("a boundary tensor", name, shape, codecs=(_codec(network.activations),))
        self._gradient = Kind("a boundary gradient", name, shape, codecs=(_codec(network.gradients),))
        self._averaging = _codec(network.averaging)
        self._tokens = Kind("tokens", "int64", (config.train.microbatch, config.data.sequence + 1))
        self._most = config.network.blob_bytes // 4  # values of a gradient whose stage is still being downloaded
        self._bytes = Kind("a chunk of bytes", "uint8", (), MAX_CHUNK_BYTES)

    def fault(self, message: Message, blobs: tuple[Blob, ...], length: int) -> str:
        """`length`: values in the stage's gradient, 0 while there is no stage."""
        if not isinstance(message, BULK):
            return f"{len(blobs)} blobs with a {type(message).__name__}, which has none" if blobs else ""
        kinds = self._kinds(message, length)
        if isinstance(kinds, str):
            return kinds
        if len(blobs) != len(kinds):
            return f"{len(blobs)} blobs with a {type(message).__name__}, not {len(kinds)}"
        faults = (self._wrong(blob, kind) for blob, kind in zip(blobs, kinds, strict=True))
        return next((f"{kind.what}: {fault}" for kind, fault in zip(kinds, faults, strict=True) if fault), "")

    def _kinds(self, message: Message, length: int) -> tuple[Kind, ...] | str:
        if isinstance(message, ReduceChunk | GatherChunk):
            heard = isinstance(message, GatherChunk) and message.to_listener
            most = length or (self._most if heard else 0)
            # A lone replica tells listeners its sum as it applies it: not encoded.
            codecs = (codec.RAW, self._averaging) if heard else (self._averaging,)
            kind = Kind("a chunk of the gradient", "float32", (), most, codecs)
            return (kind,) if most else "no stage is here to average"
        if isinstance(message, Chunk):
            return () if message.gone else (self._bytes,)
        assert isinstance(message, Forward | Backward | Boundary)
        stage, last = message.stage, self._stages - 1
        if stage > last:
            return f"{type(message).__name__} of stage {stage} in a run of {self._stages} stages"
        if isinstance(message, Boundary):
            kind = self._gradient if message.gradient else self._boundary
            return (kind,) if stage != (last if message.gradient else 0) else f"stage {stage} has no such boundary"
        return (self._tokens,) if stage in (0, last) else ()

    def _wrong(self, blob: Blob, kind: Kind) -> str:
        fault = _malformed(blob)
        if fault:
            return fault
        if blob.dtype != kind.dtype:
            return f"type {blob.dtype}, not {kind.dtype}"
        if blob.codec.partition("/")[0] not in kind.codecs:
            return f"codec {blob.codec}, not {' or '.join(kind.codecs)}, which this run uses"
        if kind.shape and blob.shape != kind.shape:
            return f"shape {blob.shape}, not {kind.shape}"
        if not kind.shape and (len(blob.shape) != 1 or not 1 <= blob.shape[0] <= kind.most):
            return f"shape {blob.shape}, not one dimension of 1 to {kind.most}"
        if blob.codec != codec.RAW:
            code = coding.code_of(blob)
            fault = compress.fault(code)
            return fault or (
                "" if compress.largest(code) <= MOST else f"values up to {compress.largest(code):.1g}: {TOO_LARGE}"
            )
        tensor = tensor_of(blob)
        if kind is self._tokens and (int(tensor.min()) < 0 or int(tensor.max()) >= self._vocabulary):
            return f"tokens from {int(tensor.min())} to {int(tensor.max())}, not 0 to {self._vocabulary - 1}"
        return _beyond(tensor) if tensor.is_floating_point() else ""


def blob_of(tensor: torch.Tensor) -> Blob:
    """A CPU tensor as a blob that shares its memory."""
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw(tensor))


def tensor_of(blob: Blob) -> torch.Tensor:
    """A raw blob as a tensor; shares its memory unless that is read-only or not aligned. ValueError: not what it says it is."""
    fault = _malformed(blob)
    if fault:
        raise ValueError(fault)
    dtype = getattr(torch, blob.dtype)
    data = memoryview(blob.data).cast("B")
    if len(data) == 0:
        return torch.empty(blob.shape, dtype=dtype)
    if data.readonly or np.frombuffer(data, dtype=np.uint8).ctypes.data % dtype.itemsize:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).view(blob.shape)


def kept(blob: Blob) -> Held:
    """A blob as it is held here. ValueError: not what it says it is."""
    if blob.codec == codec.RAW:
        return tensor_of(blob)
    fault = _malformed(blob)
    if fault:
        raise ValueError(fault)
    return blob


def _malformed(blob: Blob) -> str:
    if blob.dtype not in DTYPES:
        return f"type {blob.dtype[:20]!r} is not known here"
    size = memoryview(blob.data).nbytes
    try:
        wanted = codec.nbytes(blob.codec, blob.shape, blob.dtype)
    except ValueError as error:
        return str(error)
    if any(extent < 0 for extent in blob.shape) or size != wanted:
        return f"{size} bytes are not {blob.dtype} of shape {blob.shape} in codec {blob.codec}"
    return ""


def _codec(how: str) -> str:
    """The name that codec `how` of the configuration has on the wire."""
    return codec.RAW if compress.lossless(how) else how


def _beyond(tensor: torch.Tensor) -> str:
    """What is wrong with its values: in one pass, whose bounds are NaN if any value is."""
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if -MOST <= low and high <= MOST:
        return ""
    if not finite(tensor):
        return "values are not finite"
    return f"values from {low:.1g} to {high:.1g}: {TOO_LARGE}"


def finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite. A finite sum says so at a third of the cost; an infinite one may be an overflow."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
