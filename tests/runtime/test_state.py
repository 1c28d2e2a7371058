"""A stage's state survives the way through chunks bit for bit; whatever is wrong with a chunk or header is refused."""

from __future__ import annotations

import hashlib
import json

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.runtime import state


def a_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model/b": torch.randn(7, 5, generator=generator),
        "model/a": torch.randn(3, generator=generator).to(torch.bfloat16),
        "exp_avg/b": torch.full((7, 5), float("nan")),
        "none": torch.empty(0, 4),
        "one": torch.tensor(5, dtype=torch.int64),
    }


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    shapes = [(n, t.shape, t.dtype, bytes(state.raw(t))) for n, t in sorted(one.items())]
    return shapes == [(n, t.shape, t.dtype, bytes(state.raw(t))) for n, t in sorted(two.items())]


def chunks_of(chunk_bytes: int) -> list[bytearray]:
    copy = state.Copy(a_state(), 3, {"step": "3"}, chunk_bytes)
    return [copy.read(chunk) for chunk in range(copy.chunks)]


@given(chunk_bytes=st.integers(min_value=1, max_value=2000))
@settings(max_examples=40, deadline=None)
def test_a_state_survives_its_chunks_whatever_their_size(chunk_bytes: int) -> None:
    copy = state.Copy(a_state(), 3, {"step": "3"}, chunk_bytes)
    chunks, manifest = [copy.read(chunk) for chunk in range(copy.chunks)], copy.manifest()
    assert [len(chunk) for chunk in chunks] == list(manifest.sizes)
    assert all(1 <= size <= chunk_bytes for size in manifest.sizes)
    assert not any(state.check_chunk(c, h) for c, h in zip(chunks, manifest.hashes, strict=True))
    joined, note = state.join(chunks)
    assert equal(joined, a_state())
    assert note == {"step": "3"}


def test_the_stream_is_what_safetensors_reads_and_writes() -> None:
    written = b"".join(state.stream(a_state(), {"format": "pt"}))
    assert equal(safetensors.torch.load(written), a_state())
    assert (len(state.header(a_state(), {})) % 8) == 0
    joined, note = state.join([safetensors.torch.save(a_state(), {"format": "pt"})])
    assert equal(joined, a_state())
    assert note == {"format": "pt"}


def test_a_copy_does_not_change_with_the_state_it_was_made_of() -> None:
    live = a_state()
    copy = state.Copy({name: state.copied(tensor) for name, tensor in live.items()}, 0, {})
    before = copy.manifest()
    live["model/b"].add_(1)
    assert copy.manifest() == before
    assert state.digest(live) != state.digest(copy.state)


def test_a_changed_chunk_is_noticed() -> None:
    chunk = chunks_of(100)[1]
    sha = hashlib.sha256(chunk).hexdigest()
    assert state.check_chunk(chunk, sha) == ""
    chunk[5] ^= 1
    assert "SHA-256" in state.check_chunk(chunk, sha)
    assert "0 bytes" in state.check_chunk(b"", hashlib.sha256(b"").hexdigest())
    huge = memoryview(bytearray(state.MAX_CHUNK_BYTES + 1))
    assert "accepted" in state.check_chunk(huge, "")


def test_a_chunk_beyond_the_limit_is_not_made() -> None:
    with pytest.raises(ValueError, match="choose 1 to"):
        state.Copy(a_state(), 0, {}, state.MAX_CHUNK_BYTES + 1)
    copy = state.Copy(a_state(), 0, {})
    for chunk in (-1, copy.chunks):
        with pytest.raises(ValueError, match="of 1"):
            copy.read(chunk)


def framed(header: object, values: bytes = b"") -> list[bytes]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return [len(text).to_bytes(8, "little") + text + values]


def a_place(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("chunks", "match"),
    [
        ([], "0 bytes are no state"),
        ([b"1234567"], "7 bytes are no state"),
        ([(2**60).to_bytes(8, "little") + b"{}"], "a header of"),
        (framed(b"not json"), "cannot be read"),
        (framed(b"\xff\xff\xff"), "cannot be read"),
        (framed({"a": 5}), "cannot be read"),
        (framed({"a": a_place([2**40], 0, 2**42)}), "announces"),  # 4 TiB announced, none taken
        (framed({"a": a_place([2], 0, 8)}, b"1234567"), "announces"),
        (framed({"a": a_place([2], 0, 8)}, b"123456789"), "announces"),
        (framed({"a": a_place([2], 4, 12)}, b"1" * 12), "its shape says"),
        (framed({"a": a_place([3], 0, 8)}, b"1" * 8), "its shape says"),
        (framed({"a": a_place([2], 0, 8), "b": a_place([2], 4, 12)}, b"1" * 12), "its shape says"),
        (framed({"a": a_place([-2], 0, 8)}, b"1" * 8), "cannot be read"),
        (framed({"a": a_place([2], 0, 8, "F4")}, b"1" * 8), "unknown type"),
    ],
)
def test_a_header_that_lies_is_refused_before_memory_is_taken(chunks: list[bytes], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        state.join(chunks)


@given(at=st.integers(min_value=0, max_value=600), value=st.integers(min_value=0, max_value=255))
@settings(max_examples=200, deadline=None)
def test_any_damaged_byte_gives_a_state_or_a_value_error(at: int, value: int) -> None:
    data = bytearray(b"".join(chunks_of(10_000)))
    data[at % len(data)] = value
    try:
        state.join([data])
    except ValueError:
        pass
