"""Delayed updates, as the views tell them: the next step is computed while one is averaged, and every gradient is one step late.

With Settings.staleness = 1 step s is computed with version s - 1 of the parameters, so that step s + 1 needs nothing of step s.

    View(step s)                    s is computed
    View(step s, ahead)             the books of s are whole and closed: s is averaged, s + 1 is computed
    View(step s + 1)                s is committed; s + 1 is computed, as before
    View(step s, begun, not ahead)  a death took books of s: what is missing of it is computed again, s + 1 waits

For leader.py, which says when. What replicas do with the books of two steps is hops.py's, the tensors are the driver's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.messages import Index, View


def opened(view: View, owners: tuple[Index, ...], microbatches: int) -> View:
    """The books of the view's step are closed; the next step is computed, or goes on."""
    account = view.account
    if not view.begun:
        account = msgspec.structs.replace(account, issued=account.issued + microbatches)
    return msgspec.structs.replace(
        view,
        number=view.number + 1,
        ahead=True,
        begun=True,
        since=view.number + 1,
        owners=owners,
        account=account,
        reason=f"step {view.step} is averaged, step {view.step + 1} {'goes on' if view.begun else 'begins'}",
    )


def opened_again(view: View, owners: tuple[Index, ...]) -> View:
    """The same view, but the step that was being averaged is computed again, before all else."""
    reason = f"{view.reason}; step {view.step} is opened again"[:2000]
    return msgspec.structs.replace(view, ahead=False, since=view.number, owners=owners, reason=reason)


def nothing_ahead(number: int) -> dict[str, Any]:
    """Of view `number`, which makes all books void: nothing is computed ahead of its step."""
    return {"ahead": False, "begun": False, "since": number}
