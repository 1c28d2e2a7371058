"""Files of weights in a directory: are they there and whole, by their headers alone? For preflight.py and adapter_files.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.escaping import UNDECODABLE

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
END_BYTES = 1 << 16  # of a file, by which two are told apart
OTHERS = "weights must be safetensors: save_pretrained(..., safe_serialization=True) writes them"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor in a header of safetensors."""

    data_offsets: tuple[int, int]


def faults(place: Path, where: str, missing: str = OTHERS) -> Iterator[str]:
    """What is wrong with the shards of a model. `where`: the setting that names it; `missing`: what would bring one that is not there."""
    shards = [SINGLE]
    if (place / INDEX).is_file():
        try:
            index = msgspec.json.decode((place / INDEX).read_bytes(), type=_Index)
            shards = sorted(set(index.weight_map.values()))
        except (OSError, *UNDECODABLE) as error:
            yield f"{place / INDEX} is no index of weights ({type(error).__name__}); copy the model directory again"
            return
    for shard in shards:
        if Path(shard).name != shard or not shard.isprintable():
            yield f"{place / INDEX} names {shard!r}, which is no file of that directory"
            return
        try:
            if wrong := torn(place / shard):
                yield f"{place / shard} {wrong}; copy the model directory again"
        except OSError:
            yield f"{where} has no {shard}; {missing}"


def torn(file: Path) -> str:
    """What is wrong with a safetensors file by its header; '' when its size is what the header says. OSError: it is not there."""
    there_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if there_bytes < 8 + header_bytes or header_bytes > 100 << 20:
            return "is no safetensors file, or its beginning alone"
        try:
            header = msgspec.json.decode(stream.read(header_bytes), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            ends = [msgspec.json.decode(entry, type=_Entry).data_offsets[1] for entry in header.values()]
        except UNDECODABLE:
            return "is no safetensors file: its header cannot be read"
    need_bytes = 8 + header_bytes + max(ends, default=0)
    return f"has {there_bytes:,} bytes of {need_bytes:,}: it is torn" if there_bytes != need_bytes else ""


def ends(model: Path) -> list[bytes]:
    """The ends of its files of weights, which no two trained models share."""
    read = []
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - END_BYTES))
            read.append(stream.read())
    return read
