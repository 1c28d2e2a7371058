"""The protocol: what peers tell one another, what a machine is told, and what it asks its driver to do.

Every value here is a frozen struct. `Message`s cross the network (msgpack, tagged, bounded), `Event`s enter a machine,
`Command`s leave it. Tensors never appear: a blob is a name, and the driver keeps the table from name to bytes. One
View, the value that the members agree on by register.py, says who serves what, who owns which microbatch and which step
is trained.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import msgspec

PROTOCOL = 40  # raised with every change of a wire message, or of who sends which; peers of another number are refused at the handshake

# key id + incarnation: a restarted process is another
Peer = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Nobody = Annotated[str, msgspec.Meta(max_length=128)]  # a peer, or "": none
Holders = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=4)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Term = Annotated[int, msgspec.Meta(ge=0, le=2**32)]  # times ROUNDS_PER_TERM it is still a Count
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
Stage = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
Seat = Annotated[int, msgspec.Meta(ge=-1, lt=2**20)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Digest = Annotated[str, msgspec.Meta(max_length=128)]
Places = Annotated[tuple[Digest, ...], msgspec.Meta(max_length=16)]  # that hold a copy

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]
Route = Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=256)]  # of a text: a replica of each stage

MOST_POSITIONS = 512  # of one request of inference, which a hop of training waits for
MOST_SCORES = 1024  # of the likeliest next tokens
ABOUT = "about"  # the shard of a checkpoint that holds its small files: configuration, tokenizer, training.json
FROZEN = "frozen"  # a stage's weights that are not trained, as its replicas hold them: of no step, and of no checkpoint

TURNS = 16  # of the quickest replica of a stage
MAX_LIST_BYTES = 512 << 10  # of the authority's list of passes


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A plain value inside messages."""


