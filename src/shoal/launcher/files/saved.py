"""What a run has saved, for those who use it: generate, serve, eval, export and shoal.Checkpoint. torch is imported with a model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.config import Config, from_tree
from shoal.launcher.files import adapter_files
from shoal.model import remote
from shoal.runtime.checkpoints import marker

if TYPE_CHECKING:
    from torch import nn

_STEP = re.compile(r"step-(\d+)")


def checkpoint(place: str) -> Path:
    """The directory of a model, or of an adapter, that `place` names. ValueError says what it found instead."""
    path = Path(place)
    if (path / "config.json").is_file() or adapter_files.there(path):
        return path
    checkpoints = [child for parent in (path, path / "checkpoints") for child in _steps(parent)]
    if checkpoints:
        return max(checkpoints, key=_step)
    if not path.exists():
        raise ValueError(f"{place}: no such directory; give a checkpoint (runs/NAME/checkpoints/step-N) or runs/NAME")
    raise ValueError(f"{place}: holds no checkpoint (a directory with config.json, or checkpoints/step-N below it)")


def adapted(source: Path, base: str | None = None) -> Config:
    """The configuration of the run that wrote the checkpoint, or what an adapter of PEFT's stands for; with `source` as tune.adapter.
    ValueError: it trained all weights, or its base model is not there, or another."""
    try:
        config = marker.decoded((source / marker.MARKER).read_bytes()).config
    except FileNotFoundError:
        if not adapter_files.there(source):
            raise ValueError(f"{source} was not written by shoal: it has no {marker.MARKER}") from None
        config = _of_peft(source, base)
    if config.tune.method == "full":
        raise ValueError(
            f"{source}: all weights were trained; it is a model directory that transformers loads as it is"
        )
    recorded = str(adapter_files.read(source, str(source)).get("base_model_name_or_path"))  # the run's may be relative
    there = recorded if _is_model(recorded) else config.model.path
    model = msgspec.structs.replace(config.model, path=_local(base, config.run.dir) if base else there)
    if not _is_model(model.path):
        raise ValueError(f"the base model of {source} is not at {model.path}; say where it lies with --base DIR")
    tune = msgspec.structs.replace(config.tune, adapter=str(source))
    config = msgspec.structs.replace(config, model=model, tune=tune)
    adapter_files.refuse(config)
    return config


def _local(base: str, runs: str) -> str:
    return remote.directory(base, runs) if remote.is_url(base) else base


def _is_model(place: str) -> bool:
    """Of any text."""
    return os.path.isfile(os.path.join(place, "config.json"))


def _of_peft(source: Path, base: str | None) -> Config:
    stored = adapter_files.read(source, str(source))
    named = base or str(stored.get("base_model_name_or_path") or "a place that it does not name")
    path = _local(named, Config().run.dir)
    tune = adapter_files.settings(stored, str(source)) | {"adapter": str(source)}
    config = from_tree({"model": {"path": path}, "tune": tune, "data": {"source": "text", "path": "-", "sequence": 1}})
    data = msgspec.structs.replace(config.data, tokenizer=adapter_files.tokenizer(config))
    return msgspec.structs.replace(config, data=data)


def tokenizer_of(source: Path, base: str | None = None) -> Path:
    """The directory with its tokenizer: its own, or its base model's."""
    return Path(adapter_files.tokenizer(adapted(source, base))) if adapter_files.there(source) else source


def model_of(source: Path, base: str | None = None) -> nn.Module:
    """The whole model of a checkpoint, or of any model directory, on the CPU: an `nn.Sequential` of the user's own, adapters in
    their base model (`base`: where that lies now), or a Hugging Face model. ValueError: a tensor, a file or model.factory is missing."""
    import shoal.model.families  # noqa: F401 - keeps torchao from logging which GPU libraries do not load
    from shoal.model import sequential, weights, whole
    from shoal.model.layers import boundary

    if adapter_files.there(source):
        return _with_adapters(source, base)
    kind = json.loads((source / "config.json").read_text()).get("model_type")
    if kind == sequential.MODEL_TYPE:
        own = sequential.own_sequential(marker.decoded((source / marker.MARKER).read_bytes()).config)
        assert own is not None, "so says its config.json"
        plain = own.model.to_empty(device="cpu").eval()
        weights.load_plain(plain, source)
        return plain
    if kind == boundary.MODEL_TYPE:
        return whole.load(source)
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    return model


def _with_adapters(source: Path, base: str | None) -> nn.Module:
    from transformers import GenerationConfig

    from shoal.model import stages

    config = adapted(source, base)
    model = stages.whole(config, str(source))
    if (
        Path(config.model.path) / "generation_config.json"
    ).is_file():  # the tokens that end a text, as its peers know them
        model.generation_config = GenerationConfig.from_pretrained(config.model.path)
    return model


def _steps(parent: Path) -> list[Path]:
    """Whole checkpoints below `parent`: one that is still being written has no config.json under its name yet."""
    if not parent.is_dir():
        return []
    return [child for child in parent.iterdir() if _STEP.fullmatch(child.name) and (child / "config.json").is_file()]


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])
