"""What anybody may bring is verified within bounds, once; few names of a key are held, and nobody takes the whole table."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from shoal.transport.budget import Allowance
from shoal.transport.directory import records
from shoal.transport.directory.records import KEY_RECORDS, TTL_S, BudgetSpent, PeerRecord, Records, Sealed, seal, unseal
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, Membership, read_invite

RUN = Authority.new()
NOW = time.time()


def an_invite() -> Any:
    return read_invite(RUN.invite((), NOW + 3600), NOW)


INVITE = an_invite()


def a_record(identity: Identity, invite: Any = INVITE, **changes: Any) -> bytes:
    membership = invite.membership(identity)
    record = PeerRecord(invite.run, identity.name, "127.0.0.1", 5, expires_s=NOW + TTL_S)
    return seal(identity, membership, msgspec.structs.replace(record, **changes))


def a_table(**changes: Any) -> tuple[Records, list[str], list[str]]:
    learnt: list[str] = []
    removed: list[str] = []
    membership = INVITE.membership(Identity.new())
    table = Records(membership, lambda record: learnt.append(record.peer), removed.append, **changes)
    return table, learnt, removed


def forged(count: int) -> list[bytes]:
    """Each signed by its own key, under a pass of the run that is another's."""
    proof = INVITE.membership(Identity.new()).proof
    identities = [Identity.new() for _ in range(count)]
    for one in identities:
        one.tag = INVITE.grant.tag
    return [
        seal(one, Membership(INVITE.run, proof), PeerRecord(INVITE.run, one.name, "h", 5, expires_s=NOW + 50))
        for one in identities
    ]


def refused(table: Records, data: bytes, source: str = "s", now: float = NOW) -> str:
    with pytest.raises(ValueError) as error:
        table.add(data, source, now)
    return str(error.value)


def test_four_hundred_peers_behind_one_address_are_all_taken_at_once() -> None:
    table, learnt, _ = a_table()
    for identity in (Identity.new() for _ in range(400)):
        table.add(a_record(identity), "10.0.0.1", NOW)
    assert len(table.held) == len(learnt) == 400


def test_what_is_known_is_not_verified_again_good_or_bad() -> None:
    table, learnt, _ = a_table()
    good, (bad,) = a_record(Identity.new()), forged(1)
    table.add(good, "s", NOW)
    refused(table, bad)
    before = table.verified
    for _ in range(100):
        assert table.add(good, "anybody", NOW).run == INVITE.run
        assert "pass" in refused(table, bad, "anybody")
    assert table.verified == before and len(learnt) == 1


def test_a_pass_is_checked_once_for_all_records_of_its_key() -> None:
    table, _, _ = a_table()
    identity = Identity.new()
    for number in range(5):
        table.add(a_record(identity, expires_s=NOW + 50 + number), "s", NOW)
    assert table.verified == 3 + 4


@pytest.mark.parametrize("what", ["size", "form", "run", "name", "expired", "long", "older"])
def test_what_is_cheap_to_see_costs_no_signature(what: str) -> None:
    table, _, _ = a_table()
    identity = Identity.new()
    other = read_invite(Authority.new().invite((), NOW + 60), NOW)
    data = {
        "size": bytes(records.MAX_SEALED_BYTES + 1),
        "form": b"\xc1" * 100,
        "run": a_record(identity, other),
        "name": a_record(identity, peer=Identity.new().name),
        "expired": a_record(identity, expires_s=NOW - 1),
        "long": a_record(identity, expires_s=NOW + 100 * TTL_S),
        "older": a_record(identity, expires_s=NOW + 30),
    }[what]
    table.add(a_record(identity), "s", NOW)
    before = table.verified
    refused(table, data)
    assert table.verified == before


def test_a_flood_of_forgeries_costs_a_budget_and_leaves_others_theirs() -> None:
    table, _, _ = a_table(from_one=Allowance(1.0, 60.0), from_all=Allowance(10.0, 200.0))
    for data in forged(300):
        refused(table, data, "10.0.0.66")
    assert table.verified <= 60
    for _ in range(20):
        table.add(a_record(Identity.new()), "10.0.0.1", NOW)
    for number, data in enumerate(forged(300)):
        refused(table, data, f"2001:db8::{number}")
    assert table.verified <= 200, "addresses may be free: all have one bound"


def test_what_was_not_looked_at_is_taken_when_it_comes_again() -> None:
    table, _, _ = a_table(from_one=Allowance(3.0, 3.0))
    first, second = a_record(Identity.new()), a_record(Identity.new())
    table.add(first, "s", NOW)
    with pytest.raises(BudgetSpent):
        table.add(second, "s", NOW)
    table.add(first, "s", NOW)  # a good one that is known always passes
    assert table.add(second, "s", NOW + 1.0)


def test_of_nine_thousand_names_of_one_key_few_are_held_and_few_verified() -> None:
    table, learnt, removed = a_table()
    honest = [Identity.new() for _ in range(3)]
    for one in honest:
        table.add(a_record(one), "10.0.0.1", NOW)
    key = Identity.new().key
    before = table.verified
    identities = [a_record(Identity(key, f"{number:x}"), expires_s=NOW + 50 + number / 1000) for number in range(400)]
    for number in range(9000):
        try:
            table.add(identities[number % 400], f"10.0.{number % 9}.1", NOW + number / 1000)  # nine seconds
        except ValueError:
            continue
    names = [peer for peer in table.held if peer not in {one.name for one in honest}]
    assert 0 < len(names) <= KEY_RECORDS
    assert all(one.name in table.held for one in honest)
    assert len(learnt) <= 3 + records.KEY_NEWS.at_once + 9 * records.KEY_NEWS.per_s + 1
    assert table.verified - before <= 20, "beyond what a key may tell nothing is verified"
    assert len(removed) == len(learnt) - 3 - len(names)


