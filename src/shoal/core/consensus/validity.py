"""Whether a view is valid, and whether it can follow the one before. No voter accepts any other, whoever proposes it.

The leader decides which view comes next. These are its bounds, which each voter checks against the view that it holds (register.py):
each peer is listed once, stages and owners exist, steps and epochs advance by one, a commit counts each microbatch once at each stage,
no invite has more peers than it admits, the founder stays, and the phase may follow (phases.py). Pure.
"""

from __future__ import annotations

import math
from collections import Counter

from shoal.core.allreduce import bounds
from shoal.core.consensus.phases import misplaced, transition
from shoal.core.messages import Committed, HeldOut, Phase, Rewards, Settings, Undoing, View
from shoal.core.names import invite_of, limit_of

NUMBERS = 1 << 32  # views and epochs: attempts are numbered from a view's number times 2^20, which a message must carry


def flaw(before: View | None, view: View, settings: Settings) -> str:
    """Why `view` cannot be, or cannot be the successor of `before`, in words; '' if it can."""
    if before is not None and view.founder != before.founder:
        return f"founder {view.founder or 'none'} after {before.founder or 'none'}"
    return _shape(view, settings) or ("" if before is None else _step(before, view, settings))


def skipped_in_a_row(view: View) -> int:
    """Steps that were skipped up to that view's."""
    last = view.last
    return last.skipped if last is not None and last.step == view.step - 1 else 0


def _shape(view: View, settings: Settings) -> str:
    """What is wrong with a view by itself."""
    return (
        _members(view, settings)
        or _numbers(view, settings)
        or misplaced(view, settings)
        or _measured(view, settings)
        or _last(view, settings)
    )


def _members(view: View, settings: Settings) -> str:
    everyone = view.members + view.joining
    names = [member.peer for member in everyone]
    if not view.members or len(set(names)) != len(names):
        return f"{len(view.members)} members, {len(set(names))} of {len(names)} names differ"
    stages = [member.stage for member in everyone + view.fenced] + [one.stage for one in view.rebuilt]
    if max(stages) >= settings.stages:
        return f"somebody serves a stage beyond the run's {settings.stages}"
    invites = list(map(invite_of, names))
    admitted = Counter(invites)
    for name, invite in zip(names, invites, strict=True):
        if admitted[invite] > limit_of(name):
            return f"{admitted[invite]} peers with invite {invite}, which admits {limit_of(name)}"
    return ""


def _numbers(view: View, settings: Settings) -> str:
    count = settings.count(view.work)
    if len(view.owners) not in (0, count) or max(view.owners, default=0) >= len(view.members):
        return f"{len(view.owners)} owners among {len(view.members)} members of {count} microbatches"
    if max(view.number, view.epoch) >= NUMBERS or view.step > settings.steps:
        return f"number {view.number}, epoch {view.epoch}, step {view.step} of {settings.steps}"
    return ""


def _measured(view: View, settings: Settings) -> str:
    """What is wrong with the held-out losses that a view names."""
    last, held = view.last, view.heldout
    if held is not None and not (0.0 <= held.best_loss <= held.loss < math.inf and held.step <= view.step):
        return f"the held-out loss {held} at step {view.step}"
    if last is None or last.heldout is None or (0.0 <= last.heldout < math.inf and settings.heldout_at(last.step)):
        return ""
    return f"a commit with the held-out loss {last.heldout}"


def _last(view: View, settings: Settings) -> str:
    last = view.last
    if last is None:
        return ""
    if last.skipped:
        return f"a skipped step with a commit: {last}" if last.groups or last.digests or last.norm else ""
    if len(last.groups) != settings.stages or len(last.digests) != settings.stages:
        return f"a commit of {len(last.groups)} groups and {len(last.digests)} digests at {settings.stages} stages"
    if not (math.isfinite(last.norm) and last.norm >= 0.0):
        return f"a commit with the norm {last.norm}"
    if last.counted > settings.microbatches * settings.tokens:
        return f"a commit of {last.counted} counted tokens of {settings.microbatches * settings.tokens}"
    if wrong := wrong_rewards(last.rewards) or wrong_rewards(last.heldout_rewards):
        return f"a commit with {wrong}"
    return ""