class Wire(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A message between peers."""


class Event(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Something that happened to a peer."""


class Command(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Something a machine wants done."""


# ---------------------------------------------------------------------------------------------------- agreed state


class Member(Value, frozen=True):
    """`back`, of a joiner: it has been a member before (it moves, or lost its state), so it votes and is not counted again.
    `seat`: its number in the run's plan; -1 of a peer that the plan does not know. `since`: number of the view that made it a member.
    A peer may leave and come back in one step and get its microbatches back: what it asked for before is void.
    `turns`: of TURNS, that it has among its stage's replicas, by what it passes."""

    peer: Peer
    stage: Stage
    back: bool = False
    seat: Seat = -1
    since: Count = 0
    turns: Annotated[int, msgspec.Meta(ge=0, le=TURNS)] = TURNS


class Share(Value, frozen=True):
    """What one replica brings into a round: the indices it booked, in the order in which it added them."""

    peer: Peer
    indices: tuple[Index, ...]
    line_rate: Count = 0  # of its line, as planned or measured: kB/s; 0: not known


class Holding(Value, frozen=True):
    """A whole state of a stage: parameters and optimizer state of version `step`."""

    epoch: Count
    stage: Stage
    step: Count


class Rebuilt(Value, frozen=True):
    """A lost stage that is made from its two neighbours: `below` of the one below, the rest of the one above."""

    stage: Stage
    below: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5


class Account(Value, frozen=True):
    """Samples of the whole run so far, in microbatches. `redone` counts (microbatch, stage) bookings computed again."""

    issued: Count = 0
    committed: Count = 0
    redone: Count = 0
    counted_twice: Count = 0
    killed: Count = 0
    joined: Count = 0
    undone: Count = 0  # committed, then undone by going back to a checkpoint: issued and committed again
    skipped: Count = 0  # of those committed, the ones of steps that changed nothing, since a result was not finite


class Rewards(Value, frozen=True):
    """Of preference pairs that count. The reward of an answer is tune.beta times its log ratio to the frozen base."""

    accuracy: float  # the share whose chosen answer has the larger reward
    margin: float  # mean of the chosen answers' rewards less those of the rejected ones


class Committed(Value, frozen=True):
    """How the step before the view's step was committed: the round, the norm that clips it, who summed what."""

    step: Count
    round: Count
    norm: float  # Euclidean norm of the whole model's averaged gradient, multiplied by Settings.scale
    loss: float  # mean over the step's counted tokens
    digests: tuple[Digest, ...]  # of each stage's reduced gradient
    groups: tuple[tuple[Share, ...], ...]  # one per stage
    save: bool = False  # write a checkpoint of the parameters after this step
    joiners: tuple[Peer, ...] = ()  # joiners that the sums were sent to; no other can apply them
    skipped: Count = (
        0  # the step changes nothing (no groups, no loss), since a result was not finite: so many in a row by now
    )
    counted: Count = 0  # tokens of the step whose loss counts; 0 where every token's does
    heldout: float | None = None  # mean loss over the counted held-out tokens, with the parameters before this step
    rewards: Rewards | None = None  # of the step's preference pairs
    heldout_rewards: Rewards | None = None  # of the held-out ones
    kept: tuple[Count, ...] = ()  # of each stage, the round that its exchange began in (Round.kept)

    def round_of(self, stage: Stage) -> int:
        """The round that the stage's exchange began in."""
        return self.kept[stage] if stage < len(self.kept) else self.round


class HeldOut(Value, frozen=True):
    """The newest measurement of the held-out loss, with the parameters of version `step`, and the best so far."""

    step: Count
    loss: float
    best_step: Count
    best_loss: float
    misses: Count = 0  # measurements since the best one


class Evicted(Value, frozen=True):
    """A key, or an invite, whose peer was evicted for what it did, so many times: it is let in again after a pause that grows with them."""

    key: Nobody
    times: Count = 1


class Newcomer(Value, frozen=True):
    """A key on probation (Settings.probation): it is a member since that step, and did not come by the founder's invite."""

    key: Nobody
    since: Count


class Unchecked(Value, frozen=True):
    """The parameters hold contributions of that key to step `since`, or to later ones, that no check has passed."""

    key: Nobody
    since: Count


class Undoing(Value, frozen=True):
    """What would be undone if a peer were evicted for false values (core/leader/undo), and what was undone so far in this session."""

    unchecked: Annotated[tuple[Unchecked, ...], msgspec.Meta(max_length=1 << 14)] = ()
    saves: Annotated[
        tuple[Count, ...], msgspec.Meta(max_length=1 << 10)
    ] = ()  # versions of the checkpoints that are kept, ascending
    times: Count = 0  # that the run went back for it
    steps: Count = 0  # committed ones that were undone
    epoch: Count = 0  # the newest one that began so


class Continued(Value, frozen=True):
    """An epoch goes on with states of the epoch before, but for these stages, which are made from their neighbours first. Books of
    the epoch before are void."""

    rebuilt: tuple[Rebuilt, ...] = ()


class Phase(Enum):
    """What a run does under a view. Legal transitions: core/consensus/phases.py."""

    GATHERING = "gathering"  # no step is computed: peers join and prepare their stage's state
    TRAINING = "training"  # `step` is computed, and averaged when its books are complete
    OVERLAPPING = "overlapping"  # with delayed updates: `step` is averaged while the next one is computed
    REOPENED = "reopened"  # with delayed updates: a death took books of `step`, which is computed again before the next one goes on
    SAVING = "saving"  # all steps are committed; the last checkpoint is being written, held-out samples are measured
    FINISHED = "finished"  # the run is over
    FAILED = "failed"  # the run is over before its last step: a stage cannot be loaded, or training diverges


class View(Value, frozen=True, dict=True, gc=True):
    """The replicated value. `members` vote, serve and train; `joining` download their stage's state. Who was a member before
    goes on voting while it does: otherwise two moves and two deaths would leave five peers without a quorum.

    What follows from the fields is computed once for each view (`dict`): every peer asks for it with every message."""

    number: Count
    step: Count  # the oldest not committed; equals the version of the parameters
    members: tuple[Member, ...]
    joining: tuple[Member, ...] = ()
    owners: tuple[Index, ...] = ()  # owners[i]: position in `members` of the trainer that owns microbatch i of `work`
    phase: Phase = Phase.GATHERING
    epoch: Count = 0  # raised when the run goes back to a checkpoint: everything of an older epoch is void
    last: Committed | None = None
    account: Account = Account()
    reason: Text = ""  # why this view replaced the one before, in words
    saved: Count = 0  # version of the newest checkpoint; where the run goes back to when a stage is lost
    fenced: tuple[
        Member, ...
    ] = ()  # served those stages in this step and do not any more: books there are void until the next
    continued: Continued | None = (
        None  # until this epoch's first commit; None: it began with a checkpoint, or the run with it
    )
    since: Count = 0  # number of the view that set `work`, or set it again: requests of older views are void
    evicted: Annotated[tuple[Evicted, ...], msgspec.Meta(max_length=256)] = ()
    founder: Nobody = ""  # invite id of the peer that founded the run: one of its peers has the casting vote
    heldout: HeldOut | None = None
    newcomers: Annotated[tuple[Newcomer, ...], msgspec.Meta(max_length=1 << 14)] = ()
    undoing: Undoing | None = None  # of a run whose settings undo what evicted peers contributed
    part_norms: tuple[
        float, ...
    ] = ()  # of each stage, how long a microbatch's part of a round usually is (Settings.robust)

    @cached_property
    def started(self) -> bool:
        """This epoch's first step has begun."""
        return self.phase not in (Phase.GATHERING, Phase.FAILED)

    @cached_property
    def finished(self) -> bool:
        """The run is over, with or without its last step."""
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def failed(self) -> str:
        """Why the run is over before its last step; '' if it is not."""
        return self.reason if self.phase is Phase.FAILED else ""

    @cached_property
    def ahead(self) -> bool:
        """The books of `step` are closed and it is averaged, while the next step is computed."""
        return self.phase is Phase.OVERLAPPING

    @cached_property
    def begun(self) -> bool:
        """The next step was opened: it is computed, or waits for `step`, which was opened again."""
        return self.phase in (Phase.OVERLAPPING, Phase.REOPENED)

    @property
    def kept(self) -> bool:
        """This epoch began without going back to a checkpoint."""
        return self.continued is not None

    @property
    def rebuilt(self) -> tuple[Rebuilt, ...]:
        """Stages that are made from their neighbours before this epoch's first step."""
        return self.continued.rebuilt if self.continued is not None else ()

    def keeps(self, holding: Holding) -> bool:
        """That state of the epoch before is what this epoch begins with, too."""
        return (
            self.kept
            and holding.epoch == self.epoch - 1
            and holding.step == self.step
            and all(one.stage != holding.stage for one in self.rebuilt)
        )

    @cached_property
    def work(self) -> int:
        """The step whose microbatches are computed."""
        return self.step + self.ahead

    @cached_property
    def voters(self) -> tuple[Peer, ...]:
        """Whose quorum agrees on the view that follows this one."""
        return tuple([member.peer for member in self.members] + [member.peer for member in self.joining if member.back])

    @cached_property
    def digest(self) -> str:
        """Of everything that it says, as hexadecimal digits."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:40]

    @cached_property
    def votes(self) -> frozenset[Peer]:
        """`voters` as a set."""
        return frozenset(self.voters)

    @cached_property
    def serving(self) -> dict[Peer, Stage]:
        """The stage of each member."""
        return {member.peer: member.stage for member in self.members}

    @cached_property
    def present(self) -> dict[Peer, Stage]:
        """The stage of each member and joiner."""
        return {member.peer: member.stage for member in self.joining} | self.serving

    @cached_property
    def replicas(self) -> dict[Stage, list[Peer]]:
        """The members of each stage, in their order."""
        replicas: dict[Stage, list[Peer]] = {}
        for member in self.members:
            replicas.setdefault(member.stage, []).append(member.peer)
        return replicas


class Entry(Value, frozen=True):
    """A view on its way to being agreed: proposed in `term`, to be accepted by quorums of both sets of voters."""

    term: Term
    view: View
    before: tuple[Peer, ...]  # the voters of the view it replaces


class Signed(Value, frozen=True):
    """A peer's signature (core/consensus/certificates.py says of what), with the public key that its name is made from.
    Empty in a machine's hands:
    the driver fills in its own and hands on only those that hold."""

    peer: Peer
    key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Proof(Value, frozen=True):
    """Acceptances of a view that `leader` proposed."""

    leader: Peer
    signed: Annotated[tuple[Signed, ...], msgspec.Meta(max_length=4096)]


# ------------------------------------------------------------------------------------------- agreeing and belonging


class Lead(Wire, frozen=True):
    """Leader to everyone: I lead `term`, elected by `votes`; the view numbered `number` was agreed under `decided_term`, as `proof` shows.
    Votes and proof come with the first message after each; whoever missed one is sent it again when its Heartbeat says so."""

    term: Term
    number: Count  # the newest agreed view
    decided_term: Term = 0  # term under which that view was agreed
    digest: Digest = ""  # of that view
    proof: Proof | None = None
    votes: Annotated[tuple[Signed, ...], msgspec.Meta(max_length=4096)] = ()
    stalled: Text = ""  # why nothing has been committed for long


class Propose(Wire, frozen=True):
    """Leader to voters: accept this. With a `proof` it is agreed already: from any peer to one that missed it."""

    entry: Entry
    term: Term  # of the leader that sends it
    proof: Proof | None = None


class Accept(Wire, frozen=True):
    """Answer to Propose. Without `by`: not accepted, since I know of `term`."""

    term: Term
    number: Count
    digest: Digest = ""  # of the view
    by: Signed | None = None


class VoteRequest(Wire, frozen=True):
    term: Term
    last_term: Term
    last_number: Count
    trial: bool = False  # pre-vote: would you vote? changes nothing


class Vote(Wire, frozen=True):
    """Answer to VoteRequest. Signed when it is granted and no trial."""

    term: Term
    granted: bool
    trial: bool = False
    by: Signed | None = None


class Booking(Value, frozen=True):
    index: Index
    loss: float | None = (
        None  # at the last stage: mean over the microbatch's tokens, 0 for those not counted; of held-out ones over the counted
    )
    counted: Count = (
        0  # at the last stage: its tokens whose loss counts; 0 where every token's does, but for held-out ones
    )
    rewards: Rewards | None = None  # at the last stage: of its preference pairs


class Heartbeat(Wire, frozen=True):
    """Member (or joiner) to leader, every beat and after each booking: I live, and these are my books."""

    term: Term
    number: Count  # newest agreed view I hold
    step: Count  # version of my parameters; meaningful when ready
    ready: bool  # my parameters are those of `step`
    books: tuple[Booking, ...] = ()  # of step `work`, in the order they were added
    epoch: Count = 0
    queue_s: float = 0.0  # seconds of work waiting here
    rate: float = 0.0  # microbatches per second my stage passes when busy
    digest: Digest = ""  # of my parameters at `step`
    stage: Stage = 0  # the stage those books belong to
    work: Count = 0  # the step whose books these are
    closed: tuple[Booking, ...] = ()  # with delayed updates, those of the step before, until it is committed
    loaded: Count = 0  # chunks of my stage's state that are here, while it is downloaded
    place: Digest = (
        ""  # where I write checkpoints: peers that name the same one share it; "": nothing can be written there
    )
    up_kBps: Count = 0  # what my line has carried lately while bulk waited for it; 0: not known
    down_kBps: Count = 0
    gradient: Count = 0  # values of my stage's flat gradient; 0: I hold no state
    tensor_bytes: Count = 0  # of a boundary tensor here; 0: none has come yet
    lacks: bool = False  # the view that you have just named: it was not proposed to me, or that was lost


class KnownAnswers(Value, frozen=True):
    """What a machine computes from fixed inputs (executor/answers.py). Empty where nothing is computed."""

    dtype: Digest = ""  # that it computes in
    update: Digest = ""  # SHA-256 of optimizer steps and sums: the same bits everywhere
    codes: Digest = ""  # and of decoded values
    forward: Annotated[tuple[float, ...], msgspec.Meta(max_length=16)] = ()  # whose last bits depend on the machine


class Join(Wire, frozen=True):
    """To any member: let me take part. Repeated until a view names the sender. `holds`: what I still hold since I was evicted."""

    holds: Holding | None = None
    seat: Seat = -1  # in the run's plan
    answers: KnownAnswers = KnownAnswers()


class JoinRefused(Wire, frozen=True):
    """Leader to a peer that asked to join: you do not fit this run."""

    reason: Text


class Redirect(Wire, frozen=True):
    """Answer to Join, of a peer that does not lead: ask `leader`."""

    leader: Peer


class Leave(Wire, frozen=True):
    """To the leader, with each heartbeat: I go at the end of the step, or in its middle when that is more than 20 s away. `waited_ms`:
    since I was asked to, which another leader may not know."""

    reason: Text = ""
    waited_ms: Count = 0


class Complaint(Wire, frozen=True):
    """Member to leader, about a member. `faulty`: what it sent is wrong (shapes, values). `unreachable`: it answers me nothing. `stale`,
    about myself: my state is not the stage's, I must download it again."""

    about: Peer
    reason: Text
    kind: Literal["faulty", "unreachable", "stale"] = "faulty"


class Objection(Wire, frozen=True):
    """Voter to voters: I do not accept that view of the leader that we follow; or (`evicted`) it evicts me, and I was not asked."""

    leader: Peer
    number: Count
    reason: Text
    evicted: bool = False


class StandingRequest(Wire, frozen=True):
    """Operator to any peer: how do you stand? Answer: Standing."""


class Standing(Wire, frozen=True):
    """My newest agreed view and term, and whom I have heard lately."""

    term: Term
    view: View
    heard: tuple[Peer, ...] = ()


class Override(Wire, frozen=True):
    """Operator to survivors, who pass it on: take `view` for agreed under `term` (core/consensus/override.py). The
    driver hands on only what
    the run's authority has signed."""

    view: View
    term: Term
    authority: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # its public key
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Dismissed(Wire, frozen=True):
    """Leader to everyone of a finished run: all know that it is, so you may end."""

    number: Count


class PassesRequest(Wire, frozen=True):
    """Any peer to any other: I hold this version of the authority's list of passes. Answer: Passes. Drivers settle it (runtime/passes.py);
    no machine hears of it."""

    version: Count


class Passes(Wire, frozen=True):
    """The version I hold, with the list itself when it is newer than what was asked with. Signed by the run's authority
    (transport/identity/passes.py)."""

    version: Count
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_LIST_BYTES)] = b""


