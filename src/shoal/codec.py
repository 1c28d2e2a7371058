"""How an encoded tensor is named on the wire, and how many bytes it takes: arithmetic only, no tensor.

A blob's `codec` says all that a receiver needs beside its shape: `NAME/VERSION` or `NAME/VERSION/PARAMETER`, such as
`int8/1/1024`. numerics/compress.py encodes and decodes, transport/wire.py compares sizes before it takes memory, the planner
counts bytes. A changed layout gets another version; a version that is not known here is refused by name.

    raw             the values as they are, in the blob's own dtype
    bf16/1          bfloat16
    int8/1/B        per block of B values: an fp32 scale (all scales first), then one byte per value
    int4/1/64       m = values / 64, rounded up: m bf16 scales, then 32 m bytes of two values each
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

RAW = "raw"
VERSION = 1
INT4_BLOCK = 64
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}  # bytes of a raw value
FLOATS = ("float32", "bfloat16")  # what codecs encode: a code of float16 could decode to infinities

# What a run may choose; bytes per value with the block sizes that compress.py writes.
BYTES_PER_VALUE = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 1024, "int4": 34 / 64}

# fp32 bytes per second that one core encodes and decodes (benchmarks/codecs.py, AVX-512 EPYC): what a plan reckons with.
SPEEDS_Bps = {
    "none": (math.inf, math.inf),
    "bf16": (22e9, 26e9),
    "int8": (3.5e9, 8.8e9),
    "int4": (1.2e9, 1.6e9),
}

_MOST = {"int8": 2**20}  # largest parameter; smallest is 1


class Spec(msgspec.Struct, frozen=True):
    name: str
    parameter: int = 0


class Travel(msgspec.Struct, frozen=True):
    """How the tensors of a run travel: names as in the configuration; `narrow` times fewer values by boundary layers."""

    activations: str = "none"
    gradients: str = "none"
    averaging: str = "none"
    narrow: int = 1


def bytes_per_value(how: str, value_bytes: float) -> float:
    """`value_bytes` is what a value takes that is not encoded."""
    return value_bytes if how == "none" else BYTES_PER_VALUE[how]


def encode_s(how: str, values: float) -> float:
    return 4 * values / SPEEDS_Bps[how][0]


def decode_s(how: str, values: float) -> float:
    return 4 * values / SPEEDS_Bps[how][1]


def parse(text: str) -> Spec:
    """ValueError says why `text` names no codec known here."""
    if text == RAW:
        return Spec(RAW)
    name, *rest = text.split("/")
    wanted = 1 if name == "bf16" else 2
    if name not in ("bf16", "int4", *_MOST):
        raise ValueError(f"codec {text[:32]!r} is not known; known are raw, bf16, int4, {', '.join(_MOST)}")
    if not rest or rest[0] != str(VERSION):
        found = rest[0][:8] if rest else "none"
        raise ValueError(f"codec {name} of version {found}; version {VERSION} is known here")
    if len(rest) != wanted or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in rest):
        raise ValueError(f"codec {text[:32]!r} is not written as {name}/{VERSION}{'/NUMBER' if wanted == 2 else ''}")
    number = int(rest[1]) if wanted == 2 else 0
    if name == "int4" and number != INT4_BLOCK:
        raise ValueError(f"codec int4 with blocks of {number} values; {INT4_BLOCK} are known here")
    if name in _MOST and not 1 <= number <= _MOST[name]:
        raise ValueError(f"codec {name} with parameter {number}; 1 to {_MOST[name]} are accepted")
    return Spec(name, number)


def nbytes(text: str, shape: Sequence[int], dtype: str = "float32") -> int:
    """Bytes of a tensor of that shape and dtype under codec `text`. ValueError: it cannot be encoded so."""
    spec, count = parse(text), math.prod(shape)
    if spec.name == RAW:
        return count * WIDTHS[dtype]
    if dtype not in FLOATS:
        raise ValueError(f"codec {text} of {dtype} values; codecs encode {', '.join(FLOATS)}")
    match spec.name:
        case "bf16":
            return 2 * count
        case "int8":
            return 4 * -(-count // spec.parameter) + count
        case "int4":
            return (2 + INT4_BLOCK // 2) * -(-count // INT4_BLOCK)
    raise AssertionError(spec)
