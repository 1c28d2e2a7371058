"""How this machine's peers stand: slow and silent ones with the reason, those that have ended, and how long they took to join."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.dashboard.terminal import PeerLine, Snapshot
from shoal.launcher.files.output_files import OutputFiles
from shoal.launcher.files.run_directory import STATUS_BPS, WATCHED_S, StatusFile
from shoal.launcher.watching.presence import SHOWN_S, SILENT_S, Presence
from shoal.runtime.records.report import PeerProgress


def a_presence(**rates: float) -> tuple[Presence, dict[str, PeerProgress]]:
    presence, standing = Presence(), {}
    for label, rate in rates.items():
        presence.listening(label, 0.0)
        standing[label] = PeerProgress(label, stage=0, ready=True, rate=rate)
        presence.reported(label, standing[label], 5.0)
    return presence, standing


def test_a_replica_far_below_its_stages_fastest_is_slow_and_says_so() -> None:
    presence, standing = a_presence(p1=4.0, p2=1.5, p10=2.5, p3=0.0)
    lines = presence.lines(standing, 5.0)
    assert [line.label for line in lines] == ["p1", "p2", "p3", "p10"]
    assert [bool(line.slow) for line in lines] == [False, True, False, False]
    assert lines[1].slow == "1.5 microbatches/s, where p1 of its stage has 4"
    standing["p1"] = PeerProgress("p1", stage=0, ready=False, rate=4.0)
    assert not any(line.slow for line in presence.lines(standing, 5.0)), "one that loads is no measure"


def test_a_process_that_reports_nothing_is_slow() -> None:
    presence, standing = a_presence(p1=4.0)
    assert not presence.lines(standing, 5.0 + SILENT_S - 0.1)[0].slow
    assert presence.lines(standing, 9.0)[0].slow == "its process has reported nothing for 4.0 s"


def test_ended_peers_are_shown_for_a_while_with_how_they_ended() -> None:
    presence, standing = a_presence(p1=4.0, p2=4.0)
    presence.ended("p1", standing.pop("p1"), 6.0, well=False)
    presence.ended("p2", standing.pop("p2"), 7.0, well=True)
    presence.ended("p3", None, 8.0, well=False)  # it never reported
    assert [(line.label, line.ended, line.silent_s, line.ready) for line in presence.ended_lately(9.0)] == [
        ("p2", "left", 2.0, False),
        ("p1", "gone", 3.0, False),
    ]
    assert [line.label for line in presence.ended_lately(6.5 + SHOWN_S)] == ["p2"]


def test_join_seconds_end_with_the_first_readiness() -> None:
    presence, standing = a_presence(p1=4.0)
    presence.reported("p1", standing["p1"], 50.0)
    assert presence.lines(standing, 50.0)[0].join_s == 5.0


def test_the_bottleneck_is_the_stage_with_the_least_rate_where_all_are_known() -> None:
    peers = (PeerLine("a", 0, True, rate=2.0), PeerLine("b", 0, True, rate=2.0), PeerLine("c", 1, True, rate=3.0))

    def bottleneck(*more: PeerLine) -> int | None:
        return Snapshot(name="", elapsed_s=0, step=0, steps=1, stages=2, peers=(*peers, *more)).bottleneck

    assert bottleneck() == 1
    assert bottleneck(PeerLine("d", 1, False, rate=9.0)) == 1, "one that loads serves nothing"
    assert bottleneck(PeerLine("d", 1, True, rate=9.0)) == 0
    assert bottleneck(PeerLine("d", 1, True, machine="192.0.2.1")) is None, "its rate is not known here"


def test_the_status_is_written_each_time_while_somebody_watches(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path, lambda text: None)
    status, watched = StatusFile(files, tmp_path / "watched"), tmp_path / "watched"
    peers = tuple(PeerLine(f"p{number}") for number in range(400))

    def written(now: float) -> bool:
        (tmp_path / "status.json").unlink(missing_ok=True)
        status.write(Snapshot(name="", elapsed_s=now, step=int(now), steps=9, stages=1, peers=peers), now)
        return (tmp_path / "status.json").exists()

    assert written(0.0) and not written(1.0), f"more than {STATUS_BPS} bytes a second"
    watched.touch()
    assert written(2.0) and written(3.0)
    os.utime(watched, (0, os.stat(watched).st_mtime - WATCHED_S - 1))
    assert not written(4.0)
    files.close()
