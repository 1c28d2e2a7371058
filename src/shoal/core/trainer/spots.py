"""Which hops of my microbatches another replica computes again, and how much I trust each server. For trainer.py.

A hop is drawn after the one that went on with its result was answered: by then its result lies with another peer and can no longer be
changed. The draw is my own, from a random source that nobody else knows. A server whose hops have passed is checked less, down to a tenth
of the share of a new one; one of whose hops differed, or that found another's to differ, is checked each time until several have
passed. What follows from a difference is the leader's (core/leader/findings.py). docs/design/2026-11-24-spot-checks.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shoal.core.messages import Check, Checked, Command, Index, Peer, Send, Settings, Stage, View
from shoal.core.names import key_of
from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, Where
from shoal.core.trainer.routing import Chance

TRUSTED = 0.1  # of the share of a new server, that an old one's falls to
EARNED = 4  # checks that passed after which the share is half
MOST = 8  # who may have sent a tensor; with more nothing is found out
SUSPECT = -4  # checks that have to pass before a suspect is a new server again


class SpotChecks:
    def __init__(self, name: Peer, settings: Settings, rng: Chance) -> None:
        self._name, self._settings, self._rng = name, settings, rng
        self._passed: dict[str, int] = {}  # by the server's key
        self._asked: dict[tuple[Index, Stage, bool], tuple[Peer, Peer]] = {}  # who checks whom, in this step

    def forget(self) -> None:
        """The step is over."""
        self._asked.clear()

    def share(self, server: Peer) -> float:
        """Of that server's hops, how many are checked."""
        passed = self._passed.get(key_of(server), 0)
        if passed < 0:
            return 1.0
        return self._settings.spot_checks * max(TRUSTED, EARNED / (EARNED + passed))

    def draw(self, m: Microbatch, hop: Hop, view: View, stage_of: Mapping[Peer, Stage]) -> list[Command]:
        """`hop` was answered: shall the one whose result it went on with be checked?"""
        if not self._settings.spot_checks or m.index >= self._settings.microbatches:
            return []
        check = _before(m, hop, view, self._settings.stages - 1)
        if check is None or stage_of.get(check.of) != check.stage or check.of == self._name:
            return []
        others = [peer for peer, stage in stage_of.items() if stage == check.stage and peer != check.of]
        key = (check.index, check.stage, check.backward)
        if not others or key in self._asked or self._rng.random() >= self.share(check.of):
            return []
        peer = others[int(self._rng.random() * len(others))]
        self._asked[key] = peer, check.of
        last = self._settings.stages - 1
        tokens = m.x[0] if check.stage == 0 or (check.backward and check.stage == last) else ()
        return [Send(peer, check, tokens)]

    def on_checked(self, peer: Peer, checked: Checked) -> None:
        """One answer to each check. A difference is the fault of either: both are suspects."""
        if self._asked.get((checked.index, checked.stage, checked.backward)) != (peer, checked.of):
            return
        self._asked[checked.index, checked.stage, checked.backward] = "", ""
        if checked.outcome == "same":
            self._passed[key_of(checked.of)] = self._passed.get(key_of(checked.of), 0) + 1
        elif checked.outcome == "differs":
            for suspect in (peer, checked.of):
                self._passed[key_of(suspect)] = SUSPECT


def _before(m: Microbatch, hop: Hop, view: View, last: Stage) -> Check | None:
    """The check of the hop whose result `hop` has used: the forward of the stage below, or the backward of the stage above. None: there
    is none, or it is not known who may have sent what."""
    backward = hop.kind is Kind.BACKWARD and hop.stage < last
    stage = hop.stage + 1 if backward else hop.stage - 1
    made = m.g[hop.stage] if backward else m.x[hop.stage]
    if hop.kind is Kind.RECALL or stage < 0 or not made:
        return None
    others = _senders(m, stage, backward, made)
    if others is None or len(others) > MOST:
        return None
    check = Check(view.epoch, view.work, m.index, stage, view.number, backward, made[0], result_from=hop.peer)
    return replace(
        check,
        input_from=_maker(m.x[stage]) if stage > 0 else "",
        others=tuple(peer for peer in others if peer != made[0]),
        **_started_from(m, stage, last) if backward else {},
    )


def _started_from(m: Microbatch, stage: Stage, last: Stage) -> dict[str, Any]:
    """What a backward of that stage begins with: the gradient of its output, or the loss, which the last stage has reported."""
    return {"grad_from": _maker(m.g[stage])} if stage < last else {"loss": m.loss}


def _senders(m: Microbatch, stage: Stage, backward: bool, made: Where) -> Where | None:
    """Whoever may have sent the hop's inputs or its result to one of those who used them: a late forward's output may have come first,
    and what has not come is had from any that holds it. None: not all are known."""
    kind = Kind.BACKWARD if backward else Kind.FORWARD
    above = m.makers(Kind.BACKWARD, stage + 1) if backward else ()
    below, same = m.makers(Kind.FORWARD, stage - 1), m.makers(kind, stage)
    if above is None or below is None or same is None:
        return None
    held = (*(m.x[stage] if stage > 0 else ()), *(m.g[stage] if backward else ()), *made)
    return tuple(dict.fromkeys((*below, *above, *same, *held)))


def _maker(where: Where) -> Peer:
    return where[0] if where else ""
