"""Loops over fp32 values that are compiled for a CPU. Every operation rounds once: nothing is reordered or fused.

numba leaves IEEE semantics alone unless it is told otherwise (`fastmath`); vectors of any width give the same bits. For optimizer.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.compiled import kernel

LANES = 16  # of 64 bits: two vectors of AVX-512

Values = NDArray[np.float32]
ONE = np.float32(1.0)
ROUNDS = np.float32(1.5 * 2**23)  # added and taken off again it rounds to a whole number, halves to the even one


@kernel
def adamw(factors: Values, values: Values, gradient: Values, first: Values, second: Values) -> None:
    """One AdamW step; `factors`: optimizer.Factors. 28 bytes per value pass through memory once, as in torch's fused one."""
    clip, keep_first, add_first, keep_second, add_second, root, epsilon, rate, decay = (
        factors[0], factors[1], factors[2], factors[3], factors[4], factors[5], factors[6], factors[7], factors[8]
    )  # fmt: skip
    for i in range(values.size):
        clipped = gradient[i] * clip
        mean = first[i] * keep_first + clipped * add_first
        square = second[i] * keep_second + (clipped * clipped) * add_second
        first[i], second[i] = mean, square
        values[i] = values[i] * decay - (mean * rate) / (np.sqrt(square) * root + epsilon)


@kernel
def mix(lanes: NDArray[np.uint64], words: NDArray[np.uint32]) -> None:
    """Take `words`, a multiple of LANES, into `lanes`: each word changes its lane by a bijection. 0.3 ns per word, SHA-256 2.2 ns."""
    mixed = lanes.copy()
    for i in range(0, words.size, LANES):
        for j in range(LANES):
            mixed[j] = (mixed[j] ^ np.uint64(words[i + j])) * np.uint64(0x9E3779B97F4A7C15)
    lanes[:] = mixed


@kernel
def int8_encode(
    values: Values, scales: Values, codes: NDArray[np.int8], square: float, tiny: float, block: int
) -> None:
    """Blocks of compress.int8_encode: each is read once from memory. A scale is NaN or infinite where a value is."""
    bits, scale_bits = values.view(np.uint32), scales.view(np.uint32)
    for number in range(scales.size):
        start = number * block
        part, into = values[start : start + block], codes[start : start + block]
        words = bits[start : start + block]
        most = np.uint32(0)
        for i in range(words.size):
            most = max(most, np.uint32(words[i] & np.uint32(0x7FFFFFFF)))  # in this order NaN comes last
        scale_bits[number] = most
        inverse = ONE / scales[number] * np.float32(square) if scales[number] > np.float32(tiny) else np.float32(0.0)
        for i in range(part.size):
            root = (np.sqrt(abs(part[i]) * inverse) + ROUNDS) - ROUNDS
            into[i] = np.int8(np.copysign(root, part[i]))


@kernel
def int8_decode(codes: NDArray[np.int8], scales: Values, values: Values, square: float, block: int) -> None:
    for number in range(scales.size):
        scale = scales[number] * np.float32(1.0 / square)
        start = number * block
        part, into = codes[start : start + block], values[start : start + block]
        for i in range(part.size):
            code = np.float32(part[i])
            into[i] = (code * abs(code)) * scale


@kernel
def sum_of_squares(values: Values) -> float:
    """In fp64; halves are added to each other until one number is left."""
    rest = values.size - values.size // 2
    sums = np.zeros(max(1, rest), np.float64)
    for i in range(values.size // 2):
        low, high = np.float64(values[i]), np.float64(values[rest + i])
        sums[i] = low * low + high * high
    if rest > values.size // 2:
        middle = np.float64(values[rest - 1])
        sums[rest - 1] = middle * middle
    while rest > 1:
        half = rest // 2
        rest -= half
        for i in range(half):
            sums[i] += sums[rest + i]
    return float(sums[0])


@kernel
def sketch(values: Values, seed: int, first: int, sums: NDArray[np.float64]) -> None:
    """Add to `sums`: the products of `values`, a multiple of LANES, with four vectors of signs, of which these are numbers `first` and
    on, and the sum of squares."""
    one, two = np.uint64(1), np.float64(2.0)
    a, b, c, d, squares = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    for i in range(0, values.size, LANES):
        mixed = (np.uint64(first + i) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        for j in range(LANES):
            value, bits = np.float64(values[i + j]), mixed >> np.uint64(j)
            squares[j] += value * value
            a[j] += value * (1.0 - two * np.float64(np.int64(bits & one)))
            b[j] += value * (1.0 - two * np.float64(np.int64((bits >> np.uint64(LANES)) & one)))
            c[j] += value * (1.0 - two * np.float64(np.int64((bits >> np.uint64(2 * LANES)) & one)))
            d[j] += value * (1.0 - two * np.float64(np.int64((bits >> np.uint64(3 * LANES)) & one)))
    for j in range(LANES):
        sums[0] += a[j]
        sums[1] += b[j]
        sums[2] += c[j]
        sums[3] += d[j]
        sums[4] += squares[j]
