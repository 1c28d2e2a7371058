"""Two places without a disk in common: shards go from one to the other in chunks, and nothing that is not what it should be is kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch
from tests.runtime.test_checkpoint import ABOUT as RUN
from tests.runtime.test_checkpoint import STATES

from shoal.core.messages import ABOUT, Manifest, OfferShard, ReadShard, RunCopy, WriteChunk
from shoal.runtime.checkpoints import checkpoint, copies, marker
from shoal.runtime.checkpoints.copies import Copies

STAGES = len(STATES)
ALL = {name: tensor for state in STATES for name, tensor in state.items()}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", 4000)


class Place:
    def __init__(self, url: str, most_bytes: int = 0, key: str = "k" * 32) -> None:
        self.store = checkpoint.Store(url, key, most_bytes)
        self.copies = Copies(self.store, STAGES)

    def write(self, stage: int, step: int = 5) -> str:
        return self.store.write_shard(step, stage, STAGES, STATES[stage])

    def take(self, other: Place, stage: int, shard: str, record: str = "", step: int = 5) -> None:
        """What core's tasks do, one after the other."""
        manifest = other.copies.offer(OfferShard("t", step, stage, shard))
        start, total = 0, sum(manifest.sizes)
        for chunk in range(len(manifest.sizes)):
            data = other.copies.read(ReadShard("t", step, stage, shard, chunk, "out"))
            written = self.chunk(data, stage, shard, record, start, total, manifest.hashes[chunk], step)
            assert written == len(data) == manifest.sizes[chunk]
            start += len(data)
        self.copies.finish(RunCopy("t", step, stage, shard, record))

    def chunk(
        self, data: bytes, stage: int, shard: str, record: str, start: int, total: int, digest: str, step: int = 5
    ) -> int:
        task = WriteChunk("t", step, stage, shard, record, start, total, digest, "blob")
        return self.copies.write(task, memoryview(data))


def shard_of(record: str) -> str:
    files = msgspec.json.decode(record, type=checkpoint.Record)
    return marker.content_of((files.model, files.optimizer))


def repair(place: Place, other: Place, step: int = 5) -> None:
    """As a peer does: load, download what is lacking, load again."""
    for _ in range(STAGES + 2):
        try:
            place.store.load(step, ALL)
            return
        except checkpoint.Unloadable as error:
            assert error.lacks, error
            for lack in error.lacks:
                place.take(other, lack.stage, lack.shard, step=step)
    raise AssertionError("it is not whole after every shard was brought")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Place, Place]:
    """Stage 0 and 1 are written at the first place, the last at the second; both hold everything in the end."""
    places = Place(str(tmp_path / "a")), Place(str(tmp_path / "b"))
    records = [places[stage == STAGES - 1].write(stage) for stage in range(STAGES)]
    for stage, record in enumerate(records):
        source = places[stage == STAGES - 1]
        other = places[stage != STAGES - 1]
        other.take(source, stage, shard_of(record), record)
    names = tuple(place.store.place for place in places)
    for place in places:
        place.store.publish(5, records, RUN, (names,) * STAGES)
    return places


def test_a_shard_that_comes_after_its_place_was_made_visible_is_added(tmp_path: Path) -> None:
    """The machine that held it died meanwhile. Found 2026-11-25: the checkpoint was told as saved, and nobody could read that stage."""
    here, lost = Place(str(tmp_path / "a")), Place(str(tmp_path / "b"))
    records = [(here if stage == 0 else lost).write(stage) for stage in range(STAGES)]
    ours, theirs = (here.store.place,), (lost.store.place,)
    here.store.publish(5, records, RUN, (ours, *(theirs,) * (STAGES - 1)))
    with pytest.raises(checkpoint.Unloadable):
        here.store.load(5, ALL)
    with pytest.raises(ValueError, match="is not at"):
        here.store.publish(5, records, RUN, (ours,) * STAGES)
    assert [here.write(stage) for stage in range(1, STAGES)] == records[1:]
    for _ in range(2):
        assert here.store.publish(5, records, RUN, (ours,) * STAGES) == here.store.path(5)
        assert not here.store.catalog.inspect(5).elsewhere
        loaded = here.store.load(5, ALL)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in ALL.items())


