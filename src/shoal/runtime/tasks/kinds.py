"""Checks the blobs of a received message, and converts tensors to blobs and back.

For task_runner.py: an invalid blob is reported with its sender before any task or decoding.
"""

from __future__ import annotations

import msgspec
import torch

from shoal import codec
from shoal.config import Config, masked, microbatches, token_rows
from shoal.core.messages import (
    BULK,
    Backward,
    BoundaryTensor,
    Chunk,
    Forward,
    GatherChunk,
    HiddenStates,
    Message,
    ReduceChunk,
)
from shoal.executor.base import boundary, boundary_gradient
from shoal.numerics import compress
from shoal.runtime.data.dataset import vocabulary
from shoal.runtime.state import MAX_CHUNK_BYTES, raw
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.coding import Held
from shoal.transport.base import DTYPES, Blob

# Largest value received from a peer: larger ones make sums and squares overflow here, and this peer would be blamed. Activations
# and gradients of a model that trains are below it by 10^9.
MOST = 2.0**50
TOO_LARGE = f"beyond {MOST:.0e} what is made of them overflows"


class BlobSpec(msgspec.Struct, frozen=True):
    """The required type of a blob. An empty shape: one dimension of 1 to `most` values. `codecs`: the allowed ones."""

    what: str  # in words
    dtype: str
    shape: tuple[int, ...] = ()
    most: int = 0
    codecs: tuple[str, ...] = (codec.RAW,)
    least: int | None = None  # of tokens; ~id where some do not count


class Kinds:
    """The required blobs of each message in a run of this configuration."""

    def __init__(self, config: Config) -> None:
        shape, dtype = boundary(config)
        name = str(dtype).removeprefix("torch.")
        self._stages = config.run.stages
        self._vocabulary = vocabulary(config)
        self._trained = microbatches(config.train)
        network = config.network
        self._boundary = BlobSpec("a boundary tensor", name, shape, codecs=(_codec(network.activations),))
        back, _ = boundary_gradient(config)
        self._gradient = BlobSpec("a boundary gradient", name, back, codecs=(_codec(network.gradients),))
        self._averaging = _codec(network.averaging)
        shape = token_rows(config), config.data.sequence + 1
        self._tokens = BlobSpec("tokens", "int64", shape, least=-self._vocabulary if masked(config) else 0)
        self._heldout = BlobSpec("tokens", "int64", shape, least=-self._vocabulary)
        self._most = config.network.max_tensor_bytes // 4  # values of a gradient whose stage is still being downloaded
        self._bytes = BlobSpec("a chunk of bytes", "uint8", (), MAX_CHUNK_BYTES)

    def fault(self, message: Message, blobs: tuple[Blob, ...], length: int) -> str:
        """Why the blobs are invalid; '': they are valid. `length`: values in the stage's gradient, 0: no stage is loaded."""
        if not isinstance(message, BULK):
            return f"{len(blobs)} blobs with a {type(message).__name__}, which has none" if blobs else ""
        kinds = self._kinds(message, length)
        if isinstance(kinds, str):
            return kinds
        if len(blobs) != len(kinds):
            return f"{len(blobs)} blobs with a {type(message).__name__}, not {len(kinds)}"
        faults = (self._wrong(blob, kind) for blob, kind in zip(blobs, kinds, strict=True))
        return next((f"{kind.what}: {fault}" for kind, fault in zip(kinds, faults, strict=True) if fault), "")

    def _kinds(self, message: Message, length: int) -> tuple[BlobSpec, ...] | str:
        if isinstance(message, ReduceChunk | GatherChunk):
            return self._chunk_kinds(message, length)
        if isinstance(message, Chunk):
            return () if message.gone else (self._bytes,)
        if isinstance(message, HiddenStates):
            return (BlobSpec("hidden states", self._boundary.dtype, (1, message.count, self._boundary.shape[-1])),)
        assert isinstance(message, Forward | Backward | BoundaryTensor)
        stage, last = message.stage, self._stages - 1
        if stage > last:
            return f"{type(message).__name__} of stage {stage} in a run of {self._stages} stages"
        if isinstance(message, BoundaryTensor):
            kind = self._gradient if message.gradient else self._boundary
            return (kind,) if stage != (last if message.gradient else 0) else f"stage {stage} has no such boundary"
        return self._tokens_of(message)

    def _tokens_of(self, message: Forward | Backward) -> tuple[BlobSpec, ...] | str:
        last = self._stages - 1
        tokens = self._tokens if message.index < self._trained else self._heldout
        return (tokens,) if message.stage in (0, last) else ()

    def _chunk_kinds(self, message: ReduceChunk | GatherChunk, length: int) -> tuple[BlobSpec, ...] | str:
        for_joiner = isinstance(message, GatherChunk) and message.to_joiner
        most = length or (self._most if for_joiner else 0)
        # A single replica sends joiners its sum unencoded, as it applies it.
        codecs = (codec.RAW, self._averaging) if for_joiner else (self._averaging,)
        kind = BlobSpec("a chunk of the gradient", "float32", (), most, codecs)
        return (kind,) if most else "no stage is here to average"

    def _wrong(self, blob: Blob, kind: BlobSpec) -> str:
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
        return self._wrong_values(blob, kind)

    def _wrong_values(self, blob: Blob, kind: BlobSpec) -> str:
        if blob.codec != codec.RAW:
            code = coding.code_of(blob)
            fault = compress.fault(code)
            return fault or (
                "" if compress.largest(code) <= MOST else f"values up to {compress.largest(code):.1g}: {TOO_LARGE}"
            )
        if blob.largest is not None and blob.largest <= MOST:
            return ""
        tensor = tensor_of(blob)
        if kind.least is not None and (int(tensor.min()) < kind.least or int(tensor.max()) >= self._vocabulary):
            return f"tokens from {int(tensor.min())} to {int(tensor.max())}, not {kind.least} to {self._vocabulary - 1}"
        return _beyond(tensor) if tensor.is_floating_point() else ""


