"""Passes on real processes: a guest that is revoked is gone, says why and does not come back, while the run goes on; and a run outlives the
passes that it began with, so that replacements and guests with old texts still get in. No secret is on a command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.test_run import LONG_S, NO_MODEL, Start, end, start, wait_for

from shoal.core.names import invite_of
from shoal.launcher.files import rundir
from shoal.transport.identity.invite import read_invite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

RUN = ("run.stages=1", "run.steps=100000", *NO_MODEL, "device.emulated_s=0.05")
GUEST = tuple(word for word in NO_MODEL if "device" in word)


def committed(tmp_path: Path) -> int:
    path = tmp_path / "runs/tiny/commits.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def invites_in_view(tmp_path: Path) -> list[str]:
    """Of everybody who takes part now: by which invite they came."""
    try:
        return [invite_of(name) for name in rundir.locals_of(tmp_path / "runs/tiny").names]
    except ValueError:
        return []


def listening(tmp_path: Path, count: int) -> bool:
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    return bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == count


def goes_on(tmp_path: Path, host: subprocess.Popen[str]) -> None:
    seen = committed(tmp_path)
    wait_for(lambda: host.poll() is not None or committed(tmp_path) >= seen + 3)
    assert host.poll() is None, host.communicate()[0]


def until(condition: Callable[[], object], host: subprocess.Popen[str]) -> None:
    wait_for(lambda: host.poll() is not None or condition())
    assert host.poll() is None, host.communicate()[0]


def command_lines() -> str:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(lines)


def test_a_revoked_guest_is_shut_out_and_told_why_while_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    host = start("run", "tiny.toml", "run.peers=5", "--here", "3", *RUN)
    until(lambda: listening(tmp_path, 3), host)
    assert "wrote ann" in end(start("invite", "tiny.toml", "--name", "ann", "--peers", "2", "--out", "ann"))
    bob = end(start("invite", "tiny.toml", "--name", "bob")).strip()
    bobs = read_invite(bob, 0.0).grant.id
    anns = read_invite((tmp_path / "ann").read_text(), 0.0).grant.id
    assert (tmp_path / "ann").stat().st_mode & 0o777 == 0o600

    ann = start("join", "run.dir=ann-runs", "@ann", *GUEST)
    (tmp_path / "bob").write_text(bob)
    (tmp_path / "bob").chmod(0o600)
    guest = start("join", "@bob", "run.dir=bob-runs", *GUEST)
    until(lambda: {anns, bobs} <= set(invites_in_view(tmp_path)) and committed(tmp_path) >= 2, host)
    assert not [text for text in (bob, (tmp_path / "ann").read_text().strip()) if text in command_lines()]
    listed = end(start("invite", "tiny.toml", "--list"))
    assert f"{bobs}  bob" in listed and "1 of 16" in listed and "1 of 2" in listed, listed

    said = end(start("revoke", "tiny.toml", "bob"))
    assert f"revoked: invite {bobs} (bob)" in said and "peers have received it" in said, said
    output = end(guest, code=1)
    assert f"its invite {bobs} was revoked by the run's authority" in output, output
    until(lambda: bobs not in invites_in_view(tmp_path), host)
    goes_on(tmp_path, host)
    again = end(start("join", "@bob", "run.dir=bob-again", *GUEST), code=1)
    assert f"its invite {bobs} was revoked by the run's authority" in again, again
    assert anns in invites_in_view(tmp_path) and ann.poll() is None
    assert "revoked on" in end(start("invite", "tiny.toml", "--list"))

    new = end(start("revoke", "tiny.toml", "ann", "--rotate")).strip().splitlines()[-1]
    end(ann, code=1)
    back = start("join", "-", "run.dir=ann-again", *GUEST, stdin=new)
    until(lambda: read_invite(new, 0.0).grant.id in invites_in_view(tmp_path), host)
    goes_on(tmp_path, host)
    host.send_signal(signal.SIGINT)
    end(host, code=130)
    assert back.pid


@pytest.mark.parametrize("discovery", ["gossip", "dht"])
def test_a_run_outlives_the_passes_that_it_began_with(start: Start, tmp_path: Path, discovery: str) -> None:
    lifetime_s = 40  # on a busy machine a guest takes 12 s from its invite to its place
    about = (f"network.pass_lifetime_s={lifetime_s}", f"network.discovery={discovery}")
    host = start("run", "tiny.toml", "run.peers=4", "--here", "3", *about, *RUN)
    until(lambda: listening(tmp_path, 3), host)
    text = (
        end(start("invite", "tiny.toml", "--for", f"{lifetime_s} s", "--out", "old")) and (tmp_path / "old").read_text()
    )
    old = read_invite(text, 0.0).grant
    first = start("join", "@old", "run.dir=first", *GUEST)
    until(lambda: old.id in invites_in_view(tmp_path) and committed(tmp_path) >= 2, host)
    until(lambda: time.time() > old.ends_s + lifetime_s, host)
    goes_on(tmp_path, host)
    assert first.poll() is None and old.id in invites_in_view(tmp_path)

    victim = next(peer for peer in rundir.locals_of(tmp_path / "runs/tiny").peers if not peer.leads)
    os.kill(victim.process.pid, signal.SIGKILL)  # the launcher starts another in its place
    until(lambda: "p4" in {seat.label for seat in rundir.locals_of(tmp_path / "runs/tiny").members}, host)

    second = start("join", "@old", "run.dir=second", *GUEST)
    until(lambda: invites_in_view(tmp_path).count(old.id) == 2, host)
    goes_on(tmp_path, host)
    assert "renewed while it is used" in end(start("invite", "tiny.toml", "--list"))
    host.send_signal(signal.SIGINT)
    end(host, code=130)
    assert second.pid


def test_guests_that_go_on_without_the_founders_machine_are_told_by_way_of_one_of_them(
    start: Start, tmp_path: Path
) -> None:
    host = start("run", "tiny.toml", "run.peers=4", "--here", "1", f"checkpoint.url={tmp_path / 'saved'}", *RUN)
    until(lambda: listening(tmp_path, 1), host)
    for name, peers in (("ann", "2"), ("bob", "1")):
        end(start("invite", "tiny.toml", "--name", name, "--out", name))
        ours = (f"checkpoint.url={tmp_path / 'saved'}", f"run.dir={name}-runs", *GUEST)
        guest = start("join", f"@{name}", "--peers", peers, *ours)
    ids = {name: read_invite((tmp_path / name).read_text(), 0.0).grant.id for name in ("ann", "bob")}
    until(
        lambda: sorted(invites_in_view(tmp_path)).count(ids["ann"]) == 2 and ids["bob"] in invites_in_view(tmp_path),
        host,
    )
    until(lambda: committed(tmp_path) >= 2, host)
    host.send_signal(signal.SIGKILL)  # its peer goes with it
    host.communicate(timeout=LONG_S)

    def others() -> list[str]:
        try:
            return [invite_of(name) for name in rundir.locals_of(tmp_path / "ann-runs/tiny").names]
        except ValueError:
            return []

    wait_for(lambda: sorted(others()) == sorted([ids["ann"], ids["ann"], ids["bob"]]))
    end(start("revoke", "tiny.toml", "bob"))  # nobody answers: kept for later
    (via, *_) = json.loads((tmp_path / "ann-runs/tiny/bootstrap.json").read_bytes())
    said = end(start("invite", "tiny.toml", "--renew", "--via", via))
    assert "peers have received it" in said, said
    assert f"its invite {ids['bob']} was revoked" in end(guest, code=1)
    wait_for(lambda: others() == [ids["ann"]] * 2)
