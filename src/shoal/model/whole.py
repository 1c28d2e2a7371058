"""The whole model of a checkpoint that Shoal wrote with boundary layers, for those who use it. Apart from boundary.py, which stages use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.model.layers import boundary
from shoal.model.stages import Parts
from shoal.model.weights import materialise

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel


def load(directory: str | Path) -> PreTrainedModel:
    """The Hugging Face model of a checkpoint with boundary layers, which runs them between its blocks. ValueError: it has none."""
    place = Path(directory)
    fields = json.loads((place / "config.json").read_text())
    if fields.get("model_type") != boundary.MODEL_TYPE:
        raise ValueError(
            f"{place}/config.json has model_type {fields.get('model_type')!r}: no boundary layers of Shoal"
        )
    import transformers

    hf: PreTrainedConfig = transformers.AutoConfig.for_model(**fields["model"])
    with torch.device("meta"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(hf)
    boundary.attach(model, fields["boundary"], dict.fromkeys(fields["before_blocks"], ("narrow", "widen")))
    materialise(model, seed=0, source=str(place))
    boundary.run_between(model, Parts(model).blocks)
    model.eval()
    return model
