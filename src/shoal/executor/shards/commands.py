"""What the leading process of a sharded stage sends its followers, over a pipe; the tensors go through torch's process group."""

from __future__ import annotations

from typing import IO, TypeVar

import msgspec
import torch

from shoal.config import Config

MOST_BYTES = 1 << 24  # of one command; a configuration with many links is the largest
DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.float32, torch.bfloat16)}


class Shape(msgspec.Struct, frozen=True):
    """Of a tensor that is scattered by rows."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Shape | None:
        return None if tensor is None else cls(tuple(tensor.shape), str(tensor.dtype))

    def rows(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape[0] // count, *self.shape[1:], dtype=DTYPES[self.dtype], device=device)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first one. `store`: a file by which the processes find one another."""

    device: str
    rank: int
    count: int
    store: str
    deadline_s: float


class Build(msgspec.Struct, frozen=True, tag=True):
    """A stage in place of any earlier one. See executor.create."""

    config: Config
    stage: int
    source: str | None


class Forward(msgspec.Struct, frozen=True, tag=True):
    x: Shape


class Backward(msgspec.Struct, frozen=True, tag=True):
    x: Shape
    grad: Shape | None
    tokens: Shape | None


class Zero(msgspec.Struct, frozen=True, tag=True):
    pass


class Contribution(msgspec.Struct, frozen=True, tag=True):
    start: int
    stop: int


class Apply(msgspec.Struct, frozen=True, tag=True):
    norm: float
    step: int
    scale: float


class Gather(msgspec.Struct, frozen=True, tag=True):
    """`kind`: 0 the parameters, 1 and 2 AdamW's moments."""

    kind: int


class Load(msgspec.Struct, frozen=True, tag=True):
    kind: int


Command = Build | Forward | Backward | Zero | Contribution | Apply | Gather | Load
START, COMMAND = msgspec.msgpack.Decoder(Start), msgspec.msgpack.Decoder(Command)
T = TypeVar("T")


def encoded(command: Start | Command) -> bytes:
    """With its length before it."""
    data = msgspec.msgpack.encode(command)
    return len(data).to_bytes(4, "little") + data


def receive(pipe: IO[bytes], decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next command; None: the leading process has ended."""
    head = pipe.read(4)
    size = int.from_bytes(head, "little")
    if len(head) < 4 or size > MOST_BYTES:
        return None
    data = pipe.read(size)
    return decoder.decode(data) if len(data) == size else None
