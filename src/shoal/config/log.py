"""[log]: where the figures of each step go, besides the run's own files. dashboard/steplog.py follows it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shoal.config.section import Section


class Log(Section, frozen=True):
    """Where the figures of each step go, besides the run's own files."""

    to: Annotated[
        tuple[Literal["jsonl", "tensorboard", "wandb"], ...],
        Meta(description='The launcher also writes each step\'s figures to these, such as ["jsonl", "tensorboard"].'),
    ] = ()
