"""invites.json: who is renewed and who is not, with an injected clock; what is revoked stays so; names that are meant."""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from shoal import config as configuration
from shoal import guest
from shoal.cli import demo, join, revoke
from shoal.cli import invite as invite_command
from shoal.config import Config, to_tree
from shoal.launcher import reach
from shoal.launcher.files import rundir
from shoal.launcher.invite_text import INVITE_VARIABLE, MOST_CHARS, invite_text
from shoal.launcher.invites import InviteBook, Issued, Office, invite_named
from shoal.launcher.launch import PeerSpec, _environment
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.identity.passes import MAX_GRANTS, PassList

DAY_S = 86400.0
NOW = 1_800_000_000.0
AUTHORITY = Authority.new()


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def office(tmp_path: Path, clock: Clock) -> Office:
    return Office(tmp_path, AUTHORITY, clock)


def issue(office: Office, days: float = 7, **about: object) -> str:
    """Its id."""
    text = office.issue((), days * DAY_S, "run", **{"peers": 16, **about})  # type: ignore[arg-type]
    return read_invite(text, 0.0).grant.id


def listed(data: bytes) -> PassList:
    return msgspec.msgpack.decode(data, type=PassList)


def test_invites_of_those_who_take_part_are_renewed_for_ever_and_others_lapse(office: Office, clock: Clock) -> None:
    used, unused, final = issue(office), issue(office), issue(office, renews=False)
    office.local((), 30 * DAY_S, "run")
    local = next(each for each, issued in office.book().invites.items() if issued.local)
    versions = []
    for _ in range(365):
        clock.now += DAY_S
        if data := office.tend({used, final}):
            versions.append(listed(data).version)
        grants = {each: issued.granted for each, issued in office.book().invites.items()}
        assert grants[used].ends_s > clock.now + 3 * DAY_S and grants[local].ends_s > clock.now + 14 * DAY_S
    assert versions == sorted(set(versions)) and len(versions) > 90
    assert unused not in grants and final not in grants, "over, and forgotten"
    (mine, theirs) = sorted(listed(office.pass_list()).grants, key=lambda grant: grant.peers, reverse=True)
    assert (mine.id, theirs.id) == (local, used)
    grants[used].check(clock.now)


def test_a_renewal_keeps_holder_and_limit(office: Office, clock: Clock) -> None:
    each = issue(office, peers=3)
    before = office.book().invites[each].granted
    clock.now += 4 * DAY_S
    (after,) = listed(office.tend({each})).grants
    assert (after.holder, after.peers, after.tag) == (before.holder, 3, before.tag)
    assert after.expires == int(clock.now + 7 * DAY_S)


def test_the_launcher_hears_of_what_commands_have_changed_once(office: Office, tmp_path: Path, clock: Clock) -> None:
    launcher = Office(tmp_path, AUTHORITY, clock)
    assert launcher.tend(()) == b""
    each = issue(office)
    assert launcher.tend(()) == b"", "an invite is no news to peers"
    office.revoke([each], ["k" * 32])
    pass_list = listed(launcher.tend({each}))
    assert {entry.what for entry in pass_list.revoked} == {each, "k" * 32}
    assert launcher.tend({each}) == b""


def test_a_revoked_invite_is_never_renewed_and_stays_revoked_in_the_next_session(
    office: Office, tmp_path: Path, clock: Clock
) -> None:
    each = issue(office)
    version = listed(office.revoke([each], [])).version
    clock.now += 6 * DAY_S
    later = Office(tmp_path, AUTHORITY, clock)
    later.local((), 30 * DAY_S, "run")
    pass_list = listed(later.tend({each}))
    assert (
        pass_list.version == version and not pass_list.grants and [entry.what for entry in pass_list.revoked] == [each]
    )
    assert not later.renew(lambda name, _: name == each)


def test_versions_grow_even_when_the_file_was_lost(office: Office, tmp_path: Path, clock: Clock) -> None:
    before = listed(office.revoke([], ["k" * 32])).version
    clock.now -= 3600  # and the clock was put back
    second = listed(office.revoke([], ["l" * 32])).version
    assert second > before
    (tmp_path / "invites.json").unlink()
    clock.now += 7200
    assert listed(office.revoke([], ["m" * 32])).version > second


def test_two_commands_at_once_lose_nothing(tmp_path: Path) -> None:
    def work() -> None:
        office = Office(tmp_path, AUTHORITY)
        for _ in range(10):
            office.issue((), DAY_S, "run", peers=1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Office(tmp_path, AUTHORITY).book().invites) == 40


def test_no_secret_is_written_down(office: Office, tmp_path: Path) -> None:
    text = office.issue((), DAY_S, "run", peers=1)
    secret = read_invite(text, 0.0).seed
    office.local((), DAY_S, "run")
    written = (tmp_path / "invites.json").read_bytes()
    assert msgspec.json.encode(secret).strip(b'"') not in written and text.encode() not in written


