"""Keeps passes current at one peer: spreads the authority's list of passes and shuts out revoked peers.

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
from shoal.runtime.entry import PATIENCE_S as ENTRY_S
from shoal.runtime.entry import Entry
from shoal.transport.base import Incoming, Transport
from shoal.transport.identity.passes import Grant, Membership, PassStatus, date

log = logging.getLogger(__name__)

SPREAD_S = 5.0  # between two comparisons with another peer
FANOUT = 16  # peers that get a new list at once: 10,000 peers have it after four rounds
RESEND_S = 5.0  # shortest time between two sends of the list to a peer, whatever it requests
REFUSES = "it refuses: "  # the prefix of a refusal in handshake.py
REFUSALS = 16  # reported, since other peers choose the text
MAX_PEERS = 4096  # peers remembered
WARN = 0.2  # of a pass's lifetime before its end: when the user is warned
PATIENCE_S = 30.0  # that a joiner with an expired invite waits for a renewal


class Notices:
    """What the user is told of passes, each thing once; `show` is called with the text."""

    def __init__(self) -> None:
        self.show: Callable[[str], None] = log.warning
        self._refusals: set[str] = set()  # as shown
        self._waits_for = ""  # why this joiner is not let in, as shown last
        self._warned = 0  # expiry of the pass that the user was warned of

    def refused(self, peer: Peer, reason: str) -> None:
        """That peer refuses this one."""
        if reason not in self._refusals and len(self._refusals) < REFUSALS:
            self._refusals.add(reason)
            self.show(f"{peer}: {reason}")

    def waits(self, reason: str) -> None:
        """This joiner is not let in; where a peer refuses it, that reason is enough."""
        if not self._refusals and reason != self._waits_for:
            self._waits_for = reason
            self.show(reason)

    def expires(self, grant: Grant, remaining_s: float) -> None:
        """This peer's pass ends soon, or has ended."""
        if self._warned == grant.expires:
            return
        self._warned = grant.expires
        when = f"ends in {units.duration(remaining_s)}" if remaining_s > 0 else "is over"
        self.show(
            f"this peer's pass {when} ({date(grant.expires)}): from then on it can make no new connections. Passes are renewed by "
            "`shoal run` on the machine that founded the run, for whoever takes part; where that does not run any more: "
            "`shoal invite CONFIG --renew` there"
        )


