"""[plan]: what `shoal plan` may choose. planner/strategy/choices.py follows it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shoal.config.section import Section


class Plan(Section, frozen=True):
    """What `shoal plan` may choose that changes what is learned; else it plans with what network and train say."""

    allow: Annotated[
        tuple[Literal["bf16", "int8", "int4", "local_steps"], ...],
        Meta(description='The planner may choose these codes for tensors and train.local_steps, such as ["int8"].'),
    ] = ()
