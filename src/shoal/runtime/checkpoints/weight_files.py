"""Files of weights in a directory: are they there and whole, by their headers alone, and whose are they? Imports no torch.

For marker.py, and the launcher's preflight.py and adapter_files.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from shoal.escaping import UNDECODABLE

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEADER_BYTES = 100 << 20  # of a file, at most, as safetensors itself has it
SAMPLE_BYTES = 64  # of each end of a tensor, by which two models are told apart
OTHERS = "weights must be safetensors: save_pretrained(..., safe_serialization=True) writes them"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor in a header of safetensors."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


# At import, see marker.py.
_INDEXES = msgspec.json.Decoder(_Index)
_HEADERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(_Entry)


def shards(place: Path) -> list[str]:
    """Names of its files of weights. ValueError: its index is none."""
    if not (place / INDEX).is_file():
        return [SINGLE]
    try:
        names = sorted(set(_INDEXES.decode((place / INDEX).read_bytes()).weight_map.values()))
    except (OSError, *UNDECODABLE) as error:
        raise ValueError(
            f"{place / INDEX} is no index of weights ({type(error).__name__}); copy the model directory again"
        ) from None
    for name in names:
        if Path(name).name != name or not name.isprintable():
            raise ValueError(f"{place / INDEX} names {name!r}, which is no file of that directory")
    return names


def faults(place: Path, where: str, missing: str = OTHERS) -> Iterator[str]:
    """What is wrong with the weights of a model. `where`: the setting that names it; `missing`: what would bring a file that is gone."""
    try:
        names = shards(place)
    except ValueError as error:
        yield str(error)
        return
    for name in names:
        try:
            if wrong := torn(place / name):
                yield f"{place / name} {wrong}; copy the model directory again"
        except OSError:
            yield f"{where} has no {name}; {missing}"


def torn(file: Path) -> str:
    """What is wrong with a safetensors file by its header; '' when its size is what the header says. OSError: it is not there."""
    there_bytes = file.stat().st_size
    with file.open("rb") as stream:
        try:
            entries, start = _header(stream)
        except ValueError as error:
            return str(error)
    need_bytes = start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    return f"has {there_bytes:,} bytes of {need_bytes:,}: it is torn" if there_bytes != need_bytes else ""


def fingerprint(place: Path) -> str:
    """Of the weights of a model, by both ends of each tensor, however they are shared out among files; '' where they are not whole."""
    try:
        tensors = {name: text for shard in shards(place) for name, text in _described(place / shard)}
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()


def _described(file: Path) -> Iterator[tuple[str, str]]:
    """Each tensor by its name: type, shape, and its first and last bytes."""
    with file.open("rb") as stream:
        entries, start = _header(stream)
        size_bytes = file.stat().st_size
        for name, entry in entries.items():
            first, end = (start + offset for offset in entry.data_offsets)
            if not start <= first <= end <= size_bytes:
                raise ValueError(f"{name} lies outside of it")
            samples = []
            for at in (first, max(first, end - SAMPLE_BYTES)):
                stream.seek(at)
                samples.append(stream.read(min(SAMPLE_BYTES, end - at)).hex())
            yield name, f"{entry.dtype} {entry.shape} {samples}"


def _header(stream: IO[bytes]) -> tuple[dict[str, _Entry], int]:
    """The tensors in a file of safetensors, and where their data begin. ValueError: it is none."""
    header_bytes = int.from_bytes(stream.read(8), "little")
    if header_bytes > HEADER_BYTES:
        raise ValueError("is no safetensors file, or its beginning alone")
    try:
        header = _HEADERS.decode(stream.read(header_bytes))
        header.pop("__metadata__", None)
        return {name: _ENTRIES.decode(entry) for name, entry in header.items()}, 8 + header_bytes
    except UNDECODABLE:
        raise ValueError("is no safetensors file: its header cannot be read") from None
