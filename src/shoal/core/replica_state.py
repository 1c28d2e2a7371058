"""The state of a replica: the view it has seen, and the stage, version and fitness of the parameters it holds.

server.py alone changes it; hops.py, rounds.py and catch_up.py read it. Beside it are the small questions that all of them ask of a
view.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from shoal.core.messages import Apply, Command, Complaint, Drop, Holding, Index, Member, Peer, Send, Stage, View

TEXT = 2000  # longest reason a message may carry
# After so many steps most of a line is a joiner's: a tenth of one full of work may never carry its state and sums
HURRY_STEPS = 4
MOST_STEPS = 32  # until then: who never ends must not cost others most of their lines for ever


class Known(msgspec.Struct, frozen=True):
    """The stage of each peer in a view, by peer: every message is checked against it, which must not take a walk over the members."""

    view: View | None
    serving: dict[Peer, Stage]  # members
    present: dict[Peer, Stage]  # members and joiners


NOBODY = Known(None, {}, {})


class ReplicaState(msgspec.Struct):
    """What one peer holds of its stage. Without `has_state`, `stage`, `step`, `epoch` and `digest` mean nothing."""

    view: View | None = None
    leader: Peer | None = None
    has_state: bool = False
    stage: int = 0
    step: int = 0  # version of the parameters
    epoch: int = 0
    length: int = 0  # values in the stage's flat gradient
    digest: str = ""  # of the parameters
    unfit: str = ""  # why they are not what the run agreed on
    applying: Apply | None = None
    staleness: int = 0  # with 1, the parameters of version step - 1 are kept too
    _known: Known = NOBODY  # of `view`; computed once for each
    _owned: dict[
        Index, int
    ] = {}  # number of the view in which each microbatch of `view.work` came to its owner, if that changed
    _joining: dict[tuple[Peer, Stage], int] = {}  # joiners, and the step at which each was one first

    def adopt(self, view: View) -> None:
        """It follows `self.view`. Where views between were missed, others may have owned every microbatch meanwhile."""
        before, self.view = self.view, view
        joining, self._joining = self._joining, {}
        for member in view.joining:
            key = member.peer, member.stage
            self._joining[key] = min(joining.get(key, view.step), view.step)  # a run may go back
        if before is None or (before.epoch, before.work, before.since) != (view.epoch, view.work, view.since):
            self._owned.clear()
        elif view.number > before.number + 1:
            self._owned.update(dict.fromkeys(range(len(view.owners)), view.number))
        elif (before.owners, before.members) != (view.owners, view.members):
            was, owners = _owners(before), _owners(view)
            was += [None] * (len(owners) - len(was))
            self._owned |= {i: view.number for i, owner in enumerate(owners) if owner != was[i]}

    def speaks_for(self, index: Index, peer: Peer, number: int) -> bool:
        """Whether `peer` owns microbatch `index` and has owned it without a break since view `number`, in which it sent its request: who
        lost it and has it again, after whoever took it over has left, begins anew, and what ran for it counts no more."""
        view = self.view
        if view is None or owner_of(view, index) != peer:
            return False
        return number >= max(view.since, view.members[view.owners[index]].since, self._owned.get(index, 0))

    def hurries(self, peer: Peer) -> bool:
        """`peer` has been joining for so long that what it waits for is urgent."""
        view = self.view
        if view is None or not self._joining:
            return False
        steps = [view.step - first for (joiner, _), first in self._joining.items() if joiner == peer]
        return bool(steps) and HURRY_STEPS <= steps[0] < MOST_STEPS

    @property
    def ready(self) -> bool:
        """The parameters are those of version `step`, and no task is changing them."""
        return self.has_state and not self.unfit and self.applying is None

    @property
    def current(self) -> bool:
        """Ready for the step that the view trains."""
        view = self.view
        return view is not None and self.ready and (self.epoch, self.step) == (view.epoch, view.step)

    @property
    def able(self) -> bool:
        """The parameters that compute the view's work are here. Step s is computed with version s - staleness, which delayed updates
        keep while the next version is applied and afterwards."""
        view = self.view
        if not self.staleness:
            return self.current
        if view is None or not self.has_state or self.unfit or self.epoch != view.epoch:
            return False
        return view.work == self.step + 1 or (view.work == self.step and self.applying is None)

    @property
    def known(self) -> Known:
        """The peers of the view."""
        view = self.view
        if self._known.view is not view:
            self._known = NOBODY if view is None else Known(view, view.serving, view.present)
        return self._known


class ViewChange(Enum):
    """What a newer view means for the state that a replica holds."""

    STATE_VOID = "its epoch began without my state, or I serve another stage"
    EPOCH_KEEPS_STATE = "the state remains valid, the books do not"
    STEP = "the step before is committed, or this is the first view"
    FENCED = "I am a member no longer"
    SAME_STEP = "who is a member, or which step is computed"


def change_of(name: Peer, replica: ReplicaState, before: View | None, view: View) -> ViewChange:
    """What `view`, which follows `before`, means for peer `name`, whose state is `replica`."""
    me = member_of(view.members + view.joining, name)
    late = replica.applying is not None and replica.step + 1 == view.step  # the commit before is being applied
    goes_on = view.keeps(Holding(epoch=replica.epoch, stage=replica.stage, step=replica.step + late))
    if replica.has_state and (
        (view.epoch != replica.epoch and not goes_on) or (me is not None and me.stage != replica.stage)
    ):
        return ViewChange.STATE_VOID
    if replica.has_state and view.epoch != replica.epoch:
        return ViewChange.EPOCH_KEEPS_STATE
    if before is None or (before.epoch, before.step) != (view.epoch, view.step):
        return ViewChange.STEP
    return ViewChange.FENCED if is_fenced(name, before, view) else ViewChange.SAME_STEP


def is_fenced(name: Peer, before: View, view: View) -> bool:
    """`view` takes the membership from a peer that `before` lists."""
    return member_of(before.members, name) is not None and member_of(view.members, name) is None


def member_of(members: tuple[Member, ...], peer: Peer) -> Member | None:
    return next((member for member in members if member.peer == peer), None)


def owner_of(view: View, index: Index) -> Peer | None:
    """The owner of microbatch `index`; None where the view names none."""
    owners, members = view.owners, view.members
    if index >= len(owners) or owners[index] >= len(members):
        return None
    return members[owners[index]].peer


def _owners(view: View) -> list[Peer | None]:
    """`owner_of` of each microbatch: every peer asks for all of them with every view."""
    peers = [member.peer for member in view.members]
    count = len(peers)
    return [peers[at] if at < count else None for at in view.owners]


def complain(replica: ReplicaState, peer: Peer, reason: str) -> list[Command]:
    """A complaint to the leader, who alone evicts peers. Nothing while no leader is known."""
    return [Send(replica.leader, Complaint(peer, reason[:TEXT]))] if replica.leader is not None else []


def drop(blobs: tuple[str, ...]) -> list[Command]:
    return [Drop(blobs)] if blobs else []
