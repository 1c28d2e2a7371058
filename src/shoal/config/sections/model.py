"""[model]: which language model is trained. model/families.py and model/stages.py build it, and refuse what its family cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from shoal import importing
from shoal.config.section import Section, nearest_divisor, without_effect
from shoal.config.sections.data import Data
from shoal.config.sections.device import Device
from shoal.config.sections.run import Run

Plain = (  # a value of the Hugging Face configuration
    bool | Annotated[int, Meta(ge=-(2**53), le=2**53)] | Annotated[float, Meta(ge=-1e30, le=1e30)] | str
)
# Our word for a field of the Hugging Face configuration. Where model.path names a directory, its config.json has them instead.
THEIRS = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
}


class Model(Section, frozen=True):
    """A Hugging Face causal language model, cut into run.stages stages of whole blocks."""

    family: Annotated[
        str, Meta(description="The model is of this Hugging Face model_type, such as llama, qwen3, mistral or gemma2.")
    ] = "llama"
    path: Annotated[
        str,
        Meta(
            description='Training starts from this Hugging Face model, a directory or a URL; "" draws weights from the seed.'
        ),
    ] = ""
    factory: Annotated[
        str,
        Meta(
            description='The model is what this function of yours returns, such as "my_model:build": an nn.Sequential or a Hugging Face'
            " model."
        ),
    ] = ""
    hidden_size: Annotated[int, Meta(ge=1, le=2**20, description="Hidden states have this many values per token.")] = (
        128
    )
    layers: Annotated[int, Meta(ge=1, le=4096, description="The model has this many blocks.")] = 6
    heads: Annotated[int, Meta(ge=1, le=4096, description="Attention has this many query heads.")] = 4
    kv_heads: Annotated[int, Meta(ge=1, le=4096, description="Attention has this many key and value heads.")] = 4
    intermediate_size: Annotated[
        int, Meta(ge=1, le=2**24, description="A block's MLP has this many values per token inside.")
    ] = 384
    vocab_size: Annotated[
        int, Meta(ge=2, le=2**24, description="The model knows this many tokens, at least those of data.tokenizer.")
    ] = 256
    tied_embeddings: Annotated[
        bool, Meta(description="Embedding and head share one matrix, which needs run.stages = 1.")
    ] = False
    boundary: Annotated[
        Literal["none", "bottleneck-2x", "bottleneck-4x", "maxout-2x", "maxout-4x"],
        Meta(description="Layers of this kind at the cuts, trained with the model, make boundary tensors narrower."),
    ] = "none"
    extra: Annotated[
        dict[str, Plain | dict[str, Plain]],
        Meta(description="These further fields of the Hugging Face configuration are passed on."),
    ] = {}


def problems(model: Model, run: Run, data: Data, device: Device) -> Iterator[str]:
    if model.factory:
        why = f"model.factory = {model.factory!r} makes the model"
        yield from without_effect(model, "model", ["family", "path", "boundary", "extra", *THEIRS], why)
        yield from _factory_problems(model, data, device)
    elif model.path:
        why = f"the model in model.path = {model.path!r} has its own"
        yield from without_effect(model, "model", ["family", *THEIRS], why)
    else:
        yield from _size_problems(model, run, data, device)
    if model.boundary != "none" and run.stages == 1:
        yield f"model.boundary = {model.boundary!r} stands at cuts, and run.stages = 1 has none; try run.stages=2"
    if model.boundary != "none" and device.executor == "swapping":
        yield "device.executor = 'swapping' does not run model.boundary layers; try device.executor='resident'"


def _factory_problems(model: Model, data: Data, device: Device) -> Iterator[str]:
    if importing.malformed(model.factory):
        yield f'model.factory = {model.factory!r} names no function; write "module:function", such as "my_model:build"'
    if data.document_end >= 0:
        yield f"data.document_end = {data.document_end} has no effect: model.factory makes the model; set data.document_end=-1"
    if device.count > 1:
        yield f"device.count = {device.count} shares out Hugging Face models, and model.factory makes another; try device.count=1"
    for name in ("compile", "checkpointing"):
        if getattr(device, name):
            yield f"device.{name} has no effect: model.factory = {model.factory!r} makes the model; leave device.{name} out"


def _size_problems(model: Model, run: Run, data: Data, device: Device) -> Iterator[str]:
    """Of a model made from the tree."""
    for ours, theirs in THEIRS.items():
        if theirs in model.extra:
            value = model.extra[theirs]
            yield f"model.extra.{theirs} = {value!r} has a setting of its own; write model.{ours} = {value!r} instead"
    if run.stages > model.layers:
        yield f"run.stages = {run.stages} is more than model.layers = {model.layers}; try {model.layers} or fewer"
    elif run.layers and sum(run.layers) != model.layers and device.executor != "emulated":
        yield (
            f"run.layers = {list(run.layers)} is {sum(run.layers)} blocks together, but model.layers = {model.layers}; "
            "try run.layers=[]"
        )
    if model.hidden_size % model.heads:
        near = nearest_divisor(model.hidden_size, model.heads)
        yield f"model.heads = {model.heads} does not divide model.hidden_size = {model.hidden_size}; try {near}"
    if model.heads % model.kv_heads:
        near = nearest_divisor(model.heads, model.kv_heads)
        yield f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; try {near}"
    factor = 1 if model.boundary == "none" else int(model.boundary[-2])
    if model.hidden_size % factor:
        near = model.hidden_size // factor * factor or factor
        yield (
            f"model.boundary = {model.boundary!r} does not divide model.hidden_size = {model.hidden_size};"
            f" try model.hidden_size={near}"
        )
    if data.tokenizer == "bytes" and data.source != "dataset" and model.vocab_size < 256:
        yield f"model.vocab_size = {model.vocab_size} does not cover data.tokenizer = 'bytes'; try 256"
