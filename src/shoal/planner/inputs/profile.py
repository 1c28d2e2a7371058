"""What a model asks of whoever runs it, block by block: parameters, FLOPs, boundary and activation bytes.

Either counted (model/analysis.py) or, here, by arithmetic on a plain decoder's shape; nothing is built. Conventions as in
executor/resident.py: a backward that recomputes the stage costs three forwards, one whose activations are kept two; attention is the full
L x L square; parameters, two moments and the step's sum are fp32. Seconds come from a device's sustained FLOP/s (`shoal probe`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import msgspec

FP32_BYTES = 8.0  # per parameter: value and gradient sum
MOMENTS_BYTES = {
    "float32": 8.0,
    "8bit": 2.0 + 8.0 / 256,
}  # per parameter, of AdamW's two, by train.moments: codes with scales
# Exist at a time (model/layers/vocabulary.py): 64 MiB in fp32, enough for full speed of matrix kernels
LOGITS = 1 << 24
FORWARD, BACKWARD = 1.0, 3.0  # FLOPs of a hop in forwards: a backward that recomputes


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    gated: bool = True  # an MLP of three matrices; of two otherwise
    tied: bool = False


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step of a run."""

    microbatches: int
    sequences: int  # samples per microbatch
    tokens: int  # per row of a sample
    value_bytes: int  # of parameters in compute, and of boundary tensors
    inflight: int = 4  # microbatches a trainer drives at once; 0: as many as fill the lines
    rows: int = 1  # of a sample: a preference pair has two
    # Of each row through the stages: one more without gradient where pairs are compared with the frozen base
    passes: int = 1

    @property
    def microbatch_tokens(self) -> int:
        return self.sequences * self.rows * self.tokens

    @property
    def step_tokens(self) -> int:
        return self.microbatches * self.microbatch_tokens


class Part(msgspec.Struct, frozen=True):
    """A block, or the embedding, or the head; per microbatch where it says so."""

    name: str
    parameters: float  # that are trained
    flops: float  # of one forward, per microbatch
    activation_bytes: float  # kept for its backward, per microbatch
    working_bytes: float = 0.0  # beyond that and its gradients, at the worst moment of its backward
    matrix: float = 0.0  # parameters of its largest tensor
    input_bytes: float = 0.0  # of a block: what activation checkpointing keeps instead of activation_bytes
    forward_bytes: float = 0.0  # of its forward, at the worst moment, its input included
    shared_bytes: float = 0.0  # kept once for all blocks of a stage, such as tables of positions
    passed_bytes: float = 0.0  # made once for all blocks of a stage: those, and masks
    frozen_bytes: float = 0.0  # of parameters that are not trained
    back_flops: float | None = None  # of its backward, besides a forward that it recomputes; None: of two forwards
    # Among flops: of rows that have no gradient, which only the last stage's backward computes again
    reference_flops: float = 0.0


COUNTED = "FLOPs and bytes counted on the meta device"
FORMULA = "FLOPs and bytes by formula for a plain decoder"


class Profile(msgspec.Struct, frozen=True):
    """The whole model under one run's work. `parts` are embedding, blocks, head."""

    parts: tuple[Part, ...]
    boundary_bytes: float  # between stages, per microbatch
    tokens_bytes: float  # what the first and the last stage are sent of a microbatch
    tied: bool = False  # the head's matrix is the embedding's: one copy at each end
    basis: str = FORMULA
    slices: int = 1  # of a microbatch, one after another on the device: bytes of parts are those of one
    passes: int = 1  # of each row, see Work: boundary_bytes are those of all, gradients have the rows of one

    @property
    def blocks(self) -> int:
        return len(self.parts) - 2

    def of_size(self, factor: float) -> Profile:
        """With microbatches `factor` times as large: all but the parameters grow with the sequences, whose length stays."""
        parts = tuple(
            msgspec.structs.replace(
                part,
                flops=factor * part.flops,
                activation_bytes=factor * part.activation_bytes,
                working_bytes=factor * part.working_bytes,
                input_bytes=factor * part.input_bytes,
                forward_bytes=factor * part.forward_bytes,
                shared_bytes=factor * part.shared_bytes,
                passed_bytes=factor * part.passed_bytes,
                back_flops=None if part.back_flops is None else factor * part.back_flops,
                reference_flops=factor * part.reference_flops,
            )
            for part in self.parts
        )
        return msgspec.structs.replace(
            self, parts=parts, boundary_bytes=factor * self.boundary_bytes, tokens_bytes=factor * self.tokens_bytes
        )

    @property
    def parameters(self) -> float:
        return sum(part.parameters for part in self.parts) - (self.parts[0].parameters if self.tied else 0.0)

    @property
    def flops(self) -> float:
        """Of one microbatch's forward through the whole model."""
        return sum(part.flops for part in self.parts)

    def stage(self, span: range) -> StageProfile:
        """The blocks of `span`; the first stage also holds the embedding, the last the head."""
        first, last = span.start == 0, span.stop == self.blocks
        held = self.parts[1 + span.start : 1 + span.stop]
        held = (self.parts[:1] if first else ()) + held + (self.parts[-1:] if last else ())
        parameters = sum(part.parameters for part in held)
        if first and last and self.tied:
            parameters -= self.parts[0].parameters
        return StageProfile(
            parameters,
            sum(part.flops for part in held),
            sum(part.activation_bytes for part in held) + max((part.shared_bytes for part in held), default=0.0),
            tuple(held),
            first,
            last,
            self.tied and first and last,
            self.slices,
            self.passes,
        )


