"""Layers that make a boundary tensor narrower, trained with the model: bottleneck and maxout (SWARM 2301.11913, section 7).

    bottleneck: LayerNorm -> Linear(d, d / c) -> LayerNorm -> [wire] -> Linear(d / c, d)
    maxout:     LayerNorm -> max over c adjacent features -> LayerNorm -> [wire] -> Linear(d / c, d)

There is no residual around them, so they change what is learned (benchmarks/quality.py). They are part of the model:
`model.boundary` names kind and c; one stands at every cut between stages, its first half in the stage before and its second in
the stage after. Their parameters are averaged, stepped and saved like all others, as `shoal_boundary.K.narrow...` and
`shoal_boundary.K.widen...`, where block K is the first one after the cut.

No other program has these layers. A checkpoint that holds them says so in config.json, under a model_type that transformers
refuses to load; `load` here gives the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

MODEL_TYPE = "shoal_boundary_layers"
ATTRIBUTE = "shoal_boundary"
EXPLANATION = (
    "This model has boundary layers between its blocks, which transformers does not know: without them it computes something "
    "else. shoal.model.whole.load(directory) gives the whole model; model.path in a Shoal run goes on training it."
)


class Narrow(nn.Module):
    """(B, L, D) -> (B, L, D / c), normalised."""

    def __init__(self, kind: str, width: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.before = nn.LayerNorm(width)
        self.down = nn.Linear(width, width // factor) if kind == "bottleneck" else None
        self.after = nn.LayerNorm(width // factor)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = self.down(x) if self.down is not None else torch.unflatten(x, -1, (-1, self.factor)).amax(-1)
        y: Tensor = self.after(x)
        return y


class Layers(nn.Module):
    """The layers of one boundary, or one half of them."""

    def __init__(self, boundary: str, width: int, halves: Sequence[str] = ("narrow", "widen")) -> None:
        super().__init__()
        kind, factor = parse(boundary)
        if width % factor:
            raise ValueError(f"model.boundary = {boundary!r} does not divide the model's width {width}")
        self.narrow = Narrow(kind, width, factor) if "narrow" in halves else None
        self.widen = nn.Linear(width // factor, width) if "widen" in halves else None

    def forward(self, x: Tensor) -> Tensor:
        assert self.narrow is not None and self.widen is not None
        y: Tensor = self.widen(self.narrow(x))
        return y


def parse(boundary: str) -> tuple[str, int]:
    """Kind and factor of `maxout-4x`; ("none", 1) of "none"."""
    kind, _, factor = boundary.partition("-")
    return kind, int(factor.removesuffix("x")) if factor else 1


def attach(model: PreTrainedModel, boundary: str, halves: dict[int, Sequence[str]]) -> None:
    """Add boundary layers before the blocks in `halves`, or only the halves listed, to a model on the meta device."""
    width = model.config.hidden_size
    with torch.device("meta"):
        layers = {str(block): Layers(boundary, width, which) for block, which in halves.items()}
    setattr(model, ATTRIBUTE, nn.ModuleDict(layers))


def run_between(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> None:
    """Make the whole model run each block's boundary layers before the block."""
    for block, layers in getattr(model, ATTRIBUTE).items():
        blocks[int(block)].register_forward_pre_hook(_through(layers), with_kwargs=True)


Args = tuple[object, ...]
Keywords = dict[str, object]


def _through(layers: nn.Module) -> Callable[[nn.Module, Args, Keywords], tuple[Args, Keywords]]:
    def hook(block: nn.Module, args: Args, keywords: Keywords) -> tuple[Args, Keywords]:
        if args:
            return (layers(args[0]), *args[1:]), keywords
        return args, keywords | {"hidden_states": layers(keywords["hidden_states"])}

    return hook


# ------------------------------------------------------------------------------------------------------- config.json


def config_json(inner: str, boundary: str, blocks: Sequence[int]) -> bytes:
    """config.json of a checkpoint with boundary layers before `blocks`; `inner`: config.json of the model without them."""
    fields = {
        "model_type": MODEL_TYPE,
        "architectures": ["ShoalBoundaryLayers"],
        "explanation": EXPLANATION,
        "boundary": boundary,
        "before_blocks": list(blocks),
        "model": json.loads(inner),
    }
    return json.dumps(fields, indent=2).encode()


def inner(fields: dict[str, Any], where: str, boundary: str, blocks: Sequence[int]) -> dict[str, Any]:
    """The Hugging Face configuration in a config.json. ValueError when its boundary layers are not those of this run."""
    layered = fields.get("model_type") == MODEL_TYPE
    actual = (fields["boundary"], list(fields["before_blocks"])) if layered else ("none", [])
    if actual != (boundary, list(blocks)):
        raise ValueError(
            f"{where} has boundary layers {_words(*actual)}, this run {_words(boundary, list(blocks))}; they are part of the "
            f"model: set model.boundary={actual[0]} and cut it at the same blocks (run.stages)"
        )
    return fields["model"] if layered else fields


def _words(boundary: str, blocks: list[int]) -> str:
    return f"{boundary} before blocks {blocks}" if blocks else boundary
