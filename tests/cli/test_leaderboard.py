"""`shoal leaderboard`: who contributed what, in words, CSV and JSON, from what a run's directory holds."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import msgspec
import pytest
from tests.cli.test_watch import CONFIG, HISTORY, MICROBATCHES, a_watch
from tests.runtime.test_proofs import AUTHORITY, PEERS, a_line, a_view

from shoal import config as configuration
from shoal.cli.main import main
from shoal.core.messages import Evicted, Member
from shoal.dashboard.leaderboard import Eviction, Leaderboard, as_csv, leaderboard, line
from shoal.dashboard.terminal import Snapshot
from shoal.launcher.files.proofs import ProofFile
from shoal.launcher.invites import Office, titles
from shoal.runtime.records.account import CommitHistory, CommittedStep, Credit, credits_of
from shoal.transport.identity.invite import Authority, read_invite

CREDITS = [Credit("k1.inv1", 0, 30, 10, 60.0), Credit("k2.inv1", 1, 10, 10, 60.0), Credit("k3.inv2", 1, 20, 5, 30.0)]
TITLES = {"inv1": "anna", "inv2": "=1+1"}


def a_board(by_person: bool = True, evictions: tuple[Eviction, ...] = ()) -> Leaderboard:
    return leaderboard("tiny", CREDITS, (12, 10), TITLES, (128, 2), evictions, by_person=by_person)


def test_a_persons_keys_are_added_up_and_the_most_comes_first() -> None:
    board = a_board()
    assert [(one.person, one.keys, one.microbatches, one.tokens) for one in board.contributors] == [
        ("anna", ("k1", "k2"), 40, 2560),
        ("=1+1", ("k3",), 20, 1280),
    ]
    assert board.contributors[0].stages == {"0": 30, "1": 10} and board.contributors[0].share == pytest.approx(2 / 3)
    assert [one.keys for one in a_board(by_person=False).contributors] == [("k1",), ("k3",), ("k2",)]


def test_csv_can_be_read_back_and_computes_nothing_in_a_spreadsheet() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(a_board()))))
    assert [(row["person"], row["microbatches"], row["keys"]) for row in rows] == [
        ("anna", "40", "k1 k2"),
        ("'=1+1", "20", "k3"),
    ]


def test_who_was_evicted_is_said_with_the_reason() -> None:
    board = a_board(
        evictions=(Eviction(7, 0, "k3.1.inv2.8", "adds up wrongly"), Eviction(7, 0, "k9.1.inv2.8", "other"))
    )
    assert [len(one.evictions) for one in board.contributors] == [0, 1]


def written(directory: Path, steps: tuple[CommittedStep, ...]) -> None:
    directory.mkdir()
    (directory / "config.toml").write_text(configuration.text(CONFIG))
    (directory / "status.json").write_text("{}")
    (directory / "commits.jsonl").write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))


def test_the_command_shows_the_history_that_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = a_watch(*HISTORY).books.steps
    written(tmp_path / "run", steps)
    assert main(["leaderboard", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 committed steps are credited; undone ones are not" in said
    assert main(["leaderboard", str(tmp_path / "run"), "--json", "--by-key"]) == 0
    board = msgspec.json.decode(capsys.readouterr().out, type=Leaderboard)
    assert {one.keys[0]: one.microbatches for one in board.contributors} == {
        "a": 2 * MICROBATCHES, "c": 2 * MICROBATCHES, "b": 0, "d": 0
    }  # fmt: skip
    assert main(["leaderboard", str(tmp_path / "run"), "--csv"]) == 0
    assert capsys.readouterr().out.startswith("rank,person,keys")


def test_a_line_names_those_that_contributed_most() -> None:
    assert line(a_board()) == "contributed: anna 66.7%, =1+1 33.3% (all of it: shoal leaderboard)"
    many = [Credit(f"k{number}.i{number}", 0, 1 + number) for number in range(8)]
    assert " and 3 others " in line(leaderboard("tiny", many, (1, 1), {}, (1, 1)))
    assert "\x1b" not in line(leaderboard("tiny", CREDITS, (1, 1), {"inv1": "a\x1b[2Jb"}, (1, 1)))


def test_the_status_of_a_run_names_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run", a_watch(*HISTORY).books.steps)
    snapshot = Snapshot(name="run", elapsed_s=1.0, step=2, steps=5, stages=2)
    (tmp_path / "run" / "status.json").write_bytes(msgspec.json.encode(snapshot))
    assert main(["status", str(tmp_path / "run")]) == 0
    assert "\ncontributed: " in capsys.readouterr().out


def test_without_a_commit_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run", ())
    assert main(["leaderboard", str(tmp_path / "run")]) != 0
    assert "no step is committed yet" in capsys.readouterr().err


def test_the_launcher_lists_whom_a_view_evicts_for_what_it_did_and_nobody_who_left() -> None:
    watch = a_watch(*HISTORY)
    view = HISTORY[-1]
    after = msgspec.structs.replace(
        view,
        number=6,
        members=(Member("a", 0), Member("c", 1)),
        evicted=(Evicted("b"),),
        reason="b its sums are not those of its parts; d leaves: maintenance; step 3 begins again",
    )
    watch.everyone.evicted(view, after)
    assert watch.everyone.evictions == [Eviction(2, 1, "b", "its sums are not those of its parts")]
    watch.everyone.evicted(after, msgspec.structs.replace(after, number=7, reason="d silent"))
    assert len(watch.everyone.evictions) == 1


def test_names_of_people_outlast_their_invites(tmp_path: Path) -> None:
    now = [1e9]
    office = Office(tmp_path, Authority.new(), lambda: now[0])
    anna = read_invite(office.issue((), 100.0, "tiny", peers=2, title="anna"), 0.0).grant.id
    now[0] += 1e6
    office.issue((), 100.0, "tiny", peers=2, title="bert")
    assert anna not in office.book().invites and titles(tmp_path)[anna] == "anna"
    assert titles(tmp_path / "elsewhere") == {}


def test_credits_of_a_watch_are_of_the_later_epoch() -> None:
    credits, steps = credits_of(a_watch(*HISTORY).books.steps)
    assert steps == 2 and sum(one.microbatches for one in credits) == 2 * 2 * MICROBATCHES


def test_verify_credits_only_what_is_signed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    views = [a_view(step) for step in range(3)]
    books = CommitHistory(1, 3)
    for view in views:
        books.agree(view, float(view.step))
    written(directory, books.steps)
    for view in views[:2]:
        ProofFile(directory, pytest.fail).add(a_line(view, PEERS))
    assert main(["leaderboard", str(directory), "--json", "--by-key", "--verify", AUTHORITY.run]) == 0
    said = capsys.readouterr()
    board = msgspec.json.decode(said.out, type=Leaderboard)
    assert {one.keys[0]: one.microbatches for one in board.contributors} == {one.key_id: 2 for one in PEERS}
    assert "2 of 3 steps are proven by signatures of their voters; 0 lines prove nothing" in said.err
    ProofFile(directory, pytest.fail).add(a_line(views[2], PEERS[:1]))
    assert main(["leaderboard", str(directory), "--verify", AUTHORITY.run]) == 1
    assert "1 valid signatures of 3 voters are no quorum" in capsys.readouterr().err
    assert main(["leaderboard", str(directory), "--verify"]) != 0
    assert "give --verify the run's id" in capsys.readouterr().err
