"""Allocates and fills the parameters of a module built on the meta device: from the seed or from safetensors.

The rule of a random start: every module's own parameters and buffers are drawn by the family's `_init_weights`, on the CPU
in fp32, from a generator seeded with (seed, full name of the module). So they depend neither on the cut nor on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.model import remote
from shoal.model.cut import seeded
from shoal.model.remote import INDEX, SINGLE

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

COLUMNS = 64  # of a vocabulary's matrix that are added up at a time: 64 MiB in fp64 of 128k tokens


def materialise(
    model: PreTrainedModel, *, seed: int, source: str | None, read: Callable[[PreTrainedModel, str], None] | None = None
) -> None:
    """Fill every parameter and buffer that is still in `model`, a Hugging Face model on the meta device. `read`: fills parameters from
    `source`; None: `load`."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)  # detected below where the family does not compute it
        _initialise(model, model, "", seed, buffers_only=source is not None)
        if next(model.parameters(), None) is not None:  # some of its parts are present
            model.tie_weights()  # to_empty has allocated tied weights twice
        if source is not None:
            (read or load)(model, source)
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


@torch.no_grad()
def load(model: PreTrainedModel, source: str) -> None:
    """Read the parameters present in `model` that are trained, and no others, from a directory of safetensors shards. Where the
    vocabulary has another size than there, the first rows are kept and further ones are their mean. ValueError: a parameter is missing."""
    shards = shard_of(source)
    tied = getattr(model, "_tied_weights_keys", None) or {}  # models with tied embeddings store one of the two
    with reader(source, shards) as read:
        missing = {name: value for name, value in model.named_parameters() if value.requires_grad}
        of_tokens = _of_tokens(model)
        for name in [name for name in missing if name in shards]:
            resize = id(missing[name]) in of_tokens
            _fill(missing.pop(name), read(name), f"{source}/{shards[name]}: {name}", resize)
        for name, tensor in _converted(model, list(shards), missing, read):
            _fill(missing.pop(name), tensor, f"{source}: {name}")
        for name in [name for name in missing if tied.get(name) in shards]:
            _fill(missing.pop(name), read(tied[name]), f"{source}: {tied[name]}", resize=True)
    for name in missing:
        raise ValueError(f"{source} holds no tensor {name!r}; is it a checkpoint of {model.config.model_type}?")


@contextmanager
def reader(source: str | Path, shards: Mapping[str, str]) -> Iterator[Callable[[str], Tensor]]:
    """Gives a tensor of these shards by its name, while it is open. Of a model at a URL each is fetched by then (remote.py)."""
    from safetensors import safe_open

    if (origin := remote.source_of(source)) is not None:
        there = remote.Weights(Path(source), origin)

        def fetched(name: str) -> Tensor:
            with safe_open(there.file(shards[name], name), framework="pt", device="cpu") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor

        yield fetched
        return
    with ExitStack() as stack:
        files = {
            shard: stack.enter_context(safe_open(Path(source) / shard, framework="pt", device="cpu"))
            for shard in dict.fromkeys(shards.values())
        }
        yield lambda name: files[shards[name]].get_tensor(name)


def _of_tokens(model: PreTrainedModel) -> set[int]:
    """Parameters, by id, with a row for each token."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {id(value) for end in ends if isinstance(end, nn.Module) for value in end.parameters()}


def load_plain(model: nn.Module, source: str | Path) -> None:
    """Read the parameters of a module whose names are those of the checkpoint. ValueError: one is missing or of another shape."""
    shards = shard_of(str(source))
    with torch.no_grad(), reader(source, shards) as read:
        for name, parameter in model.named_parameters():
            if name not in shards:
                raise ValueError(f"{source} holds no tensor {name!r}; is it a checkpoint of this model?")
            _fill(parameter, read(name), f"{source}/{shards[name]}: {name}")


def _fill(parameter: nn.Parameter, tensor: Tensor, where: str, resize: bool = False) -> None:
    rows = min(len(parameter), len(tensor))
    if resize and tensor.shape[1:] == parameter.shape[1:] and len(tensor) != len(parameter):
        parameter[:rows] = tensor[:rows]
        if len(parameter) > rows:
            parameter[rows:] = _mean(tensor)
        return
    if tensor.shape != parameter.shape:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}, the model needs {tuple(parameter.shape)}")
    parameter.copy_(tensor)


def _mean(rows: Tensor) -> Tensor:
    """Over the first dimension. Halves are added to each other, an order that no machine changes."""
    means = []
    for part in torch.split(rows.reshape(len(rows), -1), COLUMNS, 1):
        total = part.double()
        while len(total) > 1:
            half = len(total) // 2
            total = torch.cat([total[:half] + total[len(total) - half :], total[half : len(total) - half]])
        means.append(total[0] / len(rows))
    return torch.cat(means).view(rows.shape[1:])


def _converted(
    model: PreTrainedModel, stored: list[str], wanted: dict[str, nn.Parameter], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Those of `wanted` that a published checkpoint stores under other names, or in parts (the experts of a layer one by one)."""
    for name, transform in _transforms(model, stored, wanted, read).items() if wanted else ():
        try:
            tensors = transform.convert(name, model=model, config=model.config)
        except Exception as error:  # transformers' operations on tensors of any shape
            raise ValueError(f"{name} cannot be made of the stored tensors ({error!r})") from error
        for target, tensor in tensors.items():
            if target in wanted:
                yield target, tensor[0] if isinstance(tensor, list) else tensor


def _transforms(
    model: PreTrainedModel, stored: list[str], wanted: dict[str, nn.Parameter], read: Callable[[str], Tensor]
) -> dict[str, Any]:
    """transformers' own rules for the tensors in `wanted`, each with the stored ones that it is made of."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    transforms: dict[str, WeightConverter | WeightRenaming] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted:
            continue
        if name not in transforms:
            transforms[name] = WeightRenaming(key, name) if pattern is None else deepcopy(converter_of[pattern])
        tensor: Any = partial(read, key)  # called when it is needed, which its annotation does not say
        transforms[name].add_tensor(name, key, pattern or key, tensor)
    return transforms


def shard_of(source: str) -> dict[str, str]:
    """The file of each tensor in the directory. ValueError: no safetensors there."""
    folder = Path(source)
    if (folder / INDEX).is_file():
        shards = remote.shards_of((folder / INDEX).read_bytes(), str(folder / INDEX))
        for shard in sorted(set(shards.values())) if remote.source_of(folder) is None else ():
            if not (folder / shard).is_file():
                raise ValueError(f"{folder / INDEX} names {shard!r}, which is no file of that directory")
        return shards
    if (folder / SINGLE).is_file():
        return tensors_of(folder, SINGLE)
    raise ValueError(f"{source} has neither {SINGLE} nor {INDEX}; other formats of weights are not read")


def tensors_of(folder: Path, file: str) -> dict[str, str]:
    """That file of safetensors, of each tensor in it."""
    from safetensors import safe_open

    with safe_open(folder / file, framework="pt", device="cpu") as opened:
        return dict.fromkeys(opened.keys(), file)
