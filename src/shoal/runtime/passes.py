"""One peer's part in keeping passes current: the authority's list reaches everybody, and whoever is on it as revoked is shut out.

Called by its node before the machine hears of a message. A list that is news goes at once to others, and every SPREAD_S to one peer more is
compared with mine, so that a list crosses a swarm in seconds and nobody is missed for good: also whoever was away, and newcomers, who are
asked when they first speak. What is revoked is decided by the list alone (transport/identity/passes.py), the same
everywhere; who is removed from
the View is core's decision (Barred).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from random import Random

from shoal import units
from shoal.core.messages import Passes, PassesRequest, Peer
from shoal.transport.base import Incoming, Transport
from shoal.transport.identity.passes import Membership, PassStatus, date

log = logging.getLogger(__name__)

SPREAD_S = 5.0  # between two comparisons with somebody
FANOUT = 16  # who are told of news at once; with so many each, 10,000 peers have heard after four rounds
AGAIN_S = 5.0  # the same list goes to the same peer no sooner: nobody can have it sent for the asking
REFUSES = "it refuses: "  # as handshake.py begins another's refusal
REFUSALS = 16  # told of, in words that others choose
MET = 4096  # peers remembered as met
WARN = 0.2  # of a pass's lifetime: how long before its end people are told
PATIENCE_S = 30.0  # for somebody to hand over a renewal to a newcomer whose invite is over


class Gate:
    """`known`: peers that I could talk to. `changed` is called when passes changed, `tell` with words for people, `refused` when this
    peer has no place in the run any more; all in the loop's thread."""

    def __init__(self, transport: Transport, membership: Membership) -> None:
        self.membership = membership
        self.known: Callable[[], Iterable[Peer]] = tuple
        self.changed: Callable[[], None] = lambda: None
        self.tell: Callable[[str], None] = log.warning
        self.refused: Callable[[str], None] = log.error
        self.inside: Callable[[], bool] = lambda: True  # in a view, as far as I know
        self._transport = transport
        self._rng = Random(membership.name)
        self._met: dict[Peer, float] = {}  # -> when the list was sent there last
        self._spread = 0  # the version that others were told of
        self._warned = 0  # the end of the pass that was warned of
        self._liars: dict[
            Peer, None
        ] = {}  # who has told a list that is none: what they tell of it is not looked at again
        self._refusals: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------------------------------------- being told

    def takes(self, incoming: Incoming) -> bool:
        """Whether this was about passes, or from nobody who counts; then it is dealt with."""
        peer, message = incoming.peer, incoming.message
        if self.membership.revoked(peer) is not None:
            self._transport.forget(peer)
            return True
        version = self.membership.standing.version
        match message:
            case PassesRequest():
                self._answer(peer, message.version)
            case Passes(data=b""):
                if message.version < version:
                    self._send(peer)
            case Passes():
                if peer not in self._liars:
                    self.hear(message.data, peer)
            case _:
                if peer not in self._met:
                    self._meet(peer, float("-inf"))
                    if version:
                        self._transport.send(peer, PassesRequest(version))
                return False
        return True

    def lost(self, peer: Peer, reason: str) -> None:
        """That peer cannot be reached: when it is because it refuses me, people are told why, once for each reason."""
        if reason.startswith(REFUSES) and reason not in self._refusals and len(self._refusals) < REFUSALS:
            self._refusals.add(reason)
            self.tell(f"{peer}: {reason}")

    def hear(self, data: bytes, peer: Peer = "") -> None:
        """A list from a peer, or from the launcher."""
        try:
            self.membership.take_list(data)
        except ValueError as error:
            log.warning("%s tells %s", peer or "the launcher", error)
            self._liars[peer] = None
            if len(self._liars) > MET:
                del self._liars[next(iter(self._liars))]

    def _answer(self, peer: Peer, version: int) -> None:
        if version < self.membership.standing.version:
            self._send(peer)
        else:
            self._transport.send(peer, Passes(self.membership.standing.version))

    def _send(self, peer: Peer) -> None:
        """The list, unless it was sent there just now."""
        now = time.monotonic()
        if now - self._met.get(peer, float("-inf")) >= AGAIN_S:
            self._meet(peer, now)
            standing = self.membership.standing
            self._transport.send(peer, Passes(standing.version, standing.data))

    def _meet(self, peer: Peer, at: float) -> None:
        self._met.pop(peer, None)
        self._met[peer] = at
        if len(self._met) > MET:
            del self._met[next(iter(self._met))]

    # -------------------------------------------------------------------------------------------------- spreading

    async def serve(self) -> None:
        """For ever."""
        self._loop = asyncio.get_running_loop()
        self.membership.on_change = self._on_change
        if self.membership.standing != PassStatus():
            self._take_effect()
        began = time.monotonic()
        while True:
            self._look_at_mine(time.monotonic() - began)
            version = self.membership.standing.version
            for peer in self._some(1) if version else ():
                self._transport.send(peer, PassesRequest(version))
            await asyncio.sleep(SPREAD_S)

    def _on_change(self) -> None:
        """In any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._take_effect)
        except RuntimeError:  # the loop is closed: this peer's part is over
            pass

    def _take_effect(self) -> None:
        membership = self.membership
        if (mine := membership.revoked(membership.name)) is not None:
            return self.refused(f"this peer is not welcome any more: {mine.words}; ask for a new invite")
        if membership.standing.version > self._spread:
            self._spread = membership.standing.version
            told = self._some(FANOUT)
            self._met = {peer: float("-inf") for peer in self._met}  # this one they have not had
            for peer in told:
                self._send(peer)
        for peer in dict.fromkeys((*self.known(), *self._met)):
            if membership.revoked(peer) is not None:
                self._transport.forget(peer)
                self._met.pop(peer, None)
        self.changed()

    def _some(self, count: int) -> list[Peer]:
        others = [peer for peer in dict.fromkeys(self.known()) if peer != self.membership.name]
        others = [peer for peer in others if self.membership.revoked(peer) is None]
        return self._rng.sample(others, min(count, len(others)))

    # ------------------------------------------------------------------------------------------------- my own pass

    def _look_at_mine(self, running_s: float) -> None:
        grant = self.membership.grant
        if grant is None:
            return
        left_s = grant.expires - self.membership.clock()
        if self.membership.clock() >= grant.ends_s and running_s >= PATIENCE_S and not self.inside():
            self.refused(
                f"the invite is expired at {date(grant.expires)}, and no peer has a renewal of it; ask for a new invite"
            )
        elif left_s < WARN * grant.lifetime_s and self._warned != grant.expires:
            self._warned = grant.expires
            when = f"ends in {units.duration(left_s)}" if left_s > 0 else "is over"
            self.tell(
                f"this peer's pass {when} ({date(grant.expires)}): from then on it can make no new connections. Passes are renewed by "
                "`shoal run` on the machine that founded the run, for whoever takes part; where that does not run any more: "
                "`shoal invite CONFIG --renew` there"
            )