def files(place: Place) -> list[Path]:
    return sorted(path for path in Path(place.store.path(5)).rglob("*") if path.is_file())


def flip(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_both_places_hold_a_checkpoint_that_anybody_reads(pair: tuple[Place, Place]) -> None:
    for place in pair:
        entry, refused = place.store.catalog.soundest_entry()
        assert entry is not None and not refused and not entry.elsewhere
        loaded = place.store.load(5, ALL)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in ALL.items())
    assert pair[0].store.place != pair[1].store.place
    by_name = [{path.name: path.read_bytes() for path in files(place)} for place in pair]
    assert by_name[0] == by_name[1]
    assert not list(Path(pair[0].store.catalog.storage.root).glob(".step*"))


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_to_any_file_is_found_by_name_and_repaired_from_the_other_copy(
    pair: tuple[Place, Place], how: str
) -> None:
    whole = [path.read_bytes() for path in files(pair[0])]
    for path, content in zip(files(pair[0]), whole, strict=True):
        for at in (0, len(content) // 2, len(content) - 1) if how == "flipped" else (0,):
            match how:
                case "flipped":
                    flip(path, at)
                case "cut":
                    path.write_bytes(content[:-1])
                case "gone":
                    path.unlink()
            with pytest.raises(checkpoint.Unloadable) as caught:
                pair[0].store.load(5, ALL)
            assert path.name in str(caught.value) and caught.value.lacks
            repair(pair[0], pair[1])
            assert path.read_bytes() == content
    with pytest.raises(ValueError, match="is not whole"):
        flip(files(pair[1])[-1])
        stage = STAGES - 1
        training = pair[0].store.catalog.open(5)
        pair[1].copies.offer(OfferShard("t", 5, stage, marker.content_of(training.shard_files(stage).values())))


def test_a_place_that_has_nothing_gets_all_that_it_needs(pair: tuple[Place, Place], tmp_path: Path) -> None:
    third = Place(str(tmp_path / "c"))
    with pytest.raises(checkpoint.Unloadable) as caught:
        third.store.load(5, STATES[1])
    assert [lack.shard for lack in caught.value.lacks] == [ABOUT]
    third.take(pair[0], 0, ABOUT)
    with pytest.raises(checkpoint.Unloadable) as caught:
        third.store.load(5, STATES[1])
    lacks = [lack.stage for lack in caught.value.lacks]
    assert lacks == [1], "only what the stage needs"
    repair(third, pair[1])
    entry = third.store.catalog.inspect(5)
    assert not entry.wrong and not entry.elsewhere


def test_a_copy_of_the_directory_is_another_place(pair: tuple[Place, Place], tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert Place(str(tmp_path / "copy")).store.place != pair[0].store.place
    assert Place(str(tmp_path / "a")).store.place == pair[0].store.place
    (tmp_path / "file").write_text("")
    assert Place(str(tmp_path / "file" / "x")).store.place == ""


def test_a_place_that_holds_a_part_says_which_files_are_elsewhere(tmp_path: Path) -> None:
    a, b = Place(str(tmp_path / "a")), Place(str(tmp_path / "b"))
    records = [(a if stage < 2 else b).write(stage) for stage in range(STAGES)]
    held = ((a.store.place,), (a.store.place,), (b.store.place,))
    for place in (a, b):
        place.store.publish(5, records, RUN, held)
    entry = a.store.catalog.inspect(5)
    assert not entry.wrong and all("00003" in name for name in entry.elsewhere) and len(entry.elsewhere) == 2
    assert a.store.catalog.soundest()[0] is None
    assert a.store.catalog.soundest(others=True)[0] is not None
    b.store.load(5, STATES[2])
    flip(Path(a.store.path(5)) / "config.json")
    damaged, _ = a.store.catalog.soundest_entry(others=True)
    assert damaged is not None and "config.json" in damaged.wrong and damaged.repairable, (
        "every place has the small files"
    )


def test_a_file_that_only_this_place_has_is_refused_by_name(tmp_path: Path) -> None:
    a, b = Place(str(tmp_path / "a")), Place(str(tmp_path / "b"))
    records = [(a if stage < 2 else b).write(stage) for stage in range(STAGES)]
    held = ((a.store.place,), (a.store.place,), (b.store.place,))
    for place in (a, b):
        place.store.publish(5, records, RUN, held)
    damaged = next(path for path in files(a) if path.name.startswith("model-00001"))
    flip(damaged)
    training, [refused] = a.store.catalog.soundest(others=True)
    assert training is None and damaged.name in refused.wrong and not refused.repairable


def test_what_does_not_fit_is_refused_before_anything_is_written(pair: tuple[Place, Place], tmp_path: Path) -> None:
    record = pair[0].write(0, step=7)
    small = Place(str(tmp_path / "c"), most_bytes=1000)
    with pytest.raises(ValueError, match="disk_bytes"):
        small.take(pair[0], 0, shard_of(record), record, step=7)
    with pytest.raises(ValueError, match="disk_bytes"):
        small.write(0)
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_file() and path.name != ".place"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"start": 10**12}, "are none of a shard"),
        ({"start": -1}, "are none of a shard"),
        ({"total": 10**15}, "is offered with"),
        ({"shard": "f" * 64}, "is not what was asked for"),
        ({"record": "{}"}, "missing required field"),
        ({"stage": 1}, "the record is of shard"),
    ],
)
def test_what_the_record_does_not_say_is_not_written(
    pair: tuple[Place, Place], tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    record = pair[0].write(0, step=7)
    sizes = msgspec.json.decode(record, type=checkpoint.Record)
    given: dict[str, Any] = {
        "stage": 0, "shard": shard_of(record), "record": record, "start": 0, "digest": "0" * 64, "step": 7,
        "total": sizes.model.bytes + sizes.optimizer.bytes,
    }  # fmt: skip
    third = Place(str(tmp_path / "c"))
    if "start" in change:
        assert third.chunk(b"x" * 100, **given) == 0, "a chunk that differs from its hash is not written"
    with pytest.raises(ValueError, match=match):
        third.chunk(b"x" * 100, **(given | change))


@pytest.mark.parametrize("name", ["../config.json", "/etc/x", ".hidden", "optimizer/x", "a\\b", "model-1/../../x", ""])
def test_no_name_from_the_network_becomes_a_path(pair: tuple[Place, Place], tmp_path: Path, name: str) -> None:
    training = pair[0].store.catalog.open(5)
    small = {n: (Path(pair[0].store.path(5)) / n).read_bytes() for n in training.files if training.shard_of(n) is None}
    file = training.files["config.json"]
    forged = msgspec.structs.replace(training, files={**training.files, name: file})
    data = msgspec.msgpack.encode({**small, name: small["config.json"], "training.json": marker.encoded(forged)})
    third = Place(str(tmp_path / "c"))
    third.chunk(data, 0, ABOUT, "", 0, len(data), hashlib.sha256(data).hexdigest())
    with pytest.raises(ValueError, match="is not what training"):
        third.copies.finish(RunCopy("t", 5, 0, ABOUT, ""))
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_file()]


def test_another_runs_marker_is_not_taken(pair: tuple[Place, Place], tmp_path: Path) -> None:
    other = Place(str(tmp_path / "c"), key="z" * 32)
    with pytest.raises(ValueError, match="of this run's step 5"):
        other.take(pair[0], 0, ABOUT)


def test_a_url_is_a_place_too(pair: tuple[Place, Place]) -> None:
    remote = Place("memory://copies")
    try:
        assert remote.store.place
        repair(remote, pair[0])
        assert not remote.store.catalog.inspect(5).wrong
    finally:
        fsspec.filesystem("memory").rm("/", recursive=True)


def test_the_manifest_of_a_shard_is_the_same_at_every_place(pair: tuple[Place, Place]) -> None:
    training = json.loads((Path(pair[0].store.path(5)) / "training.json").read_text())
    assert training["copies"] == [[place.store.place for place in pair]] * STAGES
    shard = marker.content_of(pair[0].store.catalog.open(5).shard_files(0).values())
    manifests = [place.copies.offer(OfferShard("t", 5, 0, shard)) for place in pair]
    assert manifests[0] == manifests[1] and isinstance(manifests[0], Manifest)
