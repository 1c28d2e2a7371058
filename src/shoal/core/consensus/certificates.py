"""What a peer signs when it votes or accepts a view, and when such signatures prove that something was agreed.

A View counts as agreed, and a peer as the leader of a term, when quorums have signed it: the claim of one peer, even of a member, proves
nothing. A quorum is a majority, or half of an even number of voters with the casting voter, a peer of the founder's machine
(docs/design/2026-11-23-casting-vote.md). Here: the bytes that are signed, in which message, and who must have signed. Keys are the driver's
business (runtime/signing.py): it calls `seal` on each message that is sent and `checked` on each message that is received, so that a
machine receives only valid signatures. For the other modules of consensus and the drivers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

import msgspec

from shoal.core.messages import Accept, Entry, Lead, Message, Peer, Proof, Propose, Signed, View, Vote
from shoal.core.names import invite_of

Sign = Callable[[bytes], Signed]  # by the peer itself
Holds = Callable[[Signed, bytes], bool]
SIGNED = frozenset({Accept, Lead, Propose, Vote})  # messages that can carry signatures: few of all that are sent


def accepted(term: int, number: int, view: str, leader: Peer) -> bytes:
    """What is signed: I accept the view of that number and digest, proposed by `leader` in `term`."""
    return msgspec.msgpack.encode(("accept", term, number, view, leader))


def voted(term: int, candidate: Peer) -> bytes:
    """What is signed: my vote in `term` is that candidate's."""
    return msgspec.msgpack.encode(("vote", term, candidate))


def casting_voter(voters: Iterable[Peer], founder: str) -> Peer:
    """Whose vote decides between two equal halves of `voters`: the first by name of those with the invite of the run's founder.
    '' if there are no such voters, or if an odd number of voters has no halves."""
    voters = tuple(voters)
    return min((peer for peer in voters if invite_of(peer) == founder), default="") if len(voters) % 2 == 0 else ""


def quorum(voters: Iterable[Peer], yes: Iterable[Peer], founder: str) -> bool:
    """More than half of `voters` are in `yes`, or half of them with the casting voter; true of no voters at all. Any two quorums of the
    same voters have a peer in common."""
    voters, yes = tuple(voters), set(yes)
    ahead = 2 * sum(map(yes.__contains__, voters)) - len(voters)
    return not voters or ahead > 0 or (ahead == 0 and casting_voter(voters, founder) in yes)


def can_agree(view: View, living: Iterable[Peer]) -> bool:
    """The voters of that view who are in `living` can agree on the next one without the others."""
    return quorum(view.voters, living, view.founder)


def signers(signed: Iterable[Signed]) -> set[Peer]:
    return {one.peer for one in signed}


def proves(entry: Entry, proof: Proof) -> bool:
    """Quorums of the voters before and after have accepted the entry."""
    names, founder = signers(proof.signed), entry.view.founder
    return quorum(entry.before, names, founder) and quorum(entry.view.voters, names, founder)


def _bare(message: Message) -> bool:
    """A leader's heartbeat without signatures, as most are."""
    return type(message) is Lead and message.proof is None and not message.votes


def seal(me: Peer, to: Peer, message: Message, sign: Sign) -> Message:
    """The message with my signatures where it has none yet, before it is sent to that peer."""
    if type(message) not in SIGNED or _bare(message):
        return message

    def mine(signed: tuple[Signed, ...], data: Callable[[], bytes]) -> tuple[Signed, ...]:
        return tuple(sign(data()) if one.peer == me and not one.signature else one for one in signed)

    def own(proof: Proof, term: int, number: int, view: Callable[[], str]) -> Proof:
        if proof.leader != me:
            return proof
        return Proof(me, mine(proof.signed, lambda: accepted(term, number, view(), me)))

    match message:
        case Accept(by=Signed()):
            data = accepted(message.term, message.number, message.digest, to)
            return msgspec.structs.replace(message, by=sign(data))
        case Vote(by=Signed()):
            return msgspec.structs.replace(message, by=sign(voted(message.term, to)))
        case Lead():
            proof = message.proof
            if proof is not None:
                proof = own(proof, message.decided_term, message.number, lambda: message.digest)
            votes = mine(message.votes, lambda: voted(message.term, me))
            return msgspec.structs.replace(message, proof=proof, votes=votes)
        case Propose(proof=Proof() as proof):
            entry = message.entry
            proof = own(proof, entry.term, entry.view.number, lambda: entry.view.digest)
            return msgspec.structs.replace(message, proof=proof)
    return message


def checked(me: Peer, source: Peer, message: Message, holds: Holds) -> Message | None:
    """The message with those signatures that hold; None if it is worth nothing without."""
    if type(message) not in SIGNED or _bare(message):
        return message

    def held(signed: tuple[Signed, ...], data: bytes) -> tuple[Signed, ...]:
        """Up to the first that does not hold: honest peers send none, and each costs a verification."""
        return tuple({one.peer: one for one in takewhile(lambda one: holds(one, data), signed)}.values())

    match message:
        case Accept(by=Signed() as by):
            data = accepted(message.term, message.number, message.digest, me)
            return message if by.peer == source and holds(by, data) else None
        case Vote(by=Signed() as by):
            return message if by.peer == source and holds(by, voted(message.term, me)) else None
        case Lead():
            proof = message.proof
            if proof is not None:
                data = accepted(message.decided_term, message.number, message.digest, proof.leader)
                proof = Proof(proof.leader, held(proof.signed, data))
            votes = held(message.votes, voted(message.term, source))
            return msgspec.structs.replace(message, proof=proof, votes=votes)
        case Propose(proof=Proof() as proof):
            entry = message.entry
            data = accepted(entry.term, entry.view.number, entry.view.digest, proof.leader)
            return msgspec.structs.replace(message, proof=Proof(proof.leader, held(proof.signed, data)))
    return message
