"""A checkpoint is whole or it does not count; what is wrong with one is said by name; older ones outlive every failure."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shoal.config import Checkpoint, Config, Data, Model, Run, Train
from shoal.executor import create
from shoal.runtime.checkpoints import checkpoint, marker, storage

TINY = Config(
    run=Run(name="tiny", stages=3, seed=5),
    model=Model(hidden_size=16, layers=4, heads=2, kv_heads=1, intermediate_size=24),
    data=Data(sequence=8),
    train=Train(batch=4, microbatch=2),
    checkpoint=Checkpoint(keep=2),
)


class Full(MemoryFileSystem):
    """A storage on which nothing fits any more once `room` bytes are written."""

    protocol = "full"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    room = 0

    def _open(self, path: str, mode: str = "rb", **given: Any) -> Any:
        if "w" in mode and Full.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        Full.room -= 1
        return super()._open(path, mode=mode, **given)


fsspec.register_implementation("full", Full, clobber=True)


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "checkpoints")
    else:
        yield "memory://checkpoints"
        fsspec.filesystem("memory").rm("/", recursive=True)


def states(config: Config = TINY) -> list[dict[str, torch.Tensor]]:
    """Each stage's state with moments that are not zero."""
    states = []
    for stage in range(config.run.stages):
        state = create(config, stage).state()
        for number, (name, tensor) in enumerate(state.items()):
            if not name.startswith("model/"):
                tensor.fill_(stage + number / 7)
        states.append(state)
    return states


STATES = states()
ABOUT = checkpoint.about(TINY, "d" * 64, "some data")


def a_checkpoint(store: checkpoint.Store, step: int, about: checkpoint.About = ABOUT) -> str:
    stages = len(STATES)
    return store.publish(step, [store.write_shard(step, n, stages, s) for n, s in enumerate(STATES)], about)


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def test_every_stage_reads_back_what_it_wrote(url: str) -> None:
    store = checkpoint.Store(url)
    assert store.catalog.newest() == (None, ())
    a_checkpoint(store, 7)
    training, refused = store.catalog.newest()
    assert training is not None
    assert not refused
    assert (training.step, training.cursor, training.samples, training.seed) == (7, 28, 28, 5)
    assert (training.schedule.kind, training.schedule.step, training.config) == ("cosine", 7, TINY)
    for state in STATES:
        assert same(store.load(7, state), state)


def test_another_cut_reads_it(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 7)
    whole = {name: tensor for state in STATES for name, tensor in state.items()}
    for stages in (1, 2, 4):
        config = msgspec.structs.replace(TINY, run=Run(name="tiny", stages=stages, seed=9))
        for stage in range(stages):
            loaded = store.load(7, create(config, stage).state())
            assert all(torch.equal(loaded[name], whole[name]) for name in loaded)


def test_transformers_loads_model_and_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = a_checkpoint(checkpoint.Store(str(tmp_path)), 7)
    assert path == str(tmp_path / "step-7")
    model, notes = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(notes.values())
    whole = {name.removeprefix("model/"): t for state in STATES for name, t in state.items() if name[:6] == "model/"}
    assert same(dict(model.named_parameters()), whole)
    assert AutoTokenizer.from_pretrained(path).encode("def") == [100, 101, 102]


def test_nothing_is_visible_before_it_is_whole(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 5)
    records = [store.write_shard(7, n, 3, s) for n, s in enumerate(STATES)]
    assert store.catalog.newest()[0].step == 5  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"step-7: torn"):
        store.catalog.open(7)
    store.publish(7, records, ABOUT)
    assert store.catalog.newest()[0].step == 7  # type: ignore[union-attr]


def test_publishing_twice_answers_the_same_and_replaces_nothing(url: str) -> None:
    store = checkpoint.Store(url)
    records = [store.write_shard(7, n, 3, s) for n, s in enumerate(STATES)]
    path = store.publish(7, records, ABOUT)
    training = store.catalog.open(7)
    assert store.publish(7, records, ABOUT) == path
    assert store.catalog.open(7) == training


