"""What a run has saved, for those who use it: generate, export and shoal.Checkpoint. torch is imported with a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.config import Config
from shoal.model import remote
from shoal.runtime.checkpoints import marker

if TYPE_CHECKING:
    from torch import nn

_STEP = re.compile(r"step-(\d+)")


def checkpoint(place: str) -> Path:
    """The model directory that `place` names. ValueError says what it found instead."""
    path = Path(place)
    if (path / "config.json").is_file():
        return path
    checkpoints = [child for parent in (path, path / "checkpoints") for child in _steps(parent)]
    if checkpoints:
        return max(checkpoints, key=_step)
    if not path.exists():
        raise ValueError(f"{place}: no such directory; give a checkpoint (runs/NAME/checkpoints/step-N) or runs/NAME")
    raise ValueError(f"{place}: holds no checkpoint (a directory with config.json, or checkpoints/step-N below it)")


def adapted(source: Path, base: str | None = None) -> Config:
    """The configuration of the run that wrote the checkpoint. ValueError: it trained all weights, or its base model is not there."""
    try:
        config = marker.decoded((source / marker.MARKER).read_bytes()).config
    except FileNotFoundError:
        raise ValueError(f"{source} was not written by shoal: it has no {marker.MARKER}") from None
    if config.tune.method == "full":
        raise ValueError(
            f"{source}: all weights were trained; it is a model directory that transformers loads as it is"
        )
    path = remote.directory(base, config.run.dir) if base and remote.is_url(base) else base or config.model.path
    model = msgspec.structs.replace(config.model, path=path)
    if not (Path(model.path) / "config.json").is_file():
        raise ValueError(f"the base model of {source} is not at {model.path}; say where it lies with --base DIR")
    return msgspec.structs.replace(config, model=model)


def model_of(source: Path, base: str | None = None) -> nn.Module:
    """The whole model of a checkpoint, or of any model directory, on the CPU: an `nn.Sequential` of the user's own, adapters in
    their base model (`base`: where that lies now), or a Hugging Face model. ValueError: a tensor, a file or model.factory is missing."""
    import shoal.model.families  # noqa: F401 - keeps torchao from logging which GPU libraries do not load
    from shoal.model import sequential, stages, weights, whole
    from shoal.model.layers import boundary

    kind = json.loads((source / "config.json").read_text()).get("model_type")
    if kind == sequential.MODEL_TYPE:
        own = sequential.own_sequential(marker.decoded((source / marker.MARKER).read_bytes()).config)
        assert own is not None, "so says its config.json"
        plain = own.model.to_empty(device="cpu").eval()
        weights.load_plain(plain, source)
        return plain
    if (source / "adapter_config.json").is_file():
        return stages.whole(adapted(source, base), str(source))
    if kind == boundary.MODEL_TYPE:
        return whole.load(source)
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
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
