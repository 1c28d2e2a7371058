"""[device]: what this peer computes on. The executors and executor/fit.py follow it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from shoal.config.section import DAY_S, MOST_BYTES, Section, nearest_divisor, without_effect
from shoal.config.sections.run import Run
from shoal.config.sections.train import Train

_EMULATED = ("emulated_s", "emulated_backward_s", "emulated_values", "emulated_gradient")
_REAL = ("count", "memory_bytes", "host_bytes", "sequences", "checkpointing", "kept_activations", "tf32", "compile")


class Device(Section, frozen=True):
    """What this peer computes on."""

    kind: Annotated[
        str,
        Meta(
            description="The stage is computed on this device: cpu, cuda (ROCm too), cuda:N, xpu, xpu:N or mps; auto is this"
            " machine's accelerator, or cpu where there is none."
        ),
    ] = "auto"
    count: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="The stage is shared out among this many devices of that kind (FSDP2), each with its rows of a microbatch.",
        ),
    ] = 1
    executor: Annotated[
        Literal["resident", "swapping", "emulated"],
        Meta(
            description="The stage stays on the device, or its layers take turns there (swapping), or only the time of its microbatches"
            " passes (emulated)."
        ),
    ] = "resident"
    memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_BYTES,
            description="The stage takes at most this much memory of each device; 0 is what a card has free when it is built.",
        ),
    ] = 0
    host_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_BYTES,
            description="The stage takes at most this much host memory; 0 is what is free when the stage is built.",
        ),
    ] = 0
    sequences: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="This many sequences of a microbatch are on the device at once; 0 is all of them.",
        ),
    ] = 0
    checkpointing: Annotated[
        bool,
        Meta(
            description="The backward pass keeps only the inputs of blocks and computes each block again; a plan sets it where"
            " memory lacks."
        ),
    ] = False
    kept_activations: Annotated[
        int,
        Meta(
            ge=-1,
            le=2**20,
            description="A resident stage keeps the activations of this many forwards, which their backwards then do not"
            " recompute; -1 is as many as memory is left for.",
        ),
    ] = -1
    cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_BYTES,
            description="A peer keeps at most this much of keys and values for texts of `shoal generate` and `shoal chat`; 0 serves"
            " none.",
        ),
    ] = 1 << 28
    tf32: Annotated[
        bool,
        Meta(
            description="A CUDA device rounds factors of float32 products to 10 bits (TF32), which is several times as fast."
        ),
    ] = False
    compile: Annotated[
        bool,
        Meta(description="A resident stage's blocks are compiled (torch.compile): a longer start, then faster steps."),
    ] = False
    emulated_s: Annotated[
        float,
        Meta(ge=0, le=DAY_S, description="The emulated executor takes this long for a microbatch's forward pass."),
    ] = 0.2
    emulated_backward_s: Annotated[
        float,
        Meta(ge=0, le=DAY_S, description="The emulated executor takes this long for its backward pass; 0 is double."),
    ] = 0.0
    emulated_values: Annotated[
        int, Meta(ge=1, le=2**40, description="An emulated boundary tensor has this many float32 values.")
    ] = 2_097_152
    emulated_gradient: Annotated[
        int, Meta(ge=1, le=2**40, description="An emulated stage averages this many float32 values.")
    ] = 256
    machine: Annotated[
        str,
        Meta(
            description='This peer is this machine of run.placement; with "" the leader places it where it is needed.'
        ),
    ] = ""
    threads: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="A peer computes with this many CPU threads; 0 is this machine's cores divided by its local peers.",
        ),
    ] = 0


def slices(device: Device, train: Train) -> int:
    """Parts of a microbatch that are on the device one after another."""
    return train.microbatch // (device.sequences or train.microbatch)


def problems(device: Device, run: Run, train: Train) -> Iterator[str]:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?", device.kind):
        yield f"device.kind = {device.kind!r} is none of auto, cpu, cuda, cuda:N, xpu, xpu:N and mps; try device.kind=auto"
    if device.sequences and train.microbatch % device.sequences:
        near = nearest_divisor(train.microbatch, device.sequences)
        yield f"device.sequences = {device.sequences} does not divide train.microbatch = {train.microbatch}; try {near}"
    if device.machine and device.machine not in run.placement:
        names = list(run.placement)
        near_names = difflib.get_close_matches(device.machine, names, n=1) or names[:6]
        advice = " or ".join(near_names) if near_names else "device.machine="
        yield f"device.machine = {device.machine!r} is no machine of run.placement; try {advice}"
    if device.count > 1 and device.executor != "emulated":
        yield from _sharded_problems(device, train)
    if device.executor == "swapping":
        yield from _swapping_problems(device, run)
    if device.executor == "emulated":
        why = "device.executor = 'emulated' computes nothing"
        yield from without_effect(device, "device", _REAL, why)
    else:
        why = f"device.executor = {device.executor!r} computes a real model"
        yield from without_effect(device, "device", _EMULATED, why)


def _swapping_problems(device: Device, run: Run) -> Iterator[str]:
    if device.compile:
        yield "device.compile = true with device.executor = 'swapping', whose blocks change their tensors; leave it out"
    if run.serve:
        yield (
            "device.executor = 'swapping' serves no texts: it has a part of its blocks on the device at a time, and each token would load"
            " all of them; try device.executor=resident, or more run.stages"
        )


def _sharded_problems(device: Device, train: Train) -> Iterator[str]:
    """What executor/shards does not do."""
    where = f"device.count = {device.count}"
    if device.executor != "resident":
        yield f"{where} with device.executor = {device.executor!r}; only a resident stage is shared out: try device.count=1"
    if ":" in device.kind or device.kind == "mps":
        yield (
            f"{where} with device.kind = {device.kind!r}, which is one device; try device.kind={device.kind.partition(':')[0]}"
            + (" and device.count=1" if device.kind == "mps" else "")
        )
    if train.microbatch % device.count:
        yield f"{where} does not divide train.microbatch = {train.microbatch}; each device computes as many sequences"
    without = {
        "device.compile = true": device.compile,
        f"device.sequences = {device.sequences}": device.sequences,
        f"device.kept_activations = {device.kept_activations}": device.kept_activations > 0,
        f"train.staleness = {train.staleness}": train.staleness,
        f"train.local_steps = {train.local_steps}": train.local_steps > 1,
        f"train.moments = {train.moments!r}": train.moments != "float32",
        f"train.optimizer = {train.optimizer!r}": train.optimizer != "adamw",  # it has rows of a matrix, not the whole
    }
    for setting in (setting for setting, is_set in without.items() if is_set):
        yield f"{where} with {setting}, which a stage over several devices cannot do; leave one of them out"
