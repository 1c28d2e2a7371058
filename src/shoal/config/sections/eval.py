"""[eval]: held-out text whose loss is measured while the run trains, and prompts that it continues. runtime/data/heldout.py reads the text;
core counts each sample once. launcher/watching/samples.py sends the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from shoal.config.section import Section, without_effect
from shoal.config.sections.data import Data
from shoal.config.sections.device import Device
from shoal.config.sections.run import Run
from shoal.config.sections.train import Train


class Eval(Section, frozen=True):
    """Held-out text whose loss is measured while the run trains."""

    path: Annotated[
        str,
        Meta(
            description='This file, directory or glob holds text that is not trained on, in the format of [data]; "" measures nothing.'
        ),
    ] = ""
    every: Annotated[
        int,
        Meta(
            ge=1,
            le=10**12,
            description="The held-out loss is measured, and the prompts are continued, each time this many steps are done.",
        ),
    ] = 50
    samples: Annotated[
        int,
        Meta(ge=1, le=2**20, description="At most this many held-out samples are measured, evenly spaced in the text."),
    ] = 64
    patience: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="The run ends when so many measurements in a row were not better than the best; 0 goes on to run.steps.",
        ),
    ] = 0
    keep_best: Annotated[
        bool,
        Meta(
            description="A checkpoint is written at each measurement too, and the best one stays beside the newest checkpoint.keep."
        ),
    ] = False
    prompts: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=4096)], ...],
        Meta(
            max_length=16, description="The run's peers continue these texts, or answer these messages, as it trains."
        ),
    ] = ()
    prompt_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="The likeliest tokens are added to each prompt, at most this many.")
    ] = 40


def problems(section: Eval, data: Data, run: Run, train: Train, device: Device) -> Iterator[str]:
    yield from _prompt_problems(section, data, run, device)
    if not section.path:
        fields = ["samples", "patience", "keep_best"] + ([] if section.prompts else ["every"])
        yield from without_effect(section, "eval", fields, "eval.path names no held-out text")
        return
    what = f"eval.path = {section.path!r} measures between two steps with the newest parameters"
    if run.serve:
        yield "eval.path has no effect: run.serve = true trains nothing"
    if data.source == "dataset":
        yield "eval.path is text, and data.source = 'dataset' has samples of its own; leave eval.path empty"
    if train.staleness:
        yield f"{what}, which train.staleness = {train.staleness} has not; try train.staleness=0, or `shoal eval` on checkpoints"
    if train.local_steps > 1:
        yield f"{what}, and in train.local_steps = {train.local_steps} each replica has its own; try `shoal eval` on checkpoints"
    if device.executor == "swapping" or device.count > 1:
        where = "device.executor = 'swapping'" if device.executor == "swapping" else f"device.count = {device.count}"
        yield f"eval.path is measured by stages that lie on one device, and {where}; try `shoal eval` on checkpoints"


def _prompt_problems(section: Eval, data: Data, run: Run, device: Device) -> Iterator[str]:
    if not section.prompts:
        yield from without_effect(section, "eval", ["prompt_tokens"], "eval.prompts is empty")
        return
    what = "eval.prompts are continued by the peers that train"
    if run.serve:
        yield "eval.prompts have no effect: run.serve = true trains nothing"
    if data.source == "dataset":
        yield "eval.prompts are text, and data.source = 'dataset' has samples of its own; leave eval.prompts out"
    if device.executor != "resident" or device.count > 1:
        where = f"device.executor = {device.executor!r}" if device.count == 1 else f"device.count = {device.count}"
        yield f"{what}, whose stages lie on one device, and {where}; try `shoal generate` on checkpoints"
    elif not device.cache_bytes:
        yield f"{what}, and device.cache_bytes = 0 keeps no keys and values there; leave it out"
