"""Which phase of a View may follow which: one table, for the leader that makes views, voters that accept them, checkers, and docs/view.md.

A view replaces another in the same epoch, at the same step or, with a commit, at the next; or it begins a new epoch, which makes
everything of the one before void, at the same step or back at a checkpoint's. The operator's override (override.py) stands outside of
the table: it begins with GATHERING, whatever was before.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from shoal.core.messages import Phase, Settings, View


class Step(Enum):
    """The step of a view, compared with that of the view before."""

    SAME = "same step"
    NEXT = "next step"
    SAME_OR_EARLIER = "same or an earlier step"


class Transition(msgspec.Struct, frozen=True):
    """`reason`: what such a view is for."""

    before: Phase
    after: Phase
    step: Step
    reason: str
    new_epoch: bool = False

    def fits(self, before: View, view: View) -> bool:
        """This is the transition from `before` to `view`."""
        if (before.phase, view.phase) != (self.before, self.after) or (view.epoch != before.epoch) != self.new_epoch:
            return False
        match self.step:
            case Step.SAME:
                return view.step == before.step
            case Step.NEXT:
                return view.step == before.step + 1
            case Step.SAME_OR_EARLIER:
                return view.step <= before.step


_BACK = "a stage lost its last replica, or what an evicted peer contributed is undone"
_MEMBERS = "peers join, leave, move or are evicted"
TRANSITIONS = (
    Transition(Phase.GATHERING, Phase.GATHERING, Step.SAME, _MEMBERS),
    Transition(Phase.GATHERING, Phase.TRAINING, Step.SAME, "every stage has a peer that holds its state"),
    Transition(Phase.GATHERING, Phase.SAVING, Step.SAME, "every stage is held, but no step is left"),
    Transition(Phase.GATHERING, Phase.FINISHED, Step.SAME, "no step is left, and no checkpoint to write"),
    Transition(Phase.GATHERING, Phase.FAILED, Step.SAME, "a stage can be loaded from no checkpoint of this session"),
    Transition(Phase.TRAINING, Phase.FAILED, Step.SAME, "training diverges: results are not finite"),
    Transition(Phase.REOPENED, Phase.FAILED, Step.SAME, "training diverges: results are not finite"),
    Transition(Phase.TRAINING, Phase.TRAINING, Step.SAME, _MEMBERS + ", or a microbatch gets another owner"),
    Transition(Phase.TRAINING, Phase.TRAINING, Step.NEXT, "the step is committed"),
    Transition(Phase.TRAINING, Phase.OVERLAPPING, Step.SAME, "the step's books are complete: the next step begins"),
    Transition(Phase.TRAINING, Phase.SAVING, Step.NEXT, "the last step is committed"),
    Transition(Phase.TRAINING, Phase.FINISHED, Step.NEXT, "the last step is committed, nothing is saved or measured"),
    Transition(Phase.OVERLAPPING, Phase.OVERLAPPING, Step.SAME, _MEMBERS + ", or a microbatch gets another owner"),
    Transition(Phase.OVERLAPPING, Phase.TRAINING, Step.NEXT, "the averaged step is committed"),
    Transition(Phase.OVERLAPPING, Phase.REOPENED, Step.SAME, "a member with books of the averaged step is removed"),
    Transition(Phase.REOPENED, Phase.REOPENED, Step.SAME, _MEMBERS + ", or a microbatch gets another owner"),
    Transition(Phase.REOPENED, Phase.OVERLAPPING, Step.SAME, "the step's books are complete again"),
    Transition(Phase.SAVING, Phase.SAVING, Step.SAME, _MEMBERS),
    Transition(
        Phase.SAVING,
        Phase.FINISHED,
        Step.SAME,
        "the checkpoint is published, or cannot be; what is held out is measured",
    ),
    *(
        Transition(before, Phase.GATHERING, Step.SAME_OR_EARLIER, _BACK, new_epoch=True)
        for before in Phase
        if before not in (Phase.FINISHED, Phase.FAILED)
    ),
    *(
        Transition(before, after, Step.SAME, "a replica comes back with a lost stage's state", new_epoch=True)
        for before, after in (
            (Phase.TRAINING, Phase.TRAINING),
            (Phase.OVERLAPPING, Phase.TRAINING),
            (Phase.REOPENED, Phase.TRAINING),
            (Phase.SAVING, Phase.SAVING),
        )
    ),
)
_BY_PHASES: dict[tuple[Phase, Phase], list[Transition]] = {}
for _one in TRANSITIONS:
    _BY_PHASES.setdefault((_one.before, _one.after), []).append(_one)


def transition(before: View, view: View) -> Transition | None:
    """How `view` follows `before`; None if it cannot."""
    return next((one for one in _BY_PHASES.get((before.phase, view.phase), ()) if one.fits(before, view)), None)


def ended(view: View, settings: Settings) -> bool:
    """No further step begins: all are committed, or the held-out loss has not become better for long enough."""
    heldout = view.heldout
    stops = settings.patience > 0 and heldout is not None and heldout.misses >= settings.patience
    return view.step >= settings.steps or stops


def misplaced(view: View, settings: Settings) -> str:
    """Why a view cannot have its phase at its step, in words; '' if it can."""
    if view.begun and not settings.staleness:
        return f"{view.phase.value} without delayed updates"
    if view.phase in (Phase.SAVING, Phase.FINISHED) and not ended(view, settings):
        return f"{view.phase.value} at step {view.step} of {settings.steps}"
    if view.phase in (Phase.TRAINING, Phase.OVERLAPPING, Phase.REOPENED) and view.step >= settings.steps:
        return f"{view.phase.value} step {view.step} of {settings.steps}"
    return ""
