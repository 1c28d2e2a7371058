"""[train]: what one optimizer step is. numerics/optimizer.py and the executors follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from shoal.config.section import Section, nearest_divisor, without_effect
from shoal.config.sections.plan import Plan
from shoal.config.sections.run import Run

Beta = Annotated[float, Meta(ge=0, lt=1)]
FLOAT16 = ("float16", "fp16", "half")
NO_FLOAT16 = (
    "is not there: its gradients vanish without loss scaling, which all stages would have to agree on;"
    " try train.dtype=bfloat16 (CPUs, and cards newer than the T4), or train.dtype=float32 on a T4 or V100: products at an eighth of"
    " their float16 rate, activations and boundary tensors twice as large, of which network.activations=bf16 halves the latter"
)
MOST_MICROBATCHES = 2**20  # of a step: what books and messages are made for


class Train(Section, frozen=True):
    """What one optimizer step is. With local_steps = H one step of the run is H of them, and schedule and warmup count those."""

    batch: Annotated[
        int, Meta(ge=1, le=2**24, description="An optimizer step takes this many sequences over the whole run.")
    ] = 64
    microbatch: Annotated[
        int, Meta(ge=1, le=2**20, description="A microbatch has this many sequences and divides train.batch.")
    ] = 4
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Stages compute in this type, and boundary tensors have it; the optimizer keeps float32."),
    ] = "float32"
    optimizer: Annotated[
        Literal["adamw", "muon"],
        Meta(
            description="What steps the matrices of blocks; embeddings, head, norms and biases are always stepped by AdamW."
        ),
    ] = "adamw"
    learning_rate: Annotated[
        float, Meta(gt=0, le=100, description="The learning rate reaches this peak after the warm-up.")
    ] = 1e-3
    betas: Annotated[
        tuple[Beta, Beta], Meta(description="AdamW averages gradients and their squares at these rates.")
    ] = (
        0.9,
        0.95,
    )
    epsilon: Annotated[float, Meta(gt=0, le=1, description="AdamW adds this number to its denominator.")] = 1e-8
    moments: Annotated[
        Literal["float32", "8bit"],
        Meta(description="AdamW's moments are kept, saved and sent in this format; 8bit takes a byte per value."),
    ] = "float32"
    weight_decay: Annotated[
        float,
        Meta(ge=0, le=100, description="AdamW decays matrices by this rate, and vectors (norms, biases) not at all."),
    ] = 0.1
    clip: Annotated[
        float,
        Meta(ge=0, le=1e12, description="The gradient of the whole model is clipped to this norm; 0 does not clip."),
    ] = 1.0
    schedule: Annotated[
        Literal["cosine", "linear", "constant"],
        Meta(description="The learning rate follows this curve from its peak to the last step."),
    ] = "cosine"
    warmup: Annotated[
        int, Meta(ge=0, le=10**12, description="The learning rate rises to its peak over this many steps at the start.")
    ] = 20
    final_ratio: Annotated[
        float, Meta(ge=0, le=1, description="The last learning rate is this fraction of the peak.")
    ] = 0.1
    local_steps: Annotated[
        int,
        Meta(
            ge=1,
            le=2**20,
            description="Each peer makes this many steps alone between two averagings (DiLoCo); above 1 it needs run.stages = 1.",
        ),
    ] = 1
    local_batch: Annotated[
        int,
        Meta(
            ge=0,
            le=2**24,
            description="A local step of a peer takes this many sequences; 0 is train.batch / run.peers.",
        ),
    ] = 0
    local_warmup: Annotated[
        int,
        Meta(
            ge=0, le=2**20, description="The learning rate rises anew over this many local steps after each averaging."
        ),
    ] = 0
    outer_learning_rate: Annotated[
        float,
        Meta(gt=0, le=100, description="The outer Nesterov step after local steps has this learning rate."),
    ] = 0.7
    outer_momentum: Annotated[
        float, Meta(ge=0, le=1, description="The outer Nesterov step after local steps has this momentum.")
    ] = 0.9
    on_nonfinite: Annotated[
        Literal["skip", "stop"],
        Meta(
            description="A step whose loss or gradient is not finite at every replica changes nothing, up to 5 in a row, or ends the run."
        ),
    ] = "skip"
    staleness: Annotated[
        int,
        Meta(
            ge=0, le=1, description="With 1 a step is computed while the one before is averaged, without its gradient."
        ),
    ] = 0


def microbatches(train: Train) -> int:
    """Of one step of the run: with local steps, of all that lead to one averaging."""
    return train.batch * train.local_steps // train.microbatch


def local_sequences(train: Train, run: Run) -> int:
    """Sequences per local step of one peer."""
    return train.local_batch or train.batch // run.peers


def problems(train: Train, run: Run, plan: Plan) -> Iterator[str]:
    if train.batch % train.microbatch:
        near = nearest_divisor(train.batch, train.microbatch)
        yield f"train.microbatch = {train.microbatch} does not divide train.batch = {train.batch}; try {near}"
    elif microbatches(train) >= MOST_MICROBATCHES:
        yield f"train.batch = {train.batch} is too many microbatches of {train.microbatch}; try larger ones"
    if train.schedule == "constant":
        why = "train.schedule = 'constant' stays at the peak"
        yield from without_effect(train, "train", ["final_ratio"], why)
    if train.staleness and train.local_steps > 1:
        yield "train.staleness = 1 with train.local_steps above 1, which already hide the averaging; try train.staleness=0"
    yield from _check_problems(train, run)
    if train.optimizer == "muon":
        yield from _muon_problems(train, run, plan)
    if train.moments == "8bit" and run.lost_stage == "neighbours":
        yield "run.lost_stage = 'neighbours' blends moments, which 8-bit codes do not allow; try run.lost_stage=checkpoint"
    if train.local_steps > 1:
        yield from _local_problems(train, run)
    elif "local_steps" not in plan.allow:  # else the planner may choose them, and what they need stands ready
        ignored = ["local_batch", "local_warmup", "outer_learning_rate", "outer_momentum"]
        yield from without_effect(train, "train", ignored, "train.local_steps = 1 makes no local steps")


def _muon_problems(train: Train, run: Run, plan: Plan) -> Iterator[str]:
    """What nobody has built or measured with it."""
    muon = "train.optimizer = 'muon'"
    if train.moments != "float32":
        yield f"{muon} keeps its momentum in fp32, not in train.moments = {train.moments!r}; try train.moments=float32"
    if train.local_steps > 1:
        yield f"{muon} with train.local_steps = {train.local_steps}, whose rounds begin without momentum; try train.optimizer=adamw"
    if "local_steps" in plan.allow:
        yield f"{muon} with local_steps in plan.allow, which Muon does not do; leave it out there"
    if run.lost_stage == "neighbours":
        yield f"{muon} with run.lost_stage = 'neighbours', which blends AdamW's moments; try run.lost_stage=checkpoint"


def _check_problems(train: Train, run: Run) -> Iterator[str]:
    """Of what checks and bounds gradients."""
    if run.spot_checks and (train.staleness or train.local_steps > 1):
        what = "train.staleness = 1" if train.staleness else f"train.local_steps = {train.local_steps}"
        yield f"run.spot_checks audits steps before they are committed, which {what} does not allow; try run.spot_checks=0"
    if run.robust != "none" and train.local_steps > 1:
        what = f"which train.local_steps = {train.local_steps} has none of"
        yield f"run.robust = {run.robust!r} compares gradients of microbatches, {what}; try run.robust=none"


def _local_problems(train: Train, run: Run) -> Iterator[str]:
    if run.stages > 1:  # a local step needs the whole model's gradient, which no peer of a pipeline has
        yield f"train.local_steps = {train.local_steps} needs the whole model on every peer; try run.stages=1"
    if train.local_warmup > train.local_steps:
        yield (
            f"train.local_warmup = {train.local_warmup} does not end within train.local_steps = {train.local_steps}; "
            f"try {train.local_steps // 4}"
        )
    own = local_sequences(train, run)
    if not own or own % train.microbatch:
        written = (
            f"train.local_batch = {own}"
            if train.local_batch
            else f"train.batch / run.peers = {train.batch / run.peers:g}"
        )
        near = train.microbatch * max(1, round(own / train.microbatch))
        yield f"{written} is no multiple of train.microbatch = {train.microbatch}; try train.local_batch={near}"
