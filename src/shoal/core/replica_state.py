"""Where a replica stands: the view it has seen, and the stage, version and fitness of the state it holds.

server.py alone changes it; hops.py and rounds.py read it. Beside it the small questions all three ask of a view.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from shoal.core.messages import Apply, Command, Complaint, Drop, Holding, Index, Member, Peer, Send, Stage, View

TEXT = 2000  # longest reason a message may carry


class Known(msgspec.Struct, frozen=True):
    """Stages of everyone in a view. A message is judged by it, and must not cost a walk over the whole swarm."""

    view: View | None
    serving: dict[Peer, Stage]  # members
    present: dict[Peer, Stage]  # and those who join


NOBODY = Known(None, {}, {})


class ReplicaState(msgspec.Struct):
    view: View | None = None
    leader: Peer | None = None
    installed: bool = False
    stage: int = 0
    step: int = 0  # version of the parameters
    epoch: int = 0
    length: int = 0  # values in the stage's flat gradient
    digest: str = ""  # of the parameters
    unfit: str = ""  # why they are not what the run agreed on
    applying: Apply | None = None
    staleness: int = 0  # with 1, the parameters of step - 1 are here too
    _known: Known = NOBODY  # of `view`; made once for each

    @property
    def ready(self) -> bool:
        """The parameters are those of `step`, and nothing is changing them."""
        return self.installed and not self.unfit and self.applying is None

    @property
    def current(self) -> bool:
        """Ready for the step that the view trains."""
        view = self.view
        return view is not None and self.ready and (self.epoch, self.step) == (view.epoch, view.step)

    @property
    def able(self) -> bool:
        """What computes the view's work is here. Step s is computed with version s - staleness, which delayed updates leave here
        while the next one is being made and after."""
        view = self.view
        if not self.staleness:
            return self.current
        if view is None or not self.installed or self.unfit or self.epoch != view.epoch:
            return False
        return view.work == self.step + 1 or (view.work == self.step and self.applying is None)

    @property
    def known(self) -> Known:
        """Who is in the view."""
        view = self.view
        if self._known.view is not view:
            serving = {member.peer: member.stage for member in view.members} if view is not None else {}
            joining = {member.peer: member.stage for member in view.joining} if view is not None else {}
            self._known = Known(view, serving, joining | serving)
        return self._known


class Change(Enum):
    """What a newer view means for the replica."""

    STATE_VOID = "its epoch began without my state, or I serve another stage"
    EPOCH_KEEPS_STATE = "the state stands, the books do not"
    STEP = "the step before is committed, or this is the first view"
    FENCED = "I am a member no longer"
    SAME_STEP = "who is a member, or which step is computed"


def change_of(name: Peer, replica: ReplicaState, before: View | None, view: View) -> Change:
    """Of `view` after `before` for replica `name`, whose `replica` holds its state."""
    me = member_of(view.members + view.joining, name)
    late = replica.applying is not None and replica.step + 1 == view.step  # the commit before is being applied
    goes_on = view.keeps(Holding(epoch=replica.epoch, stage=replica.stage, step=replica.step + late))
    if replica.installed and (
        (view.epoch != replica.epoch and not goes_on) or (me is not None and me.stage != replica.stage)
    ):
        return Change.STATE_VOID
    if replica.installed and view.epoch != replica.epoch:
        return Change.EPOCH_KEEPS_STATE
    if before is None or (before.epoch, before.step) != (view.epoch, view.step):
        return Change.STEP
    return Change.FENCED if is_fenced(name, before, view) else Change.SAME_STEP


def is_fenced(name: Peer, before: View, view: View) -> bool:
    return member_of(before.members, name) is not None and member_of(view.members, name) is None


def member_of(members: tuple[Member, ...], peer: Peer) -> Member | None:
    return next((member for member in members if member.peer == peer), None)


def speaks_for(view: View, index: Index, peer: Peer, number: int) -> bool:
    """Whether that microbatch is that peer's, and has been without a break since the view of that number, in which it asked for it."""
    if owner_of(view, index) != peer:
        return False
    return number >= max(view.since, view.members[view.owners[index]].since)


def owner_of(view: View, index: Index) -> Peer | None:
    if index >= len(view.owners) or view.owners[index] >= len(view.members):
        return None
    return view.members[view.owners[index]].peer


def complain(replica: ReplicaState, peer: Peer, reason: str) -> list[Command]:
    """To the leader, who alone removes peers."""
    return [Send(replica.leader, Complaint(peer, reason[:TEXT]))] if replica.leader is not None else []


def drop(blobs: tuple[str, ...]) -> list[Command]:
    return [Drop(blobs)] if blobs else []
