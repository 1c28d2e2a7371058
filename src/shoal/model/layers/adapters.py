"""LoRA adapters (arXiv 2106.09685) beside the linear layers of a stage, by PEFT; all other weights are frozen.

A stage then lists its adapters alone as parameters (cut.Stage), and the parts that tune.also names (also.py): nothing else is
averaged, downloaded or saved. Adapters are drawn like weights, per module from (seed, name): any cut has those of the whole model,
on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.config import Config, Tune
from shoal.model.cut import seeded
from shoal.model.layers import also, nf4
from shoal.model.layers.dropout import Dropout, Masks
from shoal.model.remote import name_of
from shoal.model.weights import reader, shard_of, tensors_of

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers.modeling_utils import PreTrainedModel

ADAPTER = "default"  # PEFT's name for a model's only adapter
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PeftModel before the names in its files
_OTHER_LAYERS = "set tune.targets to the target_modules of its adapter_config.json"
_OTHER_PARTS = "set tune.also to what its modules_to_save stand for, of embeddings, head and norms"
_OTHERS = 'name other layers, such as tune.targets=["q_proj", "k_proj", "v_proj", "o_proj"]'
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def settings(tune: Tune, base: str = "") -> LoraConfig:
    """In PEFT's terms. `base`: the directory of the model, for those who load the adapter. ValueError: PEFT is not installed."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise ValueError(
            "tune.method = 'lora' needs PEFT, which is not installed; try pip install 'shoal[tune]'"
        ) from None
    return LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,  # type: ignore[arg-type]  # any number
        target_modules=list(tune.targets) or "all-linear",
        use_rslora=tune.rslora,
        use_dora=tune.dora,
        lora_dropout=tune.dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
    )


def refuse(model: PreTrainedModel, tune: Tune) -> None:
    """ValueError: one of tune.targets is no layer of the whole `model`. PEFT leaves out what it does not find, if it finds one."""
    ends = [f".{name}" for name, _ in model.named_modules()]
    for target in tune.targets:
        if any(end.endswith(f".{target}") for end in ends):
            continue
        if any(name.endswith(f".{target}") for name, _ in model.named_parameters()):
            raise ValueError(
                f"tune.targets has {target!r}, which is a tensor of several experts and no layer here; {_OTHERS}"
            )
        linear = (name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear))
        raise ValueError(
            f"tune.targets has {target!r}, and the family {model.config.model_type!r} has no such layer; its linear layers are"
            f" {', '.join(dict.fromkeys(linear)) or 'none'}"
        )


def narrow(model: PreTrainedModel, config: Config) -> None:
    """Before weights are allocated: in train.dtype where they are not trained."""
    if config.tune.method != "full" or config.run.serve:
        trained = {id(value) for value in also.parameters(model, config.tune).values()}
        for value in model.parameters():
            if id(value) not in trained:
                value.data = value.data.to(DTYPES[config.train.dtype])


def encode(model: PreTrainedModel, config: Config) -> None:
    """Linear layers that are not trained, as tune.quantize says, from their weights."""
    if config.tune.method != "full" and config.tune.quantize == "nf4":
        nf4.encode(model, model.get_output_embeddings())


def attach(model: PreTrainedModel, config: Config) -> None:
    """Insert adapters, in fp32, into the parts that `model` has, whose weights are filled, and freeze the rest. ValueError: none of the
    layers named in tune.targets is there."""
    if config.tune.method == "full":
        return
    lora = settings(config.tune)
    from peft import inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    masks = Masks(config.run.seed, config.tune.dropout)
    beside = also.modules(model, config.tune)
    try:
        inject_adapter_in_model(lora, model, ADAPTER)
    except ValueError as error:
        raise ValueError(f"tune.targets = {list(config.tune.targets)}: {error}") from error
    for module in beside.values():
        for value in module.parameters(recurse=False):
            value.requires_grad_()
    for name, module in layers(model):
        if name in beside:
            raise ValueError(
                f"tune.targets: {name} would get an adapter, and tune.also trains its weights; name it in one of them"
            )
        if isinstance(module, ParamWrapper):
            raise ValueError(
                f"tune.targets: {name} holds several experts in one tensor, which get no adapters here; {_OTHERS}"
            )
        if config.tune.dropout:
            module.lora_dropout[ADAPTER] = Dropout(masks, name)
        for value in module.parameters():
            if value.requires_grad:
                value.data = value.data.float()
        with seeded(config.run.seed, name), torch.no_grad():
            module.reset_lora_parameters(ADAPTER, True)


