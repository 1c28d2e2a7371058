"""What a peer's name says: whose key it is, by which invite it came, and how many peers that invite admits at a time.

A name is `<key id>.<incarnation>.<invite id>.<limit>`. The transport compares all of it with the pass before anything is heard
from that peer (transport/identity/invite.py), so that core may believe it: nobody can name another's key or invite, nor a higher limit.
Names in any other form (`p3`, `p3.1`: tests and simulations) stand for a peer that has an invite of its own, without a limit.

Pure, total and cheap; for whoever counts or admits peers by key or by invite.
"""

from __future__ import annotations

import functools

from shoal.core.messages import Peer

UNLIMITED = 1 << 20  # peers; more than any run has
FIELDS = 4
THIRD = (
    3  # peers with new keys together get every third microbatch at most, where others are there (Settings.probation)
)


@functools.lru_cache(1 << 16)
def _parts(peer: Peer) -> tuple[str, str, int]:
    fields = peer.split(".")
    if len(fields) == FIELDS and all(fields) and fields[3].isascii() and fields[3].isdigit():
        return fields[0], fields[2], min(int(fields[3][:8]), UNLIMITED)
    key = peer.rpartition(".")[0] or peer
    return key, key, UNLIMITED


def key_of(peer: Peer) -> str:
    """Whose key this is: the same for every process (incarnation) that holds it. Of a plain name such as `p3.1` the part before
    the last dot (`p3`), of one without a dot the whole."""
    return _parts(peer)[0]


def invite_of(peer: Peer) -> str:
    """The id of the invite that the peer came by: the same for all peers of that invite, whatever keys they hold. Of a plain name its
    key: such a peer has an invite of its own."""
    return _parts(peer)[1]


def limit_of(peer: Peer) -> int:
    """How many peers may take part with that invite at a time, at least 0. Of a plain name UNLIMITED."""
    return _parts(peer)[2]
