"""The user's own model, by the function that model.factory names: an nn.Sequential, alone or with its loss, or a Hugging Face model.

For stages.py, families.py and whoever needs a model's width or vocabulary. Built on the meta device: weights are drawn from the
seed, or come from a checkpoint, never from the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal import importing
from shoal.config import Config
from shoal.model.cut import next_token_loss, spans

SETTING = "model.factory"
MODEL_TYPE = "shoal_sequential"  # in a checkpoint's config.json; `shoal.Checkpoint(path).model()` gives the model
ANY_TOKEN = 1 << 31  # the vocabulary of a model that does not begin with an embedding


class OwnModel(NamedTuple):
    model: nn.Module  # on the meta device
    loss: Callable[[Tensor, Tensor], Tensor]  # (logits, targets (B, L)) -> mean over the microbatch


def own_model(config: Config) -> OwnModel:
    """What the function returns. ValueError: it is neither an nn.Sequential, nor one with its loss, nor a Hugging Face model."""
    where = f"{SETTING} = {config.model.factory!r}"
    function = importing.load(config.model.factory, SETTING)
    try:
        with torch.device("meta"):
            returned = function()
    except Exception as error:  # the user's own code
        raise ValueError(f"{where} failed on the meta device: {error!r}") from error
    model, loss = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, next_token_loss)
    if not isinstance(model, nn.Sequential) and not hasattr(model, "base_model"):
        raise ValueError(
            f"{where} returns a {type(model).__name__}; return an nn.Sequential, (nn.Sequential, loss), or a Hugging Face model"
        )
    if not callable(loss):
        raise ValueError(f"{where}: the loss is a {type(loss).__name__}; return a function of (logits, targets)")
    return OwnModel(model, loss)


def sequential(config: Config) -> OwnModel | None:
    """The user's nn.Sequential; None: the model is a Hugging Face one."""
    own = own_model(config) if config.model.factory else None
    return own if own is not None and isinstance(own.model, nn.Sequential) else None


def vocabulary(own: OwnModel) -> int:
    assert isinstance(own.model, nn.Sequential)
    first = next(iter(own.model))
    return first.num_embeddings if isinstance(first, nn.Embedding) else ANY_TOKEN


def width(config: Config, own: OwnModel) -> int:
    """Values per token at every cut between stages. ValueError: they are not (B, L, D) with one D."""
    assert isinstance(own.model, nn.Sequential)
    children = list(own.model)
    ends = {blocks.stop for blocks in spans(len(children), config.run.stages, config.run.layers)[:-1]}
    x = torch.zeros(1, config.data.sequence, dtype=torch.int64, device="meta")
    widths: dict[int, tuple[int, ...]] = {}
    where = f"{SETTING} = {config.model.factory!r}"
    for number, child in enumerate(children, start=1):
        try:
            x = child(x)
        except Exception as error:  # the user's own modules
            raise ValueError(
                f"{where}: child {number - 1} fails on an input of shape {tuple(x.shape)}: {error!r}"
            ) from error
        if number in ends:
            widths[number] = tuple(x.shape)
    for number, shape in widths.items():
        if len(shape) != 3 or shape[:2] != (1, config.data.sequence) or shape != next(iter(widths.values())):
            raise ValueError(
                f"{where}: behind child {number - 1} stages exchange a tensor of shape {shape}; every cut needs (B, L, D) = "
                f"(1, {config.data.sequence}, D) with the same D; choose other cuts with run.layers"
            )
    return next(iter(widths.values()), (1, 1, 1))[-1]
