"""A leader that lies: what it proposes and sends instead of what an honest machine would. For strangers.py.

What it proposes is changed before it accepts it itself, so that it signs its own lie as any leader would.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.core import messages as m
from shoal.core.leader.rules.recovery import gone_back
from shoal.core.names import key_of
from shoal.core.peer import PeerMachine
from shoal.sim.faults.lies import FALSE

BACK = 4  # steps after which it goes back again
replace = msgspec.structs.replace


class LyingLeader:
    """`acting`: it lies now. `count` is told of each lie."""

    def __init__(
        self, acts: tuple[str, ...], machine: PeerMachine, acting: Callable[[], bool], count: Callable[[str], None]
    ) -> None:
        self._acts, self._machine, self._acting, self._count = acts, machine, acting, count
        self._lies: dict[str, Callable[[m.View, m.View], m.View]] = {
            "pad": self._pad, "hoard": self._hoard, "forge": self._forge, "rewind": self._rewind
        }  # fmt: skip
        register = machine.register
        self._propose = register.propose
        register.propose = self._proposed  # type: ignore[method-assign]

    def sends(self, target: m.Peer, message: m.Message) -> m.Message | None:
        """What leaves instead; None: nothing."""
        proposal = isinstance(message, m.Propose) and message.proof is None
        if not (self._acting() and self._machine.leading):
            return message
        if "stall" in self._acts and (proposal or isinstance(message, m.Round)):
            self._count("stall")
            return None
        if "fork" in self._acts and proposal and hash_of(target) % 3:
            assert isinstance(message, m.Propose)
            self._count("fork")
            other = replace(message.entry.view, reason="another view for you")
            return replace(message, entry=replace(message.entry, view=other))
        return message

    def _proposed(self, view: m.View, now: float) -> list[m.Command]:
        before = self._machine.register.agreed
        if before is not None and self._acting():
            for act in self._acts:
                lie = self._lies.get(act)
                if lie is not None and (changed := lie(before, view)) != view:
                    self._count(act)
                    view = changed
        return self._propose(view, now)

    def _commits(self, before: m.View, view: m.View) -> bool:
        return (
            view.epoch == before.epoch and view.step > before.step and view.last is not None and bool(view.last.groups)
        )

    def _pad(self, before: m.View, view: m.View) -> m.View:
        """Its own stage's microbatches are all its own."""
        last, me = view.last, self._machine.name
        if not self._commits(before, view) or last is None:
            return view
        groups = []
        for group in last.groups:
            if me in [share.peer for share in group]:
                every = tuple(index for share in group for index in share.indices)
                group = tuple(replace(share, indices=every if share.peer == me else ()) for share in group)
            groups.append(group)
        return replace(view, last=replace(last, groups=tuple(groups)))

    def _hoard(self, before: m.View, view: m.View) -> m.View:
        at = next((at for at, one in enumerate(view.members) if one.peer == self._machine.name), None)
        if at is None or not self._commits(before, view):
            return view
        return replace(view, owners=(at,) * len(view.owners))

    def _forge(self, before: m.View, view: m.View) -> m.View:
        last = view.last
        if not self._commits(before, view) or last is None:
            return view
        return replace(view, last=replace(last, digests=(FALSE,) * len(last.digests)))

    def _rewind(self, before: m.View, view: m.View) -> m.View:
        if not self._commits(before, view) or view.step % BACK:
            return view
        return gone_back(before, before.saved, "all go back, says its leader", self._machine.settings)


def hash_of(peer: m.Peer) -> int:
    return sum(key_of(peer).encode())
