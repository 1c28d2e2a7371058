"""Cuts a Hugging Face causal language model into stages of whole blocks, for the executors.

A stage is the family's own model with the blocks of other stages taken out: the whole is built on the meta device, where it
takes no memory, what belongs to other stages is replaced by `Elsewhere`, which hands hidden states through, and only the
rest is given memory and values. So positions, masks and layer types are computed by the family's own code, with each block
at its own index, and a cut model gives the bits of the whole. A family whose code does more between its blocks than hand
hidden states on (say, scale whatever enters) is found by running it with all blocks taken out, and refused.

Which blocks: cut.py. Where weights come from: weights.py. Tied embeddings would make the first and the last stage share a
parameter, whose gradient no group of replicas holds alone: they are refused for more than one stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.config import Config
from shoal.model import boundary
from shoal.model.cut import cut, next_token_loss, targets
from shoal.model.families import cuts, hf_config, model_class
from shoal.model.weights import materialise

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

# What a family may hand to every block beside the hidden states: functions of positions alone, the same in each stage.
PLAIN = {
    "attention_mask",
    "cache_position",
    "causal_mask",
    "output_attentions",
    "past_key_value",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "use_cache",
}


class Elsewhere(nn.Module):
    """Stands where a part of another stage would be: no parameters, hands its input through."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.odd: list[str] = []  # what it was given beyond hidden states and positions
        object.__setattr__(self, "part", part)  # on the meta device, and not registered as a child

    def forward(self, hidden_states: Tensor, *rest: object, **given: object) -> Tensor:
        self.odd += [f"argument {place + 2}" for place, value in enumerate(rest) if isinstance(value, Tensor)]
        self.odd += [name for name, value in given.items() if value is not None and name not in PLAIN]
        return hidden_states

    def __getattr__(self, name: str) -> Any:
        """Some models read their blocks' attributes, such as the type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "part"), name)


class HuggingFaceStage:
    """A cut.Stage: some blocks of a Hugging Face model, run by the model's own forward."""

    def __init__(self, model: PreTrainedModel, *, first: bool, last: bool) -> None:
        self.model = model
        self.first = first
        self.last = last
        self.vocabulary: int | None = model.config.vocab_size
        layers: list[boundary.Layers] = list(getattr(model, boundary.ATTRIBUTE, {}).values())
        self._widen = next((each.widen for each in layers if each.widen is not None), None)
        self._narrow = next((each.narrow for each in layers if each.narrow is not None), None)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self._widen is not None:
            x = self._widen(x)
        given = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        if self.last:
            logits: Tensor = self.model(**given).logits
            return logits
        y: Tensor = self.model.base_model(**given).last_hidden_state
        if self._narrow is not None:
            y = self._narrow(y)
        return y

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return next_token_loss(self.forward(x), targets(tokens))


def preload(config: Config) -> None:
    """Import the family's code ahead of `build`: seconds that can pass while peers are still being looked for."""
    model_class(hf_config(config))


def check(config: Config) -> None:
    """Raise ValueError for a model that `build` would refuse. Weights are neither read nor given memory."""
    if config.device.executor != "emulated":
        _hollow(config)


def build(config: Config, stage: int, *, source: str | None = None, device: str = "cpu") -> HuggingFaceStage:
    """Stage `stage` of `config.run.stages`, in fp32: from the safetensors directory `source` (or else `model.path`), or
    random from `run.seed` and then equal to that part of `whole`, whatever the cut."""
    model, parts = _hollow(config)
    first, last = _put_back(model, parts, config, stage)
    materialise(model, seed=config.run.seed, source=source or config.model.path or None)
    return HuggingFaceStage(model.eval().to(device), first=first, last=last)


def hollow(config: Config, stage: int) -> HuggingFaceStage:
    """`build` without values: parameters stay on the meta device. For who asks what a stage needs before there is one."""
    model, parts = _hollow(config)
    materialise(model, seed=config.run.seed, source=None)  # what is outside the blocks: tables of positions
    first, last = _put_back(model, parts, config, stage)
    return HuggingFaceStage(model.eval(), first=first, last=last)


def _put_back(model: Any, parts: Parts, config: Config, stage: int) -> tuple[bool, bool]:
    """Put what belongs to that stage back into the model, with the stage's halves of boundary layers. Whether it is the first, the last."""
    first, last = stage == 0, stage == config.run.stages - 1
    mine = cut(config.run, len(parts.blocks))[stage]
    parts.put_back(mine, first=first, last=last)
    if config.model.boundary != "none":
        halves = {mine.start: ("widen",), mine.stop: ("narrow",)}
        wanted = cuts(config, len(parts.blocks))
        boundary.attach(model, config.model.boundary, {block: halves[block] for block in wanted if block in halves})
    return first, last


