"""`log.to`: what each tool gets of a run, also offline, after a resume, and when a sink fails; it never disturbs the run."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.test_series import a_step
from tests.recorded_run import RecordedRun

from shoal import config as configuration
from shoal.dashboard import steplog
from shoal.dashboard.steplog import StepLog
from shoal.dashboard.terminal import PeerLine, Snapshot
from shoal.guest import MACHINE
from shoal.traffic import StoredBytes, Traffic

NAMES = {
    "time_s", "tokens", "loss", "gradient_norm", "learning_rate", "tokens_per_s", "peers", "redone", "lost", "counted_twice", "undone",
    "sent_activations_bytes", "sent_gradients_bytes", "sent_averaging_bytes", "sent_state_bytes", "sent_control_bytes",
    "memory_bytes", "queue_s", "join_s",
}  # fmt: skip


def logged(directory: Path, *to: str, steps: int = 5) -> None:
    with RecordedRun(directory, settings=[f"log.to={json.dumps(to)}"]) as run:
        for _ in range(steps):
            run.tick(2.0)
        run.output.close()


def test_json_lines_have_every_figure_of_every_step(tmp_path: Path) -> None:
    logged(tmp_path / "six", "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "six" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert set(lines[-1]) == NAMES | {"step"} and set(lines[0]) == (NAMES | {"step"}) - {"tokens_per_s"}
    assert lines[-1]["peers"] == 6 and lines[-1]["sent_gradients_bytes"] > 0 and lines[-1]["memory_bytes"] > 0


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    threads = threading.active_count()
    logged(tmp_path / "six")
    assert not (tmp_path / "six" / "metrics.jsonl").exists() and threading.active_count() == threads


def test_tensorboard_reads_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra `tensorboard` is not installed")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged(tmp_path / "six", "tensorboard", "jsonl")
    events = accumulator.EventAccumulator(str(tmp_path / "six" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    lines = [json.loads(line) for line in (tmp_path / "six" / "metrics.jsonl").read_text().splitlines()]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines
    ]


@pytest.mark.slow
def test_weights_and_biases_work_offline_and_a_resumed_run_has_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path / "six", "wandb")
    name = (tmp_path / "six" / "wandb.id").read_text()
    (file,) = tmp_path.glob("six/wandb/offline-run-*/run-*.wandb")
    assert name in file.name
    records = [wandb.Record.FromString(data) for data in stored(file.read_bytes())]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (runs[0].run_id, runs[0].display_name, runs[0].project) == (name, "six", "shoal")
    histories = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    lines = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in histories
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(NAMES - {"tokens_per_s"} <= set(line) for line in lines)
    logged(tmp_path / "six", "wandb", steps=1)
    assert (tmp_path / "six" / "wandb.id").read_text() == name


def stored(data: bytes) -> Iterator[bytes]:
    """The records of wandb's file: a header, then LevelDB's log of blocks of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_a_sink_that_fails_is_left_out_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *_: Any) -> None:
            pass

        def write(self, step: int, figures: Mapping[str, float]) -> None:
            raise OSError(28, "No space left on device\x1b[2J")

        def close(self) -> None:
            raise AssertionError("it is not used any more")

    monkeypatch.setitem(steplog.SINKS, "tensorboard", Broken)
    config = configuration.load(None, ['log.to=["tensorboard", "jsonl"]'])
    warnings: list[str] = []
    log = StepLog(config, tmp_path, warnings.append)
    for step in range(3):
        log.add(a_step(step, float(step)))
        log.flush(Snapshot(name="", elapsed_s=0, step=step, steps=3, stages=1))
    log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    (warning,) = warnings
    assert "nothing more is written to tensorboard" in warning and "No space left" in warning and "\x1b" not in warning


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    config = configuration.load(None, ['log.to=["jsonl"]'])
    log = StepLog(config, tmp_path, print, before=[a_step(0, 10.0), a_step(1, 13.0)])
    log.add(a_step(2, 14.0))
    peers = (
        PeerLine("p1", kept=StoredBytes(memory=5), join_s=2.0),
        PeerLine("p2", kept=StoredBytes(memory=7), join_s=3.0),
    )
    log.flush(Snapshot(name="", elapsed_s=0, step=3, steps=9, stages=1, peers=peers, sent=Traffic(averaging=9), lost=1))
    log.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["time_s"], line["memory_bytes"], line["join_s"]) == (3, 4.0, 12, 3.0)
    assert (line["sent_averaging_bytes"], line["lost"]) == (9, 1)


def test_a_package_that_is_missing_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steplog.PACKAGES, "wandb", "no_such_package")
    config = configuration.load(None, ['log.to=["jsonl", "wandb"]'])
    assert list(steplog.missing(config)) == [
        "log.to has 'wandb', and no_such_package is not installed; try: pip install 'shoal[wandb]'"
    ]


def test_where_figures_go_is_each_machines_own_matter() -> None:
    assert "log.to" in MACHINE