def test_peers_that_name_a_place_at_once_give_it_one_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unlike = [storage.Storage(url) for _ in range(3)]
    with monkeypatch.context() as before:
        before.setattr(storage.Storage, "size", lambda self, name: None)  # none has seen another's yet
        names = {one.place(make=True) for one in unlike}
    assert len(names) == 1 and names == {storage.Storage(url).place(make=False)} != {""}
    assert storage.Storage(url).names() == [storage.PLACE]


def test_peers_of_one_place_that_publish_at_once_all_find_the_checkpoint(tmp_path: Path) -> None:
    for step in range(1, 9):
        stores = [checkpoint.Store(str(tmp_path)) for _ in range(4)]
        records = [stores[0].write_shard(step, n, 3, s) for n, s in enumerate(STATES)]
        at_once = threading.Barrier(len(stores))

        def publish(store: checkpoint.Store, step: int = step, records: list[str] = records) -> str:
            at_once.wait()  # noqa: B023  # all threads of a step are done before the next begins
            return store.publish(step, records, ABOUT)

        with ThreadPoolExecutor(len(stores)) as threads:
            assert set(threads.map(publish, stores)) == {stores[0].path(step)}
        assert same(checkpoint.Store(str(tmp_path)).load(step, STATES[1]), STATES[1])


def test_a_file_system_without_links_and_locks_holds_checkpoints_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(storage.os, "link", refuses)
    monkeypatch.setattr(storage.fcntl, "flock", refuses)
    store = checkpoint.Store(str(tmp_path))
    a_checkpoint(store, 7)
    assert same(store.load(7, STATES[1]), STATES[1]) and store.place
    assert "are not kept apart: " in caplog.text
    assert storage.Storage(str(tmp_path)).names() == [storage.PLACE, "step-7"]


def test_a_peer_that_is_stopped_while_it_publishes_holds_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = checkpoint.Store(str(tmp_path))
    records = [store.write_shard(7, n, 3, s) for n, s in enumerate(STATES)]
    monkeypatch.setattr(storage, "ALONE_S", 0.1)
    with storage.Storage(str(tmp_path)).alone():
        with pytest.raises(TimeoutError, match=r"another peer has been making a checkpoint visible at .* for 0\.1 s"):
            store.publish(7, records, ABOUT)
    assert store.publish(7, records, ABOUT) == store.path(7)


def test_the_same_step_written_anew_replaces_the_old_one(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 7)
    other = [{name: tensor + 1 for name, tensor in state.items()} for state in STATES]
    store.publish(7, [store.write_shard(7, n, 3, s) for n, s in enumerate(other)], ABOUT)
    assert same(store.load(7, STATES[1]), other[1])


def test_drafts_of_dead_peers_are_not_published(tmp_path: Path) -> None:
    store = checkpoint.Store(str(tmp_path))
    records = [store.write_shard(7, n, 3, s) for n, s in enumerate(STATES)]
    (tmp_path / ".step-7.part" / "optimizer" / "x.0123.tmp").write_text("half a shard")
    path = store.publish(7, records, ABOUT)
    files = {str(p.relative_to(path)) for p in Path(path).rglob("*") if p.is_file()}
    assert files == {*store.catalog.open(7).files, "training.json"}
    assert storage.Storage(str(tmp_path)).names() == [storage.PLACE, "step-7"]


def test_records_that_are_not_one_of_each_stage_are_refused(url: str) -> None:
    store = checkpoint.Store(url)
    records = [store.write_shard(7, n, 3, s) for n, s in enumerate(STATES)]
    elsewhere = json.loads(records[0])
    elsewhere["model"]["bytes"] += 1
    for given, match in (
        (records[:2], "not one of each stage"),
        ([*records[:2], records[1]], "not one of each stage"),
        ([], "not one of each stage"),
        ([*records[:2], "{}"], "cannot be read"),
        ([*records[:2], records[2].replace('"step":7', '"step":8')], "not one of each stage"),
        ([json.dumps(elsewhere), *records[1:]], "is not at "),
    ):
        with pytest.raises(ValueError, match=match):
            store.publish(7, given, ABOUT)
    assert store.catalog.newest()[0] is None


