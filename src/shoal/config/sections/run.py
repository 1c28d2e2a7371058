"""[run]: the run as a whole, and how patient its peers are with one another. core and build.py follow it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from shoal.config.section import DAY_S, MOST_BYTES, Section, without_effect

Seat = Annotated[int, Meta(ge=0, le=4095)]
LEAST_BOUNDED, MOST_BOUNDED = 3, 16  # replicas of a stage whose parts can be bounded (core/allreduce/bounds.py)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Run(Section, frozen=True):
    """The run as a whole, and how patient its peers are with one another."""

    name: Annotated[str, Meta(description="The run is shown under this name, and it names the run's directory.")] = (
        "quickstart"
    )
    dir: Annotated[str, Meta(description="The run's files are written to this directory, below run.name.")] = "runs"
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="First weights and the order of samples are drawn from this number.")
    ] = 0
    peers: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="`shoal run` starts this many local peers, and training starts when this many have joined.",
        ),
    ] = 6
    stages: Annotated[int, Meta(ge=1, le=4096, description="The model is cut into this many pipeline stages.")] = 3
    layers: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=4096)], ...],
        Meta(description="Each stage holds this many blocks, such as [2, 3, 1]; [] cuts as evenly as can be."),
    ] = ()
    steps: Annotated[int, Meta(ge=1, le=10**12, description="The run ends after this many optimizer steps.")] = 200
    inflight: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | Literal["auto"],
        Meta(
            description="A peer drives this many microbatches through the pipeline at once; auto follows bandwidth, delay and memory."
        ),
    ] = "auto"
    queue_limit: Annotated[
        int,
        Meta(ge=1, le=4096, description="A peer that has this many tasks waiting answers further requests with Busy."),
    ] = 16
    heartbeat_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="The heartbeats of a peer are this far apart; in runs of more than 50 peers up to twice as far.",
        ),
    ] = 0.5
    heartbeat_timeout_s: Annotated[
        float, Meta(gt=0, le=DAY_S, description="A peer that is silent for this long is removed from the run.")
    ] = 4.0
    min_request_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=DAY_S,
            description="A request to another peer times out no earlier than this, and later where measured times are longer.",
        ),
    ] = 2.0
    ready_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=30 * DAY_S,
            description="The run waits at most this long for a peer that restores a checkpoint or catches up as it joins.",
        ),
    ] = 30.0
    lost_stage: Annotated[
        Literal["checkpoint", "neighbours", "wait"],
        Meta(
            description="A stage without a replica is restored from the newest checkpoint or blended from its neighbours,"
            " or the run waits."
        ),
    ] = "checkpoint"
    lost_stage_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=30 * DAY_S,
            description="The run waits this long for a lost replica to return before it does what run.lost_stage says.",
        ),
    ] = 5.0
    undo: Annotated[
        Literal["checkpoint", "none"],
        Meta(
            description="What a peer contributed that checks convict of false values is undone by going back to an older checkpoint, or"
            " stays."
        ),
    ] = "checkpoint"
    probation: Annotated[
        int,
        Meta(
            ge=0,
            le=10**6,
            description="For this many steps a guest's new key owns no microbatch and shares a third of a stage's, if others serve it;"
            " 0: no probation.",
        ),
    ] = 16
    spot_checks: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Other replicas recompute what a new peer computed in this share of all steps, later in half of that, in stages of"
            " two or more; 0 audits none.",
        ),
    ] = 0.0
    robust: Annotated[
        Literal["none", "clip"],
        Meta(
            description="A replica's part of a stage's gradient counts as it is, or (clip) up to 1.5 times the length that parts usually"
            " have."
        ),
    ] = "none"
    trace_bytes: Annotated[
        int,
        Meta(ge=0, le=MOST_BYTES, description="Each peer's trace takes at most this much disk; 0 writes no trace."),
    ] = 1 << 28
    serve: Annotated[
        bool,
        Meta(
            description="The peers train nothing: they serve the model to `shoal generate` and `shoal chat`; `shoal serve` sets it."
        ),
    ] = False
    log_to: Annotated[
        tuple[Literal["jsonl", "tensorboard", "wandb"], ...],
        Meta(description='The launcher also writes each step\'s figures to these, such as ["jsonl", "tensorboard"].'),
    ] = ()
    averaging_memory_bytes: Annotated[
        int,
        Meta(
            ge=2**10,
            le=MOST_BYTES,
            description="Averaging takes at most this much memory at a peer besides its result; more is averaged in pieces.",
        ),
    ] = 1 << 30
    stage_seconds: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=DAY_S)], ...],
        Meta(description="A plan expects each stage to take this many seconds per microbatch; --plan sets it."),
    ] = ()
    placement: Annotated[
        dict[str, Seat],
        Meta(description="The plan gives each of these machines the stage with this number; --plan sets it."),
    ] = {}
    line_rates: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=10**12)], ...],
        Meta(
            description="Replicas share out averaging by the line rates of run.placement's machines in kB/s, or evenly for [];"
            " --plan sets it."
        ),
    ] = ()
    join_slowdown: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="A peer beyond run.peers is left out while its narrow line makes a step this many times as long; 0 lets in all.",
        ),
    ] = 1.1
    routes: Annotated[
        tuple[tuple[tuple[Seat, ...], ...], ...],
        Meta(
            description="For each machine of run.placement and each stage, these machines (by number) serve its microbatches in turn;"
            " --plan sets it."
        ),
    ] = ()

    @property
    def directory(self) -> Path:
        """Where the run's files are."""
        return Path(self.dir) / self.name


