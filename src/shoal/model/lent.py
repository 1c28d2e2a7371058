"""A model that is not on this machine: its description came with the invite, and the run's peers give the frozen weights of a stage.

The directory stands for `model.path`, as that of a model at a URL does (remote.py). Beside the description it has a file for each
stage that was served here, with the weights as its replicas hold them: in train.dtype, or in the codes of four bits.
runtime/frozen.py writes the files; stages.py reads them. For guest.py, too, which admits a description.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.config import Config
from shoal.escaping import UNDECODABLE
from shoal.model import remote
from shoal.model.remote import CONFIG, SOURCE, Source

if TYPE_CHECKING:  # an invite needs no torch
    from torch import Tensor, nn

PEERS = "peers"  # in place of a directory, in model.path
SCHEME = "peers:"  # of the source of such a directory
MOST_FIELD = 1 << 24  # a number in a description; the largest that a known family has is a vocabulary or a context
MOST_PARTS = 1 << 17  # blocks times experts: each is an object in memory, on the meta device too


class Description(msgspec.Struct, frozen=True):
    """What a machine without the model has to know of it. `config`: the text of its config.json; `base`: the fingerprint of its weights
    (weight_files.py), '' if it is not known; `name`: where it comes from."""

    config: str
    base: str = ""
    name: str = ""


def described(path: str, base: str) -> str:
    """The model in that directory, for an invite."""
    text = (Path(path) / CONFIG).read_text(encoding="utf-8")
    source = remote.source_of(path)
    name = source.url.removeprefix("hf://") if source is not None else Path(path).resolve().name
    return msgspec.json.encode(Description(text, base, name)).decode()


def description(text: str) -> Description:
    """ValueError: it is none, or of a model beyond all bounds: it came with an invite."""
    try:
        given = msgspec.json.decode(text, type=Description)
        fields = json.loads(given.config)
    except (*UNDECODABLE, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"this invite's description of the model cannot be read ({type(error).__name__})") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ValueError("this invite's description of the model names no model_type")
    for name, number in _numbers(fields):
        if not abs(number) <= MOST_FIELD:
            raise ValueError(
                f"this invite describes a model with {name} = {number:g}; a guest takes up to {MOST_FIELD:,}"
            )
    blocks = max((int(number) for name, number in _numbers(fields) if "layer" in name), default=1)
    experts = max((int(number) for name, number in _numbers(fields) if "expert" in name), default=1)
    if max(blocks, 1) * max(experts, 1) > MOST_PARTS:
        raise ValueError(
            f"this invite describes a model of {blocks:,} blocks with {experts:,} experts; a guest takes up to {MOST_PARTS:,} parts"
        )
    return given


def _numbers(fields: dict[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int | float) and not isinstance(each, bool):
                yield name, each


def local(config: Config) -> Config:
    """With the directory that stands for the model here, in place of PEERS. ValueError: the run does not lend its model."""
    if config.model.path != PEERS:
        return config
    if not config.tune.lend or not config.tune.description:
        raise ValueError(
            f"model.path = {PEERS!r}, and this run gives no frozen weights away (tune.lend); name a directory with the model"
        )
    given = description(config.tune.description)
    digest = hashlib.sha256(config.tune.description.encode()).hexdigest()[:12]
    here = Path(config.run.dir) / ".cache" / "models" / f"{PEERS}-{digest}"
    here.mkdir(parents=True, exist_ok=True)
    remote.write(here / CONFIG, given.config.encode())
    remote.write(here / SOURCE, msgspec.json.encode(Source(SCHEME + digest, {}, given.base, given.name)))
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(here)))


def borrowed(path: str | Path) -> bool:
    """The directory stands for a model that other peers have."""
    source = remote.source_of(path)
    return source is not None and source.url.startswith(SCHEME)


def base_name(name: str) -> str:
    """Of a weight, without what PEFT puts into it where an adapter stands beside it."""
    return name.replace(".base_layer.", ".")


def place(path: str | Path, named: Iterable[tuple[str, nn.Parameter]]) -> Path:
    """The file in that directory for weights of these names, types and shapes."""
    kinds = [(base_name(name), str(value.dtype), tuple(value.shape)) for name, value in named]
    return Path(path) / f"frozen-{hashlib.sha256(repr(kinds).encode()).hexdigest()[:16]}.safetensors"


def fill(model: nn.Module, path: str) -> None:
    """Read every parameter in `model`, none of which is trained. ValueError: they are not here."""
    import torch
    from safetensors import safe_open

    named = list(model.named_parameters())
    if not named:
        return
    file = place(path, named)
    if not file.is_file():
        raise ValueError(f"{file} is not here: the frozen weights of this stage came from no peer yet")
    with safe_open(file, framework="pt", device="cpu") as opened, torch.no_grad():
        for name, value in named:
            tensor: Tensor = opened.get_tensor(base_name(name))
            value.copy_(tensor)