class Gate:
    """`known`: reachable peers. `changed` is called when passes changed, `refused` when this peer is excluded from the run; both, and
    `notices`, in the loop's thread."""

    def __init__(self, transport: Transport, membership: Membership, entry: Entry | None = None) -> None:
        self.membership, self.entry = membership, entry
        self.known: Callable[[], Iterable[Peer]] = tuple
        self.changed: Callable[[], None] = lambda: None
        self.notices = Notices()
        self.refused: Callable[[str], None] = log.error
        self.inside: Callable[[], bool] = lambda: True  # whether this peer is in a view
        self._transport = transport
        self._rng = Random(membership.name)
        self._sent_at: dict[Peer, float] = {}  # -> time of the last send of the list
        self._spread_version = 0  # the version sent to others
        self._invalid_senders: dict[Peer, None] = {}  # they sent a list that is none; later ones are not checked
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------------------------------------- messages

    def takes(self, incoming: Incoming) -> bool:
        """Handle a message about passes, or from a revoked peer; False: it is another message."""
        peer, message = incoming.peer, incoming.message
        if self.entry is not None:
            self.entry.heard = True
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
                if peer not in self._invalid_senders:
                    self.hear(message.data, peer)
            case _:
                if peer not in self._sent_at:
                    self._note_sent(peer, float("-inf"))
                    if version:
                        self._transport.send(peer, PassesRequest(version))
                return False
        return True

    def lost(self, peer: Peer, reason: str) -> None:
        """That peer is unreachable. If it refuses this peer, report the reason, once each."""
        if self.entry is not None:
            self.entry.failed(peer, reason)
        if reason.startswith(REFUSES):
            self.notices.refused(peer, reason)

    def hear(self, data: bytes, peer: Peer = "") -> None:
        """Take a list from a peer or the launcher."""
        try:
            self.membership.take_list(data)
        except ValueError as error:
            log.warning("%s sent an invalid list of passes: %s", peer or "the launcher", error)
            self._invalid_senders[peer] = None
            if len(self._invalid_senders) > MAX_PEERS:
                del self._invalid_senders[next(iter(self._invalid_senders))]

    def _answer(self, peer: Peer, version: int) -> None:
        if version < self.membership.standing.version:
            self._send(peer)
        else:
            self._transport.send(peer, Passes(self.membership.standing.version))

    def _send(self, peer: Peer) -> None:
        """Send the list, unless it was sent there less than RESEND_S ago."""
        now = time.monotonic()
        if now - self._sent_at.get(peer, float("-inf")) >= RESEND_S:
            self._note_sent(peer, now)
            standing = self.membership.standing
            self._transport.send(peer, Passes(standing.version, standing.data))

    def _note_sent(self, peer: Peer, at: float) -> None:
        self._sent_at.pop(peer, None)
        self._sent_at[peer] = at
        if len(self._sent_at) > MAX_PEERS:
            del self._sent_at[next(iter(self._sent_at))]

    # -------------------------------------------------------------------------------------------------- spreading

    async def serve(self) -> None:
        """Run until cancelled."""
        self._loop = asyncio.get_running_loop()
        self.membership.on_change = self._on_change
        if self.membership.standing != PassStatus():
            self._take_effect()
        began = time.monotonic()
        while True:
            self._check_own_pass(time.monotonic() - began)
            self._check_entry(time.monotonic() - began)
            version = self.membership.standing.version
            for peer in self._sample(1) if version else ():
                self._transport.send(peer, PassesRequest(version))
            await asyncio.sleep(SPREAD_S if self.inside() else ENTRY_S)

    def _check_entry(self, running_s: float) -> None:
        """Announce the address that others see, and say why this joiner is not let in."""
        entry = self.entry
        if entry is None:
            return
        if entry.see(self.membership.seen):
            self.changed()
        if running_s >= ENTRY_S and not self.inside():
            self.notices.waits(entry.words([peer for peer in self.known() if peer != self.membership.name]))

    def _on_change(self) -> None:
        """Called in any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._take_effect)
        except RuntimeError:  # the loop is closed: the node has finished
            pass

    def _take_effect(self) -> None:
        membership = self.membership
        if (revocation := membership.revoked(membership.name)) is not None:
            return self.refused(f"this peer is not welcome any more: {revocation.words}; ask for a new invite")
        if membership.standing.version > self._spread_version:
            self._spread_version = membership.standing.version
            recipients = self._sample(FANOUT)
            self._sent_at = {peer: float("-inf") for peer in self._sent_at}  # they do not have this list
            for peer in recipients:
                self._send(peer)
        for peer in dict.fromkeys((*self.known(), *self._sent_at)):
            if membership.revoked(peer) is not None:
                self._transport.forget(peer)
                self._sent_at.pop(peer, None)
        self.changed()

    def _sample(self, count: int) -> list[Peer]:
        others = [peer for peer in dict.fromkeys(self.known()) if peer != self.membership.name]
        others = [peer for peer in others if self.membership.revoked(peer) is None]
        return self._rng.sample(others, min(count, len(others)))

    # ------------------------------------------------------------------------------------------------- my own pass

    def _check_own_pass(self, running_s: float) -> None:
        grant = self.membership.grant
        if grant is None:
            return
        remaining_s = grant.expires - self.membership.clock()
        if self.membership.clock() >= grant.ends_s and running_s >= PATIENCE_S and not self.inside():
            self.refused(
                f"the invite is expired at {date(grant.expires)}, and no peer has a renewal of it; ask for a new invite"
            )
        elif remaining_s < WARN * grant.lifetime_s:
            self.notices.expires(grant, remaining_s)
