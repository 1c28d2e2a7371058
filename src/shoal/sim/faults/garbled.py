"""A message with one field changed: what a faulty peer sends."""

from __future__ import annotations

from random import Random

import msgspec

from shoal.core import messages as m

GARBLED = (
    m.Forward, m.Backward, m.Output, m.Gradient, m.Recall, m.Cancel, m.Cancelled, m.Query, m.Pending,
    m.Busy, m.Refused,
    m.BoundaryTensor, m.TensorRequest, m.TensorPending, m.TensorGone, m.Missing, m.ReduceChunk, m.GatherChunk,
    m.Resend, m.ChunkRequest, m.Offer, m.Chunk,
)  # fmt: skip
FIELDS = ("epoch", "step", "attempt", "index", "stage", "round", "chunk")


def garble(message: m.Message, rng: Random) -> m.Message:
    """The message with one number changed into one that means nothing here."""
    if not isinstance(message, GARBLED):
        return message
    fields = [field for field in FIELDS if field in message.__struct_fields__]
    field = rng.choice(fields)
    return msgspec.structs.replace(message, **{field: (getattr(message, field) + rng.choice((1, 3, 1000))) % 4096})
