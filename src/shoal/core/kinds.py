"""Which part of a peer takes which kind of message. For peer.py, which asks for the most frequent kinds first."""

from __future__ import annotations

from shoal.core.messages import (
    Accept,
    AuditAnswer,
    AuditRequest,
    Backward,
    Booker,
    BooksRequest,
    BoundaryTensor,
    Busy,
    Cancel,
    Cancelled,
    Chunk,
    ChunkRequest,
    Complaint,
    CopyRequest,
    Dismissed,
    Forward,
    GatherChunk,
    Gradient,
    Heartbeat,
    Join,
    JoinRefused,
    Lead,
    Leave,
    LoadFailed,
    Missing,
    NonFinite,
    Offer,
    Output,
    Override,
    Pending,
    Propose,
    Published,
    PublishRequest,
    Query,
    Recall,
    Recomputed,
    RecomputeRequest,
    Redirect,
    ReduceChunk,
    Reduced,
    Refused,
    Resend,
    Round,
    RoundFailed,
    RoundWaits,
    Saved,
    SaveRequest,
    StandingRequest,
    StateRequest,
    TensorGone,
    TensorPending,
    TensorRequest,
    Vote,
    VoteRequest,
)

CONSENSUS = frozenset({Lead, Propose, Accept, VoteRequest, Vote})
TRANSFER = frozenset({StateRequest, Offer, ChunkRequest, Chunk})
TO_LEADER = frozenset(
    {
        Heartbeat,
        Join,
        Leave,
        Complaint,
        Reduced,
        RoundFailed,
        RoundWaits,
        Booker,
        LoadFailed,
        NonFinite,
        Saved,
        Published,
        AuditAnswer,
        Recomputed,
    }
)
ABOUT_RUN = frozenset({Dismissed, StandingRequest, Override, Redirect, JoinRefused})
FROM_LEADER = frozenset({Round, SaveRequest, PublishRequest, CopyRequest, AuditRequest, RecomputeRequest})
SERVER = frozenset(
    {
        Forward,
        Backward,
        Query,
        Recall,
        Cancel,
        BooksRequest,
        BoundaryTensor,
        TensorRequest,
        TensorPending,
        TensorGone,
        ReduceChunk,
        GatherChunk,
        Resend,
    }
)
# Most of all messages: of owners to servers, between servers, and the servers' answers
WORK = SERVER | {
    Output,
    Gradient,
    Pending,
    Busy,
    Refused,
    Missing,
    Cancelled,
}
