"""FLOPs, bytes and peak memory of each part of a Hugging Face model, counted on the meta device without allocation or compute.

For `shoal probe` and `shoal plan`, in the planner's own terms (planner/inputs/profile.py prices plain decoders by formula). Each part runs
alone, forward and backward, in the model's own forward with all other parts taken out (stages.py): torch's FLOP counter
counts matrix products and attention, autograd's hooks count the tensors saved for backward, and a dispatch mode the peak of
live bytes. Elementwise work has no FLOPs here, as in the literature; attention is the full square, and saves what a fused
kernel saves (queries, keys, values, output) except in families that compute it themselves, which the profile's basis names.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shoal.config import Config, boundary_rows, paired, slices, token_rows
from shoal.model.families import hf_config, model_class
from shoal.model.layers import adapters
from shoal.model.saved import saved_by_autograd
from shoal.model.stages import HuggingFaceStage, Parts, on_meta
from shoal.planner.inputs.profile import COUNTED, Part, Profile

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

UNFUSED = COUNTED + "; {} attends without a fused kernel, and keeps scores of tokens x tokens per head"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def count(config: Config) -> Profile:
    """The profile of the configuration's model and microbatch. ValueError: no such model, or its code depends on values."""
    dtype = _DTYPES[config.train.dtype]
    hf = hf_config(config)
    fused = bool(model_class(hf)._supports_sdpa)
    if fused:  # else the family's own attention runs, which is slower and keeps all scores (Gemma 2 caps them)
        hf._attn_implementation = _attention(packed=config.data.document_end >= 0)
    model: PreTrainedModel = on_meta(hf).eval().to(dtype)
    adapters.encode(model, config)
    adapters.attach(model, config)
    for value in model.parameters():
        if value.requires_grad:
            value.data = value.data.to(dtype)  # adapters too compute with copies in it
    fake = FakeTensorMode()
    _without_values(model, fake)
    parts = Parts(model)
    parts_counted = [_count_part(parts, fake, config, _Place("embedding", first=True))]
    by_sort: dict[tuple[str, bool], Part] = {}
    for index, block in enumerate(parts.blocks):
        # Blocks of the same text (classes and sizes) and kind do the same; most models have one or two sorts. Before the first weights
        # that are trained there is no gradient.
        kinds, back = getattr(hf, "layer_types", None), any(part.parameters for part in parts_counted)
        sort = f"{block} {kinds[index] if kinds else ''}", back
        if sort not in by_sort:
            place = _Place(f"block {index}", range(index, index + 1), back=back)
            by_sort[sort] = _count_part(parts, fake, config, place)
        parts_counted.append(msgspec.structs.replace(by_sort[sort], name=f"block {index}"))
    parts_counted.append(_count_part(parts, fake, config, _Place("head", last=True)))
    all_trained = config.tune.method == "full"
    counted = tuple(
        msgspec.structs.replace(
            part,
            flops=slices(config) * part.flops,
            back_flops=None if all_trained else slices(config) * (part.back_flops or 0.0),
            reference_flops=slices(config) * part.reference_flops,
        )
        for part in parts_counted
    )
    rows, tokens = token_rows(config), config.data.sequence
    boundary = boundary_rows(config) * tokens * model.config.hidden_size * dtype.itemsize
    tied = bool(getattr(hf, "tie_word_embeddings", False))
    return Profile(
        counted,
        float(boundary),
        8.0 * rows * (tokens + 1),
        tied,
        COUNTED if fused else UNFUSED.format(hf.model_type),
        slices(config),
        boundary_rows(config) // rows,
    )


class _Place(NamedTuple):
    """A part of the model. `back`: what it takes from the part before has a gradient."""

    name: str
    blocks: range = range(0)
    first: bool = False
    last: bool = False
    back: bool = True


