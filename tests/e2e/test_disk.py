"""A full disk on real processes: checkpoints are not saved and say so, files for people are not written, and training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.e2e.test_run import NO_MODEL, Start, end, start, summary, wait_for

from shoal.runtime.records.account import CommittedStep
from shoal.runtime.records.tape import segments

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk: Linux, as root"),
]
__all__ = ["start"]  # a fixture

SIZE_KIB = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "shoal-test", str(place)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Callable[[], None]:
    """Take all the room that is left; the result gives it back."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (65536, 1024, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler.unlink


def committed(path: Path) -> list[int]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line, type=CommittedStep).commit.step for line in lines]


def test_a_checkpoint_that_finds_no_room_is_given_up_and_the_next_one_is_saved(
    start: Start, tmp_path: Path, disk: Path
) -> None:
    empty = fill(disk)
    url = f"checkpoint.url={disk / 'checkpoints'}"
    launcher = start("run", "tiny.toml", "run.steps=100000", "checkpoint.every=2", url, *NO_MODEL)
    status, commits = tmp_path / "runs/tiny/status.json", tmp_path / "runs/tiny/commits.jsonl"
    wait_for(lambda: launcher.poll() is not None or (status.exists() and b"NOT saved at step" in status.read_bytes()))
    seen = len(committed(commits))
    wait_for(lambda: launcher.poll() is not None or len(committed(commits)) >= seen + 4)
    assert not list(disk.rglob("step-*"))
    empty()
    wait_for(lambda: launcher.poll() is not None or list(disk.glob("checkpoints/step-*")))
    launcher.send_signal(signal.SIGINT)
    output = end(launcher, code=130)
    assert re.search(
        r"NOT saved at step \d+: .*(No space left on device|has no room for).*; older checkpoints are kept", output
    )
    assert (summary(tmp_path)["lost"], summary(tmp_path)["counted_twice"]) == (0, 0)


def test_a_run_whose_own_directory_is_full_trains_on_and_writes_down_later_what_it_could_not(
    start: Start, tmp_path: Path, disk: Path
) -> None:
    launcher = start("run", "tiny.toml", "run.steps=100000", f"run.dir={disk}", *NO_MODEL)
    run_directory = disk / "tiny"
    wait_for(lambda: launcher.poll() is not None or len(committed(run_directory / "commits.jsonl")) >= 2)
    empty = fill(disk)
    last = len(committed(run_directory / "commits.jsonl"))
    log = run_directory / "status.json"
    before = log.read_bytes()
    # The peers' processes tell how far they are only through the launcher, whose files stand still: wait for its words.
    assert launcher.stdout is not None
    said, steps = "", 0
    for line in launcher.stdout:
        said += line
        steps += "cannot be written" in said and "tiny: step" in line
        if steps >= 3:
            break
    assert "cannot be written, training goes on: No space left on device" in said
    assert log.read_bytes() == before
    empty()
    wait_for(lambda: launcher.poll() is not None or len(committed(run_directory / "commits.jsonl")) >= last + 20)
    launcher.send_signal(signal.SIGINT)
    end(launcher, code=130)
    committed_steps = committed(run_directory / "commits.jsonl")
    assert committed_steps == list(range(len(committed_steps))), "every commit once, in order"


def test_a_long_runs_traces_stay_within_their_room_and_replay_says_what_is_missing(
    start: Start, tmp_path: Path
) -> None:
    room = 200_000
    launcher = start("run", "tiny.toml", "run.steps=100000", f"run.trace_bytes={room}", *NO_MODEL)
    run_directory = tmp_path / "runs/tiny"
    most: dict[str, int] = {}

    def long_enough() -> bool:
        for label, pieces in segments(run_directory / "traces").items():
            with contextlib.suppress(FileNotFoundError):  # packed or dropped just now
                most[label] = max(most.get(label, 0), sum(piece.stat().st_size for piece in pieces))
        names = [[piece.name for piece in pieces] for pieces in segments(run_directory / "traces").values()]
        gaps = [".000001." in pieces[0] and ".000002." not in pieces[1] for pieces in names if len(pieces) > 2]
        return len(gaps) == 3 and all(gaps)

    wait_for(lambda: launcher.poll() is not None or long_enough())
    launcher.send_signal(signal.SIGINT)
    end(launcher, code=130)
    assert all(size <= room for size in most.values()), most
    output = end(start("replay", "runs/tiny"))
    assert "identical" in output and "lines of 3 peers are not in this trace any more" in output
    assert (run_directory / "trace.jsonl.gz").stat().st_size <= 3 * room


def test_a_trace_never_takes_the_room_of_a_checkpoint_or_of_the_account(
    start: Start, tmp_path: Path, disk: Path
) -> None:
    """On a disk of 4 MiB traces would fill it within half a minute: they give way, checkpoints are saved, the account is written."""
    words = ("run.steps=100000", "checkpoint.every=5", f"run.dir={disk}", "run.trace_bytes=1GB")
    launcher = start("run", "tiny.toml", *words, *NO_MODEL)
    run_directory = disk / "tiny"
    # The peers' words reach the launcher, which prints them.
    assert launcher.stdout is not None
    said = ""
    for line in launcher.stdout:
        said += line
        if "the trace stops here" in line:
            break
    seen = len(committed(run_directory / "commits.jsonl"))
    wait_for(lambda: launcher.poll() is not None or len(committed(run_directory / "commits.jsonl")) >= seen + 20)
    launcher.send_signal(signal.SIGINT)
    output = said + end(launcher, code=130)
    assert "NOT saved" not in output and "cannot be written" not in output
    account = json.loads((run_directory / "summary.json").read_bytes())
    assert (account["lost"], account["counted_twice"]) == (0, 0)
    assert list(run_directory.glob("checkpoints/step-*"))
