"""Passes: renewed and revoked by one signed, numbered list; what is forged, old or oversize counts for nothing; clocks differ by hours."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.messages import MAX_LIST_BYTES, PROTOCOL
from shoal.core.names import invite_of, key_of, limit_of
from shoal.transport.directory.directory import TTL_S, PeerRecord, seal, unseal
from shoal.transport.identity.identity import Identity, key_id_of
from shoal.transport.identity.invite import Authority, Invite, read_invite
from shoal.transport.identity.passes import SKEW_S, Grant, Membership, NotWelcome, Pass, PassList, Revoked
from shoal.transport.streams.handshake import HandshakeRefused, Rejection, check_hello, encode_hello, encode_rejection

DAY_S = 86400.0
NOW = 1_800_000_000.0


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Member:
    """A peer of a run, with its own clock."""

    def __init__(self, invite: Invite, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.identity = Identity.new()
        self.membership = invite.membership(self.identity, self.clock)
        self.name = self.identity.name

    def calls(self, other: Member) -> None:
        """Both hellos of a connection, as streams.py exchanges them. HandshakeRefused."""
        words = encode_hello(self.name, other.name, "control", self.membership)
        try:
            check_hello(words, self.identity.key_id, other.name, other.membership)
        except HandshakeRefused as refusal:
            check_hello(encode_rejection(refusal), other.identity.key_id, self.name, self.membership)
        words = encode_hello(other.name, self.name, "control", other.membership)
        check_hello(words, other.identity.key_id, self.name, self.membership)


RUN = Authority.new()


def an_invite(peers: int = 16, days: float = 30, run: Authority = RUN) -> Invite:
    return read_invite(run.invite((), NOW + days * DAY_S, peers=peers, issued=NOW), 0.0)


def a_list(
    version: int = 1, grants: tuple[Grant, ...] = (), revoked: tuple[str, ...] = (), run: Authority = RUN
) -> bytes:
    return run.pass_list(version, grants, tuple(run.revoked(what, NOW) for what in revoked))


# --------------------------------------------------------------------------------------------------------------- names


def test_a_name_says_by_which_invite_its_peer_came_and_how_many_that_admits() -> None:
    invite = an_invite(peers=3)
    ann, bob = Member(invite), Member(invite)
    assert invite_of(ann.name) == invite_of(bob.name) == invite.grant.id
    assert limit_of(ann.name) == 3 and key_of(ann.name) == key_id_of(ann.name) == ann.identity.key_id
    assert len(ann.name) < 80
    ann.calls(bob)


@pytest.mark.parametrize("what", ["another invite", "a higher limit", "no invite", "another limit's shape"])
def test_a_peer_cannot_claim_another_invite_or_limit_in_hello_or_record(what: str) -> None:
    mine, other = an_invite(peers=3), an_invite()
    rogue, victim = Member(mine), Member(other)
    fields = rogue.name.split(".")
    rogue.name = {
        "another invite": ".".join((*fields[:2], other.grant.id, fields[3])),
        "a higher limit": ".".join((*fields[:3], "4")),
        "no invite": ".".join(fields[:2]),
        "another limit's shape": ".".join((*fields[:3], "03")),
    }[what]
    with pytest.raises(HandshakeRefused, match="by which invite"):
        rogue.calls(victim)
    record = PeerRecord(RUN.run, rogue.name, "127.0.0.1", 5, expires_s=NOW + TTL_S)
    with pytest.raises(ValueError, match="by which invite"):
        unseal(seal(rogue.identity, rogue.membership, record), victim.membership, NOW)


def test_a_limit_is_signed() -> None:
    invite = an_invite(peers=3)
    member = Member(invite)
    shown = msgspec.msgpack.decode(member.membership.proof, type=Pass)
    more = msgspec.structs.replace(shown, grant=msgspec.structs.replace(shown.grant, peers=300))
    name = ".".join((*member.name.split(".")[:3], "300"))
    with pytest.raises(ValueError, match="forged"):
        member.membership.check(msgspec.msgpack.encode(more), name, NOW)


# ------------------------------------------------------------------------------------------------------------- renewal


def renewed(invite: Invite, days: float = 60) -> Grant:
    return RUN.renewed(invite.grant, NOW + 15 * DAY_S, NOW + days * DAY_S)


def test_after_a_month_peers_of_a_renewed_invite_are_admitted_and_others_not() -> None:
    invite, lapsed = an_invite(), an_invite()
    ann, bob, eve = Member(invite), Member(an_invite(days=400)), Member(lapsed)
    for member in (ann, bob, eve):
        member.clock.now = NOW + 31 * DAY_S
    with pytest.raises(HandshakeRefused, match="expired"):
        ann.calls(bob)
    assert bob.membership.take_list(a_list(1, (renewed(invite),)))
    ann.calls(bob)
    with pytest.raises(HandshakeRefused, match="expired"):
        eve.calls(bob)


def test_whoever_slept_through_a_renewal_or_comes_with_an_old_text_is_handed_it_with_the_hello() -> None:
    invite = an_invite()
    bob = Member(an_invite(days=400), Clock(NOW + 31 * DAY_S))
    bob.membership.take_list(a_list(1, (renewed(invite),)))
    newcomer = Member(invite, Clock(NOW + 31 * DAY_S))
    newcomer.calls(bob)
    grant = newcomer.membership.grant
    assert grant is not None and grant.expires == NOW + 60 * DAY_S
    stranger = Member(an_invite(days=400), Clock(NOW + 31 * DAY_S))  # who has heard of no list
    newcomer.calls(stranger)
    bob.calls(Member(invite, Clock(NOW + 31 * DAY_S)))  # and the other way round: whoever is called is handed it too


def test_a_list_renews_my_own_pass_and_says_so() -> None:
    invite = an_invite()
    ann = Member(invite)
    changes: list[bool] = []
    ann.membership.on_change = lambda: changes.append(True)
    before = ann.membership.proof
    assert ann.membership.take_list(a_list(1, (renewed(invite),)))
    assert changes == [True] and ann.membership.proof != before
    Member(an_invite()).membership.check(ann.membership.proof, ann.name, NOW + 59 * DAY_S)


def test_only_a_later_grant_of_ones_own_holder_is_taken() -> None:
    invite, other = an_invite(), an_invite()
    membership = Member(invite).membership
    proof = membership.proof
    forged = msgspec.structs.replace(renewed(invite), expires=int(NOW + 90 * DAY_S))
    wider = RUN.renewed(msgspec.structs.replace(invite.grant, peers=99), NOW, NOW + 90 * DAY_S)
    earlier = RUN.renewed(invite.grant, NOW, NOW + 29 * DAY_S)
    foreign = Authority.new().renewed(msgspec.structs.replace(invite.grant), NOW, NOW + 90 * DAY_S)
    for grant in (forged, wider, earlier, foreign, renewed(other)):
        assert not membership.take_grant(msgspec.msgpack.encode(grant))
    for junk in (b"", b"\xc1", b"x" * 500):
        assert not membership.take_grant(junk)
    assert membership.proof == proof


@pytest.mark.parametrize("ahead_s", [-SKEW_S, SKEW_S])
def test_clocks_that_differ_by_an_hour_keep_nobody_out(ahead_s: float) -> None:
    invite = an_invite()
    ann = Member(invite, Clock(NOW + 30 * DAY_S - 1))
    bob = Member(an_invite(days=400), Clock(ann.clock.now + ahead_s))
    ann.calls(bob)
    bob.calls(ann)
    bob.clock.now += 2 * SKEW_S + 1
    with pytest.raises(HandshakeRefused, match="expired"):
        ann.calls(bob)


def test_a_short_pass_counts_no_more_than_a_tenth_longer() -> None:
    grant = read_invite(RUN.invite((), NOW + 10, issued=NOW), 0.0).grant
    assert grant.ends_s == NOW + 11


# ---------------------------------------------------------------------------------------------------------- revocation


def test_a_revoked_invite_shuts_out_all_its_peers_and_a_revoked_key_that_peer() -> None:
    invite, other = an_invite(), an_invite()
    bob = Member(other)
    ann, twin, carl = Member(invite), Member(invite), Member(other)
    bob.membership.take_list(a_list(1, revoked=(carl.identity.key_id,)))
    ann.calls(bob)
    with pytest.raises(HandshakeRefused, match=f"its key {carl.identity.key_id} was revoked"):
        carl.calls(bob)
    bob.membership.take_list(a_list(2, revoked=(invite.grant.id, carl.identity.key_id)))
    for each in (ann, twin):
        with pytest.raises(HandshakeRefused, match=f"its invite {invite.grant.id} was revoked by the run's authority"):
            each.calls(bob)
        assert bob.membership.revoked(each.name) is not None
    assert bob.membership.revoked(bob.name) is None


def test_a_renewal_does_not_help_whoever_was_revoked() -> None:
    invite = an_invite()
    ann, bob = Member(invite), Member(an_invite())
    ann.membership.take_grant(msgspec.msgpack.encode(renewed(invite)))
    bob.membership.take_list(a_list(1, (renewed(invite),), (invite.grant.id,)))
    with pytest.raises(HandshakeRefused, match="revoked"):
        ann.calls(bob)


def test_a_revoked_peer_is_shown_the_authoritys_own_word_and_believes_nothing_less() -> None:
    invite = an_invite()
    ann, bob = Member(invite), Member(an_invite())
    for notice in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode(Authority.new().revoked(invite.grant.id, NOW)),
        msgspec.msgpack.encode(msgspec.structs.replace(RUN.revoked("x", NOW), what=invite.grant.id)),
        msgspec.msgpack.encode(RUN.revoked(an_invite().grant.id, NOW)),
    ):
        with pytest.raises(HandshakeRefused):
            check_hello(
                msgspec.msgpack.encode(Rejection("revoked!", notice)), bob.identity.key_id, ann.name, ann.membership
            )
        assert ann.membership.revoked(ann.name) is None
    bob.membership.take_list(a_list(1, revoked=(invite.grant.id,)))
    with pytest.raises(HandshakeRefused):
        ann.calls(bob)
    mine = ann.membership.revoked(ann.name)
    assert mine is not None and "its invite" in mine.words


def test_records_of_the_revoked_are_not_believed() -> None:
    invite = an_invite()
    ann, bob = Member(invite), Member(an_invite())
    data = seal(ann.identity, ann.membership, PeerRecord(RUN.run, ann.name, "h", 5, expires_s=NOW + TTL_S))
    assert unseal(data, bob.membership, NOW).peer == ann.name
    bob.membership.take_list(a_list(1, revoked=(invite.grant.id,)))
    with pytest.raises(ValueError, match="revoked"):
        unseal(data, bob.membership, NOW)


# --------------------------------------------------------------------------------------------------------------- lists


def test_versions_only_grow_so_that_an_old_list_told_again_changes_nothing() -> None:
    invite = an_invite()
    membership = Member(an_invite()).membership
    old, new = a_list(1), a_list(2, revoked=(invite.grant.id,))
    ann = Member(invite)
    assert membership.take_list(old) and membership.take_list(new)
    assert not membership.take_list(old) and not membership.take_list(new)
    assert membership.revoked(ann.name) is not None and membership.standing.version == 2


def test_forged_altered_and_oversize_lists_are_refused() -> None:
    membership = Member(an_invite()).membership
    good = a_list(7, revoked=("x" * 12,))
    theirs = msgspec.msgpack.decode(a_list(9, run=Authority.new()), type=PassList)
    posing = msgspec.msgpack.encode(msgspec.structs.replace(theirs, authority=RUN.public))
    newer = msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(good, type=PassList), version=8))
    for data in (a_list(9, run=Authority.new()), posing, newer):
        with pytest.raises(ValueError, match="forged"):
            membership.take_list(data)
    for data in (b"", b"\xc1", good[:-1], good + b"x"):
        with pytest.raises(ValueError, match="not a list of passes"):
            membership.take_list(data)
    with pytest.raises(ValueError, match="at most"):
        membership.take_list(bytes(MAX_LIST_BYTES + 1))
    assert membership.standing.version == 0


def test_the_largest_list_is_within_its_bounds_and_one_more_entry_is_refused() -> None:
    entry, grant = RUN.revoked("y" * 32, NOW), renewed(an_invite())
    data = RUN.pass_list(1, (grant,) * 1024, (entry,) * 2048)
    assert len(data) <= MAX_LIST_BYTES
    with pytest.raises(ValueError):
        RUN.pass_list(2, (grant,) * 1025, ())
    with pytest.raises(ValueError):
        RUN.pass_list(2, (), (entry,) * 2049)


def test_a_grant_is_no_revocation_and_no_list() -> None:
    """A signature of one kind never passes as one of another."""
    entry = RUN.revoked("x" * 12, NOW)
    with pytest.raises(ValueError):
        msgspec.structs.replace(entry, signature=renewed(an_invite()).signature).check_signature()
    assert PROTOCOL >= 15 and isinstance(entry, Revoked) and issubclass(NotWelcome, ValueError)


def test_a_stranger_has_no_grant() -> None:
    assert Membership(RUN.run, b"").grant is None