def whole(config: Config, source: str | None = None, device: str = "cpu") -> PreTrainedModel:
    """The uncut Hugging Face model with the same weights: what stages are compared with, and what one machine trains."""
    model = on_meta(hf_config(config))
    if config.model.boundary != "none":
        blocks = Parts(model).blocks
        boundary.attach(model, config.model.boundary, dict.fromkeys(cuts(config, len(blocks)), ("narrow", "widen")))
        boundary.run_between(model, blocks)
    materialise(model, seed=config.run.seed, source=source or config.model.path or None)
    placed: PreTrainedModel = model.eval().to(device)
    return placed


class Parts:
    """The parts of a model in the order of its pipeline plan, taken out of it one by one and put back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = model.config.model_type
        self.model, self.base = model, model.base_model
        plan = list(model.config.base_model_pp_plan or ())
        lists = [name for name in plan if isinstance(getattr(self.base, name, None), nn.ModuleList)]
        if self.base is model or len(lists) != 1 or lists[0] in (plan[0], plan[-1]):
            raise ValueError(f"model.family = {self.family!r}: its pipeline plan {plan} is not embedding, blocks, norm")
        place = plan.index(lists[0])
        self.held: nn.ModuleList = getattr(self.base, lists[0])
        self.blocks = list(self.held)
        self.before: dict[str, nn.Module] = {name: getattr(self.base, name) for name in plan[:place]}
        self.after: dict[str, nn.Module] = {name: getattr(self.base, name) for name in plan[place + 1 :]}
        self.head = {name: child for name, child in model.named_children() if child is not self.base}

    def take_out(self) -> None:
        for index, block in enumerate(self.blocks):
            self.held[index] = Elsewhere(block)
        for owner, names in ((self.base, self.before), (self.base, self.after), (self.model, self.head)):
            for name, part in names.items():
                setattr(owner, name, Elsewhere(part))
        left = [name for name, _ in self.model.named_parameters()]
        if left:
            raise ValueError(f"model.family = {self.family!r}: its pipeline plan says nothing of {left[0]}")

    def put_back(self, blocks: range, *, first: bool, last: bool) -> None:
        for index in blocks:
            self.held[index] = self.blocks[index]
        for owner, names, mine in (
            (self.base, self.before, first),
            (self.base, self.after, last),
            (self.model, self.head, last),
        ):
            for name, part in names.items() if mine else ():
                setattr(owner, name, part)


def _hollow(config: Config) -> tuple[PreTrainedModel, Parts]:
    """The model with all its parts taken out, found to hand hidden states through unchanged."""
    hf = hf_config(config)
    _refuse_tied(config, hf)
    cut(config.run, hf.num_hidden_layers)  # refuses what is no cut of it
    model = on_meta(hf)
    kept = sorted(set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)})
    if kept:
        raise ValueError(
            f"model.family = {hf.model_type!r} keeps {kept[0]} outside its parameters; that is not averaged"
        )
    parts = Parts(model)
    parts.take_out()
    if config.run.stages > 1:
        materialise(model, seed=config.run.seed, source=None)
        refuse_more_than_blocks(model, parts)
    return model, parts


def on_meta(hf: PreTrainedConfig) -> PreTrainedModel:
    described = model_class(hf)
    try:
        with torch.device("meta"):
            return described(hf)
    except Exception as error:  # the family's own code, on numbers that it may not have been written for
        raise ValueError(
            f"model.family = {hf.model_type!r} cannot be built with these settings ({error!r});"
            " it may need fields of its own under model.extra"
        ) from error


def _refuse_tied(config: Config, hf: PreTrainedConfig) -> None:
    if config.run.stages > 1 and getattr(hf, "tie_word_embeddings", False):
        setting = "model.extra.tie_word_embeddings" if config.model.path else "model.tied_embeddings"
        raise ValueError(
            f"{setting} is true, but embedding and head are on different stages (run.stages = {config.run.stages});"
            f" set {setting}=false to train them apart, or run.stages=1"
        )


def refuse_more_than_blocks(model: PreTrainedModel, parts: Parts, instead: str = "run.stages=1") -> None:
    """ValueError for a model, all parts taken out, that does more than hand hidden states on; `instead` is a way round."""
    x = torch.linspace(-1.0, 1.0, 4 * model.config.hidden_size).view(1, 4, -1)
    refused = f"model.family = {parts.family!r} cannot be cut into stages: between its blocks it does more than hand on"
    try:
        with torch.no_grad():
            y = model.eval().base_model(inputs_embeds=x, use_cache=False).last_hidden_state
    except Exception as error:  # any family's own code runs here, on an input it was not written for
        raise ValueError(f"{refused} hidden states ({error!r}); set {instead}") from error
    odd = sorted({name for part in parts.held if isinstance(part, Elsewhere) for name in part.odd})
    if odd or not torch.equal(x, y):
        raise ValueError(f"{refused} hidden states ({', '.join(odd) or 'they change'}); set {instead}")