def damage(url: str, name: str, change: Any) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    path = f"{root}/step-7/{name}"
    content = change(fs.cat_file(path))
    if content is None:
        fs.rm_file(path)
    else:
        fs.pipe_file(path, content)


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("training.json", lambda data: data[:100], "damaged: training.json cannot be read"),
        ("training.json", lambda data: b'{"format": 99}', "foreign: training.json has format 99"),
        ("training.json", lambda data: b'{"epoch": 3}', "foreign: training.json has format None"),
        ("training.json", lambda data: data.replace(b'"step": 7', b'"step": 8'), "foreign: training.json is of step 8"),
        ("training.json", lambda data: data.replace(b'"config.json"', b'"../config"'), "damaged: ../config is missing"),
        ("training.json", lambda data: None, "foreign: no training.json"),
        ("optimizer/stage-00002-of-00003.safetensors", lambda data: None, "damaged: optimizer/stage-0.* is missing"),
        ("model-00001-of-00003.safetensors", lambda data: data[:-1], "damaged: model-00001.* has .* bytes, not"),
    ],
)
def test_a_broken_checkpoint_is_passed_over_and_refused_by_name(url: str, name: str, change: Any, match: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 5)
    a_checkpoint(store, 7)
    damage(url, name, change)
    training, refused = store.catalog.newest()
    assert training is not None
    assert training.step == 5
    assert len(refused) == 1
    with pytest.raises(ValueError, match=f"step-7: {match}"):
        store.catalog.open(7)
    everything = {key: tensor for state in STATES for key, tensor in state.items()}
    with pytest.raises(checkpoint.Unloadable, match="step-7: ") as caught:
        store.load(7, everything)
    assert caught.value.older == 5


@pytest.mark.parametrize("prefix", ["model-00002", "optimizer/stage-00002"])
@pytest.mark.parametrize("change", [flip, lambda data: data[:20] + b"!" + data[21:]])
def test_a_flipped_bit_is_found_when_the_shard_is_read(url: str, prefix: str, change: Any) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 7)
    damage(url, f"{prefix}-of-00003.safetensors", change)
    with pytest.raises(ValueError, match=rf"step-7: damaged: {prefix}"):
        store.load(7, STATES[1])


def test_a_checkpoint_of_another_model_is_refused(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 7)
    wider = msgspec.structs.replace(TINY, model=msgspec.structs.replace(TINY.model, hidden_size=32))
    deeper = msgspec.structs.replace(TINY, model=msgspec.structs.replace(TINY.model, layers=5))
    with pytest.raises(ValueError, match=r"step-7: foreign: the model has model/.*32.*16"):
        store.load(7, create(wider, 0).state())
    with pytest.raises(ValueError, match=r"step-7: foreign: the model has .*does not hold it"):
        store.load(7, create(deeper, 2).state())


def test_a_run_that_cannot_go_on_from_it_is_told_why(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 7)
    training = store.catalog.open(7)
    marker.refuse_foreign(training, TINY, "d" * 64)
    longer = msgspec.structs.replace(training.config, run=Run(name="other", stages=2, seed=5, steps=900))
    marker.refuse_foreign(training, longer, "d" * 64)
    assert (
        "run.steps: " in "".join(marker.changes(training, longer)) and marker.changes(training, training.config) == []
    )
    for change, match in (
        (
            {"train": Train(batch=8, microbatch=2)},
            r"train\.batch = 4, this run has 8: the place in the data is counted in it",
        ),
        ({"run": Run(seed=6)}, r"run\.seed = 5"),
        ({"data": Data(sequence=9)}, r"data\.sequence = 8"),
        ({"model": Model()}, r"model\.hidden_size = 16, this run has 128"),
    ):
        with pytest.raises(ValueError, match=match):
            marker.refuse_foreign(training, msgspec.structs.replace(TINY, **change), "d" * 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"data \(SHA-256"):
        marker.refuse_foreign(training, TINY, "e" * 64)
    with pytest.raises(ValueError, match=r"model \(SHA-256"):
        marker.refuse_foreign(msgspec.structs.replace(training, model="0" * 64), TINY, "d" * 64)


