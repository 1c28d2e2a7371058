"""Finds a Hugging Face family's configuration and classes from our `model` section, importing that family's modules only.

For stages.py, and for checkpoints, which write the same configuration beside the weights. Every error of a user
about the model's shape is a ValueError here. Code in a model directory is never run.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config import Config
from shoal.config.sections.model import THEIRS, Model
from shoal.escaping import UNDECODABLE
from shoal.model import sequential
from shoal.model.cut import cut
from shoal.model.layers import boundary

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

# Pipeline plans of families that have none in transformers: names of modules from the embedding to the last norm.
PLANS: dict[str, tuple[str, ...]] = {
    "gpt2": ("wte", "wpe", "drop", "h", "ln_f"),
    "bloom": ("word_embeddings", "word_embeddings_layernorm", "h", "ln_f"),
    "falcon": ("word_embeddings", "h", "ln_f"),
    "opt": ("embed_tokens", "embed_positions", "project_in", "layers", "final_layer_norm", "project_out"),
}
# Families whose own code keeps documents apart where their positions begin anew (tests/model/test_documents.py).
PACKED = frozenset("llama qwen3 mistral gemma2 gemma3_text phi3 olmo2 smollm3 gpt2 gpt_neox mixtral qwen3_moe".split())
# What families call the field of THEIRS.
ALIASES = {"intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size")}

# transformers and PEFT import these where they are installed, which log GPU libraries that do not load.
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def hf_config(config: Config) -> PreTrainedConfig:
    """The Hugging Face configuration of the whole model: from the seed's settings, or of `model.path` with `model.extra`."""
    fields, family = _given(config)
    where = config.model.path or config.model.factory or f"model.family = {family!r}"
    config_class = _config_class(family)
    if not plan_of(family, config_class):
        text = f"{family}_text"
        hint = f"; try model.family={text}" if text in _families() else f", and Shoal only one of {', '.join(PLANS)}"
        raise ValueError(f"{where}: this family has no pipeline plan (base_model_pp_plan){hint}")
    field_names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    for name in config.model.extra:
        if name not in field_names:
            near = difflib.get_close_matches(name, sorted(field_names), 1)
            raise ValueError(
                f"model.extra.{name}: {family} has no such field" + (f"; did you mean {near[0]}?" if near else "")
            )
    if not config.model.path and not config.model.factory:
        if "qk_rope_head_dim" in field_names:
            fields.pop("head_dim")  # latent attention has several head sizes of its own
        fields = _as_named_by(field_names, family, fields)
    fields = _with_rope(fields, config) | {"architectures": [_class_name(family)], "dtype": config.train.dtype}
    try:
        hf = config_class.from_dict(fields)
    except Exception as error:  # the family's own validation, whose exception types are no part of its interface
        raise ValueError(f"{where}: {family} refuses this configuration: {error}") from error
    _refuse_dropout(hf, config)
    if config.data.document_end >= 0 and family not in PACKED:
        raise ValueError(
            f"data.document_end = {config.data.document_end}: {family} is not known to keep documents apart, as these are:"
            f" {', '.join(sorted(PACKED))}; set data.document_end=-1"
        )
    _refuse_long(config, hf, where)
    return hf


def _with_rope(fields: dict[str, Any], config: Config) -> dict[str, Any]:
    """`fields` with those of model.extra; a rope that is set there keeps the base that the weights were trained with."""
    rope = config.model.extra.get("rope_parameters")
    if not isinstance(rope, dict):
        return fields | config.model.extra
    stored = fields.get("rope_parameters") or {}
    base = {key: stored[key] for key in ("rope_theta",) if key in stored}
    older = {"rope_scaling"}  # directories' former word for it, which would win
    return (
        {key: value for key, value in fields.items() if key not in older}
        | config.model.extra
        | {"rope_parameters": base | rope}
    )


