"""Cuts an `nn.Sequential` and a loss, written in Python, into the same kind of stages as a Hugging Face model.

A function builds the model on the meta device: a peer never allocates more than its own stage. Weights are drawn as in
weights.py, module by module from (seed, name), by each module's `reset_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shoal.config import Config
from shoal.model import weights
from shoal.model.cut import next_token_loss, seeded, spans, targets
from shoal.model.factory import OwnModel

Loss = Callable[[Tensor, Tensor], Tensor]  # (output of the model, targets) -> mean over the microbatch


class SequentialStage:
    """A cut.Stage: consecutive children of an nn.Sequential, under their names in the whole."""

    def __init__(self, model: nn.Sequential, loss: Loss, *, first: bool, last: bool) -> None:
        self.model = model
        self.first = first
        self.last = last
        embedding = next((child for child in model if first), None)
        self.vocabulary: int | None = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
        self._loss = loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
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
