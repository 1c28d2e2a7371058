"""[checkpoint]: when the run is saved, and where. core/leader/saving.py and runtime/checkpoints/checkpoint.py follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from shoal.config.section import Section, without_effect


class Checkpoint(Section, frozen=True):
    """When the run is saved, and where."""

    every: Annotated[
        int,
        Meta(
            ge=0,
            le=10**12,
            description="A checkpoint is written each time this many steps are done; 0 writes none on the way.",
        ),
    ] = 50
    at_end: Annotated[bool, Meta(description="A checkpoint is written at the end of the run.")] = True
    keep: Annotated[
        int, Meta(ge=1, le=2**20, description="This many checkpoints are kept, and older ones are deleted.")
    ] = 3
    copies: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="Each part of a checkpoint is kept by so many machines, if there are so many; a shared directory counts once.",
        ),
    ] = 2
    url: Annotated[
        str,
        Meta(description='This machine keeps checkpoints in this path or fsspec URL; "" is checkpoints/ of the run.'),
    ] = ""
    disk_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=2**50,
            description="Checkpoints take at most this much there, if it is a path; 0: what its disk has.",
        ),
    ] = 0


def problems(checkpoint: Checkpoint) -> Iterator[str]:
    if not checkpoint.every and not checkpoint.at_end:
        why = "checkpoint.every = 0 and checkpoint.at_end = false write no checkpoint"
        yield from without_effect(checkpoint, "checkpoint", ["keep", "copies"], why)
