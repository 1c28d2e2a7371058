"""Keys and who they admit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.messages import Member, View
from shoal.core.names import invite_of, key_of, limit_of
from shoal.transport.identity import text as written
from shoal.transport.identity.identity import Identity, key_id, key_id_of, verify
from shoal.transport.identity.invite import PREFIX, Authority, as_text, read_invite, signed_by

NOW = 1_000_000.0
RUN = Authority.new()
TEXT = RUN.invite(("/ip4/10.0.0.1/tcp/4001/p2p/x", "10.0.0.2:77"), NOW + 60, "my run")
PEER_IDS = (
    "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust",
    "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
)


def test_a_key_is_kept_for_its_owner_only_and_found_again(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "peer.pem"
    first, second = Identity.load(file), Identity.load(file)
    assert first.key_id == second.key_id and first.name != second.name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "peer.pem"
    Identity.load(file)
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        Identity.load(file)


def test_what_is_no_key_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "peer.pem"
    file.touch(0o600)
    with pytest.raises(ValueError, match=r"peer\.pem: not a private key"):
        Identity.load(file)


def test_a_name_is_key_id_and_incarnation_and_by_which_invite() -> None:
    me = Identity.new()
    assert key_id_of(me.name) == me.key_id == key_id(me.public)
    invite = read_invite(RUN.invite((), NOW + 60, peers=3), NOW)
    invite.membership(me)
    assert key_id_of(me.name) == key_of(me.name) == me.key_id
    assert invite_of(me.name) == invite.grant.id and limit_of(me.name) == 3
    for wrong in (
        "",
        "p1",
        me.key_id,
        f"{me.key_id}.",
        f"{me.key_id}.a b",
        f"x{me.name}",
        f"{me.key_id}.1.a",
        f"{me.key_id}.{'9' * 33}",
    ):
        with pytest.raises(ValueError, match="is not a peer's name"):
            key_id_of(wrong)


def test_a_signature_holds_for_its_key_purpose_and_data_only() -> None:
    me = Identity.new()
    signature = me.sign("record", b"data")
    assert verify(me.public, "record", b"data", signature)
    assert not verify(me.public, "pass", b"data", signature)
    assert not verify(me.public, "record", b"datA", signature)
    assert not verify(Identity.new().public, "record", b"data", signature)
    assert not verify(b"short", "record", b"data", signature)
    assert not verify(me.public, "record", b"data", b"")


def test_an_authority_is_found_again(tmp_path: Path) -> None:
    assert Authority.load(tmp_path / "run.pem").run == Authority.load(tmp_path / "run.pem").run


def test_an_invite_tells_run_and_addresses_and_admits_its_holder() -> None:
    invite = read_invite(f"  {TEXT[:50]}\n {TEXT[50:]}\n", NOW, RUN.run)
    assert (invite.run, invite.title) == (RUN.run, "my run")
    assert invite.addresses == ("/ip4/10.0.0.1/tcp/4001/p2p/x", "10.0.0.2:77")
    me = Identity.new()
    mine = invite.membership(me)
    mine.check(mine.proof, me.name, NOW)


def test_a_pass_is_of_no_use_to_another_peer() -> None:
    me, thief = Identity.new(), Identity.new()
    mine = read_invite(TEXT, NOW).membership(me)
    with pytest.raises(ValueError, match="belongs to another peer"):
        mine.check(mine.proof, thief.name, NOW)


def test_passes_end_with_their_invite() -> None:
    me = Identity.new()
    mine = read_invite(TEXT, NOW).membership(me)
    with pytest.raises(ValueError, match="expired at 1970-01-12 13:47 UTC"):
        mine.check(mine.proof, me.name, NOW + 60)


def test_an_expired_invite_is_refused_with_its_date() -> None:
    with pytest.raises(ValueError, match="invite is expired at 1970-01-12 13:47 UTC; ask for a new invite"):
        read_invite(TEXT, NOW + 60)


def test_an_invite_to_another_run_is_refused_with_both_names() -> None:
    other = Authority.new().run
    with pytest.raises(ValueError, match=rf"is for run {RUN.run} \('my run'\), not for run {other}"):
        read_invite(TEXT, NOW, other)


def test_a_title_that_commands_the_terminal_is_escaped_in_the_error() -> None:
    text = RUN.invite((), NOW + 60, "\x1b[2Jmine")
    with pytest.raises(ValueError) as refused:
        read_invite(text, NOW, Authority.new().run)
    assert "'\\x1b[2Jmine'" in str(refused.value) and "\x1b" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "hello", PREFIX, PREFIX + "!!!", TEXT[:-10], PREFIX + "A" * 10_000])
def test_what_is_no_invite_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invite"):
        read_invite(text, NOW)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 93))
def test_an_altered_invite_is_refused(at: int, by: int) -> None:
    at %= len(TEXT)
    altered = TEXT[:at] + chr(33 + (ord(TEXT[at]) - 33 + by) % 94) + TEXT[at + 1 :]
    with pytest.raises(ValueError, match=r"was altered|not an invite|another version"):
        read_invite(altered, NOW)


@pytest.mark.parametrize("at", [0, 3, 100, len(TEXT) - len(PREFIX) - 1])
def test_two_letters_in_the_other_order_are_noticed(at: int) -> None:
    coded = TEXT.removeprefix(PREFIX)
    at = next(n for n in (*range(at, len(coded) - 1), *range(at)) if coded[n] != coded[n + 1])
    with pytest.raises(ValueError, match="was altered"):
        read_invite(PREFIX + coded[:at] + coded[at + 1] + coded[at] + coded[at + 2 :], NOW)


def test_an_invite_of_an_older_version_is_refused_with_what_to_do() -> None:
    for text in ("shoal-lqR0aW55ka8xMC43Ny4w", "shoal2abc"):
        with pytest.raises(ValueError, match=r"made by another version of Shoal.*ask for a new one"):
            read_invite(text, NOW)


def test_an_invite_that_another_key_signed_as_this_run_is_forged() -> None:
    """The forger takes the run's public key, a holder's key of its own, and signs with what it has."""
    theirs = read_invite(Authority.new().invite((), NOW + 60), NOW)
    grant = msgspec.structs.replace(theirs.grant, authority=RUN.public)
    with pytest.raises(ValueError, match="forged"):
        as_text(msgspec.structs.replace(theirs, grant=grant))


@pytest.mark.parametrize(
    "addresses",
    [
        ("192.0.2.1:4711", "[2001:db8::1]:4711", "2001:db8::1:4711", "host.example:1", "192.0.2.1:0", ":", "x"),
        tuple(f"/ip4/192.0.2.1/tcp/4711/p2p/{each}" for each in PEER_IDS),
        tuple(f"/ip{v}/{host}/tcp/65535/p2p/{PEER_IDS[0]}" for v, host in ((4, "192.0.2.1"), (6, "2001:db8::1"))),
        (f"/ip4/192.0.2.1/tcp/1/p2p/{PEER_IDS[0]}/p2p-circuit/p2p/{PEER_IDS[1]}", "/ip4/1.2.3.4/tcp/99999/p2p/x"),
        (f"/ip4/192.0.2.1/tcp/0004711/p2p/{PEER_IDS[0]}", "192.0.2.1:04711", "/ip6/::ffff:1.2.3.4/tcp/1/p2p/Qm"),
    ],
)
def test_addresses_come_out_as_they_went_in(addresses: tuple[str, ...]) -> None:
    assert read_invite(RUN.invite(addresses, NOW + 60), NOW).addresses == addresses
    assert written.unpacked(written.packed(addresses)) == addresses


def test_an_address_takes_few_bytes() -> None:
    direct = [f"192.0.2.{n}:4711" for n in range(3)]
    libp2p = [f"/ip4/192.0.2.{n}/tcp/4711/p2p/{PEER_IDS[0]}" for n in range(3)]
    assert [*map(len, written.packed(direct))] == [7, 7, 7]
    assert [*map(len, written.packed(libp2p))] == [39, 7, 7]


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_bytes_as_letters_and_digits(data: bytes) -> None:
    text = written.encoded(data)
    assert written.decoded(text) == data and text.isalnum() and text.isascii()


@pytest.mark.parametrize("data", [b"", b"\1", b"\2short", b"\4" + bytes(6), b"\xff", bytes(300)])
def test_addresses_that_are_none_are_refused_or_a_word(data: bytes) -> None:
    try:
        assert written.unpacked([data])
    except ValueError:
        pass


def test_an_invite_that_others_could_not_read_is_not_made() -> None:
    with pytest.raises(ValueError):
        RUN.invite(("x" * 300,), NOW + 60)


def test_an_override_is_the_word_of_one_runs_authority_and_of_nothing_else() -> None:
    view = View(number=5, step=2, members=(Member("a", 0),))
    override = RUN.override(view, 9)
    assert signed_by(override, RUN.run)
    other = Authority.new()
    assert not signed_by(override, other.run) and not signed_by(other.override(view, 9), RUN.run)
    forged = msgspec.structs.replace(other.override(view, 9), authority=RUN.public)
    assert not signed_by(forged, RUN.run)
    assert not signed_by(msgspec.structs.replace(override, term=10), RUN.run)
    changed = msgspec.structs.replace(view, members=(Member("b", 0),))
    assert not signed_by(msgspec.structs.replace(override, view=changed), RUN.run)
    assert not signed_by(msgspec.structs.replace(override, signature=b""), RUN.run)