def test_the_newest_are_kept_and_only_this_run_is_pruned(url: str) -> None:
    a_checkpoint(checkpoint.Store(url, "other"), 1)
    store = checkpoint.Store(url, "tiny")
    for step in (2, 3, 10):
        a_checkpoint(store, step)
    store.write_shard(11, 0, 3, STATES[0])  # being written
    store.write_shard(4, 0, 3, STATES[0])  # never finished
    assert store.prune(0) == ()
    assert store.prune(2) == (store.path(2),)
    assert [entry.step for entry in checkpoint.Catalog(url).entries() if not entry.wrong] == [10, 3, 1]
    names = [name for name in storage.Storage(url).names() if name != storage.PLACE]
    unfinished = ".step-11.tiny.part" if store.catalog.storage.local else "step-11"
    assert names == sorted(["step-1", "step-10", "step-3", unfinished])


def test_checkpoints_of_undone_steps_are_deleted_and_no_others(url: str) -> None:
    """Those of later steps that an older epoch wrote: a resume would begin with them, and pruning would keep them instead of newer ones."""
    a_checkpoint(checkpoint.Store(url, "other"), 9)
    store = checkpoint.Store(url, "tiny")
    for step, epoch in ((2, 0), (4, 0), (6, 1), (8, 0)):
        records = [store.write_shard(step, n, len(STATES), state) for n, state in enumerate(STATES)]
        store.publish(step, records, ABOUT, epoch=epoch)
    assert store.delete_undone(2, 0) == ()
    assert store.delete_undone(2, 1) == (store.path(8), store.path(4))
    assert store.delete_undone(2, 1) == ()
    assert [entry.step for entry in checkpoint.Catalog(url).entries() if not entry.wrong] == [9, 6, 2]


def test_another_runs_checkpoints_are_not_read_overwritten_or_deleted(url: str) -> None:
    other, store = checkpoint.Store(url, "keyof-other"), checkpoint.Store(url, "keyof-mine")
    a_checkpoint(other, 5)
    records = [other.write_shard(7, n, 3, s) for n, s in enumerate(STATES)]
    other.publish(7, records, ABOUT)
    a_checkpoint(store, 6)
    training, refused = store.catalog.newest()
    assert training is not None and training.step == 6 and training.authority == "keyof-mine"
    assert len(refused) == 1 and "step-7: of another run: run 'tiny' (key keyof-ot)" in refused[0]
    with pytest.raises(ValueError, match="of another run"):
        store.load(7, STATES[0])
    with pytest.raises(ValueError, match=r"step-7 is there, of another run: .* not overwritten"):
        store.write_shard(7, 0, 3, STATES[0])
    with pytest.raises(ValueError, match=r"step-7 is there, of another run: .* not overwritten"):
        store.publish(7, records, ABOUT)
    a_checkpoint(store, 9)
    assert store.prune(1) == (store.path(6),)
    assert [entry.step for entry in other.catalog.entries() if not entry.wrong] == [7, 5]
    assert same(other.load(5, STATES[1]), STATES[1])


def test_two_runs_that_write_one_step_at_a_time_do_not_mix_their_shards(tmp_path: Path) -> None:
    one, two = checkpoint.Store(str(tmp_path), "one"), checkpoint.Store(str(tmp_path), "two")
    other = [{name: tensor + 1 for name, tensor in state.items()} for state in STATES]
    first = [one.write_shard(7, n, 3, s) for n, s in enumerate(STATES)]
    second = [two.write_shard(7, n, 3, s) for n, s in enumerate(other)]
    two.write_shard(8, 0, 3, other[0])  # sweeps what it began before, and nothing of the other run's
    one.publish(7, first, ABOUT)
    assert same(one.load(7, STATES[1]), STATES[1])
    with pytest.raises(ValueError, match="of another run"):
        two.publish(7, second, ABOUT)


