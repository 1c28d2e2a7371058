"""Allocates and fills the parameters of a module built on the meta device: from the seed or from safetensors.

The rule of a random start: every module's own parameters and buffers are drawn by the family's `_init_weights`, on the CPU
in fp32, from a generator seeded with (seed, full name of the module). So they depend neither on the cut nor on the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.model.cut import seeded

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def materialise(model: PreTrainedModel, *, seed: int, source: str | None) -> None:
    """Fill every parameter and buffer that is still in `model`, a Hugging Face model on the meta device."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)  # detected below where the family does not compute it
        _initialise(model, model, "", seed, buffers_only=source is not None)
        if next(model.parameters(), None) is not None:  # some of its parts are present
            model.tie_weights()  # to_empty has allocated tied weights twice
        if source is not None:
            load(model, source)
    for name, value in model.named_buffers():
        if value.is_floating_point() and value.isnan().any():
            raise ValueError(f"model.family = {model.config.model_type!r} does not compute its buffer {name}")


def _initialise(module: nn.Module, owner: PreTrainedModel, name: str, seed: int, *, buffers_only: bool) -> None:
    """Children first, each by the innermost Hugging Face model around it: the family's own order."""
    from transformers.modeling_utils import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        owner = module
    for child_name, child in module.named_children():
        _initialise(child, owner, f"{name}.{child_name}" if name else child_name, seed, buffers_only=buffers_only)
    if not buffers_only or next(module.buffers(recurse=False), None) is not None:
        with seeded(seed, name):
            owner._init_weights(module)


def load(model: PreTrainedModel, source: str) -> None:
    """Read the parameters present in `model`, and no others, from a directory of safetensors shards. ValueError: one is missing."""
    from safetensors import safe_open

    aliases = {"lm_head.weight": "model.embed_tokens.weight"}  # not stored by models with tied embeddings
    by_shard: dict[str, list[tuple[str, Tensor]]] = {}
    shards = shard_of(source)
    parameter: Tensor
    for name, parameter in model.named_parameters():
        stored_name = name if name in shards else aliases.get(name, name)
        if stored_name not in shards:
            raise ValueError(f"{source} holds no tensor {name!r}; is it a checkpoint of {model.config.model_type}?")
        by_shard.setdefault(shards[stored_name], []).append((stored_name, parameter))
    for shard, pairs in by_shard.items():
        with safe_open(Path(source) / shard, framework="pt", device="cpu") as file:
            for stored_name, parameter in pairs:
                shape = tuple(file.get_slice(stored_name).get_shape())
                if shape != tuple(parameter.shape):
                    raise ValueError(
                        f"{source}/{shard}: {stored_name} has shape {shape}, the model needs {tuple(parameter.shape)}"
                    )
                parameter.copy_(file.get_tensor(stored_name))


def shard_of(source: str) -> dict[str, str]:
    """The file of each tensor in the directory. ValueError: no safetensors there."""
    from safetensors import safe_open

    folder = Path(source)
    if (folder / INDEX).is_file():
        shards = json.loads((folder / INDEX).read_text())["weight_map"]
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise ValueError(f"{folder / INDEX} names {shard!r}, which is no file of that directory")
        return dict(shards)
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    raise ValueError(f"{source} has neither {SINGLE} nor {INDEX}; other formats of weights are not read")
