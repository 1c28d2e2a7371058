"""Encodes tensors for the network in fewer bytes: plain torch functions, for the task runner and for benchmarks.

`encode(values, how)` returns the bytes and the codec's name, `decode` the values; codec.py defines sizes and names. Every
receiver decodes the same bits: decoding uses only additions and products, the sender square roots, each a separately rounded
operation, which no device or library reorders.

int8 (SWARM sends blockwise 8 bits both ways; Dettmers and others 2022): absmax per block of 1,024, and a code that is denser
near zero. Ours is a square law, value = scale * q|q| / 127^2 with q in -127..127, instead of Dettmers' tree of decades: it
needs no table and its error is lower on every distribution tried (docs/design/2026-11-21-codecs.md).
int4: groups of 64 values far apart are rotated by a Hadamard matrix with signs, so that one outlier costs all of its group
a little; then 16 levels per group. The signs are a bent function: a constant group becomes flat, not one spike.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal import codec
from shoal.numerics import pieces

INT8_BLOCK = 1024  # 0.4 % of scales; blocks of 256 would take 1.6 % and err 7 % less
PIECE = 1 << 17  # values per pass on a CPU, and worth another thread: 512 KiB fit its cache
TINY = 2.0**-100  # a block whose values are all below becomes zeros: the inverse scale would not be finite
# An int8 scale: a little under the largest fp32 and bfloat16, so that no decoded value overflows
LARGEST = 127 / 64 * 2.0**127
INT4_LARGEST = 2.0**120  # its decoded values are sums of 64
NAMES = {  # of what `encode` writes, by the word of the configuration
    "none": codec.RAW,
    "bf16": "bf16/1",
    "int8": f"int8/1/{INT8_BLOCK}",
    "int4": f"int4/1/{codec.INT4_BLOCK}",
}
_SQUARE = 127.0 * 127.0
_HALF = codec.INT4_BLOCK // 2


class Code(msgspec.Struct, frozen=True):
    """An encoded tensor: `data` (bytes,) uint8, on the device that encoded it."""

    dtype: str
    shape: tuple[int, ...]
    codec: str
    data: Tensor


def encode(values: Tensor, how: str) -> Code:
    """`how`: none, bf16, int8 or int4. ValueError: values that are not finite."""
    if how not in NAMES:
        raise ValueError(f"{how!r} is no codec; known are none, bf16, int8 and int4")
    flat = values.detach().contiguous().view(-1)
    match how:
        case "bf16":
            data = bf16_encode(flat.float())
        case "int8":
            data = int8_encode(flat.float(), INT8_BLOCK)
        case "int4":
            data = int4_encode(flat.float())
        case _:
            data = _bytes(flat)
    return Code(_dtype(values), tuple(values.shape), NAMES[how], data)


def nbytes(values: Tensor, how: str) -> int:
    """Bytes of `encode(values, how).data`."""
    return codec.nbytes(NAMES[how], tuple(values.shape), _dtype(values))


def decode(code: Code) -> Tensor:
    """The values, on the device of the bytes. ValueError: `fault(code)`."""
    error = fault(code)
    if error:
        raise ValueError(error)
    spec, dtype, count = codec.parse(code.codec), getattr(torch, code.dtype), math.prod(code.shape)
    match spec.name:
        case codec.RAW:
            return code.data.view(dtype).view(code.shape)
        case "bf16":
            flat = code.data.view(torch.bfloat16).to(torch.float32)
        case "int8":
            flat = int8_decode(code.data, count, spec.parameter)
        case _:
            flat = int4_decode(code.data, count)
    return flat.to(dtype).view(code.shape)


def fault(code: Code) -> str:
    """Why a code received from a peer is invalid; '': it is valid. Cheap: reads scales and sizes."""
    try:
        size = codec.nbytes(code.codec, code.shape, code.dtype)
    except (ValueError, KeyError) as error:
        return str(error)
    if any(extent < 0 for extent in code.shape) or code.data.numel() != size:
        return f"{code.data.numel()} bytes are not {code.dtype} of shape {code.shape} in codec {code.codec}"
    spec, count, data = codec.parse(code.codec), math.prod(code.shape), code.data
    if count == 0:
        return ""
    match spec.name:
        case "bf16":
            return "" if finite(data.view(torch.bfloat16)) else "values are not finite"
        case "int8":
            scales, codes = _int8_parts(data, count, spec.parameter)
            if int(codes.min()) == -128:
                return "int8 codes below -127"
            return _scales_fault(scales, LARGEST)
        case "int4":
            return _scales_fault(data[: 2 * _groups(count)].view(torch.bfloat16), INT4_LARGEST)
    return ""


def lossless(how: str) -> bool:
    return how == "none"


# -------------------------------------------------------------------------------------------------------------- bf16


def bf16_encode(flat: Tensor) -> Tensor:
    """(n,) fp32 -> (2n,) uint8."""
    rounded = flat.to(torch.bfloat16)
    if not finite(rounded):
        raise ValueError("values that are not finite, or overflow bfloat16, cannot be encoded")
    return _bytes(rounded)


# -------------------------------------------------------------------------------------------------------------- int8


def int8_encode(flat: Tensor, block: int) -> Tensor:
    """(n,) fp32 -> scales (ceil(n / block),) fp32 and codes (n,) int8, as bytes. |error| <= scale / 127 of a value's block."""
    count = len(flat)
    blocks = -(-count // block)
    data = flat.new_empty(4 * blocks + count, dtype=torch.uint8)
    scales, codes = _int8_parts(data, count, block)
    if _has_loops(flat):
        from shoal.numerics.loops import int8_encode as compiled  # numba: half a second that only those who encode pay

        pieces.each(partial(compiled, square=_SQUARE, tiny=TINY, block=block), *_pieces(block, flat, scales, codes))
    elif count:
        int8_encode_separate_(flat, scales, codes, block)
    if not finite(scales):
        raise ValueError("values that are not finite cannot be encoded")
    scales.masked_fill_(scales <= TINY, 0.0).clamp_(max=LARGEST)
    return data


def int8_decode(data: Tensor, count: int, block: int) -> Tensor:
    """(n,) fp32."""
    scales, codes = _int8_parts(data, count, block)
    if _has_loops(data):
        from shoal.numerics.loops import int8_decode as compiled

        flat = torch.empty(count)
        pieces.each(partial(compiled, square=_SQUARE, block=block), *_pieces(block, codes, scales, flat))
        return flat
    return int8_decode_separate(codes, scales, block)


def int8_encode_separate_(flat: Tensor, scales: Tensor, codes: Tensor, block: int) -> None:
    """loops.int8_encode by torch operations."""
    values = torch.nn.functional.pad(flat, (0, -len(flat) % block)) if len(flat) % block else flat
    rows = torch.abs(values).view(-1, block)
    scales.copy_(rows.amax(1))
    inverse = torch.where(scales > TINY, _SQUARE / scales, 0.0)
    codes.copy_(rows.mul_(inverse[:, None]).view(-1).sqrt_().copysign_(values).round_()[: len(flat)])


def int8_decode_separate(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """loops.int8_decode by torch operations."""
    flat = torch.zeros(len(scales) * block, device=codes.device)
    flat[: len(codes)] = codes
    flat.mul_(torch.abs(flat)).view(-1, block).mul_((scales * (1.0 / _SQUARE))[:, None])
    return flat[: len(codes)]


def _has_loops(tensor: Tensor) -> bool:
    """Whether loops.py computes there."""
    return tensor.device.type == "cpu"


def _pieces(block: int, values: Tensor, scales: Tensor, others: Tensor) -> list[list[Any]]:
    """`values` and `others` (n,) and the `scales` of their blocks, as arrays of whole blocks."""
    step = max(1, PIECE // block)
    sizes = (step * block, step, step * block)
    return [
        [part.numpy() for part in torch.split(each, size)]
        for each, size in zip((values, scales, others), sizes, strict=True)
    ]


def _int8_parts(data: Tensor, count: int, block: int) -> tuple[Tensor, Tensor]:
    scales = 4 * -(-count // block)
    return data[:scales].view(torch.float32), data[scales:].view(torch.int8)


# -------------------------------------------------------------------------------------------------------------- int4


def int4_encode(flat: Tensor) -> Tensor:
    """(n,) fp32, as (64, m) by columns: bf16 scales (m,), then codes 0..15 of rows 0..31 low, rows 32..63 high."""
    count, groups = len(flat), _groups(len(flat))
    if len(flat) % codec.INT4_BLOCK:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % codec.INT4_BLOCK))
    rows = flat.view(codec.INT4_BLOCK, groups) if count else flat.view(codec.INT4_BLOCK, 0)
    data = flat.new_empty((2 + _HALF) * groups, dtype=torch.uint8)
    scales, packed = data[: 2 * groups].view(torch.bfloat16), data[2 * groups :].view(_HALF, groups)
    signs = _signs(flat.device)
    for start, stop in _columns(flat, groups):
        rotated = _rotate(rows[:, start:stop] * signs)
        scale = rotated.abs().amax(0).to(torch.bfloat16)
        scales[start:stop] = scale
        scale_fp32 = scale.float()
        codes = rotated.mul_(torch.where(scale_fp32 > TINY, 7.5 / scale_fp32, 0.0)).add_(7.5).round_().clamp_(0, 15)
        codes = codes.to(torch.uint8)
        torch.bitwise_or(codes[:_HALF], codes[_HALF:] << 4, out=packed[:, start:stop])
    if groups and not float(scales.max()) <= INT4_LARGEST:  # a maximum of NaN and others is NaN
        raise ValueError(f"values that are not finite, or above {INT4_LARGEST:.0e}, cannot be encoded")
    scales.masked_fill_(scales <= TINY, 0.0)
    return data


def int4_decode(data: Tensor, count: int) -> Tensor:
    """(n,) fp32."""
    groups = _groups(count)
    scales, packed = data[: 2 * groups].view(torch.bfloat16), data[2 * groups :].view(_HALF, groups)
    flat = torch.empty(codec.INT4_BLOCK * groups, dtype=torch.float32, device=data.device)
    rows = flat.view(codec.INT4_BLOCK, groups)
    signs = _signs(flat.device)
    for start, stop in _columns(flat, groups):
        codes, rotated = packed[:, start:stop], rows.new_empty(codec.INT4_BLOCK, stop - start)
        torch.sub(codes & 15, 7.5, out=rotated[:_HALF])
        torch.sub(codes >> 4, 7.5, out=rotated[_HALF:])
        rotated.mul_(scales[start:stop].float() * (1 / 7.5))
        torch.mul(_rotate(rotated), signs, out=rows[:, start:stop])
    return flat[:count]


def _rotate(rows: Tensor) -> Tensor:
    """Multiply every column (64,) by the orthonormal Hadamard matrix H64 / 8, its own inverse, as a fast transform. Overwrites `rows`."""
    width, others = rows.shape[1], torch.empty_like(rows)
    for half in (32, 16, 8, 4, 2, 1):
        pairs, into = rows.view(-1, 2, half, width), others.view(-1, 2, half, width)
        torch.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        rows, others = others, rows
    return rows.mul_(0.125)


@cache
def _signs(device: torch.device) -> Tensor:
    """(64, 1) of +-1: the bent function b0 b1 + b2 b3 + b4 b5 of the row's number, whose Hadamard transform is flat."""
    row = torch.arange(codec.INT4_BLOCK)
    parity = (row & row >> 1) & 1 ^ (row >> 2 & row >> 3) & 1 ^ (row >> 4 & row >> 5) & 1
    return (1.0 - 2.0 * parity.float())[:, None].to(device)


def _groups(count: int) -> int:
    return -(-count // codec.INT4_BLOCK)


def _columns(flat: Tensor, groups: int) -> list[tuple[int, int]]:
    step = max(1, _piece(flat, codec.INT4_BLOCK) // codec.INT4_BLOCK)
    return [(start, min(start + step, groups)) for start in range(0, groups, step)]


def finite(*tensors: Tensor) -> bool:
    """Whether all values are finite. A finite sum proves it at a fraction of the cost; an infinite sum may be an overflow."""
    if torch.isfinite(torch.stack([tensor.sum() for tensor in tensors])).all():
        return True
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all())


# ------------------------------------------------------------------------------------------------------------- private


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def largest(code: Code) -> float:
    """Upper bound of the absolute decoded values, from the scales where there are any."""
    spec, count = codec.parse(code.codec), math.prod(code.shape)
    if count == 0:
        return 0.0
    match spec.name:
        case "bf16":
            return float(code.data.view(torch.bfloat16).abs().max())
        case "int8":
            return float(_int8_parts(code.data, count, spec.parameter)[0].max())
    return 64 * float(code.data[: 2 * _groups(count)].view(torch.bfloat16).max())


def _scales_fault(scales: Tensor, largest: float) -> str:
    if not finite(scales):
        return "scales are not finite"
    if float(scales.min()) < 0 or float(scales.max()) > largest:
        return f"scales from {float(scales.min())} to {float(scales.max())}"
    return ""


def _piece(flat: Tensor, block: int) -> int:
    """Values per pass: a multiple of `block`."""
    if flat.device.type != "cpu":
        return max(block, -(-len(flat) // block) * block)
    return max(1, PIECE // block) * block
