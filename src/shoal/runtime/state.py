"""A stage's tensors as one stream of bytes: chunks with their SHA-256 for a joiner's download, and checkpoint files.

The stream has the safetensors layout, a header with names, types, shapes and offsets and then the raw values, so that a
checkpoint's file is that stream and a download needs no other format. Nothing is trusted: header and chunk sizes are
bounded, offsets must have no gap or overlap, and every chunk is compared with its hash. core/transfer/download.py decides
which chunk is requested from which peer, and what follows when a hash differs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
import torch

from shoal.core.messages import Manifest
from shoal.escaping import UNDECODABLE

MAX_CHUNK_BYTES = 64 << 20
CHUNK_BYTES = 16 << 20  # 0.7 s on a 200 Mbit/s link: short enough to request again when it is lost
MAX_HEADER_BYTES = 16 << 20  # some 100,000 tensors
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

State = Mapping[str, torch.Tensor]
Read = Callable[[int], bytes | bytearray | memoryview]  # n -> the stream's next n bytes, or fewer at its end


class TensorSpan(msgspec.Struct, frozen=True):
    """A tensor in the stream; offsets count from the end of the header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**48)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


# At import: msgspec 0.22 crashes when two threads decode a type for the first time
_SPANS = msgspec.json.Decoder(TensorSpan)


def raw(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; shares the memory of a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def header(state: State, note: Mapping[str, str]) -> bytes:
    """The start of the stream: 8 bytes of length, then JSON, padded to align the values."""
    fields: dict[str, object] = {"__metadata__": dict(note)}
    end = 0
    for name, tensor in state.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        fields[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream(state: State, note: Mapping[str, str]) -> Iterator[memoryview]:
    """The whole stream, piece by piece, without copying CPU tensors."""
    yield memoryview(header(state, note))
    for tensor in state.values():
        yield raw(tensor)


def unpack(
    read: Read, select: Callable[[str], bool] = lambda _: True
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The stream's `wanted` tensors and its note. Reads to the end. ValueError: malformed."""
    size = int.from_bytes(_read_exactly(read, 8), "little")
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes; at most {MAX_HEADER_BYTES} are accepted")
    spans, note = parse(bytes(_read_exactly(read, size)))
    tensors: dict[str, torch.Tensor] = {}
    for name, span in spans.items():
        target = torch.empty(span.shape, dtype=DTYPES[span.dtype]) if select(name) else None
        buffer = None if target is None else raw(target)
        offset = 0
        while offset < span.nbytes:
            piece = read(min(CHUNK_BYTES, span.nbytes - offset))
            if not piece:
                raise ValueError(f"it ends {span.nbytes - offset} bytes inside {name}")
            if buffer is not None:
                buffer[offset : offset + len(piece)] = piece
            offset += len(piece)
        if target is not None:
            tensors[name] = target
    if read(1):
        raise ValueError("there are bytes after the last tensor")
    return tensors, note


def parse(text: bytes) -> tuple[dict[str, TensorSpan], dict[str, str]]:
    """The header's tensors in the order of the stream, and its note."""
    try:
        fields = msgspec.json.decode(text.rstrip(b" "), type=dict[str, msgspec.Raw])
        note = msgspec.json.decode(fields.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        spans = {name: _SPANS.decode(span) for name, span in fields.items()}
    except UNDECODABLE as error:
        raise ValueError(f"a header that cannot be read: {error}") from error
    spans = dict(sorted(spans.items(), key=lambda item: item[1].data_offsets))
    end = 0
    for name, span in spans.items():
        dtype = DTYPES.get(span.dtype)
        if dtype is None:
            raise ValueError(f"{name}: unknown type {span.dtype[:20]!r}")
        start, expected = end, end + math.prod(span.shape) * dtype.itemsize
        if span.data_offsets != (start, expected):
            raise ValueError(f"{name}: lies at {span.data_offsets}, its shape says {(start, expected)}")
        end = expected
    return spans, note


def _read_exactly(read: Read, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        piece = read(count - len(data))
        if not piece:
            raise ValueError(f"it ends inside its header, {count - len(data)} bytes early")
        data += piece
    return data


# ----------------------------------------------------------------------------------------------------------- chunks


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own, which training does not change."""
    return tensor.detach().to("cpu", copy=True)


class Copy:
    """A stage's state of version `step`, readable in chunks while training goes on: its tensors are `copied`."""

    def __init__(
        self, state: dict[str, torch.Tensor], step: int, note: Mapping[str, str], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunks of {chunk_bytes} bytes; choose 1 to {MAX_CHUNK_BYTES}")
        self.step = step
        self.state = state
        self._pieces = [piece for piece in stream(self.state, note) if piece]
        self._chunk_bytes = chunk_bytes
        self.nbytes = sum(map(len, self._pieces))
        self.chunks = -(-self.nbytes // chunk_bytes)

    def read(self, chunk: int) -> bytearray:
        """The bytes of chunk `chunk`. ValueError: no such chunk."""
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk {chunk} of {self.chunks}")
        start = chunk * self._chunk_bytes
        end = min(start + self._chunk_bytes, self.nbytes)
        data, offset = bytearray(), 0
        for piece in self._pieces:
            if offset + len(piece) > start and offset < end:
                data += piece[max(0, start - offset) : end - offset]
            offset += len(piece)
        return data

    def manifest(self) -> Manifest:
        """Sizes and hashes of all chunks."""
        hashes, sizes = [], []
        for chunk in range(self.chunks):
            data = self.read(chunk)
            hashes.append(hashlib.sha256(data).hexdigest())
            sizes.append(len(data))
        return Manifest(tuple(hashes), tuple(sizes))


def join(chunks: Sequence[bytes | bytearray | memoryview]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state and its note from all chunks in order. ValueError: malformed."""
    views = [memoryview(chunk).cast("B") for chunk in chunks]
    number, offset = 0, 0

    def read(count: int) -> memoryview:
        nonlocal number, offset
        while number < len(views) and offset == len(views[number]):
            number, offset = number + 1, 0
        if number == len(views):
            return memoryview(b"")
        piece = views[number][offset : offset + count]
        offset += len(piece)
        return piece

    # The sizes in the header are compared with the bytes present before allocation.
    total = sum(map(len, views))
    if total < 8 or len(views[0]) == 0:
        raise ValueError(f"{total} bytes are no state")
    size = int.from_bytes(_read_exactly(read, 8), "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, total - 8):
        raise ValueError(f"a header of {size} bytes in {total}")
    announced, _ = parse(bytes(_read_exactly(read, size)))
    needed = 8 + size + sum(span.nbytes for span in announced.values())
    if needed != total:
        raise ValueError(f"the header announces {needed} bytes, {total} are here")
    number, offset = 0, 0
    return unpack(read)


def digest(state: State) -> str:
    """SHA-256 over the whole stream: names, types, shapes and values."""
    sha = hashlib.sha256()
    for piece in stream(state, {}):
        sha.update(piece)
    return sha.hexdigest()


def check_chunk(data: bytes | bytearray | memoryview, expected: str) -> str:
    """Why a downloaded chunk is invalid; '': its SHA-256 is `expected`."""
    size = memoryview(data).nbytes
    if not 1 <= size <= MAX_CHUNK_BYTES:
        return f"a chunk of {size} bytes; 1 to {MAX_CHUNK_BYTES} are accepted"
    actual = hashlib.sha256(data).hexdigest()
    return "" if actual == expected else f"its SHA-256 is {actual[:16]}, not {expected[:16]}"
