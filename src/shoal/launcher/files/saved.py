"""What a run has saved, for the commands that use it: generate and export. Without torch."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from shoal.config import Config
from shoal.runtime.checkpoints import marker

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
    model = msgspec.structs.replace(config.model, path=base or config.model.path)
    if not (Path(model.path) / "config.json").is_file():
        raise ValueError(f"the base model of {source} is not at {model.path}; say where it lies with --base DIR")
    return msgspec.structs.replace(config, model=model)


def _steps(parent: Path) -> list[Path]:
    """Whole checkpoints below `parent`: one that is still being written has no config.json under its name yet."""
    if not parent.is_dir():
        return []
    return [child for child in parent.iterdir() if _STEP.fullmatch(child.name) and (child / "config.json").is_file()]


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])
