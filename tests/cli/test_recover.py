"""What `shoal recover` says of survivors that are too few."""

from __future__ import annotations

from typing import Any

from shoal.cli.recover import Desk
from shoal.core.messages import Member, View


def unserved(views: list[View], epoch: int, stages: int = 2) -> str:
    nothing: Any = None
    return Desk(nothing, nothing, stages)._unserved(views, epoch)


def test_survivors_that_cannot_serve_every_stage_say_at_once_which_one_waits_for_a_peer() -> None:
    alone = View(number=9, step=4, members=(Member("a", 0),), epoch=3)
    assert unserved([alone], 3) == (
        "no peer is left to serve stage 1 (of 2): training goes on when one more joins, on any machine"
    )
    assert unserved([], 3) == "", "nobody has answered"
    assert unserved([alone], 4) == "", "the override was not received yet"
    two = View(number=9, step=4, members=(Member("a", 0),), joining=(Member("b", 0),), epoch=3)
    assert unserved([two], 3) == "", "one of them moves"