def write(model: PreTrainedModel, config: Config, adapters: dict[str, Tensor], directory: str) -> None:
    """Write a directory that `PeftModel.from_pretrained` loads. `model`: the whole of that family, its parameters on the meta device
    and without adapters; `adapters`: trained values by our names."""
    from peft import get_peft_model_state_dict, inject_adapter_in_model
    from safetensors.torch import save_file

    beside = also.peft_names(model, config.tune)
    whole = {name: adapters[name] for name in also.parameters(model, config.tune)}
    inject_adapter_in_model(settings(config.tune, name_of(config.model.path)), model, ADAPTER)
    lora: Any = model.peft_config[ADAPTER]  # with the names of the layers that it has found
    lora.inference_mode = True
    lora.modules_to_save = beside or None
    lora.save_pretrained(directory)
    named = get_peft_model_state_dict(model, state_dict=adapters, adapter_name=ADAPTER)
    prefixed = {PREFIX + name: value.contiguous() for name, value in (named | whole).items()}
    save_file(prefixed, Path(directory) / WEIGHTS, {"format": "pt"})


def load(model: PreTrainedModel, tune: Tune, directory: str) -> None:
    """Fill what is trained of `model` from a directory of PEFT, or a run's checkpoint. ValueError: it adapts other layers, or those of
    another model."""
    from peft import get_peft_model_state_dict

    where = f"the adapter in {directory!r}"
    wanted: dict[str, Tensor] = {}
    if (Path(directory) / WEIGHTS).is_file():
        shards = tensors_of(Path(directory), WEIGHTS)
        stored = {name.removeprefix(PREFIX): name for name in shards}
        if any(layers(model)):
            wanted = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
        wanted |= also.parameters(model, tune)
    else:
        shards = shard_of(directory)
        stored = {name: name for name in shards}
        wanted = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with reader(directory, shards) as tensor, torch.no_grad():
        for name, value in wanted.items():
            if name not in stored:
                raise ValueError(f"{where} holds no {name}: {_OTHER_LAYERS if '.lora_' in name else _OTHER_PARTS}")
            if (shape := tensor(stored[name]).shape) != value.shape:
                raise ValueError(
                    f"{where} is of another base model: its {name} has shape {tuple(shape)}, and the one in model.path"
                    f" needs {tuple(value.shape)}"
                )
            value.copy_(tensor(stored[name]))
    _refuse_unused(model, stored, where)


def _refuse_unused(model: PreTrainedModel, stored: Iterable[str], where: str) -> None:
    """ValueError: one of these tensors changes a layer that `model` has, and is not trained there."""
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    still = {name for name, value in model.named_parameters() if not value.requires_grad}
    for name in stored:
        if name.partition(".lora_")[0] in linear:
            raise ValueError(f"{where} holds {name}, which would get no adapter: {_OTHER_LAYERS}")
        if name in still:
            raise ValueError(f"{where} holds {name}, which is not trained here: {_OTHER_PARTS}")


def layers(model: PreTrainedModel) -> Iterable[tuple[str, Any]]:
    """The layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model computes as its frozen base does."""
    adapted = [module for _, module in layers(model)]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)


def frozen(model: torch.nn.Module) -> list[Tensor]:
    """The weights that are not trained."""
    return [value for value in model.parameters() if not value.requires_grad]
