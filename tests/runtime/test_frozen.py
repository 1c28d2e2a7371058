"""A machine without the model builds its stage of frozen weights that others gave it: the same bits, and nothing of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.model.test_adapters import based, same
from tests.runtime.test_node import TINY

from shoal.config import Config
from shoal.core.messages import FROZEN, Lack, Manifest, OfferShard, ReadShard, RunCopy, WriteChunk
from shoal.executor import create
from shoal.executor.base import Executor
from shoal.model import lent, stages
from shoal.runtime import frozen
from shoal.runtime.checkpoints import weight_files
from shoal.runtime.checkpoints.checkpoint import Unloadable
from shoal.runtime.checkpoints.marker import model_digest
from shoal.runtime.frozen import LISTED, Frozen, Incomplete, OtherBase
from shoal.runtime.tasks.seat import Copy, Download, _note, _whole

STAGE = 1


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "CHUNK_BYTES", 4_000)


def lending(folder: Path, dtype: str = "float32", **tune: Any) -> Config:
    train = msgspec.structs.replace(TINY.train, dtype=dtype)
    return based(msgspec.structs.replace(TINY, train=train), folder / "base", lend=True, **tune)


def without_the_model(config: Config, folder: Path) -> Config:
    """The configuration of a guest, as its invite and `shoal join` make it."""
    text = lent.described(config.model.path, weight_files.fingerprint(Path(config.model.path)))
    tune = msgspec.structs.replace(config.tune, description=text)
    model = msgspec.structs.replace(config.model, path=lent.PEERS)
    run = msgspec.structs.replace(config.run, dir=str(folder / "guest"))
    return lent.local(msgspec.structs.replace(config, model=model, tune=tune, run=run))


def giving(config: Config, stage: int = STAGE) -> tuple[Frozen, Executor]:
    executor, donor = create(config, stage), Frozen(config)
    donor.serve(stage, executor)
    return donor, executor


def offered(donor: Frozen, stage: int = STAGE) -> Manifest:
    manifest = donor.offer(OfferShard("t", 0, stage, FROZEN)).manifest
    assert manifest is not None
    return manifest


def send(donor: Frozen, guest: Frozen, chunk: int, stage: int = STAGE, change: int = 0, total: int = 0) -> int:
    """Chunk `chunk` goes from one to the other. `change`: is added to its last byte; `total`: said to be the size of all."""
    manifest = offered(donor, stage)
    data = donor.read(ReadShard("t", 0, stage, FROZEN, chunk, "out"))
    data[-1] = (data[-1] + change) % 256
    start, sizes = sum(manifest.sizes[:chunk]), total or sum(manifest.sizes)
    task = WriteChunk("t", 0, stage, FROZEN, "", start, sizes, manifest.hashes[chunk], "blob")
    return guest.write(task, memoryview(data))


def finish(guest: Frozen, stage: int = STAGE) -> None:
    guest.finish(RunCopy("t", 0, stage, FROZEN, ""))


def taken(donor: Frozen, config: Config, stage: int = STAGE) -> Frozen:
    guest = Frozen(config)
    with pytest.raises(Incomplete) as nothing:
        finish(guest, stage)
    assert nothing.value.held == ()
    for chunk in reversed(range(len(offered(donor, stage).sizes))):
        assert send(donor, guest, chunk, stage)
    finish(guest, stage)
    return guest


@pytest.mark.parametrize(
    ("dtype", "tune"),
    [
        ("float32", {}),
        pytest.param("bfloat16", {}, marks=pytest.mark.slow),
        ("bfloat16", {"dora": True}),
        pytest.param("float32", {"quantize": "nf4"}, marks=pytest.mark.slow),
        ("bfloat16", {"quantize": "nf4"}),
    ],
)
def test_a_stage_of_lent_weights_has_the_bits_of_one_that_read_the_model(
    tmp_path: Path, dtype: str, tune: dict[str, Any]
) -> None:
    config = lending(tmp_path, dtype, **tune)
    guest = without_the_model(config, tmp_path)
    for stage in range(config.run.stages):
        donor, there = giving(config, stage)
        with taken(donor, guest, stage).building(stage):
            here = create(guest, stage)
        assert here.base == there.base and here.digest() == there.digest()
        assert all(same(one, other) for one, other in zip(here.state().values(), there.state().values(), strict=True))
        copy = Copy(_whole(there), 5, _note(stage, 5, there.base), 1000)
        download = Download()
        download._chunks = {n: torch.frombuffer(copy.read(n), dtype=torch.uint8) for n in range(copy.chunks)}
        from shoal.core.messages import Import

        download.load(here, Import(id="t", stage=stage, step=5, chunks=copy.chunks))
    if not tune.get("quantize"):
        original = dict(stages.whole(config).named_parameters())
        assert all(same(value, original[name]) for name, value in stages.build(guest, 0).named_frozen())
    assert not list((tmp_path / "guest").rglob("model.safetensors*")), "the rest of the model is not here"


def test_a_swapping_stage_and_one_with_delayed_updates_lend_the_same_bytes(tmp_path: Path) -> None:
    config = lending(tmp_path)
    expected = offered(giving(config)[0])
    swapping = msgspec.structs.replace(config.device, executor="swapping", memory_bytes=1 << 22)
    assert offered(giving(msgspec.structs.replace(config, device=swapping))[0]) == expected
    delayed = msgspec.structs.replace(config.train, staleness=1)
    assert offered(giving(msgspec.structs.replace(config, train=delayed))[0]) == expected


def test_what_is_not_what_it_should_be_is_not_kept(tmp_path: Path) -> None:
    config = lending(tmp_path)
    donor, _ = giving(config)
    guest = Frozen(without_the_model(config, tmp_path))
    assert send(donor, guest, 0, change=1) == 0, "its hash is another"
    with pytest.raises(ValueError, match="are offered, and stage 1 of this model has"):
        send(donor, guest, 1, total=10**9)
    other, _ = giving(msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, quantize="nf4")))
    with pytest.raises(ValueError, match="are offered"):
        send(other, guest, 0)
    assert not list((tmp_path / "guest").rglob("frozen-*"))


def test_an_interrupted_download_goes_on_with_the_chunks_that_have_their_hash(tmp_path: Path) -> None:
    config = lending(tmp_path)
    donor, _ = giving(config)
    without = without_the_model(config, tmp_path)
    manifest, first = offered(donor), Frozen(without)
    assert len(manifest.sizes) > 4
    for chunk in (0, 2, 3):
        send(donor, first, chunk)
    (partial,) = (tmp_path / "guest").rglob("frozen-*.partial")
    (lines,) = (tmp_path / "guest").rglob(f"frozen-*{LISTED}")
    with partial.open("r+b") as stream:  # the machine lost its power: chunk 2 is listed, and torn
        stream.seek(sum(manifest.sizes[:2]) + 7)
        stream.write(b"torn")
    lines.write_text(lines.read_text() + "\n[123, ")
    second = Frozen(without)
    with pytest.raises(Incomplete) as there:
        finish(second)
    assert set(there.value.held) == {manifest.hashes[0], manifest.hashes[3]}
    for chunk in range(len(manifest.sizes)):
        if chunk not in (0, 3):
            send(donor, second, chunk)
    finish(second)
    third = Frozen(without)
    finish(third)
    assert create(without, STAGE).base == create(config, STAGE).base
    assert all(len(json.loads(line)) == 3 for line in lines.read_text().splitlines() if line.endswith('"]'))


def test_a_whole_file_that_was_damaged_since_is_mended(tmp_path: Path) -> None:
    config = lending(tmp_path)
    donor, _ = giving(config)
    without = without_the_model(config, tmp_path)
    taken(donor, without)
    (file,) = (tmp_path / "guest").rglob("frozen-*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(5_000)
        stream.write(b"damage")
    guest = Frozen(without)
    with pytest.raises(Incomplete):
        finish(guest)
    assert not file.exists()
    send(donor, guest, 1)
    finish(guest)
    assert create(without, STAGE).base == create(config, STAGE).base


def test_weights_that_are_not_those_of_the_stages_other_replicas_are_deleted(tmp_path: Path) -> None:
    config = lending(tmp_path)
    donor, _ = giving(config)
    without = without_the_model(config, tmp_path)
    guest = taken(donor, without)
    with pytest.raises(OtherBase), guest.building(STAGE):
        raise OtherBase
    assert not list((tmp_path / "guest").rglob("frozen-*"))
    with pytest.raises(Unloadable) as missing, guest.building(STAGE):
        raise AssertionError
    assert missing.value.lacks == (Lack(STAGE, FROZEN),) and missing.value.older is None


def test_weights_are_given_where_the_run_says_so_and_of_the_stage_that_is_here(tmp_path: Path) -> None:
    config = lending(tmp_path)
    donor, executor = giving(config)
    other, _ = giving(config, 0)
    assert offered(donor, 0) == offered(other, 0), "from the model that lies here"
    for chunk in range(len(offered(donor, 0).sizes)):
        donor.read(ReadShard("t", 0, 0, FROZEN, chunk, "out"))
    with pytest.raises(ValueError, match="not offered any more"):
        donor.read(ReadShard("t", 0, 0, FROZEN, 0, "out"))
    borrower = taken(donor, without_the_model(config, tmp_path))
    borrower.serve(STAGE, executor)
    assert offered(borrower) == offered(donor), "who was lent it lends it on"
    with pytest.raises(ValueError, match="stage 0 is not here"):
        offered(borrower, 0)
    offered(donor)
    donor.serve(STAGE, None)
    with pytest.raises(ValueError, match="not offered any more"):
        donor.read(ReadShard("t", 0, STAGE, FROZEN, 0, "out"))
    miser = Frozen(msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, lend=False)))
    miser.serve(STAGE, executor)
    with pytest.raises(ValueError, match=r"tune\.lend"):
        offered(miser)
    with pytest.raises(ValueError, match="reads its model itself"):
        send(giving(config)[0], Frozen(config), 0)


def test_a_guests_checkpoints_are_of_the_runs_model(tmp_path: Path) -> None:
    config = lending(tmp_path)
    guest = without_the_model(config, tmp_path)
    assert model_digest(guest) == model_digest(config)
    assert weight_files.fingerprint(Path(guest.model.path)) == weight_files.fingerprint(Path(config.model.path)) != ""


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lending(tmp_path)
    donor, _ = giving(config)
    monkeypatch.setattr(frozen, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ValueError, match="do not fit on the disk"):
        send(donor, Frozen(without_the_model(config, tmp_path)), 0)
