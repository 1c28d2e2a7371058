"""How this peer is reached, and why it is not let into the run: for a joiner whose user would otherwise wait in silence.

Other peers say, in their handshakes, from which address this peer's calls arrive. One that is none of this machine's own is a
router's: it is announced, too, as a forwarded port is reached there. For passes.py, which sees every message and every failure; the words
are for people.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Protocol

import msgspec

from shoal.core.messages import Peer
from shoal.transport.directory.records import MAX_ADDRESSES, PeerRecord

FAILURES = 16  # remembered
PATIENCE_S = 4.0  # before a joiner is told why it waits


class Announced(Protocol):
    """A directory, as far as needed here: this peer's record, which is announced."""

    own: PeerRecord


class Entry:
    def __init__(self, directory: Announced, run: Sequence[str]) -> None:
        """`run`: the invite's addresses."""
        self.heard = False  # some peer has sent something
        self._failures: dict[Peer, str] = {}
        self._directory, self._run = directory, run
        self._outside = ""  # a router's address that was announced

    def failed(self, peer: Peer, reason: str) -> None:
        """Peer is not reached from here."""
        self._failures[peer] = reason
        if len(self._failures) > FAILURES:
            del self._failures[next(iter(self._failures))]

    def see(self, host: str) -> bool:
        """This peer's calls arrive from `host`. True: it was not announced before."""
        own = self._directory.own
        if not host or host in own.hosts:
            return False
        try:
            if ipaddress.ip_address(host).is_loopback:
                return False
        except ValueError:
            return False
        kept = [each for each in own.addresses if each != self._outside]
        self._outside = host
        self._directory.own = msgspec.structs.replace(own, addresses=(host, *kept)[:MAX_ADDRESSES])
        return True

    def words(self, known: Sequence[Peer]) -> str:
        """Why this peer is not let in yet, and what to do. `known`: peers of the run that the directory lists."""
        own, run = self._directory.own, ", ".join(self._run)
        if self.heard:
            return f"{_peers(known)} found and answer, but no leader admits this one yet: is a majority of the run up?"
        if not known:
            return f"no peer of the run answers this invite at {run}: it may be revoked or over; ask for a new one"
        if self._failures:
            peer, reason = next(iter(self._failures.items()))
            return f"{peer} of the run is found, but cannot be reached from here ({reason}): let that machine's firewall open its port"
        port = f"TCP port {own.port}" if own.port else "its port"
        if self._outside:
            return (
                f"{_peers(known)} reached from here, but their answers do not arrive: they see this machine as"
                f" {self._outside}, a router's address, and it has {own.host}. Forward {port} to this machine (network.port fixes the"
                " number), or let the run use network.transport=auto, which needs no open port"
            )
        return (
            f"{_peers(known)} reached from here, but their answers do not arrive at {own.host}: open {port} in this"
            " machine's firewall (network.port fixes the number)"
        )


def _peers(known: Sequence[Peer]) -> str:
    return f"{len(known)} peer{'s' if len(known) > 1 else ''} of the run {'are' if len(known) > 1 else 'is'}"