def test_a_restarted_peer_is_held_though_its_key_has_names_enough() -> None:
    table, _, removed = a_table()
    key = Identity.new().key
    started = [Identity(key, f"{number}") for number in range(KEY_RECORDS + 1)]
    for number, one in enumerate(started):
        table.add(a_record(one, expires_s=NOW + 40 + number), "s", NOW)
    names = [one.name for one in started]
    assert set(table.held) == set(names[1:]) and removed == names[:1]


def test_where_the_table_is_full_the_invite_that_filled_it_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 30)
    table, _, _ = a_table()
    greedy, honest = an_invite(), an_invite()
    mine = [Identity.new() for _ in range(8)]
    for one in mine[:4]:
        table.add(a_record(one, honest), "10.0.0.1", NOW)
    for number in range(60):
        try:
            table.add(a_record(Identity.new(), greedy), "10.0.0.66", NOW)
        except BudgetSpent:
            assert number >= 26
    for one in mine[4:]:
        table.add(a_record(one, honest), "10.0.0.1", NOW)
    assert all(one.name in table.held for one in mine) and len(table.held) == 30


def test_the_table_has_a_bound_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS_BYTES", 20_000)
    table, _, _ = a_table()
    for _ in range(40):
        try:
            table.add(a_record(Identity.new(), addresses=("x" * 450,) * 4), "s", NOW)
        except BudgetSpent:
            continue
    assert sum(len(held.data) for held in table.held.values()) <= 20_000


def test_records_that_have_ended_make_room() -> None:
    table, _, _ = a_table()
    for _ in range(3):
        table.add(a_record(Identity.new()), "s", NOW)
    assert len(table.fresh(NOW)) == 3
    assert table.fresh(NOW + TTL_S + 1) == [] and not table.held


def test_a_changed_body_under_a_good_pass_is_refused_once_it_is_looked_at() -> None:
    table, _, _ = a_table()
    identity = Identity.new()
    table.add(a_record(identity), "s", NOW)
    sealed = msgspec.msgpack.decode(a_record(identity), type=Sealed)
    body = msgspec.msgpack.encode(PeerRecord(INVITE.run, identity.name, "evil", 6, expires_s=NOW + 2 * TTL_S))
    forgery = msgspec.msgpack.encode(msgspec.structs.replace(sealed, body=body))
    assert "signature is wrong" in refused(table, forgery)
    with pytest.raises(ValueError, match="signature is wrong"):
        unseal(forgery, INVITE.membership(identity), NOW)
    assert table.held[identity.name].record.host == "127.0.0.1"


def test_a_revocation_counts_at_once_and_a_renewal_too_whatever_was_looked_at_before() -> None:
    invite, member = an_invite(), Identity.new()
    membership = INVITE.membership(Identity.new())
    removed: list[str] = []
    table = Records(membership, lambda _: None, removed.append)
    data, next_one = a_record(member, invite), a_record(member, invite, expires_s=NOW + TTL_S + 1)
    table.add(data, "s", NOW)
    membership.take_list(RUN.pass_list(1, (), (RUN.revoked(invite.grant.id, NOW),)))
    for pass_list in (data, next_one):
        assert "its invite" in refused(table, pass_list)
    assert table.fresh(NOW) == [] and removed == [member.name] and table.verified == 4
    membership.take_list(RUN.pass_list(2, (), ()))
    table.add(next_one, "s", NOW)
    assert member.name in table.held

    short = read_invite(RUN.invite((), NOW + 1, issued=NOW - 100), NOW)
    late = a_record(Identity.new(), short, expires_s=NOW + 100 + TTL_S)
    assert "expired" in refused(table, late, now=NOW + 100)
    membership.take_list(RUN.pass_list(3, (RUN.renewed(short.grant, NOW, NOW + 3600),), ()))
    table.add(late, "s", NOW + 100)


def test_a_pass_that_was_checked_lets_no_name_claim_another_invite() -> None:
    table, _, _ = a_table()
    identity = Identity.new()
    table.add(a_record(identity), "s", NOW)
    fields = identity.name.split(".")
    for wrong in (".".join((*fields[:2], "q" * 12, fields[3])), ".".join((*fields[:3], "999")), ".".join(fields[:2])):
        assert "by which invite" in refused(table, a_record(identity, peer=wrong, expires_s=NOW + 40))


@pytest.mark.parametrize(
    ("port", "addresses", "entries"),
    [
        (9, ("198.51.100.2", "127.0.0.1", "a name"), ("192.0.2.7:9", "198.51.100.2:9")),
        (9, ("/relay/198.51.100.9/80/key",), ()),
        (0, ("/ip4/192.0.2.7/tcp/4/p2p/Q", "/ip4/192.0.2.9/tcp/4/p2p/R/p2p-circuit/p2p/Q", "/p2p/Q"), 1),
        (0, (), ()),
    ],
)
def test_newcomers_enter_through_a_peer_that_others_reach(port: int, addresses: tuple[str, ...], entries: Any) -> None:
    record = PeerRecord("run", "peer", "192.0.2.7", 5, port, addresses=addresses)
    assert record.entries == (addresses[:entries] if isinstance(entries, int) else entries)