def blob_of(tensor: torch.Tensor) -> Blob:
    """A CPU tensor as a blob that shares its memory."""
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw(tensor))


def sendable(pending: Held) -> Blob:
    """What the network takes; waits for it while it is pending."""
    held = coding.ready(pending)
    return held if isinstance(held, Blob) else blob_of(held)


def tensor_of(blob: Blob) -> torch.Tensor:
    """A raw blob as a tensor; shares its memory unless that is read-only or not aligned. ValueError: malformed."""
    fault = _malformed(blob)
    if fault:
        raise ValueError(fault)
    dtype = getattr(torch, blob.dtype)
    data = memoryview(blob.data).cast("B")
    if len(data) == 0:
        return torch.empty(blob.shape, dtype=dtype)
    if data.readonly or torch.frombuffer(data, dtype=torch.uint8).data_ptr() % dtype.itemsize:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).view(blob.shape)


def checked(blob: Blob) -> Held:
    """A blob for storage: a raw one becomes a tensor. ValueError: malformed."""
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
        expected = codec.nbytes(blob.codec, blob.shape, blob.dtype)
    except ValueError as error:
        return str(error)
    if any(extent < 0 for extent in blob.shape) or size != expected:
        return f"{size} bytes are not {blob.dtype} of shape {blob.shape} in codec {blob.codec}"
    return ""


def _codec(how: str) -> str:
    """The wire name of codec `how` of the configuration."""
    return codec.RAW if compress.lossless(how) else how


def _beyond(tensor: torch.Tensor) -> str:
    """Why the values are invalid; '': they are valid. One pass: the bounds are NaN if any value is."""
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if -MOST <= low and high <= MOST:
        return ""
    if not compress.finite(tensor):
        return "values are not finite"
    return f"values from {low:.1g} to {high:.1g}: {TOO_LARGE}"