def wrong_rewards(rewards: Rewards | None) -> str:
    """What is wrong with them, in words; '' if nothing is."""
    if rewards is None or (0.0 <= rewards.accuracy <= 1.0 and math.isfinite(rewards.margin)):
        return ""
    return f"an accuracy of {rewards.accuracy:g} with a margin of {rewards.margin:g}"


def measured(before: HeldOut | None, step: int, loss: float) -> HeldOut:
    """With this loss of the parameters of version `step`. After a way back to a checkpoint, what was measured before stays."""
    if before is None:
        return HeldOut(step, loss, step, loss)
    if step <= before.step:
        return before
    if loss < before.best_loss:
        return HeldOut(step, loss, step, loss)
    return HeldOut(step, loss, before.best_step, before.best_loss, before.misses + 1)


def _heldout(before: View, view: View, settings: Settings) -> str:
    """What was measured changes with a commit that measured, and at the end."""
    expected, last = before.heldout, view.last
    if view.epoch == before.epoch and view.step > before.step and last is not None and last.heldout is not None:
        expected = measured(expected, last.step, last.heldout)
    elif view.heldout is not None and view.phase is Phase.FINISHED and settings.heldout_at(view.step):
        expected = measured(expected, view.step, view.heldout.loss)
    return (
        "" if view.heldout in (expected, before.heldout) else f"the held-out loss {view.heldout} after {before.heldout}"
    )


def _step(before: View, view: View, settings: Settings) -> str:
    if wrong := _heldout(before, view, settings):
        return wrong
    if view.number != before.number + 1:
        return f"number {view.number} after {before.number}"
    if view.epoch not in (before.epoch, before.epoch + 1) or before.finished:
        return f"epoch {view.epoch} after {before.epoch}{' of a finished run' if before.finished else ''}"
    if transition(before, view) is None:
        epoch = " of a new epoch" if view.epoch > before.epoch else ""
        return f"{view.phase.value} at step {view.step}{epoch} after {before.phase.value} at step {before.step}"
    if wrong := _counted(before, view, settings):
        return wrong
    if view.epoch > before.epoch:
        return ""
    if view.step == before.step:
        return "" if view.last == before.last else "another commit of the same step"
    last = view.last
    if last is None or last.step != before.step:
        return f"step {view.step} after {before.step}, last committed {last.step if last is not None else 'none'}"
    return _commit(before, last, settings)


def _undone(before: View, view: View) -> str:
    """Steps are counted as undone for an eviction only where a new epoch goes back by them."""
    old, new = before.undoing or Undoing(), view.undoing or Undoing()
    if (new.times, new.steps, new.epoch) == (old.times, old.steps, old.epoch):
        return ""
    back = before.step - view.step
    if (new.times, new.steps, new.epoch) == (old.times + 1, old.steps + back, view.epoch) and view.epoch > before.epoch:
        return ""
    return f"{new.steps} steps undone in {new.times} times after {old.steps} in {old.times}, from step {before.step} to {view.step}"


def _counted(before: View, view: View, settings: Settings) -> str:
    return _undone(before, view) or _parts(before, view, settings)


def _parts(before: View, view: View, settings: Settings) -> str:
    commits = view.epoch == before.epoch and view.step > before.step and view.last is not None and not view.last.skipped
    return bounds.flaw(before.part_norms, view.part_norms, commits, settings)


def _commit(before: View, last: Committed, settings: Settings) -> str:
    if last.skipped:
        in_a_row = skipped_in_a_row(before) + 1
        return "" if last.skipped == in_a_row else f"{last.skipped} steps are skipped in a row, not {in_a_row}"
    if last.kept and (len(last.kept) != settings.stages or max(last.kept) > last.round):
        return f"a commit of round {last.round} whose exchanges began in rounds {last.kept}"
    present = {member.peer: member.stage for member in before.members + before.joining}
    for stage, group in enumerate(last.groups):
        others = [share.peer for share in group if present.get(share.peer) != stage]
        if others:
            return f"{others[0]} is averaged at stage {stage}, which it does not serve"
        indices = [index for share in group for index in share.indices]
        if len(indices) != settings.microbatches or set(indices) != set(range(settings.microbatches)):
            return f"stage {stage} commits {len(indices)} microbatches, {len(set(indices))} different, of {settings.microbatches}"
    return ""
