"""A commit is proven by signatures of its voters, whom the run's key admits; anything less proves nothing."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from shoal.core.consensus.certificates import accepted
from shoal.core.messages import Committed, Member, Phase, Share, Signed, View
from shoal.launcher.files.proofs import FILE, OLDER, ProofFile, verified
from shoal.runtime.proofs import Verifier
from shoal.runtime.records.report import Proven
from shoal.runtime.signing import Signing
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, read_invite

AUTHORITY = Authority.new()
INVITE = read_invite(AUTHORITY.invite((), time.time() + 1000.0, "tiny"), 0.0)


def identities(count: int, authority: Authority = AUTHORITY) -> tuple[list[Identity], dict[str, bytes]]:
    """Peers by one invite of that authority, and their passes."""
    invite = read_invite(authority.invite((), time.time() + 1000.0, "tiny"), 0.0)
    peers = [Identity.new() for _ in range(count)]
    return peers, {peer.key_id: invite.membership(peer).proof for peer in peers}


PEERS, PASSES = identities(3)


def a_view(step: int = 4, peers: list[Identity] = PEERS) -> View:
    groups = (tuple(Share(one.name, (number,)) for number, one in enumerate(peers)),)
    last = Committed(step, 7, 1.0, 2.0, ("sum",), groups)
    return View(step + 9, step + 1, tuple(Member(one.name, 0) for one in peers), phase=Phase.TRAINING, last=last)


def a_line(
    view: View, signers: list[Identity], run: str = AUTHORITY.run, passes: dict[str, bytes] = PASSES, term: int = 3
) -> Proven:
    leader, voters = view.members[0].peer, tuple(one.peer for one in view.members)
    data = accepted(term, view.number, view.digest, leader)
    signed = tuple(Signed(one.name, one.public, one.sign(f"agree {run}", data)) for one in signers)
    return Proven(view.number, msgspec.msgpack.encode(view), term, leader, voters, signed, passes)


def test_a_majority_whose_passes_are_genuine_proves_a_commit() -> None:
    view = a_view()
    assert Verifier(AUTHORITY.run).check(a_line(view, PEERS[:2])) == view.last
    known = Verifier(AUTHORITY.run)
    known.check(a_line(view, PEERS))
    assert known.check(a_line(a_view(5), PEERS, passes={})) == a_view(5).last, "passes are told once"


@pytest.mark.parametrize(
    "line",
    [
        a_line(a_view(), PEERS[:1]),
        a_line(a_view(), [PEERS[0], PEERS[0]]),
        a_line(a_view(), PEERS, run="another"),
        a_line(a_view(), PEERS, passes={}),
        msgspec.structs.replace(a_line(a_view(), PEERS), term=4),
        msgspec.structs.replace(a_line(a_view(), PEERS), view=msgspec.msgpack.encode(a_view(5))),
        msgspec.structs.replace(a_line(a_view(), PEERS), view=b"\x00"),
        a_line(msgspec.structs.replace(a_view(), last=None), PEERS),
    ],
    ids=["one", "one twice", "another run", "no passes", "another term", "another view", "no view", "no commit"],
)
def test_anything_else_proves_nothing(line: Proven) -> None:
    with pytest.raises(ValueError, match=r"no quorum|not a view|commits nothing"):
        Verifier(AUTHORITY.run).check(line)


def test_keys_that_another_authority_admits_prove_nothing() -> None:
    """Somebody with keys of their own cannot make up a run's commits."""
    other = Authority.new()
    peers, passes = identities(3, other)
    line = a_line(a_view(peers=peers), peers, passes=passes)
    with pytest.raises(ValueError, match="no quorum"):
        Verifier(AUTHORITY.run).check(line)


def test_a_machine_names_its_signatures_by_the_run() -> None:
    signing = Signing(PEERS[0], AUTHORITY.run)
    signed = signing._sign(b"data")
    assert Signing.verifier(AUTHORITY.run)(signed, b"data") and not Signing.verifier("other")(signed, b"data")


def test_the_file_is_bounded_and_each_part_can_be_checked_by_itself(tmp_path: Path) -> None:
    file = ProofFile(tmp_path, pytest.fail, half_bytes=20_000)
    for step in range(60):
        passes = PASSES if not step else {}
        for line in (a_line(a_view(step), PEERS[:2], passes=passes), a_line(a_view(step), PEERS, passes=passes)):
            file.add(line)
    assert (tmp_path / FILE).stat().st_size + (tmp_path / OLDER).stat().st_size < 50_000
    commits, wrong = verified(tmp_path, AUTHORITY.run)
    steps = [commit.step for commit in commits]
    assert not wrong and steps == list(range(steps[0], 60)) and len(steps) > 10, "each once, the newest ones"
    (tmp_path / OLDER).unlink()
    assert verified(tmp_path, AUTHORITY.run)[1] == []
    with (tmp_path / FILE).open("ab") as torn:
        torn.write(msgspec.json.encode(a_line(a_view(60), PEERS[:1])) + b"\nhalf a line")
    commits, wrong = verified(tmp_path, AUTHORITY.run)
    assert commits[-1].step == 59 and len(wrong) == 1 and "no quorum" in wrong[0]


def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    file = ProofFile(tmp_path / "gone", said.append)
    for step in range(3):
        file.add(a_line(a_view(step), PEERS))
    assert len(said) == 1 and "cannot be written, training goes on" in said[0]