# ------------------------------------------------------------------------------------------------------------- hops


class Forward(Wire, frozen=True):
    """Owner to server: run the stage. Answer: Output. At stage 0 blob 0 is the tokens. Elsewhere the input lies with `input_from`,
    to be tried in turn, or is on its way to the server if that is named; the output goes straight `to` the peer that is asked next."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    view: Count
    input_from: Holders = ()
    to: Nobody = ""


class Backward(Wire, frozen=True):
    """Owner to server: recompute the stage and run it back. Booked once. Answer: Gradient. At the first and the last stage blob 0
    is the tokens. The stage's input lies with `input_from`, the gradient of its output with `grad_from`, as with Forward."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    view: Count
    input_from: Holders = ()
    grad_from: Holders = ()
    to: Nobody = ""


class Output(Wire, frozen=True):
    """A receipt: the stage's output is computed, `nbytes` large, and kept here."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    nbytes: Count = 0


class Gradient(Wire, frozen=True):
    """A receipt: the microbatch is booked here. The gradient of the stage's input (none at stage 0), `nbytes` large, is kept here."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    loss: float | None = None
    nbytes: Count = 0


# The first `call` of a TensorRequest for an audit: answered with the tensor, though it was sent for a hop before
AUDIT_CALL = 1 << 16


class BoundaryTensor(Wire, frozen=True):
    """Server to server: blob 0 is the input of that microbatch at `stage`, or (`gradient`) the gradient of its output there."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    gradient: bool
    call: Count = 0  # the request that it answers; 0: sent unasked, when it was made


class TensorRequest(Wire, frozen=True):
    """Server to server: your copy of that tensor, please. Answer: BoundaryTensor, TensorGone, or TensorPending."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    gradient: bool
    call: Count = 1  # of its sender for that tensor, to know how long the answer took


class TensorGone(Wire, frozen=True):
    """Server to server: I do not hold that tensor (any more)."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    gradient: bool


class TensorPending(Wire, frozen=True):
    """Server to server: that tensor was sent to you before, and the connection has held since. It is of so many bytes."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    gradient: bool
    nbytes: Count = 0


class Missing(Wire, frozen=True):
    """Server to owner: not taken; the input (`gradient`: the gradient of the output) does not come from any that was named."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    backward: bool
    gradient: bool


class Recall(Wire, frozen=True):
    """Owner to server: send the Gradient you booked again. Answer: Gradient, or Cancelled when nothing is booked."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    view: Count


class Cancel(Wire, frozen=True):
    """Owner to server: unless booked or running, forget every backward attempt up to this one. Answer: Cancelled or
    Gradient."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    view: Count


class Cancelled(Wire, frozen=True):
    """Answer to Cancel or Recall: nothing is booked, and that attempt never will be."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count


class Query(Wire, frozen=True):
    """Owner to server: have you got that request (`backward` or forward)? Answer: Pending while it waits or runs; what was
    answered before, where that is kept; nothing where it is not known."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    backward: bool


class Pending(Wire, frozen=True):
    """Server to owner: that request waits or runs here. `coming`: it waits for a tensor of a peer whose other tensors have come since."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    coming: bool = False


class Busy(Wire, frozen=True):
    """Server to owner: not taken; my queue is `wait_s` long, or I do not hold that version or view yet."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    backward: bool
    wait_s: float


class Refused(Wire, frozen=True):
    """Server to owner: that request is wrong and will never be taken."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    attempt: Count
    backward: bool
    reason: Text


class BooksRequest(Wire, frozen=True):
    """New owner to server: which microbatches have you booked? Answered once the view is `view` or newer and nothing
    that a former owner sent is running."""

    epoch: Count
    step: Count
    view: Count


class Books(Wire, frozen=True):
    """Answer to BooksRequest: what this server has booked of the step, at `stage`."""

    epoch: Count
    step: Count
    view: Count
    stage: Stage
    indices: tuple[Index, ...]


