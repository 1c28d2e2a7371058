"""Names and sizes of encoded tensors on the wire: arithmetic only, no tensor.

A blob's `codec` holds all that a receiver needs besides shape and dtype: `NAME/VERSION` or `NAME/VERSION/PARAMETER`, such as
`int8/1/1024`. numerics/compress.py encodes and decodes, transport/wire.py compares sizes before it takes memory, the planner
counts bytes. A changed layout gets another version; an unknown version is refused by name.

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
FLOATS = ("float32", "bfloat16")  # types that codecs encode: a code of float16 could decode to infinities

# What a run may choose; bytes per value with the block sizes that compress.py writes.
BYTES_PER_VALUE = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 1024, "int4": 34 / 64}

# Of a vector's norm, what encoding it loses at most. A value x of a block of B values up to m loses sqrt(x m) / 127 in int8, sqrt(x m) / 7
# in int4: most of the norm where all but one of the block are m / sqrt(B), 3 % and 29 %.
LOST = {"none": 0.0, "bf16": 2.0**-8, "int8": 0.05, "int4": 0.5}

# fp32 bytes per second that one core encodes and decodes (benchmarks/codecs.py, AVX-512 EPYC): the figures of a plan.
SPEEDS_Bps = {
    "none": (math.inf, math.inf),
    "bf16": (22e9, 26e9),
    "int8": (15e9, 23e9),
    "int4": (1.2e9, 1.6e9),
}

_MOST = {"int8": 2**20}  # largest parameter; smallest is 1


class CodecSpec(msgspec.Struct, frozen=True):
    name: str
    parameter: int = 0


class Travel(msgspec.Struct, frozen=True):
    """The codecs of a run, named as in the configuration. Boundary layers make boundary tensors `narrow` times smaller."""

    activations: str = "none"
    gradients: str = "none"
    averaging: str = "none"
    narrow: int = 1


def bytes_per_value(how: str, value_bytes: float) -> float:
    """Bytes per value in codec `how`; `value_bytes`: without encoding."""
    return value_bytes if how == "none" else BYTES_PER_VALUE[how]


def encode_s(how: str, values: float) -> float:
    return 4 * values / SPEEDS_Bps[how][0]


def decode_s(how: str, values: float) -> float:
    return 4 * values / SPEEDS_Bps[how][1]


def parse(text: str) -> CodecSpec:
    """The codec named `text`. ValueError: unknown or malformed."""
    if text == RAW:
        return CodecSpec(RAW)
    name, *rest = text.split("/")
    expected_parts = 1 if name == "bf16" else 2
    if name not in ("bf16", "int4", *_MOST):
        raise ValueError(f"codec {text[:32]!r} is not known; known are raw, bf16, int4, {', '.join(_MOST)}")
    if not rest or rest[0] != str(VERSION):
        version = rest[0][:8] if rest else "none"
        raise ValueError(f"codec {name} of version {version}; version {VERSION} is known here")
    if len(rest) != expected_parts or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in rest):
        raise ValueError(
            f"codec {text[:32]!r} is not written as {name}/{VERSION}{'/NUMBER' if expected_parts == 2 else ''}"
        )
    return _checked(CodecSpec(name, int(rest[1]) if expected_parts == 2 else 0))


def _checked(spec: CodecSpec) -> CodecSpec:
    name, number = spec.name, spec.parameter
    if name == "int4" and number != INT4_BLOCK:
        raise ValueError(f"codec int4 with blocks of {number} values; {INT4_BLOCK} are known here")
    if name in _MOST and not 1 <= number <= _MOST[name]:
        raise ValueError(f"codec {name} with parameter {number}; 1 to {_MOST[name]} are accepted")
    return spec


def nbytes(text: str, shape: Sequence[int], dtype: str = "float32") -> int:
    """Bytes of a tensor in codec `text`. ValueError: the codec is unknown or does not encode that dtype."""
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
