"""Figures by step: what a step's tokens, rate and loss are, also after the run went back; and the reader that feeds them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
from tests.recorded_run import RecordedRun

from shoal.config import Config, tokens_per_step
from shoal.core.messages import Committed, Rewards
from shoal.dashboard.series import Series, columns
from shoal.launcher.files.contributions import board_in
from shoal.launcher.watching.reader import RunReader
from shoal.runtime.records.account import CommittedStep

SIZE = tokens_per_step(Config())


def a_step(step: int, heard_s: float, loss: float = 2.0, epoch: int = 0, skipped: int = 0) -> CommittedStep:
    return CommittedStep(epoch, Committed(step, 0, 1.5, loss, (), (), skipped=skipped), heard_s)


def a_series(*steps: CommittedStep) -> Series:
    series = Series(Config())
    for step in steps:
        series.add(step)
    return series


def test_time_goes_on_where_the_clock_of_a_restarted_machine_began_again() -> None:
    series = a_series(a_step(0, 100.0), a_step(1, 102.0), a_step(2, 7.0), a_step(3, 11.0))
    assert [one.time_s for one in series.figures] == [0.0, 2.0, 2.0, 6.0]
    assert series.figures[1].tokens_per_s == SIZE / 2 and series.figures[0].tokens_per_s is None
    assert series.figures[3].tokens_per_s == 3 * SIZE / 6


def test_a_step_that_changed_nothing_and_a_loss_that_is_no_number_have_none() -> None:
    figures = a_series(a_step(0, 1.0, skipped=1), a_step(1, 2.0, loss=float("nan"))).figures
    assert [one.loss for one in figures] == [None, None]
    assert figures[1].tokens == 2 * SIZE and figures[1].gradient_norm == 1.5


def test_many_steps_are_thinned_evenly_and_keep_the_newest() -> None:
    figures = a_series(*(a_step(step, float(step)) for step in range(1001))).figures
    steps = columns(figures, 100)["step"]
    assert len(steps) <= 100 and steps[-1] == 1001 and {b - a for a, b in pairwise(steps)} == {11}
    assert columns(figures[:7], 100)["step"] == [1, 2, 3, 4, 5, 6, 7]


def test_commits_are_read_once_and_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    with RecordedRun(tmp_path / "six") as run:
        run.tick(10.0)
        reader = RunReader(run.output.path)
        reader.read()
        generation = reader.series.generation
        assert [one.step for one in reader.series.figures] == [1, 2, 3, 4, 5]
        line = msgspec.json.encode(a_step(5, 12.0)) + b"\n"
        with open(run.output.path / "commits.jsonl", "ab") as file:
            file.write(line[:40])
            file.flush()
            reader.read()
            assert len(reader.series.figures) == 5
            file.write(line[40:])
            file.flush()
            reader.read()
        assert [one.step for one in reader.series.figures] == [
            1,
            2,
            3,
            4,
            5,
            6,
        ] and reader.series.generation == generation


def test_a_run_that_went_back_has_each_step_once(tmp_path: Path) -> None:
    with RecordedRun(tmp_path / "six") as run:
        run.tick(10.0)
        reader = RunReader(run.output.path)
        reader.read()
        generation = reader.series.generation
        with open(run.output.path / "commits.jsonl", "ab") as file:
            file.writelines(msgspec.json.encode(a_step(step, 20.0 + step, 7.0, epoch=1)) + b"\n" for step in (2, 3))
        reader.read()
    figures = reader.series.figures
    assert [one.step for one in figures] == [1, 2, 3, 4] and [one.loss for one in figures[2:]] == [7.0, 7.0]
    assert reader.series.generation > generation, "a browser must get all steps again"


def test_contributors_are_those_of_the_history_that_stands(tmp_path: Path) -> None:
    """However often it is read meanwhile: also after the run went back, and when it was read for the first time only then."""
    with RecordedRun(tmp_path / "six") as run:
        reader = RunReader(run.output.path)
        run.tick(1.0)
        assert reader.read().board is None
        for _ in range(5):
            run.tick(2.0)
            board = reader.read().board
            assert board is not None and board == board_in(run.output.path)
        assert (board.credited, len(board.contributors)) == (5, 1)  # all came by one invite
        assert sum(board.contributors[0].stages.values()) == 5 * 3 * 128
        with open(run.output.path / "commits.jsonl", "ab") as file:
            file.writelines(msgspec.json.encode(a_step(step, 20.0 + step, 7.0, epoch=1)) + b"\n" for step in (2, 3))
        again = reader.read().board
        assert again is not None and again.credited == 4 and sum(again.contributors[0].stages.values()) == 2 * 3 * 128
        assert again == RunReader(run.output.path).read().board == board_in(run.output.path)


def test_a_run_that_was_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    with RecordedRun(tmp_path / "six") as run:
        run.tick(10.0)
        reader = RunReader(run.output.path)
        reader.read()
    (tmp_path / "six").rename(tmp_path / "six.1")
    with RecordedRun(tmp_path / "six", settings=["train.batch=256"]) as run:
        run.tick(4.0)
        reading = reader.read()
    assert [one.step for one in reader.series.figures] == [1, 2] and reading.config.train.batch == 256
    assert reader.series.figures[-1].tokens == 2 * tokens_per_step(reading.config)


def test_rewards_of_pairs_are_figures_of_their_step_and_absent_where_there_are_none() -> None:
    compared = msgspec.structs.replace(
        a_step(0, 1.0).commit, rewards=Rewards(0.75, 2.5), heldout_rewards=Rewards(0.5, 1.0)
    )
    one, other = a_series(CommittedStep(0, compared, 1.0), a_step(1, 2.0)).figures
    assert (one.reward_accuracy, one.reward_margin) == (0.75, 2.5)
    assert (one.heldout_reward_accuracy, one.heldout_reward_margin) == (0.5, 1.0)
    assert other.reward_accuracy is None and other.heldout_reward_margin is None
    assert columns([one, other], 1)["heldout_reward_accuracy"] == [0.5]
