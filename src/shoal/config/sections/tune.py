"""[tune]: what of the model is trained. model/layers/adapters.py attaches the adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from shoal.config.section import Section, without_effect
from shoal.config.sections.data import Data, paired
from shoal.config.sections.device import Device
from shoal.config.sections.model import Model
from shoal.config.sections.train import Train

_OF_ADAPTERS = ("adapter", "rank", "alpha", "targets", "also", "dropout", "rslora", "dora", "quantize", "lend")


class Tune(Section, frozen=True):
    """All weights, or adapters beside the frozen weights of model.path. Only what is trained is averaged, downloaded and saved."""

    method: Annotated[
        Literal["full", "lora"],
        Meta(description="Training changes all weights, or LoRA adapters (arXiv 2106.09685) beside frozen weights."),
    ] = "full"
    adapter: Annotated[
        str,
        Meta(
            description='Training goes on from the LoRA adapter in this directory, of PEFT or a checkpoint; "" begins with a new one.'
        ),
    ] = ""
    rank: Annotated[int, Meta(ge=1, le=4096, description="An adapter's two matrices have this many inner values.")] = 16
    alpha: Annotated[
        float, Meta(gt=0, le=2**20, description="An adapter's output is multiplied by this number over its rank.")
    ] = 32.0
    targets: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.]+$")], ...],
        Meta(max_length=64, description="Linear layers with these names get adapters; [] means all within the blocks."),
    ] = ()
    also: Annotated[
        tuple[Literal["embeddings", "head", "norms"], ...],
        Meta(
            max_length=3,
            description='These weights are trained beside the adapters: any of "embeddings", "head", "norms".',
        ),
    ] = ()
    dropout: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="This share of what an adapter takes in is dropped in training, by (run.seed, step, microbatch, row, layer).",
        ),
    ] = 0.0
    rslora: Annotated[
        bool, Meta(description="The factor is alpha over the rank's square root (rsLoRA, arXiv 2312.03732).")
    ] = False
    dora: Annotated[
        bool, Meta(description="The norms of the weights' rows are trained apart (DoRA, arXiv 2402.09353).")
    ] = False
    quantize: Annotated[
        Literal["none", "nf4"],
        Meta(
            description="Frozen weights of linear layers are kept in train.dtype, or in 4.5 bits each (NF4 of QLoRA, arXiv 2305.14314)."
        ),
    ] = "none"
    lend: Annotated[
        bool,
        Meta(
            description="Peers give the frozen weights of their stage to machines that join without the model, if its licence allows that."
        ),
    ] = False
    description: Annotated[
        str,
        Meta(
            max_length=1 << 15,
            description="What such machines have to know of the model; `shoal invite` writes it into an invite.",
        ),
    ] = ""
    beta: Annotated[
        float,
        Meta(
            gt=0,
            le=1000,
            description="DPO (arXiv 2305.18290) multiplies log ratios by this number: the larger, the nearer to the base.",
        ),
    ] = 0.1


def problems(tune: Tune, model: Model, train: Train, device: Device, data: Data) -> Iterator[str]:
    yield from _pair_problems(tune, data, device)
    if tune.method == "full":
        yield from without_effect(tune, "tune", _OF_ADAPTERS, "tune.method = 'full' trains all weights")
        return
    if device.executor == "emulated":
        return
    if not model.path:
        yield "tune.method = 'lora' adapts a trained model; name its directory with model.path"
    if tune.dora and tune.quantize != "none":
        yield f"tune.dora = true needs norms of the weights that tune.quantize = {tune.quantize!r} encodes; try tune.dora=false"
    if tune.dropout:
        yield from _dropout_problems(tune, device)
    if tune.also:
        yield from _also_problems(tune, data)
    if device.count > 1:
        yield f"device.count = {device.count} shares out all of a stage's weights, and adapters are not; try device.count=1"
    if train.optimizer == "muon":
        yield f"train.optimizer = 'muon' with tune.method = {tune.method!r}, whose matrices are thin; try train.optimizer=adamw"
    if model.boundary != "none":
        yield f"model.boundary = {model.boundary!r} is trained with the whole model; try tune.method=full or model.boundary=none"


def _also_problems(tune: Tune, data: Data) -> Iterator[str]:
    what = f"tune.also = {list(tune.also)}"
    if len(set(tune.also)) < len(tune.also):
        yield f"{what} names one twice"
    if paired(data):
        yield f"{what} changes the base that data.format = {data.format!r} compares with; leave tune.also out"
    if tune.lend:
        yield f"{what} with tune.lend = true, which gives away only weights that are frozen; leave one of them out"


def _dropout_problems(tune: Tune, device: Device) -> Iterator[str]:
    what = f"tune.dropout = {tune.dropout:g}"
    if tune.dora:
        yield f"{what} with tune.dora = true, whose norms are those of the whole input; set one of them to its default"
    if device.executor == "swapping":
        yield f"{what} with device.executor = 'swapping', which draws no masks; try device.executor=resident or tune.dropout=0"
    if device.compile:
        yield f"{what} with device.compile = true, whose blocks draw nothing; try device.compile=false or tune.dropout=0"


def _pair_problems(tune: Tune, data: Data, device: Device) -> Iterator[str]:
    if not paired(data):
        yield from without_effect(tune, "tune", ["beta"], f"data.format = {data.format!r} holds no preference pairs")
        return
    what = f"data.format = {data.format!r} compares with the frozen base"
    if tune.method == "full":
        yield (
            f"{what}, and tune.method = 'full' changes it: each peer would need its stage of a second model;"
            " try tune.method=lora"
        )
    if device.executor == "swapping":
        yield f"{what}, whose rows device.executor = 'swapping' does not compute yet; try device.executor=resident"
    if tune.adapter:
        yield (
            f"{what}, not with tune.adapter = {tune.adapter!r} in it; merge that adapter (shoal export RUN --merge DIR), and name"
            " what comes out with model.path"
        )
