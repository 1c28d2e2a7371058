"""Signs this peer's votes and acceptances, and verifies those of others (core/consensus/certificates.py).

An Override needs the signature of the run's authority.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from shoal.core.consensus import certificates
from shoal.core.messages import Message, Override, Peer, Signed
from shoal.core.names import key_of
from shoal.transport.identity.identity import Identity, key_id, verify
from shoal.transport.identity.invite import signed_by

REMEMBERED = 8192  # verified signatures; the same ones arrive with each repetition


class Signatures(Protocol):
    """The node's interface to signatures."""

    def seal(self, to: Peer, message: Message) -> Message:
        """The message with this peer's signatures."""

    def check(self, source: Peer, message: Message) -> Message | None:
        """The message with the valid signatures only; None: drop it."""


class Signing:
    """One peer in one run: signatures of other runs are invalid here."""

    def __init__(self, identity: Identity, run: str) -> None:
        self._identity, self._run = identity, run
        self._purpose = f"agree {run}"
        self._is_valid = functools.lru_cache(REMEMBERED)(self._verify)

    def seal(self, to: Peer, message: Message) -> Message:
        return certificates.seal(self._identity.name, to, message, self._sign)

    def check(self, source: Peer, message: Message) -> Message | None:
        if isinstance(message, Override):
            return message if signed_by(message, self._run) else None
        return certificates.checked(self._identity.name, source, message, self._is_valid)

    @staticmethod
    def verifier(run: str) -> Callable[[Signed, bytes], bool]:
        """Says of a signature whether it is that peer's, under that data, in the run with that id."""
        return functools.partial(_valid, f"agree {run}")

    def _sign(self, data: bytes) -> Signed:
        return Signed(self._identity.name, self._identity.public, self._identity.sign(self._purpose, data))

    def _verify(self, one: Signed, data: bytes) -> bool:
        return _valid(self._purpose, one, data)


def _valid(purpose: str, one: Signed, data: bytes) -> bool:
    if not one.signature or key_id(one.key) != key_of(one.peer):
        return False
    return verify(one.key, purpose, data, one.signature)