def _count_part(parts: Parts, fake: FakeTensorMode, config: Config, place: _Place) -> Part:
    """Forward and backward of one part alone; of preference pairs also the forward that they are compared with."""
    name, blocks, first, last, back = place
    model, end = parts.model, config.data.document_end
    parts.remove_parts()
    parts.insert_parts(blocks, first=first, last=last)
    shape = (token_rows(config) // slices(config), config.data.sequence)
    sizes = [value.numel() for value in model.parameters() if value.requires_grad]
    frozen_bytes = sum(value.nbytes for value in adapters.frozen(model))
    flops, memory = _counter(), _MemoryMode()
    passed: dict[int, int] = {}
    hooks = [parts.blocks[index].register_forward_pre_hook(lambda *_: passed.update(memory.alive)) for index in blocks]
    with _countable(parts, name), _quiet(), fake, torch.device("meta"):
        tokens = torch.zeros((shape[0], shape[1] + 1), dtype=torch.int64)
        hidden = torch.zeros((*shape, model.config.hidden_size + (end >= 0)), dtype=model.dtype)
        stage = _alone(model, config, first, last)
        reference = hidden.clone() if stage.paired else None
        x = tokens[:, 1:].clone() if first else hidden.requires_grad_(back)
        reference_flops = _reference_flops(stage, x)
        own_storages = {value.untyped_storage()._cdata for value in model.parameters()}
        with flops, memory:
            with saved_by_autograd(own_storages) as saved:
                y = stage.loss(x, tokens, reference) if last else stage.forward(x)
            forward, forward_bytes = flops.get_total_flops(), memory.most
            memory.most = memory.now
            if y.requires_grad:
                y.backward(torch.empty_like(y))
    for hook in hooks:
        hook.remove()
    before_bytes = saved.get(x.untyped_storage()._cdata, 0)  # the input, if it is saved, which is not of `memory`
    passed_bytes = sum(passed.values())
    shared_bytes = sum(saved[storage] for storage in saved.keys() & passed.keys())
    own_bytes = sum(saved.values()) - shared_bytes
    beside = sum(sizes) * model.dtype.itemsize + shared_bytes - before_bytes + (0 if last else y.nbytes)
    return Part(
        name,
        float(sum(sizes)),
        float(forward + reference_flops),
        float(own_bytes),
        float(memory.most - own_bytes - beside),
        float(max(sizes, default=0)),
        float(x.nbytes) if blocks else 0.0,
        float(forward_bytes - passed_bytes + x.nbytes),
        float(shared_bytes),
        float(passed_bytes),
        float(frozen_bytes),
        float(flops.get_total_flops() - forward),
        float(reference_flops),
    )


def _alone(model: PreTrainedModel, config: Config, first: bool, last: bool) -> HuggingFaceStage:
    beta = config.tune.beta if paired(config) else 0.0
    stage = HuggingFaceStage(model, first=first, last=last, document_end=config.data.document_end, beta=beta)
    if stage.masks is not None:
        stage.masks.sample = 0, 0  # masks take memory
    return stage


def _reference_flops(stage: HuggingFaceStage, x: Tensor) -> int:
    """Of the frozen base's forward, where preference pairs are compared with it; at the end it is within the loss."""
    if not stage.paired or stage.last:
        return 0
    with _counter() as flops, _MemoryMode():
        stage.reference(x)
    return int(flops.get_total_flops())


def _counter() -> FlopCounterMode:
    """With formulas for attention of our own: those of PyTorch 2.11 refuse fewer key heads than query heads."""
    kernel, back = (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
    )

    def product(query: torch.Size, key: torch.Size) -> int:
        batch, heads, rows, width = query
        return 2 * batch * heads * rows * key[2] * width

    def forward_flops(query: torch.Size, key: torch.Size, *_: object, **__: object) -> int:
        return 2 * product(query, key)  # the scores, and their products with the values

    def back_flops(grad: torch.Size, query: torch.Size, key: torch.Size, *_: object, **__: object) -> int:
        return 5 * product(query, key)  # the scores again, and four for the gradients

    return FlopCounterMode(display=False, custom_mapping={kernel: forward_flops, back: back_flops})


@contextmanager
def _countable(parts: Parts, name: str) -> Iterator[None]:
    """ValueError: the part's code needs values. Frees its gradients."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"model.family = {parts.family!r}: {name} cannot be counted without values ({str(error).splitlines()[0]});"
            " try a family with the same sizes that is a plain decoder, such as model.family=llama"
        ) from error
    finally:
        parts.model.zero_grad(set_to_none=True)


def _without_values(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replace parameters and buffers by fake tensors: some families' code reads values of meta tensors otherwise."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    table[name] = fake.from_tensor(value)  # type: ignore[assignment]  # a parameter of a parameter


def _attention(packed: bool) -> str:
    """Register an attention that counts as one kernel; returns its name in transformers. `packed`: with the masks of packed documents."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = "shoal_counted_packed" if packed else "shoal_counted"
    AttentionInterface.register(name, _fused)
    if packed:
        AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _fused(
    module: object, query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
) -> tuple[Tensor, None]:
    """(B, H, L, D) each, as transformers calls it; (B, L, H, D). A mask changes no FLOPs."""
    from transformers.integrations.sdpa_attention import repeat_kv

    width = value.shape[-1]
    if width < query.shape[-1]:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))  # as transformers does for fused kernels
    if rest[0] is not None:  # with a mask, transformers gives each query head a copy of its keys and values
        repeats = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    if rest[0] is not None:
        assert isinstance(rest[0], Tensor)
        out = _Biased.apply(out, rest[0].to(query.dtype))  # type: ignore[no-untyped-call]  # not annotated by torch
    return out[..., :width].transpose(1, 2).contiguous(), None


class _Biased(torch.autograd.Function):
    """Saves the mask as kernels do: as what is added to the scores."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of an error that we report in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class _MemoryMode(TorchDispatchMode):
    """`now` and `most`: live bytes of the tensors created inside and their peak, gradients of parameters included; `alive`: by storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self.now, self.most = 0, 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:  # type: ignore[attr-defined]  # a tensor
            # On the meta device torch has it for bf16 only.
            bf16 = (
                value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value for value in args
            )
            result: object = func(*bf16, **(kwargs or {})).float()
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs | self.alive.keys():
                self._watch(leaf.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        number, nbytes = storage._cdata, storage.nbytes()
        self.alive[number] = nbytes
        self.now += nbytes

        def freed() -> None:
            self.alive.pop(number, None)
            self.now -= nbytes

        weakref.finalize(storage, freed)
