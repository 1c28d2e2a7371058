"""What each part of a Hugging Face model asks for, counted on the meta device: nothing is allocated and nothing computed.

For `shoal probe` and `shoal plan`, in the planner's own terms (planner/inputs/profile.py prices plain decoders by formula). Each part runs
alone, forward and backward, in the model's own forward with all other parts taken out (stages.py): torch's FLOP counter
counts its matrix products and attention, autograd's hooks what it keeps for its backward, and a dispatch mode the bytes alive
at the worst moment. Elementwise work has no FLOPs here, as everywhere in the literature; attention is the full square, and
keeps what a fused kernel keeps (queries, keys, values, output) except in families that compute it themselves.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shoal.config import Config
from shoal.model.families import hf_config
from shoal.model.stages import Parts, on_meta
from shoal.planner.inputs.profile import COUNTED, Part, Profile

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def count(config: Config) -> Profile:
    """The profile of the configuration's model and microbatch. ValueError: no such model, or one that only real values lead
    through its layers."""
    try:
        return _count(config, _DTYPES[config.train.dtype], 1)
    except ValueError:
        if config.train.dtype != "float32":
            raise
        # torch has kernels of mixed experts for bf16 alone; here values are twice as large.
        return _count(config, torch.bfloat16, 2)


def _count(config: Config, dtype: torch.dtype, larger: int) -> Profile:
    """In `dtype`; bytes are then `larger` times as many."""
    hf = hf_config(config)
    hf._attn_implementation = _attention()
    model: PreTrainedModel = on_meta(hf).eval().to(dtype)
    fake = FakeTensorMode()
    _without_values(model, fake)
    parts = Parts(model)
    counted = [_counted(parts, fake, config, "embedding", range(0), first=True, last=False)]
    alike: dict[str, Part] = {}
    for index, block in enumerate(parts.blocks):
        # Blocks of the same text (classes and sizes) and kind do the same; most models have one or two sorts.
        kinds = getattr(hf, "layer_types", None)
        sort = f"{block} {kinds[index] if kinds else ''}"
        if sort not in alike:
            alike[sort] = _counted(
                parts, fake, config, f"block {index}", range(index, index + 1), first=False, last=False
            )
        counted.append(msgspec.structs.replace(alike[sort], name=f"block {index}"))
    counted.append(_counted(parts, fake, config, "head", range(0), first=False, last=True))
    sized = tuple(
        msgspec.structs.replace(
            part, activation_bytes=larger * part.activation_bytes, working_bytes=larger * part.working_bytes
        )
        for part in counted
    )
    sequences, tokens = config.train.microbatch, config.data.sequence
    boundary = sequences * tokens * model.config.hidden_size * dtype.itemsize * larger
    tied = bool(getattr(hf, "tie_word_embeddings", False))
    return Profile(sized, float(boundary), 8.0 * sequences * (tokens + 1), tied, COUNTED)


def _counted(
    parts: Parts, fake: FakeTensorMode, config: Config, name: str, blocks: range, *, first: bool, last: bool
) -> Part:
    """One part alone, forward and backward."""
    model = parts.model
    parts.take_out()
    parts.put_back(blocks, first=first, last=last)
    shape = (config.train.microbatch, config.data.sequence)
    values = sum(parameter.numel() for parameter in model.parameters())
    try:
        with _quiet(), fake, torch.device("meta"):
            x = torch.zeros(shape, dtype=torch.int64)
            targets = torch.zeros_like(x).flatten()
            if not first:
                x = torch.zeros((*shape, model.config.hidden_size), dtype=model.dtype).requires_grad_()
            given: dict[str, Tensor | bool] = {"input_ids" if first else "inputs_embeds": x, "use_cache": False}
            own = {held.untyped_storage()._cdata for held in (x, *model.parameters())}
            flops, alive = FlopCounterMode(display=False), _Alive()
            with flops, alive:
                with _kept(own) as kept:
                    if last:
                        logits = model(**given).logits
                        y = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)
                    else:
                        y = model.base_model(**given).last_hidden_state
                forward = flops.get_total_flops()
                if y.requires_grad:
                    y.backward(torch.empty_like(y))
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"model.family = {parts.family!r}: {name} cannot be counted without values ({str(error).splitlines()[0]});"
            " try a family with the same sizes that is a plain decoder, such as model.family=llama"
        ) from error
    finally:
        model.zero_grad(set_to_none=True)
    bytes_kept = float(sum(kept.values()))
    return Part(
        name,
        float(values),
        float(forward),
        bytes_kept,
        max(0.0, alive.most - bytes_kept - values * model.dtype.itemsize),
    )


def _without_values(model: nn.Module, fake: FakeTensorMode) -> None:
    """Fake tensors for what the model holds: the families' code looks at values unless it is told that there are none."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None:
                    held[name] = fake.from_tensor(value)  # type: ignore[assignment]  # a parameter of a parameter


def _attention() -> str:
    """The name of an attention that is counted as one kernel, as transformers knows it."""
    from transformers import AttentionInterface

    AttentionInterface.register("shoal_counted", _fused)
    return "shoal_counted"


def _fused(
    module: object, query: Tensor, key: Tensor, value: Tensor, *rest: object, **given: object
) -> tuple[Tensor, None]:
    """(B, H, L, D) each, as transformers calls it; (B, L, H, D). Masks change neither FLOPs nor bytes."""
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))  # as transformers does for fused kernels
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return out[..., :width].transpose(1, 2).contiguous(), None


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs at length what is told in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _kept(own: set[int]) -> Iterator[dict[int, int]]:
    """Bytes that autograd keeps inside, by storage; parameters and the part's input are not counted."""
    found: dict[int, int] = {}
    held: list[Tensor] = []  # so that no storage is taken for one that was there before

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
            held.append(value)
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield found


class _Alive(TorchDispatchMode):
    """Bytes of all tensors made inside that are alive, and the most there ever were; gradients of parameters among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given | self._known:
                self._watch(leaf.untyped_storage())
        self.most = max(self.most, self.now)
        return made

    def _watch(self, storage: torch.UntypedStorage) -> None:
        number, nbytes = storage._cdata, storage.nbytes()
        self._known.add(number)
        self.now += nbytes

        def gone() -> None:
            self._known.discard(number)
            self.now -= nbytes

        weakref.finalize(storage, gone)