# ------------------------------------------------------------------------------------------------------------ rounds


class Round(Wire, frozen=True):
    """Leader to members: average now. groups[s] lists the replicas of stage s with what each brings, joiners[s] the joiners
    that still download: they get the sums too, and apply them later. kept[s] is the round that the exchange of stage s began in: an earlier
    one goes on or is over, since the peers that have left were none of its group. Messages between replicas, and theirs to the leader,
    name that round. (): all begin with this one."""

    epoch: Count
    step: Count
    round: Count
    view: Count
    groups: tuple[tuple[Share, ...], ...]
    joiners: tuple[tuple[Peer, ...], ...] = ()
    kept: tuple[Count, ...] = ()

    def round_of(self, stage: Stage) -> int:
        """The round that the stage's exchange began in."""
        return self.kept[stage] if stage < len(self.kept) else self.round

    def at(self, stage: Stage) -> Round:
        """As replicas of that stage see it: numbered like their exchange."""
        return msgspec.structs.replace(self, round=self.round_of(stage), kept=()) if self.kept else self


class ReduceChunk(Wire, frozen=True):
    """Reduce-scatter, replica to chunk owner: blob 0 is that chunk of my gradient sum, or of my row's. Chunks are numbered through all
    pieces of the gradient, in each piece those of the group's sum before those of a row's (core/allreduce/layout.py). `again`: a copy,
    which was asked for."""

    epoch: Count
    step: Count
    round: Count
    chunk: Index
    again: bool = False


class GatherChunk(Wire, frozen=True):
    """All-gather, chunk owner to replicas, and on to those of its row: blob 0 is the chunk added up over the group, in group order
    within a row, then the rows in theirs. `to_joiner`: to a joiner that catches up. `first`: it goes before reduce chunks that wait,
    of slices that come later. `again`: a copy, which was asked for. `urgent`: to a joiner that has waited for steps."""

    epoch: Count
    step: Count
    round: Count
    chunk: Index
    to_joiner: bool = False
    first: bool = False
    again: bool = False
    urgent: bool = False


class Resend(Wire, frozen=True):
    """Replica to replica: I still miss your ReduceChunk (as a chunk's owner) or your GatherChunk (`sum` true) of that chunk. `vain`: the
    leader has learned that I wait for you."""

    epoch: Count
    step: Count
    round: Count
    chunk: Index
    sum: bool
    vain: bool = False


class Sketch(Value, frozen=True):
    """Of a vector: its products with four vectors of +1 and -1, and its squared norm. Products of two vectors add up to those of their
    sum."""

    products: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    norm_sq: float = 0.0


class OwnedSums(Value, frozen=True):
    """What a replica knows of the chunks that one owner has added up (core/allreduce/checked.py). `part`: of its own gradient. The owner
    itself lists the `parts` that it received, in group order, and what encoding the sums has `lost`."""

    digest: Digest
    sum: Sketch
    part: Sketch = Sketch()
    parts: Annotated[tuple[Sketch, ...], msgspec.Meta(max_length=16)] = ()
    lost: Sketch = Sketch()


class Reduced(Wire, frozen=True):
    """Replica to leader: I hold the group's reduced gradient. `sums`: of each owner, in group order; of groups in rows, none."""

    epoch: Count
    step: Count
    round: Count
    digest: Digest
    norm_sq: float
    sums: Annotated[tuple[OwnedSums, ...], msgspec.Meta(max_length=16)] = ()


class AuditRequest(Wire, frozen=True):
    """Leader to a participant of a round whose sums are made: which tensors have you used and made in this step? `seed`: of the signs of
    their sketches, drawn now. Answer: AuditAnswer. docs/design/2026-11-24-audited-steps.md"""

    epoch: Count
    step: Count
    round: Count
    seed: Digest


class TensorRecord(Value, frozen=True):
    """A boundary tensor of the step as a replica holds it, `stage` and `gradient` as in BoundaryTensor; at the stage and in the direction
    that have none, the microbatch's tokens. `source`: who sent it; "": it was made here. No sketch of tokens."""

    index: Index
    stage: Stage
    gradient: bool
    digest: Digest
    source: Nobody = ""
    sketch: Sketch = Sketch()


AUDIT_RECORDS, AUDIT_HOPS = (
    2**13,
    2**13,
)  # in a message, which may have 4 MiB: 2.7 and 4.1 MB with the longest names and digests


class AuditAnswer(Wire, frozen=True):
    """What every booked hop has used, and what was made here and is still held: message number `part` of `parts`."""

    epoch: Count
    step: Count
    round: Count
    records: Annotated[tuple[TensorRecord, ...], msgspec.Meta(max_length=AUDIT_RECORDS)] = ()
    part: Count = 0
    parts: Count = 1


class AuditedHop(Value, frozen=True):
    """A booked backward: who holds its input and the gradient of its output; "": there is none, or it is the tokens."""

    index: Index
    input_from: Nobody = ""
    grad_from: Nobody = ""


class RecomputeRequest(Wire, frozen=True):
    """Leader to another replica of the stage of `of`: compute those hops again, add nothing to your sum. `exchange`: the round that the
    stage's exchange began in. Answer: Recomputed."""

    epoch: Count
    step: Count
    round: Count
    of: Peer
    seed: Digest
    exchange: Count
    hops: Annotated[tuple[AuditedHop, ...], msgspec.Meta(max_length=AUDIT_HOPS)]


class RecomputedHop(Value, frozen=True):
    """What came in, by digest, and sketches of what was made of it, after the same code. `loss`: at the last stage."""

    index: Index
    tokens: Digest = ""
    input: Digest = ""
    grad: Digest = ""
    output: Sketch = Sketch()
    gradient: Sketch = Sketch()
    loss: float | None = None


class Recomputed(Wire, frozen=True):
    """`parts`: sketches of the sum of all the hops' gradients, one for each owner of chunks, by the signs of Reduced; () where those are
    not known. No hops: I could not."""

    epoch: Count
    step: Count
    round: Count
    of: Peer
    hops: Annotated[tuple[RecomputedHop, ...], msgspec.Meta(max_length=AUDIT_HOPS)] = ()
    parts: Annotated[tuple[Sketch, ...], msgspec.Meta(max_length=16)] = ()


class RoundWaits(Wire, frozen=True):
    """Replica to leader: whose parts, and whose sums, I lack in this round; nobody's: what I reported before has come. `vain`: nothing
    new has come for long; else others wait for me in vain, and I for these."""

    epoch: Count
    step: Count
    round: Count
    parts: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=1024)] = ()
    sums: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=1024)] = ()
    vain: bool = True
    piece: Count = 0  # of the gradient, that I am at


class BookerRequest(Wire, frozen=True):
    """Leader to owner: whose gradient of your microbatch did you get at that stage? Either two say that they have booked it, or nobody
    does, and nothing is booked any more. To the server for which an owner waits: have you got it, and for whom do you wait? Answer:
    Booker."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage


class Booker(Wire, frozen=True):
    """`peer` is empty while none has answered; then `at` is who I wait for. `slow`: how many were late with this hop, that one too. Of a
    server: `peer` is its own name if it has booked the microbatch; `at` is who does not give it a tensor, its own name if it lacks
    none, empty if it has not got the hop."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    peer: Nobody = ""
    at: Nobody = ""
    slow: Count = 0


class RoundFailed(Wire, frozen=True):
    """Replica to leader: this round cannot end here. `culprit` is empty when it is nobody's fault (books have
    changed)."""

    epoch: Count
    step: Count
    round: Count
    reason: Text
    culprit: Nobody = ""


