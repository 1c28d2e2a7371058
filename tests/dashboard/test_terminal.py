"""The live view: what it shows, that it keeps to its screen, and plain lines when there is none."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from shoal.dashboard.terminal import Happening, PeerLine, ProgressLines, Snapshot, Terminal, headline, render, rows
from shoal.traffic import StoredBytes, Traffic


def a_snapshot(**changes: object) -> Snapshot:
    snapshot = Snapshot(
        name="quickstart",
        elapsed_s=72.0,
        step=36,
        steps=80,
        stages=3,
        losses=tuple(5.5 - 0.1 * i for i in range(36)),
        tokens_per_s=5212.0,
        step_s=2.0,
        redone=3,
        peers=(*(PeerLine(f"p{i}", i % 3, i != 4, i == 2, 0.4 * i, 1.2) for i in range(6)), PeerLine("p7")),
        happenings=tuple(
            Happening(i, 60.0 + i, "joined", f"p{i} takes a seat at stage 1, which served least", "p2")
            for i in range(30)
        ),
    )
    return msgspec.structs.replace(snapshot, **changes)


def drawn(snapshot: Snapshot, width: int, height: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=True, color_system=None).print(
        render(snapshot, width, height)
    )
    return out.getvalue().splitlines()


def test_one_line_tells_step_loss_speed_and_the_time_to_go() -> None:
    line = headline(a_snapshot())
    for words in (
        "step 36/80",
        "loss 2.000",
        "5,212 tokens/s",
        "7 peers",
        "3 redone",
        "1 min 12 s",
        "about 1 min 28 s to go",
    ):
        assert words in line


def test_the_line_tells_what_was_undone_by_going_back() -> None:
    assert "undone" not in headline(a_snapshot())
    assert "48 undone (went back 2x)" in headline(a_snapshot(undone=48, recovered=2))
    line = headline(a_snapshot(undone=48, recovered=2, evictions_undone=1, gone_back_s=75.0))
    assert "48 undone (went back 2x, 1x for evicted peers, 1 min 15 s lost)" in line


def test_the_line_tells_that_gradients_are_late() -> None:
    assert "late" not in headline(a_snapshot())
    assert "gradients 1 step late" in headline(a_snapshot(staleness=1))


def test_of_a_machine_alone_no_peers_and_no_stages_are_told() -> None:
    alone = a_snapshot(stages=0, peers=())
    assert "peers" not in headline(alone)
    screen = drawn(alone, 100, 30)
    assert "nobody" not in "".join(screen) and "nobody" in "".join(drawn(a_snapshot(peers=()), 100, 30))


def test_the_time_to_go_follows_the_pace_of_late_and_not_the_start() -> None:
    assert a_snapshot(step_s=2.0).remaining_s == 88.0
    assert a_snapshot(step=0, step_s=0.0).remaining_s is None
    assert a_snapshot(first_step=18, step_s=0.0).remaining_s is None, "a start-up is no pace"


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (40, 12), (30, 8)])
def test_the_screen_is_never_larger_than_the_terminal(width: int, height: int) -> None:
    lines = drawn(a_snapshot(), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_every_stage_is_shown_with_its_peers_its_rate_and_what_waits() -> None:
    lines = drawn(a_snapshot(), 100, 30)
    stage = {line.split()[0]: line for line in lines if line.strip() and "│" not in line}
    assert "p2*" in stage["2"]  # leads
    assert "p4~" in stage["1"]  # still loading
    assert "1.2" in stage["1"]  # the loading one does not count
    assert "2.0 s" in stage["2"]
    assert "p7~" in stage["-"]  # no seat yet


def test_a_stage_that_nobody_serves_stands_out() -> None:
    lines = drawn(a_snapshot(peers=(PeerLine("p0", 0, True),)), 80, 24)
    assert sum("nobody" in line for line in lines) == 2


def test_the_newest_events_are_shown_with_their_reasons() -> None:
    lines = drawn(a_snapshot(), 100, 24)
    assert "p29 takes a seat at stage 1" in lines[-1]


def test_markup_in_a_reason_is_text() -> None:
    event = Happening(1, 3.0, "refused", "[red]x[/red] and [/nothing]")
    assert any("[red]x[/red] and [/nothing]" in line for line in drawn(a_snapshot(happenings=(event,)), 100, 24))
    out = io.StringIO()
    with Terminal(Console(file=out, width=60)) as terminal:
        terminal.show(a_snapshot(happenings=(event,)))
    assert "[red]x[/red] and [/nothing]" in out.getvalue()


def test_without_a_terminal_each_event_is_printed_once_and_progress_now_and_then() -> None:
    plain = ProgressLines()
    event = Happening(0, 1.0, "joined", "p1 came", "p0")
    commit = Happening(1, 2.0, "commit", "step 0", "p0")
    first = plain.lines(a_snapshot(elapsed_s=2.0, step=1, happenings=(event, commit)))
    assert [line for line in first if "p1 came" in line]
    assert [line for line in first if "step 1/80" in line]
    assert not [line for line in first if "step 0" in line]
    assert plain.lines(a_snapshot(elapsed_s=3.0, step=2, happenings=(event, commit))) == []
    assert len(plain.lines(a_snapshot(elapsed_s=9.0, step=3, happenings=(event, commit)))) == 1


def test_the_last_step_and_every_change_of_state_are_always_told() -> None:
    plain = ProgressLines()
    plain.lines(a_snapshot(elapsed_s=2.0, step=79, happenings=()))
    assert "step 80/80" in plain.lines(a_snapshot(elapsed_s=2.1, step=80, happenings=()))[0]
    assert (
        "writing" in plain.lines(a_snapshot(elapsed_s=2.2, step=80, happenings=(), state="writing the checkpoint"))[0]
    )


def test_a_pipe_gets_plain_lines_without_control_codes() -> None:
    out = io.StringIO()
    with Terminal(Console(file=out, width=60)) as terminal:
        terminal.show(a_snapshot())
    assert "\x1b" not in out.getvalue()
    assert "step 36/80" in out.getvalue()


def test_a_terminal_is_left_as_it_was_found() -> None:
    out = io.StringIO()
    with Terminal(Console(file=out, width=80, height=24, force_terminal=True)) as terminal:
        terminal.show(a_snapshot())
        terminal.show(a_snapshot(step=37))
    assert "37/80" in out.getvalue()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1  # cursor hidden and shown again


def test_bytes_by_kind_are_shown_and_by_peer_where_there_is_room() -> None:
    assert not any("sent" in line for line in drawn(a_snapshot(), 100, 50))
    peers = tuple(PeerLine(f"p{i}", i % 3, True, sent=Traffic(i << 20, 0, 5 << 10, 0, 9)) for i in range(6))
    snapshot = a_snapshot(peers=peers, sent=Traffic(15 << 20, 0, 30 << 10, 0, 54))
    small, large = drawn(snapshot, 100, 14), drawn(snapshot, 100, 50)
    assert len(small) <= 14 and len(large) <= 50
    for lines in (small, large):
        assert any("sent 15.0 MiB: activations 15.0 MiB, averaging 30.0 KiB, control 54 B" in line for line in lines)
    assert not any("received" in line for line in small)
    assert any(line.startswith("p5") and "5.0 MiB" in line and "5.0 KiB" in line for line in large)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 40), (100, 40), (40, 40)])
def test_what_each_peer_received_and_holds_is_shown_by_kind_where_there_is_room(width: int, height: int) -> None:
    kept = StoredBytes(store=111 << 20, memory=222 << 20, disk=333 << 20)
    received = Traffic(1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20)
    peers = tuple(PeerLine(f"p{i}", i % 3, True, sent=Traffic(7 << 20), received=received, kept=kept) for i in range(4))
    snapshot = a_snapshot(peers=peers, sent=Traffic(28 << 20))
    lines = drawn(snapshot, width, height)
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    if width < 80:
        return
    assert any(line.startswith("p3") and "7.0 MiB" in line and "15.0 MiB" in line for line in lines)
    full = drawn(snapshot, width, rows(snapshot))
    assert any(line.startswith("p3") and all(f"{n}.0 MiB" in line for n in (111, 222, 333)) for line in full)
    assert any(line.startswith("p3") and all(f" {n}.0 MiB" in line for n in (1, 2, 3, 4, 5)) for line in full)
    assert not any("received by" in line for line in drawn(snapshot, width, 24))


def test_a_whole_status_shows_every_table_of_a_large_run() -> None:
    peers = tuple(
        PeerLine(f"p{i}", i % 3, True, sent=Traffic(1), received=Traffic(2), kept=StoredBytes(3)) for i in range(60)
    )
    lines = drawn(snapshot := a_snapshot(peers=peers, sent=Traffic(60)), 80, rows(a_snapshot(peers=peers)))
    assert [line.split()[0] for line in lines].count("p59") == 3 and len(lines) <= rows(snapshot)
    assert not any("received by" in line for line in drawn(snapshot, 80, 30))


def test_a_run_that_has_stopped_shows_the_whole_command_that_goes_on_instead_of_a_time_to_go() -> None:
    advice = (
        "anna silent; 1 of 2 members answer. " * 3 + "If it is gone for good: shoal recover runs/ours --gone abcdef"
    )
    lines = drawn(a_snapshot(stopped="STOPPED at 42 s", advice=advice), 60, 24)
    assert len(lines) <= 24 and "to go" not in lines[0]
    assert "shoal recover runs/ours --gone abcdef" in " ".join(line.strip() for line in lines)


def test_what_a_loss_costs_is_read_whole_on_a_narrow_screen() -> None:
    survives = "survives no loss (1 with 1 peer more); stages 0, 1 have one replica, without which the run goes back"
    snapshot = a_snapshot(survives=survives)
    lines = drawn(snapshot, 60, 24)
    assert len(lines) <= 24 and survives in " ".join(line.strip() for line in lines)
    assert survives in " ".join(line.strip() for line in drawn(snapshot, 80, rows(snapshot)))