def problems(run: Run) -> Iterator[str]:
    if not _NAME.fullmatch(run.name):
        yield f"run.name = {run.name!r} cannot name a directory; try letters, digits, '-', '_' and '.'"
    if run.peers < run.stages:
        yield f"run.peers = {run.peers} cannot serve run.stages = {run.stages}; try {run.stages} peers or more"
    if run.stage_seconds and len(run.stage_seconds) != run.stages:
        yield (
            f"run.stage_seconds = {list(run.stage_seconds)} must be one number for each of run.stages = {run.stages}; "
            "try run.stage_seconds=[]"
        )
    if run.layers and len(run.layers) != run.stages:
        yield (
            f"run.layers = {list(run.layers)} must be one number for each of run.stages = {run.stages}; "
            "try run.layers=[]"
        )
    if run.heartbeat_timeout_s < 3 * run.heartbeat_s:
        yield (
            f"run.heartbeat_timeout_s = {run.heartbeat_timeout_s} is under three times run.heartbeat_s = {run.heartbeat_s};"
            f" try {8 * run.heartbeat_s}"
        )
    if run.lost_stage == "wait":
        yield from without_effect(
            run, "run", ["lost_stage_wait_s"], "with run.lost_stage = 'wait' the run waits without end"
        )
    if run.robust != "none":
        yield from _robust_problems(run)
    yield from _plan_problems(run)


def _robust_problems(run: Run) -> Iterator[str]:
    """The length that parts usually have is a median, and it is the owners of chunks who say how long each is."""
    if run.peers < LEAST_BOUNDED * run.stages:
        yield (
            f"run.robust = {run.robust!r} compares {LEAST_BOUNDED} replicas or more of each stage, and run.peers = {run.peers} are"
            f" {run.peers // run.stages} for each of run.stages = {run.stages}; try run.peers={LEAST_BOUNDED * run.stages}"
            " or run.robust=none"
        )
    if run.peers > MOST_BOUNDED * run.stages:
        yield (
            f"run.robust = {run.robust!r} bounds the parts of {MOST_BOUNDED} replicas of a stage at most, and run.peers = {run.peers}"
            f" are more for each of run.stages = {run.stages}; try run.robust=none"
        )
    placed = Counter(run.placement.values())
    few = [stage for stage in range(run.stages) if placed and placed[stage] < LEAST_BOUNDED]
    if few:
        yield (
            f"run.robust = {run.robust!r} compares {LEAST_BOUNDED} replicas or more of each stage, and run.placement gives stage"
            f" {few[0]} only {placed[few[0]]}; try another plan or run.robust=none"
        )


def _plan_problems(run: Run) -> Iterator[str]:
    names, stages = list(run.placement), tuple(run.placement.values())
    if not run.placement:
        if run.routes:
            yield "run.routes without run.placement; try run.routes=[]"
        if run.line_rates:
            yield "run.line_rates without run.placement; try run.line_rates=[]"
        return
    if run.line_rates and len(run.line_rates) != len(names):
        yield f"run.line_rates = {list(run.line_rates)} must be one number for each of {len(names)} run.placement; try run.line_rates=[]"
    if set(stages) != set(range(run.stages)):
        yield f"run.placement = {dict(run.placement)} must serve all stages from 0 to {run.stages - 1} and no other"
    yield from _route_problems(run, names, stages)


def _route_problems(run: Run, names: list[str], stages: tuple[int, ...]) -> Iterator[str]:
    for number, by_stage in enumerate(run.routes):
        complete = len(by_stage) == run.stages and all(by_stage) and len(run.routes) == len(names)
        if not complete or any(
            seat >= len(names) or stages[seat] != stage for stage, seats in enumerate(by_stage) for seat in seats
        ):
            yield (
                f"run.routes[{number}] = {[list(seats) for seats in by_stage]} must name seats 0 to {len(names) - 1} of each of"
                f" run.stages = {run.stages} stages, one list for each, and there is one entry for each seat"
            )