# ------------------------------------------------------------------------------------------------- state, checkpoints


class StateRequest(Wire, frozen=True):
    """Joiner to replica: offer me the state of your stage, of version `since` or newer: what is committed from there on I hear. With
    `shard`, between any two: offer me that shard of the checkpoint of step `since`, or the stage's frozen weights."""

    epoch: Count
    stage: Stage
    since: Count
    shard: Digest = ""


class Manifest(Value, frozen=True):
    """State of one stage at one version, cut into chunks: SHA-256 and size of each."""

    hashes: tuple[Digest, ...]
    sizes: tuple[Annotated[int, msgspec.Meta(ge=1, le=2**28)], ...]


class Offer(Wire, frozen=True):
    """Replica to joiner. An empty manifest: I have no state of that stage, or not that shard, to give (now)."""

    epoch: Count
    step: Count
    stage: Stage
    manifest: Manifest
    shard: Digest = ""


class ChunkRequest(Wire, frozen=True):
    """Joiner to replica: send that chunk of the state. Answer: Chunk. `again`: I have asked you for it before, and it has not come."""

    epoch: Count
    step: Count
    stage: Stage
    chunk: Index
    shard: Digest = ""
    again: bool = False


class Chunk(Wire, frozen=True):
    """Blob 0: the chunk's bytes. `gone` (and no blob): that version, or shard, is no longer held here. `urgent`: to a joiner that has
    waited for steps."""

    epoch: Count
    step: Count
    stage: Stage
    chunk: Index
    gone: bool = False
    shard: Digest = ""
    urgent: bool = False


class LoadFailed(Wire, frozen=True):
    """Member to leader, before an epoch's first step: the checkpoint of `step` is damaged or gone, so I cannot load my stage from it.
    `older`: the step of the newest older checkpoint of which I find every byte whole; 0: none is. `asked`: so many other peers do not have
    what is missing."""

    epoch: Count
    step: Count
    stage: Stage
    older: Count
    reason: Text = ""
    asked: Count = 0


class NonFinite(Wire, frozen=True):
    """Replica to leader: what my stage makes of this microbatch is not finite: a fact about training if another replica finds it too."""

    epoch: Count
    step: Count
    index: Index
    stage: Stage
    reason: Text = ""


class Saved(Wire, frozen=True):
    """To the leader: that stage's shard of the checkpoint is written where I write checkpoints. `failed` says why it could not be."""

    epoch: Count
    step: Count
    stage: Stage
    record: Annotated[str, msgspec.Meta(max_length=2**20)] = ""  # JSON: files, tensors, sizes, hashes
    failed: Text = ""
    shard: Digest = ""  # names its content: SHA-256 over the hashes of its files


class SaveRequest(Wire, frozen=True):
    """Leader to replica: write your stage's shard of the checkpoint of version `step` (you keep a copy until told)."""

    epoch: Count
    step: Count


class CopyRequest(Wire, frozen=True):
    """Leader to a peer of another place: download that shard from `holders` and write it where you write checkpoints. Answer: Saved."""

    epoch: Count
    step: Count
    stage: Stage
    record: Annotated[str, msgspec.Meta(max_length=2**20)]
    shard: Digest
    holders: Holders


class PublishRequest(Wire, frozen=True):
    """Leader to one peer of each place: every shard is where it belongs; make the checkpoint whole and visible."""

    epoch: Count
    step: Count
    records: Annotated[tuple[str, ...], msgspec.Meta(max_length=4096)]
    copies: Annotated[
        tuple[Places, ...], msgspec.Meta(max_length=4096)
    ] = ()  # of each shard; none: all share one place
    edition: Digest = ""  # of records and copies: a place that dies is replaced by others, and those are asked again


class Published(Wire, frozen=True):
    """Answer to PublishRequest: the checkpoint is visible at `path`, or why it `failed`."""

    epoch: Count
    step: Count
    path: Text = ""
    failed: Text = ""
    edition: Digest = ""  # of the request


# ----------------------------------------------------------------------------------------------- measuring the links


class Ping(Wire, frozen=True):
    """To any peer, whose driver answers Pong with a blob of `answer_bytes`. With a blob: its bytes are the load, and no more."""

    id: Count
    answer_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**26)] = 0
    facts: bool = False  # tell what your machine is, too


class Pong(Wire, frozen=True):
    """Blob 0: as many bytes as were asked for, if any."""

    id: Count
    facts: Annotated[str, msgspec.Meta(max_length=4000)] = ""  # the peer's device.toml


class Measure(Wire, frozen=True):
    """Measure your links to these peers, all at once, with at most `most_bytes` each way per transfer. Answer: Measured for each."""

    id: Count
    peers: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=1024)]
    most_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**26)]


class Measured(Wire, frozen=True):
    """What the sender found on its way to `peer`. A `reason` says why there are no figures."""

    id: Count
    peer: Peer
    delay_s: float = 0.0  # half of the shortest round trip
    loaded_s: float = 0.0  # half of the median round trip while bytes were on their way
    bandwidth_Bps: float = 0.0
    reason: Text = ""


# --------------------------------------------------------------------------------------------------------- inference


class Generate(Wire, frozen=True):
    """Client to the first replica of `route`: run these tokens of my text, whose first is at `position`, through all stages. Answers:
    TextPending and Passed of each replica but the last, which answers Predicted; or NotServed of the one where it ends."""

    session: Count  # of the client: one text
    call: Count  # of the session: a higher one voids those before
    position: Count  # 0: the text begins anew
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=MOST_POSITIONS)]
    route: Route
    scores: Annotated[int, msgspec.Meta(ge=0, le=MOST_SCORES)] = 1  # of the likeliest next tokens that are asked for


class HiddenStates(Wire, frozen=True):
    """Replica to the next one of the route: blob 0 is the input (1, count, width) of `stage`. `oldest`, `newest`: versions of the
    parameters that it was made with."""

    client: Peer
    session: Count
    call: Count
    position: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_POSITIONS)]
    stage: Stage
    route: Route
    scores: Annotated[int, msgspec.Meta(ge=0, le=MOST_SCORES)]
    oldest: Count
    newest: Count


class Passed(Wire, frozen=True):
    """Replica to client, a receipt: the stage is computed and its output sent on."""

    session: Count
    call: Count
    stage: Stage


class TextPending(Wire, frozen=True):
    """Replica to client, twice a second: that request waits or runs here."""

    session: Count
    call: Count
    stage: Stage


class Predicted(Wire, frozen=True):
    """Last replica to client: the likeliest next tokens, the likeliest first, and their logits."""

    session: Count
    call: Count
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(max_length=MOST_SCORES)]
    scores: Annotated[tuple[float, ...], msgspec.Meta(max_length=MOST_SCORES)]
    oldest: Count
    newest: Count


class NotServed(Wire, frozen=True):
    """Replica to client: not taken. `missing`: I do not hold the keys and values before `position`; `busy`: ask again later; `elsewhere`:
    I do not serve that stage; `refused`: nor will I ever take it."""

    session: Count
    call: Count
    stage: Stage
    kind: Literal["missing", "busy", "elsewhere", "refused"]
    reason: Text = ""


