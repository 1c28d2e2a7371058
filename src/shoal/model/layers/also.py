"""Embeddings, head and norms that are trained beside adapters (tune.also): which parts of a model these are, and PEFT's name for them.

They keep their names and have no second copy: a stage lists them as parameters (cut.Stage), so that they have masters, moments, sums
and chunks of state as weights of a full fine-tuning have. PEFT calls them modules_to_save, and keeps the old weights beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shoal.config import Tune

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel


def modules(model: PreTrainedModel, tune: Tune) -> dict[str, nn.Module]:
    """Those that are in `model` and have weights, by name, in the model's order."""
    ends = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    chosen = {id(end) for kind, end in ends.items() if kind in tune.also}
    return {
        name: module
        for name, module in model.named_modules()
        if (id(module) in chosen or ("norms" in tune.also and _is_norm(module)))
        and next(module.parameters(recurse=False), None) is not None
    }


def parameters(model: PreTrainedModel, tune: Tune) -> dict[str, nn.Parameter]:
    """The weights of these, by name."""
    return {
        f"{name}.{own}": value
        for name, module in modules(model, tune).items()
        for own, value in module.named_parameters(recurse=False)
    }


def _is_norm(module: nn.Module) -> bool:
    """Families have classes of their own, such as LlamaRMSNorm."""
    return type(module).__name__.lower().endswith("norm")


def refuse(model: PreTrainedModel, tune: Tune, *, tied: bool) -> None:
    """ValueError: the whole `model` has no such parts, or one matrix is embedding and head."""
    ends = [kind for kind in ("embeddings", "head") if kind in tune.also]
    if tied and ends:
        raise ValueError(
            f"tune.also has {ends[0]!r}, and in this model embedding and head are one matrix, at both ends of its stages; set"
            " model.extra.tie_word_embeddings=false to go on with two, or leave it frozen"
        )
    for kind in tune.also:
        if not modules(model, Tune(also=(kind,))):
            raise ValueError(
                f"tune.also has {kind!r}, and the family {model.config.model_type!r} has none with weights"
            )


def peft_names(model: PreTrainedModel, tune: Tune) -> list[str]:
    """modules_to_save of the whole `model`: PEFT takes every module whose name ends so. Short names, as people write them, where those
    name the same modules."""
    names = list(modules(model, tune))
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    matched = [name for name, _ in model.named_modules() if name.endswith(tuple(short))] if short else []
    return short if matched == names else names