def test_what_is_no_checkpoint_of_ours_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step-7 is there, foreign: no training.json: it is not overwritten"):
        a_checkpoint(checkpoint.Store(str(tmp_path), "mine"), 7)


def test_a_checkpoint_that_is_adopted_is_whole_and_says_whose_it_was(url: str) -> None:
    other, store = checkpoint.Store(url, "other"), checkpoint.Store(url, "mine")
    a_checkpoint(other, 7)
    store.catalog.adopt(7, "new")
    training = store.catalog.soundest()[0]
    assert training is not None
    assert (training.run, training.authority, training.adopted) == ("new", "mine", ("other",))
    assert same(store.load(7, STATES[2]), STATES[2])
    assert other.catalog.newest()[0] is None


def test_what_was_given_up_does_not_take_space_from_the_next(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 5)
    store.write_shard(6, 0, 3, STATES[0])
    a_checkpoint(store, 7)
    assert {*storage.Storage(url).names()} - {storage.PLACE} == {"step-5", "step-7"}


def test_no_space_leaves_the_older_ones_and_no_half_shard() -> None:
    store = checkpoint.Store("full://checkpoints")
    Full.room = 1000
    a_checkpoint(store, 5)
    for room in range(2 * len(STATES)):
        Full.room = room
        with pytest.raises(OSError, match="No space left on device"):
            a_checkpoint(store, 7)
        assert store.catalog.newest()[0].step == 5  # type: ignore[union-attr]
        assert same(store.load(5, STATES[2]), STATES[2])
    Full.room = 1000
    a_checkpoint(store, 7)
    assert store.catalog.newest()[0].step == 7  # type: ignore[union-attr]


def test_no_space_on_a_local_disk_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = checkpoint.Store(str(tmp_path))
    a_checkpoint(store, 5)

    written = storage.written

    def full(handle: Any, pieces: Any) -> storage.File:
        """The parameters still fit, the optimizer's state does not."""
        if "optimizer" not in handle.name:
            return written(handle, pieces)
        handle.write(next(iter(pieces)))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "written", full)
        with pytest.raises(OSError, match="No space left on device"):
            store.write_shard(7, 1, 3, STATES[1])
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and "step-5" not in p.parts and p.name != storage.PLACE]
    assert store.catalog.newest()[0].step == 5  # type: ignore[union-attr]
    a_checkpoint(store, 7)
    assert store.catalog.newest()[0].step == 7  # type: ignore[union-attr]


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.url = 'nosuch://x'"):
        checkpoint.Store("nosuch://x")


def files_of(store: checkpoint.Store, step: int) -> list[str]:
    return sorted([*store.catalog.open(step).files, marker.MARKER])