Message = (
    Lead | Propose | Accept | VoteRequest | Vote | Heartbeat | Join | JoinRefused | Redirect | Leave | Complaint | Dismissed
    | Forward | Backward | Output | Gradient | Recall | Cancel | Cancelled | Busy | Refused | BooksRequest | Books
    | Query | Pending
    | BoundaryTensor | TensorRequest | TensorPending | TensorGone | Missing
    | Round | ReduceChunk | GatherChunk | Resend | Reduced | RoundFailed | RoundWaits | BookerRequest | Booker
    | AuditRequest | AuditAnswer | RecomputeRequest | Recomputed
    | StateRequest | Offer | ChunkRequest | Chunk | LoadFailed | NonFinite | Saved | SaveRequest | CopyRequest
    | PublishRequest | Published
    | StandingRequest | Standing | Override | Objection
    | PassesRequest | Passes
    | Ping | Pong | Measure | Measured
    | Generate | HiddenStates | Passed | TextPending | Predicted | NotServed
)  # fmt: skip

BULK = (
    Forward,
    Backward,
    BoundaryTensor,
    ReduceChunk,
    GatherChunk,
    Chunk,
    Ping,
    Pong,
    HiddenStates,
)  # may carry blobs; all others travel as control


RANKS = 8  # of bulk
URGENT = 1
# Pieces of higher ranks that go before one of that rank: state for a joiner costs hops a tenth of a line, two thirds of it if it is urgent
PASSED = (9, 9, 3, 9, 9, 9, 9, 9)


def rank(message: Message) -> int:
    """Which bulk messages go first on a line, 0 before 1: requests with a microbatch's tokens, which are small and which a first stage
    waits for, what is urgent to a joiner, then backward, as it frees memory and is waited for longest, then forward, averaging, state and
    frozen weights for a joiner, shards of a checkpoint and texts. Messages to one peer keep their order within a rank only."""
    match message:
        case Forward() | Backward():
            return 0
        case BoundaryTensor():
            return 2 if message.gradient else 3
        case GatherChunk(urgent=True) | Chunk(urgent=True):
            return URGENT
        case GatherChunk():
            return 4 if message.first else 5
        case ReduceChunk():
            return 5
        case Chunk(shard=shard) if shard and shard != FROZEN:
            return 7
        case HiddenStates():
            return 7
    return 6


# ------------------------------------------------------------------------------------------------------------ events


class BlobRef(msgspec.Struct, frozen=True, gc=False):
    """A tensor the driver holds under a local name."""

    id: str
    nbytes: int
    holders: tuple[Peer, ...] = ()


class Received(Event, frozen=True):
    """A message came. `fault` says what is wrong with its blobs (shape, type, non-finite values), checked by the
    driver."""

    peer: Peer
    message: Message
    blobs: tuple[BlobRef, ...] = ()
    fault: Text = ""


class Unreachable(Event, frozen=True):
    """The transport cannot reach that peer now (connection refused or broken)."""

    peer: Peer


class Result(msgspec.Struct, frozen=True, gc=False):
    """What a task found out; fields that do not apply keep their defaults."""

    loss: float | None = None
    counted: int = 0  # tokens whose loss counts, in a run where not every token's does; or preference pairs
    rewards: Rewards | None = None
    digest: str = ""
    norm_sq: float = 0.0
    length: int = 0  # values in the stage's flat gradient
    manifest: Manifest | None = None
    record: str = ""
    nbytes: int = 0
    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    digests: tuple[str, ...] = ()
    sketches: tuple[Sketch, ...] = ()


class Done(Event, frozen=True):
    """A task ended well; `result` has the fields its docstring names."""

    id: str
    result: Result
    seconds: float = 0.0


class Lack(Value, frozen=True):
    """A shard of a checkpoint, or frozen weights, that are not whole here."""

    stage: Stage
    shard: Digest


class Failed(Event, frozen=True):
    """A task was not done. `lost`: nor will it ever be, since the device is gone or has too little memory: the peer ends."""

    id: str
    reason: Text
    lost: bool = False
    nonfinite: bool = False  # of RunForward and RunBackward: a result is not finite
    older: int | None = None  # of Init, for a damaged checkpoint: the step of the newest older whole one; 0: none is
    lacks: tuple[Lack, ...] = ()  # of Init: shards that are missing or damaged here, and that another peer may have
    held: tuple[str, ...] = ()  # of RunCopy: SHA-256 of the chunks that are here of a shard that is not whole


class Tick(Event, frozen=True):
    """The machine's deadline has come (or the driver simply calls)."""


class Found(Event, frozen=True):
    """The directory lists these peers of the run."""

    peers: tuple[Peer, ...]


class Asked(Event, frozen=True):
    """A person or the launcher asks this peer to leave: at the end of the step, or within 20 s."""

    reason: Text = ""


class SaveAsked(Event, frozen=True):
    """The launcher, which is about to end the run, asks for a checkpoint: whoever leads sees to it."""


class LineMeasured(Event, frozen=True):
    """What this machine's line has carried lately while bulk waited for it, kB/s. 0: not known."""

    up_kBps: Count = 0
    down_kBps: Count = 0


class Barred(Event, frozen=True):
    """The run's authority has revoked these peers of my view: whoever leads removes them. Told again with every view that has some."""

    peers: tuple[Peer, ...]


# ---------------------------------------------------------------------------------------------------------- commands


class Send(Command, frozen=True):
    """Blobs are local names, resolved when the command is carried out: a Drop may follow at once."""

    peer: Peer
    message: Message
    blobs: tuple[str, ...] = ()


class Drop(Command, frozen=True):
    """Forget these blobs."""

    blobs: tuple[str, ...]


class Withdraw(Command, frozen=True):
    """What waits here need not go: chunks of that void round, or a `committed` one's but for joiners' sums; without a `round`, boundary
    tensors of steps before `step`. One on its way arrives."""

    epoch: Count
    step: Count
    round: Count | None = None
    committed: bool = False

    def voids(self, _: Peer, message: Message) -> bool:
        if self.round is None:
            return isinstance(message, BoundaryTensor) and (message.epoch, message.step) < (self.epoch, self.step)
        if not isinstance(message, ReduceChunk | GatherChunk):
            return False
        needed = self.committed and isinstance(message, GatherChunk) and message.to_joiner
        return not needed and (message.epoch, message.step, message.round) == (self.epoch, self.step, self.round)


class WithdrawState(Command, frozen=True):
    """Chunks of my stage's state that wait here for that peer need not go: it has all, or wants newer ones. One on its way arrives."""

    peer: Peer

    def voids(self, peer: Peer, message: Message) -> bool:
        return peer == self.peer and isinstance(message, Chunk) and not message.shard


class Note(Command, frozen=True):
    """A decision worth telling: `text` is the reason in words."""

    # joined | removed | recovered | commit | skipped | round | leader | checkpoint | unsaved | route | refused | stall | finished | state
    kind: str
    text: str


class Finish(Command, frozen=True):
    """This peer's part in the run is over."""

    ok: bool
    reason: str


class Find(Command, frozen=True):
    """Ask the directory for peers of the run; answered by Found."""


class Do(Command, frozen=True):
    """Carry out a task; answered by exactly one Done or Failed with the task's id, unless the task says otherwise."""

    task: Task


Lane = Literal["compute", "average", "read", "write"]
Purpose = Literal["hop", "round", "state"]
Asker = Literal["server", "trainer", "transfer", "inference"]
ASKERS: dict[str, Asker] = {
    "s": "server",
    "t": "trainer",
    "y": "transfer",
    "i": "inference",
}  # by the beginning of a task's id


