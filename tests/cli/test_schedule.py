"""What chaos does and when, and that it leaves a run a majority and every stage a replica unless told otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import msgspec
import pytest

from shoal import config as configuration
from shoal.cli import main as program
from shoal.config import Config
from shoal.exit_codes import ExitCode
from shoal.launcher import process
from shoal.launcher.chaos.chaos import LOOK_S, Chaos
from shoal.launcher.chaos.schedule import Act, Kind, Rates, choose, drawn, from_trace, named, read
from shoal.launcher.files.rundir import LocalPeer, MemberSeat, PeersFile
from shoal.launcher.process import Process
from shoal.runtime.records.report import replace
from shoal.sim.faults.preemption import Change, most, some
from shoal.sim.faults.preemption import read as read_trace

TRACE = Path(__file__).parents[2] / "configs" / "traces" / "aws-g4dn-spot.csv"


def a_run(*stages: int, elsewhere: int = 0) -> PeersFile:
    """Peers p0, p1, ... of these stages; p1 leads. `elsewhere`: members of another machine, all at stage 0."""
    peers = [
        LocalPeer(f"p{n}", Process(100 + n, "then"), stage, leads=n == 1, peer=f"name{n}")
        for n, stage in enumerate(stages)
    ]
    seats = [MemberSeat(peer.label, peer.stage or 0) for peer in peers] + [MemberSeat("", 0)] * elsewhere
    return PeersFile(launcher=Process(1, "then"), started=True, peers=tuple(peers), members=tuple(seats))


def an_act(kind: Kind = "kill", who: str = "anyone", every: bool = False) -> Act:
    return Act(at_s=0.0, kind=kind, who=who, every=every)


def chosen(act: Act, run: PeersFile, away: frozenset[str] = frozenset(), lose_stages: bool = False) -> set[str]:
    """Whoever may be hit, over many seeds."""
    choices = [choose(act, run, away, Random(seed), lose_stages) for seed in range(60)]
    return {label for choice in choices for label in choice.labels}


# ------------------------------------------------------------------------------------------------------------- who


def test_anyone_is_anyone_whose_stage_has_another() -> None:
    assert chosen(an_act(), a_run(0, 0, 1, 2, 2)) == {"p0", "p1", "p3", "p4"}
    assert chosen(an_act(), a_run(0, 0, 1, 2, 2), lose_stages=True) == {"p0", "p1", "p2", "p3", "p4"}


def test_a_replica_that_is_stopped_or_killed_already_is_none() -> None:
    assert chosen(an_act(), a_run(0, 0, 1, 1, 2), away=frozenset({"p0"})) == {"p2", "p3"}


def test_a_replica_on_another_machine_counts() -> None:
    assert chosen(an_act(), a_run(0, 1, elsewhere=2)) == {"p0"}


@pytest.mark.parametrize("kind", ["kill", "remove", "stop", "cut"])
def test_a_majority_of_the_members_is_always_left(kind: Kind) -> None:
    run = a_run(0, 0, 0, 0, 0)
    for away in (frozenset(), frozenset({"p0"})):
        assert chosen(an_act(kind), run, away, lose_stages=True)
    choice = choose(an_act(kind), run, frozenset({"p0", "p1"}), Random(0), lose_stages=True)
    assert choice.later and "of 5 members 2 would be left" in choice.why_not and not choice.labels
    every = choose(an_act(kind, "stage 0", every=True), run, frozenset(), Random(0))
    assert every.later and not every.labels


def test_who_moves_to_another_stage_still_votes() -> None:
    run = a_run(0, 0, 0, 0, 0)
    run = msgspec.structs.replace(run, members=run.members[:4], voters=tuple(peer.label for peer in run.peers))
    assert chosen(an_act(), run, away=frozenset({"p4"}), lose_stages=True)
    assert not chosen(an_act(), run, away=frozenset({"p4", "p3"}), lose_stages=True)


def test_even_numbers_need_more_than_half() -> None:
    assert not chosen(an_act(), a_run(0, 0, 0, 0), away=frozenset({"p0"}))


def test_a_joiner_is_nobody_whom_the_run_relies_on() -> None:
    run = a_run(0, 1)
    run = msgspec.structs.replace(run, peers=(*run.peers, LocalPeer("p9", Process(9, "now"))))
    assert chosen(an_act(), run) == {"p9"}
    assert chosen(an_act(who="member"), run) == set(), "each is its stage's last"
    assert chosen(an_act(who="member"), run, lose_stages=True) == set(), "one of two is no majority"
    assert chosen(an_act(who="member"), a_run(0, 0, 0)) == {"p0", "p1", "p2"}


def test_a_label_a_stage_and_the_leader_can_be_named() -> None:
    run = a_run(0, 0, 1, 1, 2, 2)
    assert chosen(an_act(who="p3"), run) == {"p3"}
    assert chosen(an_act(who="stage 1"), run) == {"p2", "p3"}
    assert chosen(an_act(who="leader"), run) == {"p1"}
    assert choose(an_act(who="stage 1", every=True), run, frozenset(), Random(0)).labels == ("p2", "p3")
    nobody = choose(an_act(who="p77"), run, frozenset(), Random(0))
    assert nobody.why_not == "nobody here is p77" and not nobody.later


def test_a_slow_peer_goes_on_working_so_anyone_may_be_slowed() -> None:
    assert chosen(an_act("slow"), a_run(0, 1)) == {"p0", "p1"}


def test_a_cut_off_peer_is_gone_for_the_others_and_a_lagging_one_goes_on() -> None:
    assert chosen(an_act("cut"), a_run(0, 0, 1, 2, 2)) == {"p0", "p1", "p3", "p4"}
    assert chosen(an_act("lag"), a_run(0, 1)) == {"p0", "p1"}


def test_links_of_a_peer_that_does_not_listen_yet_cannot_be_cut() -> None:
    run = a_run(0, 0, 0)
    run = msgspec.structs.replace(run, peers=(*run.peers[:2], msgspec.structs.replace(run.peers[2], peer="")))
    assert chosen(an_act("cut"), run) == {"p0", "p1"}
    assert chosen(an_act("kill"), run) == {"p0", "p1", "p2"}


def test_the_far_ends_of_a_link_are_named_like_the_near_ones() -> None:
    assert [peer.label for peer in named("stage 1", a_run(0, 1, 1))] == ["p1", "p2"]
    assert [peer.label for peer in named("leader", a_run(0, 1, 1))] == ["p1"]


# ------------------------------------------------------------------------------------------------------------ when


def test_a_seed_is_one_schedule_and_the_mean_is_what_was_asked_for() -> None:
    rates = Rates(kill_every_s=10.0, stop_every_s=25.0)
    acts = drawn(rates, 3, 10_000.0)
    assert acts == drawn(rates, 3, 10_000.0) != drawn(rates, 4, 10_000.0)
    assert list(acts) == sorted(acts, key=lambda act: act.at_s) and acts[-1].at_s < 10_000.0
    assert sum(act.kind == "kill" for act in acts) == pytest.approx(1000, rel=0.1)
    assert sum(act.kind == "stop" for act in acts) == pytest.approx(400, rel=0.1)
    alone = drawn(Rates(kill_every_s=10.0), 3, 10_000.0)
    assert alone == tuple(act for act in acts if act.kind == "kill"), "one more kind moves none of the others"


def test_a_trace_is_entered_where_it_has_as_many_nodes_as_the_run() -> None:
    joined = [Change(10.0 * n, f"n{n}", True) for n in range(4)]
    changes = [*joined, Change(100.0, "n0", False), Change(160.0, "n9", True)]
    acts = from_trace(changes, peers=3, compress=10.0)
    assert [(act.at_s, act.kind) for act in acts] == [(1.0, "add"), (8.0, "remove"), (14.0, "add")]
    assert acts[1].why == "n0 was taken away after 1 min 40 s"
    with pytest.raises(ValueError, match="never has 5 nodes at once, at most 4"):
        from_trace(changes, peers=5, compress=1.0)


def test_a_node_taken_away_can_be_a_peer_cut_off_until_one_comes_again() -> None:
    joined = [Change(10.0 * n, f"n{n}", True) for n in range(3)]
    rest = [(100.0, False), (110.0, False), (160.0, True), (200.0, False), (300.0, True), (400.0, True), (500.0, True)]
    changes = [*joined, *(Change(at_s, "n7", joins) for at_s, joins in rest)]
    acts = from_trace(changes, peers=3, compress=10.0, cut=True)
    assert [(act.kind, act.at_s, act.length_s) for act in acts] == [
        ("cut", 8.0, 6.0),
        ("cut", 9.0, 19.0),
        ("cut", 18.0, 20.0),
        ("add", 48.0, 0.0),
    ]


def test_drawn_cuts_go_in_every_direction_and_change_no_other_kind() -> None:
    acts = drawn(Rates(kill_every_s=10.0, cut_every_s=10.0, lag_every_s=20.0), 3, 1000.0)
    assert {act.direction for act in acts if act.kind == "cut"} == {"both", "out", "in"}
    assert {act.length_s for act in acts if act.kind == "lag"} == {20.0}
    assert tuple(act for act in acts if act.kind == "kill") == drawn(Rates(kill_every_s=10.0), 3, 1000.0)
    inwards = drawn(Rates(cut_every_s=10.0, cut_direction="in"), 3, 1000.0)
    assert {act.direction for act in inwards} == {"in"}


@pytest.mark.parametrize("one_of", [1, 2, 4])
def test_the_peers_wanted_follow_the_nodes_of_the_trace(one_of: int) -> None:
    changes = some(read_trace(TRACE), one_of)
    wanted = highest = 6
    for act in from_trace(read_trace(TRACE), peers=6, compress=60.0, one_of=one_of):
        wanted += 1 if act.kind == "add" else -1
        highest = max(highest, wanted)
        assert wanted >= 0
    assert highest == most(changes)
    assert wanted == sum(1 if change.joins else -1 for change in changes)


def test_a_schedule_file_is_read_by_time_with_its_units(tmp_path: Path) -> None:
    path = tmp_path / "acts.toml"
    path.write_text(
        '[[act]]\nat = "1 min"\nkind = "stop"\nwho = "stage 1"\nevery = true\nfor = "500 ms"\n'
        '[[act]]\nat = 5\nkind = "slow"\nby = 4\n'
    )
    slow, stop = read(path)
    assert (slow.at_s, slow.kind, slow.who, slow.by, slow.length_s) == (5.0, "slow", "anyone", 4.0, 20.0)
    assert (stop.at_s, stop.who, stop.every, stop.length_s) == (60.0, "stage 1", True, 0.5)
    assert str(stop) == "  1:00.0  stop every peer of stage 1 for 500 ms: acts.toml says so"


def test_links_and_moments_are_written_in_a_schedule_file(tmp_path: Path) -> None:
    path = tmp_path / "acts.toml"
    path.write_text(
        '[[act]]\nat = 1\nkind = "cut"\nwho = "p2"\nfrom = "leader"\ndirection = "out"\nfor = "9 s"\n'
        '[[act]]\nat = 2\nkind = "lag"\ndelay = "200 ms"\nbandwidth = "8 Mbit/s"\n'
        '[[act]]\nat = 3\nkind = "kill"\nwho = "stage 1"\non = "optimizer"\n'
    )
    cut, lag, kill = read(path)
    assert (cut.off, cut.direction, cut.length_s) == ("leader", "out", 9.0)
    assert (lag.link.delay_s, lag.link.up_Bps, lag.length_s) == (0.2, 1e6, 20.0)
    assert str(cut) == "  0:01.0  cut p2 from leader, outwards only for 9.0 s: acts.toml says so"
    assert "lag anyone from all others by 200 ms and 976.6 KiB/s for 20.0 s" in str(lag)
    assert str(kill) == "  0:03.0  kill stage 1 when it begins the optimizer step: acts.toml says so"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("act = 3", "not a schedule"),
        ('[[act]]\nat = "1 s"\nkind = "explode"', "explode"),
        ('[[act]]\nat = "1 s"\nkind = "kill"\nwhom = "p1"', "whom"),
        ('[[act]]\nat = "1 parsec"\nkind = "kill"', "parsec"),
        ('[[act]]\nat = -1\nkind = "kill"', "times are 0 or more"),
        ('[[act]]\nat = 1\nkind = "slow"\nby = 1', "`by` is above 1"),
        ('[[act]]\nkind = "kill"\non = "lunch"', "'lunch' is no moment; there are backward, averaging"),
        ('[[act]]\nkind = "cut"\ndirection = "up"', "up"),
        ("[[act", "not a schedule"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "acts.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"acts\.toml") as refused:
        read(path)
    assert said in str(refused.value)


# ------------------------------------------------------------------------------------------------------ the command


def test_a_dry_run_prints_the_schedule_and_needs_no_running_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["chaos", str(tmp_path), "--kill-every", "20", "--stop-every", "1 min", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 30 and any("stop anyone for 8.0 s: drawn from seed 0" in line for line in lines)
    (tmp_path / "config.toml").write_text(configuration.text(Config()))
    assert program.main(["chaos", str(tmp_path), "--trace", str(TRACE), "--compress", "60", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "add: node" in lines[0] and len(lines) == 153 - 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "in one way"),
        (["--kill-every", "5", "--trace", "x.csv"], "in one way"),
        (["--kill-every", "0"], "--kill-every 0"),
        (["--kill-every", "5", "--slow-by", "1"], "--slow-by 1"),
        (["--trace", "x.csv"], "no run is there"),
        (["--kill-every", "5"], "no run is there"),
        (["--cut-every", "5"], "kind = 'cut' needs a run that was started with network.fault_injection=true"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert program.main(["chaos", str(tmp_path), *words]) == ExitCode.USER_ERROR
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- end


def test_chaos_ends_when_the_launcher_has_seen_whom_it_removed(tmp_path: Path) -> None:
    """Else the launcher takes it for a peer that is lost, and starts another one."""
    me = process.identify(os.getpid())
    sleepers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        peers = []
        for at, sleeper in enumerate(sleepers):
            identified = process.identify(sleeper.pid)
            assert identified is not None and me is not None
            peers.append(LocalPeer(f"p{at}", identified, 0, peer=f"name{at}"))
        seats = (*(MemberSeat(peer.label, 0) for peer in peers), MemberSeat("", 0))
        run = PeersFile(launcher=me, started=True, peers=tuple(peers), members=seats)
        (tmp_path / "peers.json").write_bytes(msgspec.json.encode(run))
        chaos = Chaos(tmp_path, Random(0), lose_stages=False)
        ends = threading.Thread(target=chaos.run, args=((an_act("remove", "p1"),),), daemon=True)
        ends.start()
        assert sleepers[1].wait(20) == -signal.SIGKILL
        ends.join(4 * LOOK_S)
        assert ends.is_alive(), "peers.json still has it"
        replace(tmp_path / "peers.json", msgspec.json.encode(msgspec.structs.replace(run, peers=run.peers[:1])))
        ends.join(20)
        assert not ends.is_alive()
        assert sleepers[0].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.communicate()
