"""Cuts an `nn.Sequential` and a loss, written in Python, into the same kind of stages as a Hugging Face model.

A function builds the model on the meta device: a peer never allocates more than its own stage. Weights are drawn as in
weights.py, module by module from (seed, name), by each module's `reset_parameters`. The user's own model is what the function that
model.factory names returns: an nn.Sequential, alone or with its loss, or a Hugging Face model, which families.py takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal import importing
from shoal.config import Config
from shoal.model import weights
from shoal.model.cut import next_token_loss, seeded, spans, targets
from shoal.model.layers.dropout import Masks

SETTING = "model.factory"
MODEL_TYPE = "shoal_sequential"  # in a checkpoint's config.json; `shoal.Checkpoint(path).model()` gives the model
ANY_TOKEN = 1 << 31  # the vocabulary of a model that does not begin with an embedding
Loss = Callable[[Tensor, Tensor], Tensor]  # (output of the model, targets) -> mean over the microbatch


class OwnModel(NamedTuple):
    model: nn.Module  # on the meta device
    loss: Loss  # (logits, targets (B, L)) -> mean over the microbatch


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


def own_sequential(config: Config) -> OwnModel | None:
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


class SequentialStage:
    """A cut.Stage: consecutive children of an nn.Sequential, under their names in the whole."""

    paired = False

    def __init__(self, model: nn.Sequential, loss: Loss, *, first: bool, last: bool) -> None:
        self.model = model
        self.first = first
        self.last = last
        embedding = next((child for child in model if first), None)
        self.vocabulary: int | None = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
        self._loss = loss
        self.compared: list[Tensor] = []
        self.masks: Masks | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def named_frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def frozen(self) -> list[Tensor]:
        return []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y

    def infer(self, x: Tensor, cache: object) -> tuple[Tensor, object]:
        raise ValueError("a model of your own (model.factory) keeps no keys and values, so that it serves no texts")

    def reference(self, x: Tensor) -> Tensor:
        raise ValueError(
            "a model of your own (model.factory) has no adapters, so that nothing is compared with its base"
        )

    def loss(self, x: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Tensor:
        return self._loss(self.forward(x), targets(tokens))


def build(
    make: Callable[[], nn.Sequential],
    span: tuple[int, int],
    *,
    loss: Loss = next_token_loss,
    seed: int,
    device: str = "cpu",
) -> SequentialStage:
    """Stage `span[0]` of `span[1]` of the model that `make()` returns; each child is one block. ValueError: it cannot be cut."""
    stage, stages = span
    with torch.device("meta"):
        model = make()
    return _filled(_cut(model, loss, stage, stages), seed, device)


def hollow(own: OwnModel, config: Config, stage: int) -> SequentialStage:
    """A stage of the user's own model on the meta device. ValueError: it cannot be cut."""
    _refuse_undrawn(own.model)
    return _cut(own.model, own.loss, stage, config.run.stages, config.run.layers)


def own_stage(own: OwnModel, config: Config, stage: int, source: str | None, device: str) -> SequentialStage:
    """A stage of the user's own model, drawn from run.seed or read from the safetensors directory `source`."""
    built = _filled(hollow(own, config, stage), config.run.seed, device)
    if source is not None:
        weights.load_plain(built.model, source)
    return built


def _cut(model: nn.Module, loss: Loss, stage: int, stages: int, layers: tuple[int, ...] = ()) -> SequentialStage:
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"a {type(model).__name__} cannot be cut; give a function that returns an nn.Sequential")
    _refuse_shared(model)
    names = [name for name, _ in model.named_children()]
    mine = {names[block] for block in spans(len(names), stages, layers)[stage]}
    for name in names:
        if name not in mine:
            delattr(model, name)
    return SequentialStage(model.eval(), loss, first=stage == 0, last=stage == stages - 1)


def _filled(stage: SequentialStage, seed: int, device: str) -> SequentialStage:
    stage.model.to_empty(device="cpu")
    with torch.no_grad():
        _initialise(stage.model, seed)
    stage.model.to(device)
    return stage


def _initialise(model: nn.Sequential, seed: int) -> None:
    _refuse_undrawn(model)
    for name, module in _drawn(model):
        with seeded(seed, name):
            module.reset_parameters()  # type: ignore[operator]


def _drawn(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters or buffers of their own."""
    for name, module in model.named_modules():
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            yield name, module


def _refuse_undrawn(model: nn.Module) -> None:
    for name, module in _drawn(model):
        if not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{name}: {type(module).__name__} has parameters or buffers but no reset_parameters() to draw them with"
            )


def _refuse_shared(model: nn.Sequential) -> None:
    """A parameter in two stages would be trained as two; dropout would differ when a stage is recomputed."""
    owner: dict[nn.Parameter, str] = {}
    for name, child in model.named_children():
        for parameter in child.parameters():
            if owner.setdefault(parameter, name) != name:
                raise ValueError(f"children {owner[parameter]} and {name} share a parameter; stages cannot")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(f"{name}: stages are recomputed and cannot drop out; set its p to 0")