class TaskBase(msgspec.Struct, frozen=True, tag=True, gc=False):
    """What all tasks say of themselves: the lane they run on ("average" is "compute" where updates are not delayed), what they are part
    of, and the fields that name the blobs they read and make. Tasks of one lane are carried out in the order given."""

    id: str

    lane: ClassVar[Lane] = "compute"
    purpose: ClassVar[Purpose] = "state"
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the blobs that it needs, in order."""
        return self._blobs(self.inputs)

    @property
    def makes(self) -> tuple[str, ...]:
        return self._blobs(self.outputs)

    @property
    def asker(self) -> Asker:
        return asker_of(self.id)

    def _blobs(self, fields: tuple[str, ...]) -> tuple[str, ...]:
        """A field holds one name, '' for none, or several."""
        names: list[str] = []
        for field in fields:
            value = getattr(self, field)
            names += (value,) if isinstance(value, str) else value
        return tuple([name for name in names if name])


def asker_of(id: str) -> Asker:
    """Which part of a peer gave the task with that id, and gets its end."""
    return ASKERS[id.partition("/")[0]]


class Fetch(TaskBase, frozen=True):
    """Read microbatch `index` of `step` from the data into blob `out` (tokens: (B, L+1) int64)."""

    lane = "read"
    purpose = "hop"
    outputs = ("out",)
    step: int
    index: int
    out: str


class RunForward(TaskBase, frozen=True):
    """The stage on blob `x` into blob `out`. `heldout`: there will be no backward."""

    purpose = "hop"
    inputs = ("x",)
    outputs = ("out",)
    step: int
    index: int
    stage: int
    x: str
    out: str
    heldout: bool = False


class RunBackward(TaskBase, frozen=True):
    """Recompute the stage on `x`, run back from `grad` (last stage: loss against the tokens), add to the step's sum,
    write the gradient of `x` to `out` ('' at stage 0). Result: loss, counted tokens and rewards at the last stage. Failed leaves
    the sum as it was. `heldout`, at the last stage: the loss and the counted tokens alone."""

    purpose = "hop"
    inputs = ("x", "grad")
    outputs = ("out",)
    step: int
    index: int
    stage: int
    x: str
    grad: str  # '' when the model has one stage: x holds the tokens
    out: str
    heldout: bool = False


class Describe(TaskBase, frozen=True):
    """Result: the digest of each of `blobs`, and with a `seed` a sketch of each tensor by its signs."""

    lane = "read"
    purpose = "hop"
    inputs = ("blobs",)
    blobs: tuple[str, ...]
    seed: str = ""


class RunAudit(TaskBase, frozen=True):
    """RunBackward of another replica's hop: the gradient is added to a sum beside the step's, which the `first` hop begins. Result: digests
    of the tokens, of `x` and of `grad` ('' where there is none, or it is the tokens), sketches of the output and of the gradient of `x`,
    by the signs of `seed`; loss at the last stage."""

    purpose = "hop"
    inputs = ("x", "grad")
    step: int
    index: int
    stage: int
    x: str
    grad: str
    seed: str
    first: bool


class EndAudit(TaskBase, frozen=True):
    """Give up the sum that RunAudit has made. Result: sketches of its slices from `bounds[i]` to `bounds[i+1]`, by the signs of
    `digests[i]`."""

    purpose = "hop"
    bounds: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()


class Cut(TaskBase, frozen=True):
    """Copy slices of the step's sum (of `bounds[i]` to `bounds[i+1]` values) into blobs `outs`. With `longest` the whole sum is shortened
    to that norm first, if it is longer."""

    purpose = "round"
    outputs = ("outs",)
    step: int
    bounds: tuple[int, ...]
    outs: tuple[str, ...]
    longest: float | None = None


class Add(TaskBase, frozen=True):
    """Add blobs `parts` in that order into blob `out`. Result, with `check`: sketches of the parts and of what encoding lost."""

    lane = "average"
    purpose = "round"
    inputs = ("parts",)
    outputs = ("out",)
    parts: tuple[str, ...]
    out: str
    check: bool = False


class AddRow(TaskBase, frozen=True):
    """Add blobs `parts` in that order, and copy slices of their sum, which is values `bounds[0]` to `bounds[-1]` of the gradient,
    into blobs `outs`."""

    lane = "average"
    purpose = "round"
    inputs = ("parts",)
    outputs = ("outs",)
    parts: tuple[str, ...]
    bounds: tuple[int, ...]
    outs: tuple[str, ...]


class Gather(TaskBase, frozen=True):
    """Put `sums` one after another into the reduced gradient of `round`, from value `start` on. With `last` it is whole.
    Result, then: digest, norm_sq (fp64). With `own`, this replica's parts of the same chunks ('' where it has added them up): digests
    of the sums, and sketches of each sum and part. Failed: non-finite values."""

    lane = "average"
    purpose = "round"
    inputs = ("sums", "own")
    step: int
    round: int
    sums: tuple[str, ...]
    start: int = 0
    last: bool = True
    own: tuple[str, ...] = ()


class Apply(TaskBase, frozen=True):
    """Multiply round `round`'s reduced gradient by `scale`, clip it by the whole model's `norm`, one optimizer step, empty the
    step's sum; parameters are now those of step + 1. With `save`, keep a copy for RunSave. Result: digest of the parameters.

    With delayed updates hops of step + 1 go on before and after with the parameters of `step`, which stay until the next."""

    purpose = "round"
    step: int
    round: int
    norm: float
    save: bool
    skip: bool = False  # the parameters stay: only their version advances
    scale: float = 1.0


class Reset(TaskBase, frozen=True):
    """Empty every step's sum (a peer's books are void: it was fenced, moved or rolled back). Result: nothing."""


class Init(TaskBase, frozen=True):
    """Build stage `stage` with the parameters of version `step`: from the seed, or from the checkpoint of that step. Checkpoints of later
    versions that epochs before `void_before` wrote are deleted first: they are undone. Result: digest, length."""

    stage: int
    step: int
    void_before: int = 0


class Export(TaskBase, frozen=True):
    """Copy parameters, optimizer state and schedule position of version `step`, to be read by ReadChunk. It is made in slices, between
    which other tasks of the lane have their turn, and whole before an Apply. Result: manifest. A later Export replaces the copy."""

    step: int


class ReadChunk(TaskBase, frozen=True):
    """Chunk `chunk` of the exported copy of `step` into blob `out`. Failed: another version is held."""

    lane = "read"
    outputs = ("out",)
    step: int
    chunk: int
    out: str


class CheckChunk(TaskBase, frozen=True):
    """Compare blob `blob` with `digest` (SHA-256) and keep it as chunk `chunk`. Failed: it differs."""

    lane = "read"
    inputs = ("blob",)
    chunk: int
    digest: str
    blob: str


class Import(TaskBase, frozen=True):
    """Build stage `stage` at version `step` from the kept chunks. Result: digest, length."""

    stage: int
    step: int
    chunks: int


class Blend(TaskBase, frozen=True):
    """Build stage `stage` at version `step` from its neighbours' states. Kept chunks 0 to `chunks[0]` are the stage below,
    the next `chunks[1]` the one above; every tensor is `below` of the one and the rest of the other. Result: digest, length."""

    stage: int
    step: int
    chunks: tuple[int, int]
    below: float


class RunSave(TaskBase, frozen=True):
    """Write this stage's shard of the checkpoint of version `step`, from the copy that Apply kept or from one made in turn with the
    hops, while the parameters are still those. The file is written beside them. Result: record, digest (names its content)."""

    stage: int
    step: int


class RunPublish(TaskBase, frozen=True):
    """Write index and configuration, and make the checkpoint of `step` visible at once. Those of later versions and older epochs than
    `epoch` were undone, and are deleted. Result: record = its path."""

    lane = "write"
    step: int
    records: tuple[str, ...]
    copies: tuple[tuple[str, ...], ...] = ()
    best: int = 0  # the step whose checkpoint stays, however old; 0: none
    epoch: int = 0


class OfferShard(TaskBase, frozen=True):
    """Read that shard of the checkpoint of `step` from the files, or the frozen weights of the stage that is here. Result: manifest.
    Failed: it is not here, or not whole."""

    lane = "write"
    step: int
    stage: int
    shard: str


class ReadShard(TaskBase, frozen=True):
    """Chunk `chunk` of that shard, as it was offered, into blob `out`. Failed: it is no longer offered, or cannot be read."""

    lane = "write"
    outputs = ("out",)
    step: int
    stage: int
    shard: str
    chunk: int
    out: str


class WriteChunk(TaskBase, frozen=True):
    """Compare blob `blob` with `digest` (SHA-256) and write it from byte `start` on of the shard that is `size_bytes` long. Result: nbytes,
    0 when it differs and nothing was written. Failed: it cannot be written here, or such a shard does not belong here."""

    lane = "write"
    inputs = ("blob",)
    step: int
    stage: int
    shard: str
    record: str  # of the shard; '' when the marker of the checkpoint, which is here, says what its files are
    start: int
    size_bytes: int
    digest: str
    blob: str


class RunCopy(TaskBase, frozen=True):
    """All chunks of that shard are written: compare its files with their hashes and put them in their place. Result: record. Failed: it
    is not whole; `held`."""

    lane = "write"
    step: int
    stage: int
    shard: str
    record: str


class Infer(TaskBase, frozen=True):
    """The stage on the next positions of a text, `tokens` at stage 0 and elsewhere blob `x`, with the keys and values that are kept for
    `session`, which `start` empties. Into blob `out`; at the last stage, where it is '', the `scores` likeliest next tokens.
    Result: nbytes of the keys and values; tokens, scores. Failed: they are void."""

    purpose = "hop"
    inputs = ("x",)
    outputs = ("out",)
    session: str
    stage: int
    start: bool
    tokens: tuple[int, ...]
    x: str
    out: str
    scores: int


class Forget(TaskBase, frozen=True):
    """Let go of the keys and values of these sessions. Result: nothing."""

    purpose = "hop"
    sessions: tuple[str, ...]


Task = (
    Fetch | RunForward | RunBackward | Describe | RunAudit | EndAudit | Cut | AddRow | Add | Gather | Apply | Reset | Init | Export
    | ReadChunk | CheckChunk
    | Import | Blend | RunSave | RunPublish | OfferShard | ReadShard | WriteChunk | RunCopy | Infer | Forget
)  # fmt: skip


class Settings(msgspec.Struct, frozen=True):
    """What the machines need to know of a run's configuration."""

    stages: int
    microbatches: int  # per step
    steps: int  # the run ends when this many steps are committed
    first_step: int = 0  # a resumed run starts here
    peers: int = 1  # training starts when this many have joined and every stage is served
    inflight: int = 4  # microbatches a trainer drives at once; 0: as many as fill the lines
    queue_limit: int = 16  # tasks a server holds before it answers Busy
    activation_store_bytes: int = 1 << 32  # of boundary tensors a server keeps before it answers Busy
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    save_last: bool = True
    copies: int = 1  # of each shard of a checkpoint, in as many places, where there are so many
    keep: int = 3  # checkpoints
    place: str = ""  # where this peer writes checkpoints
    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 4.0  # a member not heard for this long is removed; below the 5 s promised
    min_request_timeout_s: float = 2.0  # no hop is called slow before this
    ready_timeout_s: float = (
        30.0  # longest wait for a peer that builds the state all went back to, or for sums that a joiner lacks
    )
    staleness: int = 0  # 1: a step is computed while the one before is averaged, with parameters that lack its gradient
    nonfinite: str = "skip"  # a step whose loss or gradient is not finite: skip | stop
    lost_stage: str = "checkpoint"  # what to do when a stage has lost its last replica: checkpoint | neighbours | wait
    lost_stage_wait_s: float = 0.0  # before that: one that was only cut off may come back with the state
    ban_s: float = (
        10.0  # first pause of a peer that fails (routing.py: up to 8 times this) or is evicted (evictions.py)
    )
    stage_seconds: tuple[float, ...] = ()  # planned seconds per microbatch, for placement before anything is measured
    piece_values: int = 0  # of a stage's gradient that are averaged at a time; 0: all at once
    home: bool = (
        False  # owners run what they can themselves: with one stage nothing but tokens could be gained elsewhere
    )
    tokens: int = 0  # of a microbatch, where not every token's loss counts; 0: it does
    seat: int = -1  # of this peer in the plan
    seats: tuple[int, ...] = ()  # stage of each planned seat
    routes: tuple[tuple[tuple[int, ...], ...], ...] = ()  # by owner's seat and stage: the seats that serve it, in turn
    line_rates: tuple[int, ...] = ()  # of each planned seat's line, kB/s, where owners of unlike shares average sooner
    averaging_bytes: float = 4.0  # of a value of a gradient, as it is sent
    # A peer beyond `peers` whose narrow line makes a step longer by this factor is left out; 0: none is
    join_slowdown: float = 0.0
    averaging_error: float = 0.0  # of a sum's norm, that its encoding loses at most
    spot_checks: float = 0.0  # share of the steps in which another replica computes a new peer's hops again; 0: none
    spot_tolerance: float = 0.01  # of the norm of a hop's result, by which unlike machines may differ
    part_tolerance: float = 0.01  # of the norm of a replica's part of a round, likewise, encoding included
    probation: int = (
        0  # steps in which new keys together serve a third of the microbatches at most, where others can; 0: none
    )
    robust: str = "none"  # parts of a round: none | clip, to a multiple of the norm that they usually have
    undo: str = "none"  # what a peer contributed that is evicted for false values: none | checkpoint, if checks of values are on
    answers: KnownAnswers = KnownAnswers()  # of this machine
    serve: bool = False  # nothing is trained: the stages serve texts alone
    cache_bytes: int = 1 << 28  # of keys and values that this peer keeps for texts; 0: it serves none
    borrows: bool = False  # this machine has no model: other peers give it the frozen weights of its stage

    heldout: int = (
        0  # microbatches of held-out samples, of which the last stage computes the loss and nobody a gradient
    )
    heldout_every: int = 0  # steps between them
    heldout_tokens: int = 0  # of one of them
    save_measured: bool = False  # a checkpoint of each version that is measured; the best one is kept
    patience: int = 0  # measurements without a better one after which the run ends; 0: it goes on

    @property
    def checks_values(self) -> bool:
        """Somebody recomputes what others send, so that values can be found false that were believed before."""
        return self.spot_checks > 0.0

    def heldout_at(self, step: int) -> int:
        """Held-out microbatches of that step, the last one's parameters included. Their indices follow those that are trained on."""
        due = self.heldout_every > 0 and (step % self.heldout_every == 0 or step >= self.steps)
        return self.heldout if due else 0

    def count(self, step: int) -> int:
        """All microbatches of that step."""
        return self.microbatches + self.heldout_at(step)

    def scale(self, counted: int) -> float:
        """What makes a mean over all tokens of a step the mean over its `counted` ones."""
        return self.tokens * self.microbatches / counted if counted else 1.0
