"""Commits with the signatures that prove them: reported by each node, kept by its launcher, checked by anybody, offline.

A proof is a view as it was agreed, who had signed that they accept it (core/consensus/certificates.py), and the passes by which the run's
authority admits the signers. With the run's id alone, the hash of its public key, anybody can check who was averaged in a step,
for `shoal leaderboard --verify`. It does not prove that a view follows another: a majority of a view's own voters can sign what it likes.
"""

from __future__ import annotations

import msgspec

from shoal.core.consensus.certificates import accepted, proves
from shoal.core.messages import Committed, Entry, Peer, Proof, Propose, View
from shoal.core.names import key_of
from shoal.core.peer import PeerMachine
from shoal.escaping import UNDECODABLE
from shoal.runtime.records.report import Proven
from shoal.runtime.signing import Signatures, Signing
from shoal.transport.identity.passes import Membership, genuine

_VIEWS = msgspec.msgpack.Decoder(
    View
)  # at import: msgspec 0.22 crashes when two threads decode a type for the first time


class Prover:
    """One node's: proofs of the commits that it hears of."""

    def __init__(self, machine: PeerMachine, signing: Signatures, membership: Membership) -> None:
        self._machine, self._signing, self._membership = machine, signing, membership
        self._told: set[str] = set()  # keys whose passes were reported

    def proof_of(self, view: View) -> Proven | None:
        """None: it commits nothing, or its proof is not here, as after an operator's override."""
        views = self._machine.register.views
        if view.last is None or views.entry is None or views.entry.view is not view or views.proof is None:
            return None
        entry, me = views.entry, self._machine.name
        sealed = self._signing.seal(me, Propose(entry=entry, term=entry.term, proof=views.proof))
        assert isinstance(sealed, Propose) and sealed.proof is not None
        signed = tuple(one for one in sealed.proof.signed if one.signature)
        known = {**self._membership.shown, key_of(me): self._membership.proof}
        keys = [key for one in signed if (key := key_of(one.peer)) not in self._told and key in known]
        self._told.update(keys)
        return Proven(
            number=view.number,
            view=msgspec.msgpack.encode(view),
            term=entry.term,
            leader=sealed.proof.leader,
            before=entry.before,
            signed=signed,
            passes={key: known[key] for key in keys},
        )


class Verifier:
    """Checks proofs of the run with that id, in the order in which they were written: passes are told once."""

    def __init__(self, run: str) -> None:
        self._run, self._passes = run, dict[str, bytes]()
        self._admitted: dict[Peer, bool] = {}
        self._holds = Signing.verifier(run)

    def check(self, line: Proven) -> Committed:
        """The commit that the line proves. ValueError: it proves none, and why."""
        for key, shown in line.passes.items():
            self._passes.setdefault(key, shown)
        try:
            view = _VIEWS.decode(line.view)
        except UNDECODABLE as error:
            raise ValueError(f"not a view: {error}") from None
        if view.last is None:
            raise ValueError(f"view {view.number} commits nothing")
        data = accepted(line.term, view.number, view.digest, line.leader)
        signed = tuple(one for one in line.signed if self._admits(one.peer) and self._holds(one, data))
        if not proves(Entry(line.term, view, line.before), Proof(line.leader, signed)):
            voters = len(view.voters)
            raise ValueError(f"view {view.number}: {len(signed)} valid signatures of {voters} voters are no quorum")
        return view.last

    def _admits(self, peer: Peer) -> bool:
        """The run's authority admits that peer. When its pass ended does not matter: it was let in by those who had to look."""
        if peer not in self._admitted:
            try:
                genuine(self._passes.get(key_of(peer), b""), self._run, peer)
                self._admitted[peer] = True
            except ValueError:
                return False
        return self._admitted[peer]
