"""A founder that is started again: do others still train its run?"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest

from shoal import config as configuration
from shoal.core.messages import Committed, Member, Peer, Phase, Standing, View
from shoal.launcher import returning
from shoal.launcher.files import rundir
from shoal.launcher.invites import Office
from shoal.runtime.records.account import Base, CommittedStep
from shoal.transport.identity.invite import Authority, read_invite

NAMES = ("a", "b", "c", "d")
VIEW = View(9, 30, tuple(Member(name, number % 2) for number, name in enumerate(NAMES)), phase=Phase.TRAINING)


def answers(*peers: Peer, view: View = VIEW) -> dict[Peer, Standing]:
    return {peer: Standing(1, view) for peer in peers}


def test_a_quorum_of_the_newest_view_trains_on() -> None:
    assert returning.agreeing(answers("b", "c", "d")) == VIEW
    assert returning.agreeing(answers("b", "c")) is None, "two of four agree on nothing"
    assert returning.agreeing({}) is None
    older = msgspec.structs.replace(VIEW, number=5, members=VIEW.members[:3])
    assert returning.agreeing({**answers("a", view=older), **answers("c")}) is None, "the newest view counts"


def test_nobody_is_asked_for_a_run_that_nobody_can_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration.load(None, [f"run.dir={tmp_path}"])
    assert returning.living(config, tmp_path) is None, "it was never begun"
    Authority.load(tmp_path / "authority.key")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for text in ("", "[", json.dumps([f"127.0.0.1:{closed.getsockname()[1]}"])):
            (tmp_path / "bootstrap.json").write_text(text)
            assert returning.living(config, tmp_path) is None
            assert not (tmp_path / "bootstrap.json").exists(), "an invite would name a port that nobody listens at"
            assert returning.living(config, tmp_path) is None, "killed meanwhile, it asks the same again"
    assert not capsys.readouterr().out


def test_a_returning_founder_has_the_invite_of_the_session_before(tmp_path: Path) -> None:
    """With it, it has the casting vote."""
    authority = Authority.load(tmp_path / "authority.key")

    def local(*, again: bool) -> str:
        return read_invite(Office(tmp_path, authority).local(("here:1",), 60.0, "run", again=again), 0.0).grant.id

    before = local(again=False)
    assert (tmp_path / "local.invite").stat().st_mode & 0o077 == 0
    assert local(again=True) == before
    assert local(again=False) != before, "a session of its own"


def a_commit(step: int, epoch: int = 0, saved: int = 0) -> CommittedStep:
    commit = Committed(step, round=step, norm=1.0, loss=2.0, digests=(), groups=())
    return CommittedStep(epoch=epoch, commit=commit, heard_s=0.0, saved=saved)


def test_a_returning_machine_undoes_nothing_that_still_stands(tmp_path: Path) -> None:
    steps = [a_commit(step, saved=4) for step in range(8)]
    lines = b"".join(msgspec.json.encode(step) + b"\n" for step in steps)
    (tmp_path / "commits.jsonl").write_bytes(lines)
    (tmp_path / "session.json").write_bytes(msgspec.json.encode(Base(first_step=2)))
    resumed = rundir.rejoin(tmp_path, VIEW, ("there:1",))
    assert (resumed.first_step, resumed.steps, resumed.living) == (2, tuple(steps), ("there:1",))
    assert (tmp_path / "commits.jsonl").read_bytes() == lines
    back = msgspec.structs.replace(VIEW, epoch=1)  # they have gone back to a checkpoint, of step 4 or a later one
    assert rundir.rejoin(tmp_path, back, ()).steps == tuple(steps[:4])