def test_all_the_launchers_peers_come_by_one_invite_with_the_addresses_of_the_moment(office: Office) -> None:
    first = read_invite(office.local((), DAY_S, "run"), 0.0)
    second = read_invite(office.local(("a:1",), DAY_S, "run"), 0.0)
    assert first.grant == second.grant and second.addresses == ("a:1",)


def test_a_file_that_is_no_list_is_named_and_too_many_invites_are_refused(office: Office, tmp_path: Path) -> None:
    (tmp_path / "invites.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"invites\.json is not a list of invites"):
        office.book()
    one = msgspec.msgpack.encode(read_invite(AUTHORITY.invite((), NOW + DAY_S, issued=NOW), 0.0).grant)
    book = InviteBook(invites={f"{number:012}": Issued(grant=one) for number in range(MAX_GRANTS)})
    (tmp_path / "invites.json").write_bytes(msgspec.json.encode(book))
    with pytest.raises(ValueError, match="revoke some"):
        issue(office)


def test_who_is_meant_by_a_word(office: Office) -> None:
    ann, bob = issue(office, title="ann"), issue(office, title="bob")
    book, me = office.book(), Identity.new()
    by_bob = f"{me.key_id}.1.{bob}.16"
    labels = {"p1": f"{'a' * 32}.1.{ann}.16"}
    assert revoke._meant("ann", book, labels, ()) == ("invite", ann)
    assert revoke._meant(bob, book, labels, ()) == revoke._meant(bob[:5], book, labels, ()) == ("invite", bob)
    assert revoke._meant("p1", book, labels, ()) == ("key", "a" * 32)
    for word in (by_bob, me.key_id, me.key_id[:8]):
        assert revoke._meant(word, book, labels, (by_bob,)) == ("key", me.key_id)
    assert bob in revoke._still(me.key_id, (by_bob,))
    for word in ("carl", "p9", bob[:3], ""):
        with pytest.raises(ValueError, match="is no invite and no peer"):
            revoke._meant(word, book, labels, (by_bob,))
    assert invite_named("ann", book) == [ann]


def test_the_table_names_every_invite_with_its_state(office: Office, clock: Clock) -> None:
    ann, bob = issue(office, title="ann", peers=3), issue(office, days=1)
    revoked_invite = issue(office, title="carl")
    office.revoke([revoked_invite], ["k" * 32])
    clock.now += 1.5 * DAY_S
    text = invite_command.table(office, [f"{'a' * 32}.1.{ann}.3"])
    lines = dict(line.split(maxsplit=1) for line in text.splitlines()[1:-1])
    assert "ann" in lines[ann] and "1 of 3" in lines[ann] and "renewed while it is used" in lines[ann]
    assert lines[bob].endswith("over") and "revoked on 2027-01-15" in lines[revoked_invite]
    assert f"key {'k' * 32} was revoked" in text


# ------------------------------------------------------------------------------------------------------------- secrets


def test_an_invite_is_read_from_wherever_it_was_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "an invite=x"
    file.write_text("shoal1abc\n")
    file.chmod(0o600)
    monkeypatch.delenv(INVITE_VARIABLE, raising=False)
    assert invite_text(["shoal1x"]) == "shoal1x"
    assert invite_text([f"@{file}"]).strip() == "shoal1abc"
    with pytest.raises(ValueError, match="no invite"):
        invite_text([])
    with pytest.raises(ValueError, match="one invite, not 2"):
        invite_text(["shoal1x", f"@{file}"])
    with pytest.raises(OSError):
        invite_text([f"@{tmp_path}/none"])
    monkeypatch.setenv(INVITE_VARIABLE, "shoal1env")
    assert invite_text([]) == "shoal1env"
    assert invite_text(["shoal1x"]) == "shoal1x"


def test_an_invite_that_others_can_read_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "invite"
    file.write_text("shoal1abc")
    file.chmod(0o644)
    invite_text([f"@{file}"])
    assert f"chmod 600 {file}" in capsys.readouterr().err


def test_more_than_an_invite_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_text("x" * 1_000_000)
    assert len(invite_text([f"@{file}"])) <= MOST_CHARS


def test_peers_inherit_no_invite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INVITE_VARIABLE, "shoal1secret")
    spec = PeerSpec(config=to_tree(Config()), directory="", label="p1", first=False)
    assert "shoal1secret" not in _environment(spec).values()


def test_settings_and_invite_are_told_apart() -> None:
    parser = argparse.ArgumentParser()
    join.arguments(parser)
    args = parser.parse_intermixed_args(["run.dir=x", "-", "--peers", "2", "device.kind=cpu"])
    assert args.words == ["run.dir=x", "-", "device.kind=cpu"] and args.peers == 2
    assert parser.parse_intermixed_args(["run.dir=x", "@an=invite"]).words == ["run.dir=x", "@an=invite"]


def test_standard_input_is_read_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("shoal1in\nmore\n"))
    assert invite_text(["-"]) == "shoal1in\nmore\n", "a chat's line breaks do no harm"