class StageProfile(msgspec.Struct, frozen=True):
    parameters: float  # that are trained
    flops: float  # of one forward, per microbatch
    activation_bytes: float
    parts: tuple[Part, ...]
    first: bool
    last: bool
    tied: bool  # its first and its last part share a matrix
    slices: int
    passes: int = 1

    @property
    def frozen_bytes(self) -> float:
        return sum(part.frozen_bytes for part in self.parts) - (self.parts[0].frozen_bytes if self.tied else 0.0)

    @property
    def back_flops(self) -> float:
        """Of one backward, per microbatch, besides a forward that it recomputes."""
        return sum(
            (BACKWARD - FORWARD) * (part.flops - part.reference_flops) if part.back_flops is None else part.back_flops
            for part in self.parts
        )

    @property
    def again_flops(self) -> float:
        """Of the forward that a backward recomputes, per microbatch; the last stage's backward is the first to compute it."""
        return self.flops - (0.0 if self.last else sum(part.reference_flops for part in self.parts))

    def hop_flops(self, kept: bool) -> float:
        """Of one microbatch, there and back; its forward is recomputed unless its activations are `kept`."""
        again = 0.0 if kept and not self.last else self.again_flops
        return (0.0 if self.last else self.flops) + self.back_flops + again

    @property
    def block_flops(self) -> float:
        """What activation checkpointing computes again, per microbatch."""
        return sum(part.flops - part.reference_flops for part in self.parts if part.input_bytes)

    @property
    def input_bytes(self) -> float:
        """A whole microbatch's boundary tensor as it is computed with, of one pass."""
        return self.slices * max((part.input_bytes for part in self.parts), default=0.0)


@cache
def profile(shape: Shape, work: Work) -> Profile:
    d, tokens, value = shape.hidden, work.microbatch_tokens, work.value_bytes
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = 3 if shape.gated else 2
    weights = 2.0 * d * queries + 2.0 * d * keys + matrices * d * shape.intermediate
    flops = tokens * (2 * weights + 4.0 * work.tokens * queries)
    block = Part(
        "block",
        parameters=weights + 2 * d,
        flops=work.passes * flops,
        reference_flops=(work.passes - 1) * flops,
        # Two norms and their outputs, two residuals; q, k, v before and after rotation; the attention's output; the MLP's inside.
        activation_bytes=tokens * value * (6.0 * d + 3 * queries + 3 * keys + (matrices + 1) * shape.intermediate),
        matrix=float(d * max(queries, shape.intermediate)),
        input_bytes=float(tokens * value * d),
    )
    table = float(shape.vocabulary) * d
    embedding = Part("embedding", table, 0.0, tokens * value * float(d), matrix=table)
    # Logits in the compute dtype, in fp32, and their gradient.
    logits = min(tokens * shape.vocabulary, LOGITS)
    scores = 2.0 * tokens * table  # FLOPs
    head = Part(
        "head",
        table + d,
        work.passes * scores,
        logits * (value + 8.0),
        matrix=table,
        reference_flops=(work.passes - 1) * scores,
    )
    parts = (embedding, *(msgspec.structs.replace(block, name=f"block {i}") for i in range(shape.layers)), head)
    sequence_bytes = 8.0 * (work.tokens + 1)
    boundary_bytes, tokens_bytes = (
        float(work.passes * tokens * value * d),
        work.sequences * work.rows * sequence_bytes,
    )
    return Profile(parts, boundary_bytes, tokens_bytes, shape.tied, passes=work.passes)


def spans(blocks: int, stages: int) -> tuple[range, ...]:
    """The blocks of each stage as model/cut.py gives them out: even, and the ends get an extra one last."""
    if not 1 <= stages <= blocks:
        raise ValueError(f"{stages} stages of a model of {blocks} blocks; each needs at least one")
    base, extra = divmod(blocks, stages)
    inner_first = sorted(range(stages), key=lambda stage: (-min(stage, stages - 1 - stage), stage))
    sizes = [base + (stage in inner_first[:extra]) for stage in range(stages)]
    return consecutive(sizes)


def consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    """Ranges of these sizes, one after the other."""
    ends = itertools.accumulate(sizes)
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
