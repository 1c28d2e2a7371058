"""Cuts a Hugging Face causal language model into stages of whole blocks, for the executors.

A stage is the family's own model without the blocks of other stages: the whole is built on the meta device, parts of other
stages are replaced by `Passthrough`, which returns its input, and only the rest is allocated and filled. So the family's own
code computes positions, masks and layer types, with each block at its own index, and a cut model gives the bits of the whole.
A family whose code does more between its blocks than pass hidden states on (say, scales them) is refused: the model without
blocks is run to test that.

Which blocks: cut.py. Where weights come from: weights.py. Tied embeddings would make the first and the last stage share a
parameter, whose gradient no group of replicas holds alone: they are refused for more than one stage, unless they are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.config import Config, paired
from shoal.model import lent, sequential
from shoal.model.cut import (
    counted_pairs,
    cut,
    document_starts,
    next_token_loss,
    positions,
    row_losses,
    targets,
    with_borders,
)
from shoal.model.families import cuts, hf_config, model_class, plan_of
from shoal.model.layers import adapters, also, balance, boundary, linear, nf4, pairs, vocabulary
from shoal.model.layers.dropout import masks_of
from shoal.model.weights import materialise

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.cache_utils import DynamicCache
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

POSITIONS = {"wpe", "embed_positions"}  # learned tables of positions, which the first stage alone adds
IN_TUPLES = {"bloom", "falcon"}  # families whose blocks return tuples

# Arguments that a block may get beside hidden states: functions of positions alone, the same in each stage.
PLAIN = {
    "alibi",
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


class Passthrough(nn.Module):
    """Replaces a part of another stage: no parameters, returns its input, in a tuple where the part's family wants one."""

    def __init__(self, part: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        self.odd: list[str] = []  # names of arguments beyond hidden states and positions
        self._in_tuple = in_tuple
        object.__setattr__(self, "part", part)  # on the meta device, and not registered as a child

    def forward(self, hidden_states: Tensor, *rest: object, **keywords: object) -> Tensor | tuple[Tensor]:
        self.odd += [f"argument {position + 2}" for position, value in enumerate(rest) if isinstance(value, Tensor)]
        self.odd += [name for name, value in keywords.items() if value is not None and name not in PLAIN]
        return (hidden_states,) if self._in_tuple else hidden_states

    def __getattr__(self, name: str) -> Any:
        """The replaced part's attribute: some models read their blocks' attributes, such as the type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "part"), name)


class NoPositions(nn.Module):
    """Replaces a table of positions in later stages: the hidden states that they receive have them."""

    def forward(self, *args: object, **keywords: object) -> Tensor:
        return torch.zeros(())


class HuggingFaceStage:
    """A cut.Stage: some blocks of a Hugging Face model, run by the model's own forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        first: bool,
        last: bool,
        document_end: int = -1,
        blocks: range = range(0),
        beta: float = 0.0,
    ) -> None:
        """`blocks`: those that it holds, for `infer` alone. `beta`: of preference pairs (tune.beta); 0: samples are none."""
        self.model, self._blocks = model, blocks
        self.document_end = document_end
        self.first = first
        self.last = last
        self.vocabulary: int | None = model.config.vocab_size
        self.paired, self._beta = beta > 0, beta
        self.compared: list[Tensor] = []
        self.masks = masks_of(model)
        layers: list[boundary.Layers] = list(getattr(model, boundary.ATTRIBUTE, {}).values())
        self._widen = next((each.widen for each in layers if each.widen is not None), None)
        self._narrow = next((each.narrow for each in layers if each.narrow is not None), None)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)

    def named_frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self.model.named_parameters() if not value.requires_grad)

    def frozen(self) -> list[Tensor]:
        return [value for _, value in self.named_frozen()]

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            logits: Tensor = self.model(**self._keywords(x)).logits
            return logits
        y = self._hidden(x)
        if self._narrow is not None:
            y = self._narrow(y)
        return y if self.document_end < 0 else with_borders(y, self._starts(x))

    def infer(self, x: Tensor, cache: DynamicCache | None) -> tuple[Tensor, DynamicCache]:
        cache = self._new_cache() if cache is None else cache
        length, most = cache.get_seq_length() + x.shape[1], getattr(self.model.config, "max_position_embeddings", None)
        if isinstance(most, int) and length > most:
            raise ValueError(f"a text of {length} tokens is longer than the model's {most} positions")
        if self._widen is not None:
            x = self._widen(x)
        keywords = {"input_ids" if self.first else "inputs_embeds": x, "past_key_values": cache, "use_cache": True}
        if self.last:
            return self.model(**keywords, logits_to_keep=1).logits[:, -1], cache
        y: Tensor = self.model.base_model(**keywords).last_hidden_state
        return y if self._narrow is None else self._narrow(y), cache

    def _new_cache(self) -> DynamicCache:
        """Empty. The family's code asks the first layers for the length of the text, and those may belong to another stage: they share
        the cache of an own layer of their kind."""
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache(config=self.model.config)
        own = [cache.layers[index] for index in self._blocks]
        cache.layers = [
            layer if at in self._blocks else next((mine for mine in own if type(mine) is type(layer)), own[0])
            for at, layer in enumerate(cache.layers)
        ]
        return cache

    def loss(self, x: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Tensor:
        if reference is not None:
            margins = self.margins(x, tokens, reference)
            self.compared.append(torch.where(counted_pairs(tokens), margins.detach(), torch.nan))
            return pairs.loss(margins, tokens)
        head = vocabulary.sliced_head(self.model, targets(tokens).numel())
        if head is None:
            return next_token_loss(self.forward(x), targets(tokens))
        return vocabulary.loss(self.model, head, self._hidden(x), targets(tokens))

    def reference(self, x: Tensor) -> Tensor:
        with torch.no_grad(), adapters.disabled(self.model):
            return self.forward(x)

    def margins(self, x: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
        """See pairs.margins, at the last stage. The reference's come first: its activations are gone before the others' are kept."""
        with torch.no_grad(), adapters.disabled(self.model):
            of_base = self._row_losses(reference, tokens)
        return pairs.margins(self._row_losses(x, tokens), of_base, self._beta)

    def _row_losses(self, x: Tensor, tokens: Tensor) -> Tensor:
        head = vocabulary.sliced_head(self.model, targets(tokens).numel())
        if head is None:
            return row_losses(self.forward(x), targets(tokens))
        return vocabulary.token_losses(self.model, head, self._hidden(x), targets(tokens)).sum(1)

    def _hidden(self, x: Tensor) -> Tensor:
        y: Tensor = self.model.base_model(**self._keywords(x)).last_hidden_state
        return y

    def _keywords(self, x: Tensor) -> dict[str, Any]:
        keywords: dict[str, Any] = {"use_cache": False}
        if self.document_end >= 0:  # the family's own code makes the mask of positions that begin anew
            keywords["position_ids"] = positions(self._starts(x))
            x = x if self.first else x[..., :-1]
        if self._widen is not None:
            x = self._widen(x)
        return keywords | {"input_ids" if self.first else "inputs_embeds": x}

    def _starts(self, x: Tensor) -> Tensor:
        return document_starts(x, self.document_end) if self.first else x[..., -1] > 0


def check(config: Config) -> None:
    """ValueError: `build` would refuse the model. No weights are read or allocated."""
    if config.device.executor == "emulated":
        return
    own = sequential.own_sequential(config)
    if own is None:
        _hollow(config)
    else:
        sequential.width(config, own)
        sequential.hollow(own, config, 0)


def build(
    config: Config, stage: int, *, source: str | None = None, device: str = "cpu"
) -> HuggingFaceStage | sequential.SequentialStage:
    """Stage `stage` of `config.run.stages`, in fp32: from the safetensors directory `source` (or else `model.path`), or
    random from `run.seed` and then equal to that part of `whole`, whatever the cut. Frozen weights are those of `model.path`, in
    train.dtype, as are all that run.serve only computes with."""
    if (own := sequential.own_sequential(config)) is not None:
        return sequential.own_stage(own, config, stage, source, device)
    model, parts = _hollow(config)
    blocks = _insert(model, parts, config, stage)
    _fill(model, config, source)
    if config.device.compile:
        for block in parts.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
    else:
        linear.prefer(model)
    return _stage(model.eval().to(device), blocks, config, stage)


def hollow(config: Config, stage: int) -> HuggingFaceStage | sequential.SequentialStage:
    """`build` with parameters on the meta device, to compute what a stage needs."""
    if (own := sequential.own_sequential(config)) is not None:
        return sequential.hollow(own, config, stage)
    model, parts = _hollow(config)
    materialise(model, seed=config.run.seed, source=None)  # the tables of positions outside the blocks
    blocks = _insert(model, parts, config, stage)
    adapters.narrow(model, config)
    adapters.encode(model, config)
    adapters.attach(model, config)
    return _stage(model.eval(), blocks, config, stage)


def _stage(model: PreTrainedModel, blocks: range, config: Config, stage: int) -> HuggingFaceStage:
    first, last = stage == 0, stage == config.run.stages - 1
    end, beta = config.data.document_end, config.tune.beta if paired(config) else 0.0
    return HuggingFaceStage(model, first=first, last=last, document_end=end, blocks=blocks, beta=beta)


def _insert(model: Any, parts: Parts, config: Config, stage: int) -> range:
    """Insert the parts of that stage into the model, with its halves of boundary layers. Returns the stage's blocks."""
    own_blocks = cut(config.run, len(parts.blocks))[stage]
    parts.insert_parts(own_blocks, first=stage == 0, last=stage == config.run.stages - 1)
    if config.model.boundary != "none":
        halves = {own_blocks.start: ("widen",), own_blocks.stop: ("narrow",)}
        boundaries = cuts(config, len(parts.blocks))
        boundary.attach(model, config.model.boundary, {block: halves[block] for block in boundaries if block in halves})
    return own_blocks


def whole(config: Config, source: str | None = None, device: str = "cpu") -> PreTrainedModel:
    """The uncut Hugging Face model with the same weights, as the reference of stages and for one machine alone."""
    model = on_meta(hf_config(config))
    balance.attach(model, Parts(model).blocks, config)
    if config.model.boundary != "none":
        blocks = Parts(model).blocks
        boundary.attach(model, config.model.boundary, dict.fromkeys(cuts(config, len(blocks)), ("narrow", "widen")))
        boundary.run_between(model, blocks)
    _fill(model, config, source)
    linear.prefer(model)
    moved: PreTrainedModel = model.eval().to(device)
    return moved


def _fill(model: PreTrainedModel, config: Config, source: str | None) -> None:
    adapters.narrow(model, config)
    if config.tune.method == "full":
        return materialise(model, seed=config.run.seed, source=source or config.model.path or None)
    if lent.borrowed(config.model.path):
        adapters.encode(model, config)
        materialise(model, seed=config.run.seed, source=config.model.path, read=lent.fill)
    else:
        materialise(model, seed=config.run.seed, source=config.model.path)
        adapters.encode(model, config)
    adapters.attach(model, config)
    if source or config.tune.adapter:
        adapters.load(model, config.tune, source or config.tune.adapter)


class Parts:
    """The parts of a model in the order of its pipeline plan, which can be removed and inserted."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = model.config.model_type
        self.model, self.base = model, getattr(model.base_model, "decoder", model.base_model)
        plan = plan_of(self.family, type(model.config))
        plan = tuple(name for name in plan if getattr(self.base, name, None) is not None)
        lists = [name for name in plan if isinstance(getattr(self.base, name), nn.ModuleList)]
        if self.base is model or len(lists) != 1 or lists[0] in (plan[0], plan[-1]):
            raise ValueError(f"model.family = {self.family!r}: its pipeline plan {plan} is not embedding, blocks, norm")
        place = plan.index(lists[0])
        self.block_list: nn.ModuleList = getattr(self.base, lists[0])
        self.blocks = list(self.block_list)
        self.before: dict[str, nn.Module] = {name: getattr(self.base, name) for name in plan[:place]}
        self.after: dict[str, nn.Module] = {name: getattr(self.base, name) for name in plan[place + 1 :]}
        self.head = {name: child for name, child in model.named_children() if child is not model.base_model}

    def passthrough(self, name: str, part: nn.Module) -> nn.Module:
        """What replaces the part of that name, or a block without name."""
        return NoPositions() if name in POSITIONS else Passthrough(part, in_tuple=not name and self.family in IN_TUPLES)

    def remove_parts(self) -> None:
        for index, block in enumerate(self.blocks):
            self.block_list[index] = self.passthrough("", block)
        for owner, names in ((self.base, self.before), (self.base, self.after), (self.model, self.head)):
            for name, part in names.items():
                setattr(owner, name, self.passthrough(name, part))
        uncovered = [name for name, _ in self.model.named_parameters()]
        if uncovered:
            raise ValueError(f"model.family = {self.family!r}: its pipeline plan does not cover {uncovered[0]}")

    def insert_parts(self, blocks: range, *, first: bool, last: bool) -> None:
        for index in blocks:
            self.block_list[index] = self.blocks[index]
        for owner, names, mine in (
            (self.base, self.before, first),
            (self.base, self.after, last),
            (self.model, self.head, last),
        ):
            for name, part in names.items() if mine else ():
                setattr(owner, name, part)


def _hollow(config: Config) -> tuple[PreTrainedModel, Parts]:
    """The model without its parts, tested to pass hidden states on unchanged. ValueError: it cannot be cut."""
    hf = hf_config(config)
    tied = bool(getattr(hf, "tie_word_embeddings", False))
    if config.run.stages > 1 and (config.tune.method != "full" or config.run.serve):
        hf.tie_word_embeddings = False  # a matrix that is not trained may lie at both ends
    _refuse_tied(config, hf)
    cut(config.run, hf.num_hidden_layers)  # ValueError: no such cut
    model = on_meta(hf)
    also.refuse(model, config.tune, tied=tied)
    adapters.refuse(model, config.tune)
    if config.tune.quantize == "nf4":
        nf4.refuse(model, model.get_output_embeddings())
    persistent_buffers = sorted(
        set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    )
    if persistent_buffers:
        raise ValueError(
            f"model.family = {hf.model_type!r} keeps {persistent_buffers[0]} outside its parameters; that is not averaged"
        )
    parts = Parts(model)
    balance.attach(model, parts.blocks, config)
    if config.device.checkpointing:
        for block in parts.blocks:
            block.forward = partial(_checkpointed, block.forward)
    parts.remove_parts()
    if config.run.stages > 1:
        materialise(model, seed=config.run.seed, source=None)
        refuse_more_than_blocks(model, parts)
    return model, parts


def _checkpointed(forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """The block's forward, of which the backward pass keeps the input alone. Blocks draw nothing at random."""
    if not torch.is_grad_enabled():
        return forward(*args, **keywords)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **keywords)


def on_meta(hf: PreTrainedConfig) -> PreTrainedModel:
    cls = model_class(hf)
    try:
        with torch.device("meta"):
            return cls(hf)
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
    """ValueError: without its parts the model does more than pass hidden states on. `instead`: a setting that avoids the cut."""
    x = torch.linspace(-1.0, 1.0, 4 * model.config.hidden_size).view(1, 4, -1)
    refused = f"model.family = {parts.family!r} cannot be cut into stages: between its blocks it does more than pass on"
    try:
        with torch.no_grad():
            y = model.eval().base_model(inputs_embeds=x, use_cache=False).last_hidden_state
    except Exception as error:  # any family's own code runs here, on an input it was not written for
        raise ValueError(f"{refused} hidden states ({error!r}); set {instead}") from error
    odd = sorted({name for part in parts.block_list if isinstance(part, Passthrough) for name in part.odd})
    if odd or not torch.equal(x, y):
        raise ValueError(f"{refused} hidden states ({', '.join(odd) or 'they change'}); set {instead}")