def model_class(hf: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's causal language model. Imports its modeling module, which takes seconds."""
    import transformers

    cls: type[PreTrainedModel] = getattr(transformers, _class_name(hf.model_type))  # lazily: its own module alone
    return cls


def plan_of(family: str, config_class: type[PreTrainedConfig]) -> tuple[str, ...]:
    """Names of the base model's modules from the embedding to the last norm. (): it is not known how to cut the family."""
    return tuple(getattr(config_class, "base_model_pp_plan", None) or PLANS.get(family, ()))


def _as_named_by(field_names: set[str], family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` under the family's names. ValueError: it has no field for a setting that is not the default."""
    named, default = {}, Model()
    ours = {theirs: name for name, theirs in THEIRS.items()}
    for name, value in fields.items():
        actual = next((each for each in (name, *ALIASES.get(name, ())) if each in field_names), None)
        if actual is not None:
            named[actual] = value
        elif name in ours and value != getattr(default, ours[name]):
            raise ValueError(f"model.{ours[name]} = {value!r} has no effect: {family} has no such field; leave it out")
    return named


def _given(config: Config) -> tuple[dict[str, Any], str]:
    """Fields of the Hugging Face configuration, and the family."""
    if config.model.path:
        return _read(config)
    if not config.model.factory:
        return _fields(config), config.model.family
    model = sequential.own_model(config).model
    hf: PreTrainedConfig | None = getattr(model, "config", None)
    if hf is None or type(model) is not model_class(hf):
        wanted = "an nn.Sequential" if hf is None else f"a {model_class(hf).__name__}, transformers' own"
        raise ValueError(f"model.factory = {config.model.factory!r} returns a {type(model).__name__}; return {wanted}")
    return hf.to_dict(), hf.model_type


def _fields(config: Config) -> dict[str, Any]:
    ours = config.model
    for multiple, divisor, multiple_name, divisor_name in (
        (ours.hidden_size, ours.heads, "hidden_size", "heads"),
        (ours.heads, ours.kv_heads, "heads", "kv_heads"),
    ):
        if divisor < 1 or multiple % divisor:
            raise ValueError(
                f"model.{multiple_name} = {multiple} is not a multiple of model.{divisor_name} = {divisor}"
            )
    fields: dict[str, Any] = {theirs: getattr(ours, name) for name, theirs in THEIRS.items()}
    fields["head_dim"] = ours.hidden_size // ours.heads  # some families have a fixed default instead
    fields["max_position_embeddings"] = config.data.sequence
    # The families' special tokens are those of their own tokenizers, and a padding token would get no gradient.
    return fields | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _read(config: Config) -> tuple[dict[str, Any], str]:
    path = config.model.path
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"model.path = {path!r} has no config.json; give a Hugging Face model directory")
    try:
        fields = json.loads(file.read_text())
        layered = fields["model_type"] == boundary.MODEL_TYPE
        layers = (fields["model"] if layered else fields).get("num_hidden_layers", 0)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, *UNDECODABLE) as error:
        raise ValueError(f"{file} is no Hugging Face configuration: {error!r}") from error
    if layered or config.model.boundary != "none":
        fields = boundary.inner(fields, str(file), config.model.boundary, cuts(config, layers))
    return fields, fields["model_type"]


def cuts(config: Config, layers: int) -> list[int]:
    """The blocks before which boundary layers stand: the first of every stage but the first."""
    if config.model.boundary == "none":
        return []
    return [blocks.start for blocks in cut(config.run, layers)[1:]]


def _families() -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _class_name(family: str) -> str:
    return _families()[family]


def _config_class(family: str) -> type[PreTrainedConfig]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    families = _families()
    if family not in families:
        near = difflib.get_close_matches(family, sorted(families), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model.family = {family!r} is no Hugging Face causal language model{hint}")
    cls: type[PreTrainedConfig] = CONFIG_MAPPING[family]
    return cls


def _refuse_long(config: Config, hf: PreTrainedConfig, where: str) -> None:
    """ValueError: sequences are longer than the model's positions."""
    positions = getattr(hf, "max_position_embeddings", None)
    if isinstance(positions, int) and config.data.sequence > positions:
        raise ValueError(
            f"data.sequence = {config.data.sequence} is above the {positions} positions of {where}; try data.sequence={positions},"
            f" or model.extra.max_position_embeddings={config.data.sequence} to train it on longer ones,"
            " with a rope for them where its own is too short (model.extra.rope_parameters)"
        )


def _refuse_dropout(hf: PreTrainedConfig, config: Config) -> None:
    """ValueError: dropout. A backward pass recomputes the stage, maybe on another peer, and needs the same activations."""
    drops = {
        name: value
        for name, value in hf.to_dict().items()
        if ("dropout" in name or name.endswith("_pdrop")) and not name.startswith(("classifier", "summary"))
        if isinstance(value, float | int) and value > 0
    }
    if drops and not config.run.serve:
        values = ", ".join(f"{name} = {value}" for name, value in drops.items())
        fix = " ".join(f"model.extra.{name}=0.0" for name in drops)
        raise ValueError(f"{values}: stages are recomputed and cannot drop out; set {fix}")
