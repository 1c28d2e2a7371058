"""A stage's tensors as one stream of bytes: chunks with their SHA-256 for a joiner's download, and checkpoint files.

The stream has the safetensors layout, a header with names, types, shapes and offsets and then the raw values, so that a
checkpoint's file is that stream as it is, and a download needs no format of its own. Nothing is believed: header and
chunk sizes are bounded, offsets must follow one another without gap or overlap, and every chunk is compared with its
hash. Who asks whom for which chunk, and what happens when a hash differs, is core's matter (core/transfer/download.py).
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

MAX_CHUNK_BYTES = 64 << 20
CHUNK_BYTES = 16 << 20  # 0.7 s on a 200 Mbit/s link: short enough to be asked for again when it is lost
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
Read = Callable[[int], bytes | bytearray | memoryview]  # the stream's next so many bytes, or fewer at its end


class Place(msgspec.Struct, frozen=True):
    """A tensor in the stream; offsets count from the end of the header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**48)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


def raw(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, shared where it lies whole in the CPU's memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def header(state: State, note: Mapping[str, str]) -> bytes:
    """The stream's beginning: 8 bytes of length, then JSON, padded so that the values are aligned."""
    told: dict[str, object] = {"__metadata__": dict(note)}
    end = 0
    for name, tensor in state.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        told[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream(state: State, note: Mapping[str, str]) -> Iterator[memoryview]:
    """The whole stream, piece by piece, without copying CPU tensors."""
    yield memoryview(header(state, note))
    for tensor in state.values():
        yield raw(tensor)


def unpack(
    read: Read, wanted: Callable[[str], bool] = lambda _: True
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The stream's `wanted` tensors and its note. Reads to the end. ValueError says what is wrong with it."""
    size = int.from_bytes(_exactly(read, 8), "little")
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes; at most {MAX_HEADER_BYTES} are accepted")
    places, note = parse(bytes(_exactly(read, size)))
    found: dict[str, torch.Tensor] = {}
    for name, place in places.items():
        target = torch.empty(place.shape, dtype=DTYPES[place.dtype]) if wanted(name) else None
        into = None if target is None else raw(target)
        at = 0
        while at < place.nbytes:
            piece = read(min(CHUNK_BYTES, place.nbytes - at))
            if not piece:
                raise ValueError(f"it ends {place.nbytes - at} bytes inside {name}")
            if into is not None:
                into[at : at + len(piece)] = piece
            at += len(piece)
        if target is not None:
            found[name] = target
    if read(1):
        raise ValueError("there are bytes after the last tensor")
    return found, note


def parse(text: bytes) -> tuple[dict[str, Place], dict[str, str]]:
    """The header's tensors in the order of the stream, and its note."""
    try:
        told = msgspec.json.decode(text.rstrip(b" "), type=dict[str, msgspec.Raw])
        note = msgspec.json.decode(told.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        places = {name: msgspec.json.decode(place, type=Place) for name, place in told.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"a header that cannot be read: {error}") from error
    places = dict(sorted(places.items(), key=lambda item: item[1].data_offsets))
    end = 0
    for name, place in places.items():
        dtype = DTYPES.get(place.dtype)
        if dtype is None:
            raise ValueError(f"{name}: unknown type {place.dtype[:20]!r}")
        start, expected = end, end + math.prod(place.shape) * dtype.itemsize
        if place.data_offsets != (start, expected):
            raise ValueError(f"{name}: lies at {place.data_offsets}, its shape says {(start, expected)}")
        end = expected
    return places, note


def _exactly(read: Read, count: int) -> bytearray:
    held = bytearray()
    while len(held) < count:
        piece = read(count - len(held))
        if not piece:
            raise ValueError(f"it ends inside its header, {count - len(held)} bytes early")
        held += piece
    return held


# ----------------------------------------------------------------------------------------------------------- chunks


class Copy:
    """A copy of a stage's state of version `step`, readable in chunks while training goes on."""

    def __init__(self, state: State, step: int, note: Mapping[str, str], chunk_bytes: int = CHUNK_BYTES) -> None:
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunks of {chunk_bytes} bytes; choose 1 to {MAX_CHUNK_BYTES}")
        self.step = step
        self.state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        self._pieces = [piece for piece in stream(self.state, note) if piece]
        self._chunk_bytes = chunk_bytes
        self.nbytes = sum(map(len, self._pieces))
        self.chunks = -(-self.nbytes // chunk_bytes)

    def read(self, chunk: int) -> bytearray:
        """Chunk `chunk`'s bytes. ValueError when there is no such chunk."""
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk {chunk} of {self.chunks}")
        start = chunk * self._chunk_bytes
        end = min(start + self._chunk_bytes, self.nbytes)
        held, at = bytearray(), 0
        for piece in self._pieces:
            if at + len(piece) > start and at < end:
                held += piece[max(0, start - at) : end - at]
            at += len(piece)
        return held

    def manifest(self) -> Manifest:
        """Sizes and hashes of all chunks."""
        hashes, sizes = [], []
        for chunk in range(self.chunks):
            data = self.read(chunk)
            hashes.append(hashlib.sha256(data).hexdigest())
            sizes.append(len(data))
        return Manifest(tuple(hashes), tuple(sizes))


def join(chunks: Sequence[bytes | bytearray | memoryview]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state, and its note, from all chunks in order. ValueError says what is wrong with them."""
    places = [memoryview(chunk).cast("B") for chunk in chunks]
    number, at = 0, 0

    def read(count: int) -> memoryview:
        nonlocal number, at
        while number < len(places) and at == len(places[number]):
            number, at = number + 1, 0
        if number == len(places):
            return memoryview(b"")
        piece = places[number][at : at + count]
        at += len(piece)
        return piece

    # What the header announces is compared with what is here before memory is taken for it.
    total = sum(map(len, places))
    if total < 8 or len(places[0]) == 0:
        raise ValueError(f"{total} bytes are no state")
    size = int.from_bytes(_exactly(read, 8), "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, total - 8):
        raise ValueError(f"a header of {size} bytes in {total}")
    announced, _ = parse(bytes(_exactly(read, size)))
    needed = 8 + size + sum(place.nbytes for place in announced.values())
    if needed != total:
        raise ValueError(f"the header announces {needed} bytes, {total} are here")
    number, at = 0, 0
    return unpack(read)


def digest(state: State) -> str:
    """SHA-256 over the whole stream: names, types, shapes and values."""
    sha = hashlib.sha256()
    for piece in stream(state, {}):
        sha.update(piece)
    return sha.hexdigest()


def check_chunk(data: bytes | bytearray | memoryview, expected: str) -> str:
    """What is wrong with a downloaded chunk; '' when its SHA-256 is `expected`."""
    size = memoryview(data).nbytes
    if not 1 <= size <= MAX_CHUNK_BYTES:
        return f"a chunk of {size} bytes; 1 to {MAX_CHUNK_BYTES} are accepted"
    found = hashlib.sha256(data).hexdigest()
    return "" if found == expected else f"its SHA-256 is {found[:16]}, not {expected[:16]}"
