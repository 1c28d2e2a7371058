"""Files of weights in a directory: are they there and whole, by their headers alone, and whose are they? Imports no torch.

For marker.py, and the launcher's preflight.py and adapter_files.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from shoal.model import remote
from shoal.model.remote import INDEX, SINGLE

SAMPLE_BYTES = 64  # of each end of a tensor, by which two models are told apart
OTHERS = "weights must be safetensors: save_pretrained(..., safe_serialization=True) writes them"


def shards(place: Path) -> list[str]:
    """Names of its files of weights. ValueError: its index is none."""
    if not (place / INDEX).is_file():
        return [SINGLE]
    return sorted(set(remote.shards_of((place / INDEX).read_bytes(), str(place / INDEX)).values()))


def faults(place: Path, where: str, missing: str = OTHERS) -> Iterator[str]:
    """What is wrong with the weights of a model. `where`: the setting that names it; `missing`: what would bring a file that is gone."""
    if remote.source_of(place) is not None:
        return  # they are fetched when they are needed
    try:
        names = shards(place)
    except (ValueError, OSError) as error:
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
    with file.open("rb") as stream:
        try:
            remote.spans(stream, file.stat().st_size)
        except ValueError as error:
            return str(error)
    return ""


def fingerprint(place: Path) -> str:
    """Of the weights of a model, by both ends of each tensor, however they are shared out among files; '' where they are not whole. Of a
    model that other peers have, what they say."""
    if (source := remote.source_of(place)) is not None and source.base:
        return source.base
    try:
        tensors = {name: text for shard in shards(place) for name, text in _described(place / shard)}
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()


def _described(file: Path) -> Iterator[tuple[str, str]]:
    """Each tensor by its name: type, shape, and its first and last bytes."""
    with file.open("rb") as stream:
        entries, start = remote.header(stream)
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
