"""A directory with LoRA adapters, written by PEFT or as a run's checkpoint: the settings it stands for, and what is wrong with it.

For preflight.py, before a run goes on from one, and for saved.py, before one is used. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.config import Config, Tune
from shoal.escaping import UNDECODABLE, Faults
from shoal.runtime.checkpoints import marker, weight_files

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_OF_ADAPTER: dict[str, tuple[str, object]] = {  # settings by PEFT's names, and PEFT's defaults
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8),
    "rslora": ("use_rslora", False),
    "dora": ("use_dora", False),
}
# What an adapter's configuration may say beside these without any effect on what it computes.
_READ = {name for name, _ in _OF_ADAPTER.values()} | set(
    "peft_type task_type peft_version base_model_name_or_path revision inference_mode auto_mapping target_modules lora_dropout"
    " modules_to_save init_lora_weights megatron_core qalora_group_size".split()
)
KINDS = ("embeddings", "head", "norms")  # of tune.also
_MERGE = "merge that adapter into the model and begin a new one"
_OTHER_FORMATS = (
    f"has no {WEIGHTS}: pickled weights are not read; load it with PEFT and write it with save_pretrained(...)"
)


def there(place: Path) -> bool:
    return (place / SETTINGS).is_file()


def read(place: Path, where: str) -> dict[str, Any]:
    """What its adapter_config.json says. ValueError: it is no LoRA adapter. `where`: the setting that names it."""
    try:
        stored = msgspec.json.decode((place / SETTINGS).read_bytes(), type=dict[str, Any])
        kind = stored["peft_type"]
    except OSError:
        raise ValueError(
            f"{where} has no {SETTINGS}; it must be a directory that PEFT's save_pretrained or `shoal export --adapter` wrote, or a"
            " checkpoint (runs/NAME/checkpoints/step-N) of a run that trained adapters"
        ) from None
    except (KeyError, *UNDECODABLE):
        raise ValueError(f"{place / SETTINGS} is no configuration of PEFT's; copy the directory again") from None
    if kind != "LORA":
        raise ValueError(f"{where} is an adapter of the kind {kind!r}; 'LORA' is read")
    return stored


def settings(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of [tune] that an adapter_config.json stands for. ValueError: it names layers by a pattern."""
    targets = stored.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(
            f"{where} has target_modules = {targets!r}, a pattern, and names of layers are read; write the list of the layers"
            f" that have an adapter into its {SETTINGS}"
        )
    named = {ours: stored.get(theirs, value) for ours, (theirs, value) in _OF_ADAPTER.items()}
    named["also"] = _also(stored)
    if others := [name for name in named["also"] if name not in KINDS]:
        raise ValueError(
            f"{where} has modules_to_save = {others}, and embeddings, head and norms alone are read; {_MERGE}"
        )
    return {"method": "lora", "targets": sorted(targets, key=str) if isinstance(targets, list) else [], **named}


def refuse(config: Config) -> None:
    """Raise `faults`, if there are any."""
    if lines := list(faults(config)):
        raise Faults(lines)


def faults(config: Config) -> Iterator[str]:
    """Is tune.adapter a directory whose adapter computes what these settings do, beside the model in model.path?"""
    tune = config.tune
    if not tune.adapter:
        return
    place, where = Path(tune.adapter).expanduser(), f"tune.adapter = {tune.adapter!r}"
    try:
        stored = read(place, where)
    except ValueError as error:
        yield str(error)
        return
    yield from _unlike(stored, tune, where)
    base, here = (
        str(stored.get("base_model_name_or_path")),
        weight_files.fingerprint(Path(config.model.path).expanduser()),
    )
    checkpoint = (place / marker.MARKER).is_file()
    trained_beside = _recorded(place) if checkpoint else weight_files.fingerprint(Path(base))
    if here and trained_beside and here != trained_beside:
        yield f"{where} was trained beside the model in {base!r}, and the weights in model.path = {config.model.path!r} are others"
    if checkpoint:
        yield from weight_files.faults(
            place, where, "copy the files of that checkpoint from the machines that keep them"
        )
        return
    try:
        if wrong := weight_files.torn(place / WEIGHTS):
            yield f"{place / WEIGHTS} {wrong}; copy the directory again"
    except OSError:
        yield f"{where} {_OTHER_FORMATS}"


def _recorded(checkpoint: Path) -> str:
    """The fingerprint of the weights beside which its run trained; '' where it says none."""
    try:
        return marker.decoded((checkpoint / marker.MARKER).read_bytes()).base
    except ValueError:
        return ""  # what is wrong with it is said where it is read


def tokenizer(config: Config) -> str:
    """The directory with the tokenizer of a model that is served or used, and not trained: the adapter's, or its base model's."""
    place = Path(config.tune.adapter)
    beside = config.tune.adapter and any((place / file).is_file() for file in TOKENIZER_FILES)
    return config.tune.adapter if beside else config.model.path


def _unlike(stored: dict[str, Any], tune: Tune, where: str) -> Iterator[str]:
    """What a LoRA adapter's configuration says that these settings do not."""
    for ours, (theirs, value) in _OF_ADAPTER.items():
        if (there := stored.get(theirs, value)) != getattr(tune, ours):
            yield f"{where} has {theirs} = {there!r}, and tune.{ours} = {getattr(tune, ours)!r}; set tune.{ours}={json.dumps(there)}"
    if (there := _also(stored)) != sorted(tune.also):
        if set(there) <= set(KINDS):
            remedy = f"tune.also = {list(tune.also)}; set tune.also={json.dumps(there)}"
        else:
            remedy = f"embeddings, head and norms alone are trained beside adapters here; {_MERGE}"
        yield f"{where} has modules_to_save = {stored.get('modules_to_save')!r}, and {remedy}"
    for name, value in sorted(stored.items()):
        if value and name not in _READ and value != "none":
            yield f"{where} has {name} = {value!r}, which is not trained here; {_MERGE}"


def _also(stored: Mapping[str, Any]) -> list[str]:
    """tune.also by PEFT's modules_to_save, in order of the alphabet; a name that stands for none of its kinds as it is."""
    names = stored.get("modules_to_save") or []
    return sorted(
        {_kind(str(name).rpartition(".")[2]) or str(name) for name in (names if isinstance(names, list) else [names])}
    )


def _kind(name: str) -> str:
    """Families have names of their own; model/layers/adapters.py compares the tensors."""
    if "norm" in name or name.startswith("ln_"):
        return "norms"
    if "head" in name or name == "embed_out":
        return "head"
    return "embeddings" if "embed" in name or name == "wte" else ""
