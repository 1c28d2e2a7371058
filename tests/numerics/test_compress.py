"""Codecs: sizes are the formulas', errors stay within their bounds, bits are the same however they are made, nothing wrong passes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import codec
from shoal.numerics import compress
from shoal.numerics.compress import Code

HOWS = ("none", "bf16", "int8", "int4")
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4096, 70_001, 131_072, 140_000]))


def drawn(count: int, seed: int, scale: float = 1.0, outliers: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * scale
    if outliers:
        values[:: max(1, count // 7)] *= 50.0
    return values


def relative(values: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((values.double() - wanted.double()).norm() / wanted.double().norm())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HOWS), SIZES, st.integers(0, 2**20), st.floats(-25, 25), st.booleans())
def test_bytes_are_the_formulas_and_values_come_back_within_the_bound(
    how: str, count: int, seed: int, exponent: float, outliers: bool
) -> None:
    values = drawn(count, seed, 10.0**exponent, outliers)
    code = compress.encode(values, how)
    assert code.data.numel() == codec.nbytes(code.codec, code.shape, code.dtype)
    assert compress.fault(code) == ""
    decoded = compress.decode(code)
    assert decoded.shape == values.shape and decoded.dtype == values.dtype
    error = (decoded.double() - values.double()).abs()
    if how == "none":
        assert not error.any()
    elif how == "bf16":
        assert bool((error <= values.abs() * 2.0**-8 + 2.0**-134).all())
    elif how == "int8":
        padded = torch.nn.functional.pad(values, (0, -count % compress.INT8_BLOCK)).view(-1, compress.INT8_BLOCK)
        bound = (padded.abs().amax(1, keepdim=True).double() * (1.0001 / 127)).expand_as(padded).reshape(-1)[:count]
        assert bool((error <= bound + compress.TINY).all())
    else:
        # The rotation keeps distances: half a step of 1/7.5 of the largest rotated value, for each of the 64.
        assert float(error.norm()) <= 0.27 * float(values.double().norm()) + 8 * compress.TINY * math.sqrt(count)


@pytest.mark.parametrize(("how", "most"), [("bf16", 0.002), ("int8", 0.0080), ("int4", 0.105)])
def test_error_statistics_against_double_precision(how: str, most: float) -> None:
    """Normal values; int8 by block absmax and a square law, int4 by 16 levels of a rotated group."""
    values = drawn(1 << 18, 1)
    decoded = compress.decode(compress.encode(values, how))
    assert relative(decoded, values) < most
    bias = float((decoded.double() - values.double()).mean())
    assert abs(bias) < 3e-4


def test_outliers_do_not_cost_their_neighbours_everything() -> None:
    """One of 64 features is 50 times the others, as in trained models: what a code without care loses."""
    values = drawn(1 << 16, 2).view(-1, 64)
    values[:, 5] *= 50.0
    rest = torch.ones(64, dtype=torch.bool)
    rest[5] = False
    int8 = compress.decode(compress.encode(values, "int8"))
    scale = values.abs().amax() / 127
    linear = (values / scale).round() * scale
    assert relative(int8[:, rest], values[:, rest]) < 0.1 < 3 * relative(linear[:, rest], values[:, rest])
    int4 = compress.decode(compress.encode(values, "int4"))
    assert relative(int4, values) < 0.12


@pytest.mark.parametrize("how", HOWS)
def test_a_code_of_a_code_is_the_same_values_and_pieces_do_not_show(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(50_000, 3, outliers=True)
    code = compress.encode(values, how)
    decoded = compress.decode(code)
    monkeypatch.setattr(compress, "PIECE", 4096)
    again = compress.encode(values, how)
    assert torch.equal(again.data, code.data)
    assert torch.equal(compress.decode(again), decoded)


@pytest.mark.parametrize("how", HOWS)
def test_shape_and_type_are_kept(how: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 5, 7), (0,), (1,), ()):
            values = torch.linspace(-1, 1, math.prod(shape)).to(dtype).view(shape)
            decoded = compress.decode(compress.encode(values, how))
            assert (decoded.shape, decoded.dtype) == (values.shape, dtype)
            assert torch.allclose(decoded.float(), values.float(), atol=0.3)


@pytest.mark.parametrize("how", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(how: str, bad: float) -> None:
    values = drawn(4096, 4).view(64, 64)
    values[17, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        compress.encode(values, how)


def test_zeros_stay_zeros_and_extremes_stay_finite() -> None:
    for how in HOWS:
        assert not compress.decode(compress.encode(torch.zeros(5000), how)).any()
    largest = torch.finfo(torch.float32).max
    for how in ("int8", "none"):
        decoded = compress.decode(compress.encode(torch.tensor([largest, -largest, 1.0]), how))
        assert bool(torch.isfinite(decoded).all())
        assert float(decoded[0]) > 0.99 * largest
    assert bool(torch.isfinite(compress.decode(compress.encode(torch.full((64,), 2.0**100), "int4"))).all())
    with pytest.raises(ValueError, match="above"):
        compress.encode(torch.full((64,), 2.0**123), "int4")


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["bf16/1", "int8/1/64", "int4/1/64"]), st.binary(min_size=0, max_size=400))
def test_bytes_from_anybody_decode_to_finite_values_or_are_refused(written: str, data: bytes) -> None:
    """With the size that the shape asks for and without."""
    count = 70
    size = codec.nbytes(written, (count,))
    for given_bytes in (data, (data * size + bytes(size))[:size]):
        code = Code("float32", (count,), written, torch.tensor(list(given_bytes), dtype=torch.uint8))
        if compress.fault(code):
            with pytest.raises(ValueError):
                compress.decode(code)
        else:
            assert bool(torch.isfinite(compress.decode(code)).all())


def test_the_largest_scales_that_pass_decode_to_finite_values() -> None:
    for written, largest in (("int8/1/64", compress.LARGEST), ("int4/1/64", compress.INT4_LARGEST)):
        for dtype in ("float32", "bfloat16"):
            size = codec.nbytes(written, (64,))
            scale = torch.tensor([largest]).to(torch.float32 if "int8" in written else torch.bfloat16)
            rest = torch.full((size - scale.nbytes,), 127 if "int8" in written else 255, dtype=torch.uint8)
            code = Code(dtype, (64,), written, torch.cat([scale.view(torch.uint8), rest]))
            assert compress.fault(code) == ""
            assert bool(torch.isfinite(compress.decode(code)).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codec": "zip/1"}, "codec 'zip/1' is not known"),
        ({"codec": "int8/2/1024"}, "int8 of version 2; version 1 is known"),
        ({"codec": "int8/1"}, "not written as int8/1/NUMBER"),
        ({"codec": "int8/1/0"}, "parameter 0"),
        ({"codec": "int8/1/-4"}, "not written as"),
        ({"codec": "int8/1/99999999999"}, "not written as"),
        ({"codec": "int4/1/32"}, "blocks of 32 values"),
        ({"codec": "bf16/1/3"}, "not written as bf16/1"),
        ({"dtype": "int64"}, "of int64 values"),
        ({"shape": (101,)}, "104 bytes are not float32 of shape (101,)"),
        ({"codec": "powersgd/1/1"}, "codec 'powersgd/1/1' is not known"),
    ],
)
def test_what_is_wrong_with_a_code_is_said(change: dict[str, Any], words: str) -> None:
    code = compress.encode(drawn(100, 5), "int8")
    assert words in compress.fault(msgspec.structs.replace(code, **change))


def test_broken_scales_and_codes_are_found() -> None:
    code = compress.encode(drawn(100, 6), "int8")
    for at, value, words in ((3, 0xFF, "scales"), (50, 0x80, "below -127")):
        data = code.data.clone()
        data[at] = value
        assert words in compress.fault(msgspec.structs.replace(code, data=data))


def with_feedback(values: torch.Tensor, error: torch.Tensor, how: str) -> tuple[compress.Code, torch.Tensor]:
    """As a run does it (runtime/tasks/coding.py): what a code leaves out is added the next time (Karimireddy 2019)."""
    wanted = values + error
    code = compress.encode(wanted, how)
    return code, wanted - compress.decode(code)


@pytest.mark.parametrize("how", ["bf16", "int8", "int4"])
def test_fed_back_errors_do_not_add_up(how: str) -> None:
    values, error, sent = drawn(3000, 9), torch.zeros(3000), torch.zeros(3000, dtype=torch.float64)
    once = relative(compress.decode(compress.encode(values, how)), values)
    for _ in range(50):
        code, error = with_feedback(values, error, how)
        sent += compress.decode(code).double()
    assert relative(sent / 50, values) < 0.1 * once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_finite_unless_a_value_is_not_even_if_its_sum_overflows(dtype: torch.dtype) -> None:
    large = torch.full((4, 5), torch.finfo(dtype).max, dtype=dtype)
    assert compress.finite(torch.zeros(3, dtype=dtype), large)
    for bad in (math.inf, -math.inf, math.nan):
        value = torch.ones(4, 5, dtype=dtype)
        value[2, 3] = bad
        assert not compress.finite(torch.zeros(3, dtype=dtype), value)
    assert not compress.finite(torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize("count", [1, 1023, 1024, 2 * compress.PIECE + 5])
def test_the_compiled_loops_have_the_bits_of_separate_operations(count: int) -> None:
    """torch's square root on a CPU may be MKL's, which is not rounded correctly: a code may then be its neighbour."""
    drawn = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=drawn) * 10.0 ** torch.randint(-8, 9, (count,), generator=drawn)
    data = compress.int8_encode(values, 1024)
    scales, codes = compress._int8_parts(data, count, 1024)
    other_scales, other_codes = torch.empty_like(scales), torch.empty_like(codes)
    compress.int8_encode_separate_(values, other_scales, other_codes, 1024)
    assert torch.equal(scales, other_scales)
    assert int((codes.short() - other_codes.short()).abs().max()) <= 1
    decoded = compress.int8_decode(data, count, 1024)
    assert torch.equal(decoded, compress.int8_decode_separate(codes, scales, 1024))