@pytest.mark.parametrize("number", range(len(STATES) * 2 + 5))
def test_one_flipped_bit_in_any_file_is_found_and_the_next_older_one_is_taken(url: str, number: int) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 5)
    a_checkpoint(store, 7)
    names = files_of(store, 7)
    assert len(names) == len(STATES) * 2 + 5
    path = f"{store.path(7)}/{names[number]}"
    for place in (0, 0.3, 0.5, 0.9, 1):
        with fsspec.open(path, "rb") as file:
            whole = file.read()
        at = min(len(whole) - 1, int(place * len(whole)))
        for bit in (0, 5, 7):
            with fsspec.open(path, "wb") as file:
                file.write(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            training, refused = store.catalog.soundest()
            assert training is not None and training.step == 5
            assert [entry.step for entry in refused] == [7] and refused[0].wrong.startswith(("damaged", "foreign"))
        with fsspec.open(path, "wb") as file:
            file.write(whole)
    assert store.catalog.soundest()[0].step == 7  # type: ignore[union-attr]


def test_no_bit_of_the_marker_can_be_another_but_those_of_the_seals_own_name() -> None:
    """In memory: a file that is written and read seven hundred times takes long on a busy disk."""
    files = fsspec.filesystem("memory")
    store = checkpoint.Store("memory://sealed")
    a_checkpoint(store, 7)
    path = f"/sealed/step-7/{marker.MARKER}"
    whole = files.cat_file(path)
    name = whole.index(b'"seal"')
    for at in range(len(whole)):
        files.pipe_file(path, whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        [entry] = store.catalog.entries()
        assert entry.wrong or name <= at < name + 6, (at, whole[at - 20 : at + 20])
        if not entry.wrong:  # without a seal, as before there was one: all else is as it was
            files.pipe_file(path, whole)
            assert msgspec.structs.replace(entry.training, seal="") == msgspec.structs.replace(
                store.catalog.open(7), seal=""
            )
    files.rm("/", recursive=True)


@pytest.mark.parametrize("harm", ["truncated", "missing", "longer", "empty"])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, harm: str) -> None:
    store = checkpoint.Store(str(tmp_path))
    a_checkpoint(store, 5)
    a_checkpoint(store, 7)
    for name in files_of(store, 7):
        path = tmp_path / "step-7" / name
        whole = path.read_bytes()
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes({"truncated": whole[: len(whole) // 2], "longer": whole + b"x", "empty": b""}[harm])
        training, [entry] = store.catalog.soundest()
        assert training is not None and training.step == 5 and (name in entry.wrong or name == marker.MARKER)
        path.write_bytes(whole)


def test_a_damaged_checkpoint_is_set_aside_so_that_its_step_can_be_written_again(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 5)
    a_checkpoint(store, 7)
    path = f"{store.path(7)}/model-00001-of-00003.safetensors"
    with fsspec.open(path, "rb") as file:
        whole = file.read()
    with fsspec.open(path, "wb") as file:
        file.write(whole[:-1] + bytes([whole[-1] ^ 1]))
    store.catalog.set_aside(7)
    assert [entry.step for entry in store.catalog.entries() if not entry.wrong] == [5]
    a_checkpoint(store, 7)
    assert store.catalog.soundest()[0].step == 7  # type: ignore[union-attr]


def test_a_checkpoint_from_before_there_were_seals_is_read(tmp_path: Path) -> None:
    store = checkpoint.Store(str(tmp_path))
    a_checkpoint(store, 5)
    file = tmp_path / "step-5" / marker.MARKER
    seal = json.loads(file.read_text())
    del seal["seal"]
    file.write_text(json.dumps(seal))
    assert store.catalog.soundest()[0].step == 5  # type: ignore[union-attr]


def test_what_cannot_be_loaded_names_the_newest_older_one_that_is_whole(url: str) -> None:
    store = checkpoint.Store(url, "mine")
    for step in (3, 5, 7, 9):
        a_checkpoint(store, step)
    a_checkpoint(checkpoint.Store(url, "other"), 6)
    damage(url, "model-00002-of-00003.safetensors", flip)
    with pytest.raises(checkpoint.Unloadable, match=r"step-7: damaged: model-00002") as raised:
        store.load(7, STATES[1])
    assert raised.value.older == 5, "not the newer one, nor another run's"
    for step in (3, 5):
        store.catalog.set_aside(step)
    with pytest.raises(checkpoint.Unloadable) as raised:
        store.load(7, STATES[1])
    assert raised.value.older == 0
    with pytest.raises(checkpoint.Unloadable, match=r"step-8: torn"):
        store.load(8, STATES[1])


def test_a_damaged_checkpoint_that_is_trained_again_is_written_again_though_its_hashes_are_the_same(url: str) -> None:
    store = checkpoint.Store(url)
    a_checkpoint(store, 7)
    damage(url, "model-00002-of-00003.safetensors", flip)
    a_checkpoint(store, 7)
    assert store.catalog.soundest()[0].step == 7  # type: ignore[union-attr]
