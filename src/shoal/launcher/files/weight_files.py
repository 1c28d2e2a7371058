"""Files of weights in a directory: are they there and whole, by their headers alone? For preflight.py and adapter_files.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.escaping import UNDECODABLE
from shoal.model import remote
from shoal.model.remote import INDEX, SINGLE

END_BYTES = 1 << 16  # of a file, by which two are told apart
OTHERS = "weights must be safetensors: save_pretrained(..., safe_serialization=True) writes them"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def faults(place: Path, where: str, missing: str = OTHERS) -> Iterator[str]:
    """What is wrong with the shards of a model. `where`: the setting that names it; `missing`: what would bring one that is not there."""
    if remote.source_of(place) is not None:
        return  # they are fetched when they are needed
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
    with file.open("rb") as stream:
        try:
            remote.spans(stream, file.stat().st_size)
        except remote.Unreadable as error:
            return str(error)
    return ""


def ends(model: Path) -> list[bytes]:
    """The ends of its files of weights, which no two trained models share."""
    read = []
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - END_BYTES))
            read.append(stream.read())
    return read