def test_of_what_a_person_pastes_one_line_is_read() -> None:
    """So that Enter is enough."""
    code = "from shoal.launcher.invite_text import invite_text; print('got', invite_text(['-']).strip())"
    parent, child = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=child, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as asked:
        os.write(parent, b"shoal1in\n")
        output, prompt = asked.communicate(timeout=60)
    os.close(parent)
    os.close(child)
    assert output == b"got shoal1in\n" and prompt == b"paste the invite: "


def test_an_invite_file_is_for_its_owner_only_also_where_there_was_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "invite"
    file.write_text("old")
    file.chmod(0o644)
    invite_command.hand_over("shoal1new", str(file))
    assert file.read_text() == "shoal1new\n" and file.stat().st_mode & 0o777 == 0o600
    assert "shoal join @" in capsys.readouterr().out
    file = tmp_path / reach.INVITE
    file.write_text("an older and longer one")
    file.chmod(0o644)
    assert reach.keep(tmp_path, "shoal1new") == file
    assert file.read_text() == "shoal1new\n" and file.stat().st_mode & 0o777 == 0o600


PEER_ID = "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"


@pytest.mark.parametrize(
    ("addresses", "most"), [(("192.0.2.17:45123",), 310), ((f"/ip4/192.0.2.17/tcp/45123/p2p/{PEER_ID}",), 350)]
)
def test_an_invite_fits_into_a_chat(addresses: tuple[str, ...], most: int) -> None:
    """One unbroken word of letters and digits; 621 to 710 characters before."""
    config = configuration.load(demo.CONFIG, ["run.peers=7", f"data.digest={hashlib.sha256(b'').hexdigest()[:32]}"])
    text = AUTHORITY.invite(addresses, NOW + 7 * DAY_S, config.run.name, guest.shared(config), issued=NOW)
    assert text.isalnum() and len(text) <= most
    assert guest.joined(read_invite(text, NOW).config, []).run.peers == 7


def test_an_invite_names_one_peer_at_all_its_hosts_and_other_peers() -> None:
    addresses = tuple(f"192.0.2.{host}:{port}" for port in (1, 2, 3) for host in range(6))
    assert reach.few(addresses) == (*(f"192.0.2.{host}:1" for host in range(4)), "192.0.2.0:2", "192.0.2.0:3")
    assert reach.few(addresses[:1]) == addresses[:1] and reach.few(()) == ()
    elsewhere = tuple(f"198.51.100.{host}:{10 + host}" for host in range(5))
    assert reach.few((*addresses, *elsewhere))[4:] == elsewhere[:3], "other machines may live when this one has ended"
    assert reach.few(addresses, ("a:1", "192.0.2.0:1"))[:3] == ("a:1", "192.0.2.0:1", "192.0.2.1:1")


def test_a_run_is_named_by_its_directory_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(f'[run]\nname = "ours"\ndir = "{tmp_path}"\n')
    assert invite_command.directory_of(str(tmp_path / "ours.toml"), ()) == tmp_path / "ours"
    (tmp_path / "ours").mkdir()
    assert invite_command.directory_of(str(tmp_path / "ours"), ()) == tmp_path / "ours"
    assert invite_command.directory_of(str(file), ["run.name=theirs"]) == tmp_path / "theirs"


def test_a_run_that_is_starting_is_waited_for(tmp_path: Path) -> None:
    """A founder's port was open a moment before its address was written, and `shoal invite` said that nobody had started a run there."""
    directory = tmp_path / "run"
    directory.mkdir()
    invite_command.await_start(directory)  # nobody is starting one
    with rundir.claimed(directory):
        files = [directory / name for name in ("config.toml", rundir.BOOTSTRAP)]
        timer = threading.Timer(0.3, lambda: [file.write_text("") for file in files])
        timer.start()
        invite_command.await_start(directory)
        assert all(file.exists() for file in files)
        timer.join()
        (directory / rundir.BOOTSTRAP).unlink()
        invite_command.await_start(directory, ("192.0.2.1:4711",))  # by which others are found, whoever listens here


def test_invites_and_lists_go_by_the_addresses_of_before_while_a_run_begins_again_or_could_not(tmp_path: Path) -> None:
    """A resume that is refused, as others train on with other settings, must not leave a run that nobody can be invited to."""
    with pytest.raises(ValueError, match="no run has been started there"):
        invite_command.Founded(tmp_path)
    (tmp_path / "config.toml").write_text(configuration.text(configuration.load(demo.CONFIG)))
    Authority.load(tmp_path / "authority.key")
    (tmp_path / rundir.BOOTSTRAP).write_text('["192.0.2.1:4711"]')
    assert rundir.set_addresses_aside(tmp_path) == ("192.0.2.1:4711",)
    assert not (tmp_path / rundir.BOOTSTRAP).exists()
    assert invite_command.Founded(tmp_path).addresses == ("192.0.2.1:4711",)
    assert invite_command.Founded(tmp_path, ("there:1",)).addresses == ("there:1", "192.0.2.1:4711")
