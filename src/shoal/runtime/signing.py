"""Signatures under what peers agree on (core/consensus/certificates.py): made for what this peer sends, checked in what it is sent.

An Override needs the signature of the run's authority.
"""

from __future__ import annotations

import functools
from typing import Protocol

from shoal.core.consensus import certificates
from shoal.core.messages import Message, Override, Peer, Signed
from shoal.core.names import key_of
from shoal.transport.identity.identity import Identity, key_id, verify
from shoal.transport.identity.invite import signed_by

REMEMBERED = 8192  # signatures known to hold: the same ones come with each repair


class Signatures(Protocol):
    """What a node needs."""

    def seal(self, to: Peer, message: Message) -> Message:
        """What is sent instead: with my signatures."""

    def check(self, source: Peer, message: Message) -> Message | None:
        """What the machine is handed instead: with the signatures that hold. None: nothing."""


class Signing:
    """Of one peer in one run: signatures made in another are worth nothing here."""

    def __init__(self, identity: Identity, run: str) -> None:
        self._identity, self._run = identity, run
        self._purpose = f"agree {run}"
        self._holds = functools.lru_cache(REMEMBERED)(self._verified)

    def seal(self, to: Peer, message: Message) -> Message:
        return certificates.seal(self._identity.name, to, message, self._sign)

    def check(self, source: Peer, message: Message) -> Message | None:
        if isinstance(message, Override):
            return message if signed_by(message, self._run) else None
        return certificates.checked(self._identity.name, source, message, self._holds)

    def _sign(self, data: bytes) -> Signed:
        return Signed(self._identity.name, self._identity.public, self._identity.sign(self._purpose, data))

    def _verified(self, one: Signed, data: bytes) -> bool:
        if not one.signature or key_id(one.key) != key_of(one.peer):
            return False
        return verify(one.key, self._purpose, data, one.signature)
