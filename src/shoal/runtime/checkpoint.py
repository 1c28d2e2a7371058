"""Checkpoints of a whole run: written stage by stage by different peers, made visible at once, read by any cut.

`URL/step-N/` is a Hugging Face model directory (config, safetensors shards with their index, tokenizer) with, beside it,
the optimizer's state (`optimizer/`) and `training.json`: step, cursor, schedule, seed, configuration, size and SHA-256 of
every file. A checkpoint without `training.json` does not count. Locally all is written in a hidden directory that is
renamed at the end; on other storage, which cannot rename, `training.json` is simply written last. When to save, who
writes and who publishes is core's matter; an error is its caller's to report, and leaves older checkpoints as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import torch
from fsspec.implementations.local import LocalFileSystem

from shoal.config import Config, Train
from shoal.runtime import state as states
from shoal.runtime.state import State

FORMAT = 1
MARKER = "training.json"
INDEX = "model.safetensors.index.json"
MODEL = "model/"  # prefix of parameters in a stage's state; all else is the optimizer's
STEP = re.compile(r"^step-(\d{1,15})$")
SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"')
READ_BYTES = 8 << 20  # at a time, when every byte of a checkpoint is looked at
HIDDEN = re.compile(r"^\.step-(\d{1,15})\.(part|gone)$")


class File(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer tells of the shard that it wrote."""

    step: int
    stage: int
    stages: int
    model: File
    optimizer: File
    tensors: tuple[str, ...]  # names in the model's file
    values_bytes: int  # of those tensors


class Schedule(msgspec.Struct, frozen=True):
    """Where the learning rate's schedule stands: `step` of `steps`."""

    kind: str
    step: int
    steps: int
    warmup: int
    peak: float
    final_ratio: float


class Training(msgspec.Struct, frozen=True):
    """training.json."""

    format: int
    run: str
    step: int  # steps done: parameters are those with which step `step` is trained
    cursor: int  # number of the next sample
    samples: int  # trained on so far, each once
    seed: int
    stages: int
    schedule: Schedule
    data: str  # digest of the samples
    data_note: str
    config: Config
    files: dict[str, File]
    seal: str = "0" * 64  # SHA-256 of this file, with zeros here; before November 2026 there was none


class About(msgspec.Struct, frozen=True):
    """What a checkpoint says of its run beside the tensors. `files`: the model's configuration, the tokenizer."""

    config: Config
    data: str
    data_note: str
    files: dict[str, bytes]


class Entry(msgspec.Struct, frozen=True):
    """A checkpoint found in the store; `wrong` says why it cannot be used, '' for a complete one."""

    step: int
    path: str
    wrong: str = ""
    training: Training | None = None


class Store:
    """Checkpoints at a local path or any fsspec URL. ValueError when that kind of storage is not at hand."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"checkpoint.url = {url!r}: {error}") from error
        self._local = isinstance(self._fs, LocalFileSystem)

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` is, once published."""
        place = posixpath.join(self._root, f"step-{step}")
        return place if self._local else str(self._fs.unstrip_protocol(place))

    # ------------------------------------------------------------------------------------------------------ writing

    def write_shard(self, step: int, stage: int, stages: int, state: State) -> str:
        """Write a stage's parameters and optimizer state. Returns the record that `publish` wants, as JSON.

        One checkpoint is written at a time: what was begun for older steps is given up, and would only take space.
        OSError (no space, no access): this shard's files are removed again."""
        self._sweep(before=step)
        folder = self._unfinished(step)
        if not self._local:
            self._delete(posixpath.join(folder, MARKER))  # what was there under this step is being replaced
        model = {name.removeprefix(MODEL): tensor for name, tensor in state.items() if name.startswith(MODEL)}
        optimizer = {name: tensor for name, tensor in state.items() if not name.startswith(MODEL)}
        note = {"format": "pt", "step": str(step), "stage": str(stage)}
        names = _shard_names(stage, stages)
        files = []
        try:
            for name, tensors in zip(names, (model, optimizer), strict=True):
                files.append(self._write(posixpath.join(folder, name), states.stream(tensors, note)))
        except BaseException:
            for name in names:
                self._delete(posixpath.join(folder, name))
            raise
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
        record = Record(step, stage, stages, files[0], files[1], tuple(model), size)
        return msgspec.json.encode(record).decode()

    def publish(self, step: int, records: Iterable[str], about: About) -> str:
        """Make the checkpoint of `step` whole and visible, and return its path. Asked again, it answers the same.

        ValueError: the records are not one of each stage, or a shard is not here. OSError: as the storage has it."""
        shards = _checked(step, records)
        files = {name: file for shard in shards for name, file in _files_of(shard).items()}
        ours = self._inspect(step)
        if ours.training is not None and not ours.wrong and files.items() <= ours.training.files.items():
            return self.path(step)
        folder = self._unfinished(step)
        for name, file in files.items():
            if self._size(posixpath.join(folder, name)) != file.bytes:
                raise ValueError(f"{name} of step {step} is not at {self.url}, which must be one place for all peers")
        for name, content in {**about.files, INDEX: _index(shards)}.items():
            files[name] = self._write(posixpath.join(folder, name), [memoryview(content)])
        training = _sealed(msgspec.json.format(msgspec.json.encode(_training(step, shards, about, files)), indent=2))
        self._write(posixpath.join(folder, MARKER), [memoryview(training)])
        if self._local:
            self._reveal(step, {*files, MARKER})
        return self.path(step)

    def prune(self, keep: int, run: str) -> tuple[str, ...]:
        """Delete run `run`'s checkpoints but the newest `keep` (0: none), and what was left unfinished before them."""
        whole = [entry for entry in self.entries() if not entry.wrong and entry.training and entry.training.run == run]
        old = [entry.step for entry in whole[keep:]] if keep > 0 else []
        for step in old:
            self._remove(step)
        if whole:
            self._sweep(before=whole[0].step)
        return tuple(self.path(step) for step in old)

    # ------------------------------------------------------------------------------------------------------ reading

    def entries(self) -> list[Entry]:
        """All that look like checkpoints here, newest first."""
        steps = sorted({int(found[1]) for name in self._names() if (found := STEP.match(name))}, reverse=True)
        return [self._inspect(step) for step in steps]

    def newest(self) -> tuple[Training | None, tuple[str, ...]]:
        """The newest complete checkpoint, and what is wrong with any newer one."""
        refused: list[str] = []
        for entry in self.entries():
            if not entry.wrong:
                return entry.training, tuple(refused)
            refused.append(f"{entry.path}: {entry.wrong}")
        return None, tuple(refused)

    def soundest(self) -> tuple[Training | None, tuple[Entry, ...]]:
        """The newest checkpoint of which every byte is what was written, and the newer ones, with what is wrong with each. Reads all of
        them: as long as it takes to load one."""
        refused: list[Entry] = []
        for entry in self.entries():
            wrong = entry.wrong or self._damage(entry)
            if not wrong:
                return entry.training, tuple(refused)
            refused.append(msgspec.structs.replace(entry, wrong=wrong))
        return None, tuple(refused)

    def newest_bytes(self, beside: Path) -> int:
        """Size of the newest checkpoint, if it lies on the same disk as `beside`, else 0: about what the next one will take."""
        if not self._local:
            return 0
        try:
            if os.stat(self._root).st_dev != os.stat(beside).st_dev:
                return 0
            found = self._names()
            step = max((int(match[1]) for name in found if (match := STEP.match(name))), default=None)
            place = Path(self._root, f"step-{step}")
            return sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) if step is not None else 0
        except OSError:  # there is none yet, or it is deleted just now
            return 0

    def unfinished(self, entry: Entry) -> bool:
        """Is this what a storage that cannot rename holds of a checkpoint while it is written?"""
        return not self._local and entry.wrong.startswith("torn")

    def set_aside(self, step: int) -> str:
        """Take a damaged checkpoint out of the way of the one that will be written in its place. Returns where it is now."""
        place = posixpath.join(self._root, f"step-{step}")
        if not self._local:  # it cannot be renamed; without this file it does not count
            self._delete(posixpath.join(place, MARKER))
            return f"{self.path(step)}, without its {MARKER}"
        number, aside = 1, f"{place}.damaged"
        while os.path.lexists(aside):
            number += 1
            aside = f"{place}.damaged.{number}"
        os.rename(place, aside)
        return aside

    def open(self, step: int) -> Training:
        """The checkpoint of `step`. ValueError says what is wrong with it."""
        entry = self._inspect(step)
        if entry.training is None or entry.wrong:
            raise ValueError(f"{entry.path}: {entry.wrong}")
        return entry.training

    def load(self, step: int, like: State) -> dict[str, torch.Tensor]:
        """The tensors that `like` has, in its order, from whichever shards hold them: any cut reads any other's.

        ValueError: files were damaged, or it is a checkpoint of another model."""
        training = self.open(step)
        found: dict[str, torch.Tensor] = {}
        for name, file in sorted(training.files.items()):
            if name.endswith(".safetensors"):
                found |= self._load_file(step, name, file, like)
        for name, tensor in like.items():
            here = found.get(name)
            if here is None or here.shape != tensor.shape or here.dtype != tensor.dtype:
                what = "does not hold it" if here is None else f"has {_shaped(here)}"
                raise ValueError(f"{self.path(step)}: foreign: the model has {name}, {_shaped(tensor)}; this {what}")
        return {name: found[name] for name in like}

    def _load_file(self, step: int, name: str, file: File, like: State) -> dict[str, torch.Tensor]:
        prefix = "" if name.startswith("optimizer/") else MODEL
        sha = hashlib.sha256()
        with self._fs.open(posixpath.join(self._root, f"step-{step}", name), "rb") as handle:

            def read(count: int) -> bytes:
                data: bytes = handle.read(count)
                sha.update(data)
                return data

            if not self._holds(handle, prefix, like):
                return {}
            try:
                tensors, _ = states.unpack(read, lambda short: prefix + short in like)
            except ValueError as error:
                raise ValueError(f"{self.path(step)}: damaged: {name}: {error}") from error
        if sha.hexdigest() != file.sha256:
            raise ValueError(
                f"{self.path(step)}: damaged: {name} has SHA-256 {sha.hexdigest()[:16]}, not {file.sha256[:16]}"
            )
        return {prefix + short: tensor for short, tensor in tensors.items()}

    def _damage(self, entry: Entry) -> str:
        """What is wrong with the content of its files; '' when nothing is."""
        assert entry.training is not None
        for name, file in sorted(entry.training.files.items()):
            sha = hashlib.sha256()
            try:
                with self._fs.open(posixpath.join(self._root, f"step-{entry.step}", name), "rb") as handle:
                    while data := handle.read(READ_BYTES):
                        sha.update(data)
            except OSError as error:  # a disk that fails, or somebody deletes it just now
                return f"damaged: {name} cannot be read: {error.strerror or error}"
            if sha.hexdigest() != file.sha256:
                return f"damaged: {name} has SHA-256 {sha.hexdigest()[:16]}, not {file.sha256[:16]}"
        return ""

    def _holds(self, handle: Any, prefix: str, like: State) -> bool:
        """Whether the header names any tensor of `like`; one that cannot be read is for `unpack` to refuse."""
        size = int.from_bytes(handle.read(8), "little")
        try:
            places = states.parse(handle.read(min(size, states.MAX_HEADER_BYTES)))[0]
        except ValueError:
            return True
        finally:
            handle.seek(0)
        return any(prefix + short in like for short in places)

    def _inspect(self, step: int) -> Entry:
        folder, path = posixpath.join(self._root, f"step-{step}"), self.path(step)
        if self._size(posixpath.join(folder, MARKER)) is None:
            foreign = self._size(posixpath.join(folder, "config.json")) is not None
            return Entry(
                step, path, f"foreign: no {MARKER}" if foreign else f"torn: no {MARKER}; it was never finished"
            )
        try:
            with self._fs.open(posixpath.join(folder, MARKER), "rb") as handle:
                text = handle.read()
            told = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            number = msgspec.json.decode(told.get("format", msgspec.Raw(b"null")))
            if number != FORMAT:
                return Entry(step, path, f"foreign: {MARKER} has format {number!r}, this version reads {FORMAT}")
            training = msgspec.json.decode(msgspec.json.encode(told), type=Training)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return Entry(step, path, f"damaged: {MARKER} cannot be read: {error}")
        if training.step != step:
            return Entry(step, path, f"foreign: {MARKER} is of step {training.step}")
        for name, file in sorted(training.files.items()):
            size = self._size(posixpath.join(folder, name)) if _inside(name) else None
            if size != file.bytes:
                wrong = f"{name} is missing" if size is None else f"{name} has {size} bytes, not {file.bytes}"
                return Entry(step, path, f"damaged: {wrong}", training)
        if b'"seal"' in text and (len(SEAL.findall(text)) != 1 or _sealed(text) != text):
            return Entry(step, path, f"damaged: {MARKER} is not what was written")
        return Entry(step, path, "", training)

    # ------------------------------------------------------------------------------------------------------ storage

    def _unfinished(self, step: int) -> str:
        return posixpath.join(self._root, f".step-{step}.part" if self._local else f"step-{step}")

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return sorted(posixpath.basename(name.rstrip("/")) for name in self._fs.ls(self._root, detail=False))
        except FileNotFoundError:
            return []

    def _size(self, path: str) -> int | None:
        try:
            found = self._fs.info(path)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def _write(self, path: str, pieces: Iterable[memoryview]) -> File:
        """Write a file whole or not at all."""
        if not self._local:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            with self._fs.open(path, "wb") as handle:
                return _written(handle, pieces)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.{uuid.uuid4().hex}.tmp"  # two replicas may write the same shard: equal bytes, either may win
        try:
            with open(draft, "wb") as handle:
                file = _written(handle, pieces)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(draft, path)
        except BaseException:
            self._delete(draft)
            raise
        return file

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # gone already, which is what was wanted
            if self._local:
                os.unlink(path)
            elif self._fs.exists(path):
                self._fs.rm_file(path)

    def _reveal(self, step: int, names: set[str]) -> None:
        folder, place = self._unfinished(step), posixpath.join(self._root, f"step-{step}")
        for base, _, found in os.walk(folder, topdown=False):
            for name in found:
                if posixpath.relpath(posixpath.join(base, name), folder) not in names:
                    self._delete(posixpath.join(base, name))  # drafts of peers that died while writing
            _sync(base)
        if os.path.lexists(place):
            self._hide(step)
        os.rename(folder, place)
        _sync(self._root)
        self._sweep_gone(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint so that at no moment half of it looks whole."""
        if self._local:
            self._hide(step)
            self._sweep_gone(step)
        else:
            folder = posixpath.join(self._root, f"step-{step}")
            self._delete(posixpath.join(folder, MARKER))
            self._fs.rm(folder, recursive=True)

    def _hide(self, step: int) -> None:
        gone = posixpath.join(self._root, f".step-{step}.gone")
        shutil.rmtree(gone, ignore_errors=True)  # left by a peer that died while deleting
        os.rename(posixpath.join(self._root, f"step-{step}"), gone)

    def _sweep_gone(self, step: int) -> None:
        shutil.rmtree(
            posixpath.join(self._root, f".step-{step}.gone"), ignore_errors=True
        )  # the next prune tries again

    def _sweep(self, before: int) -> None:
        """Delete what was begun for older steps and never finished."""
        for name in self._names():
            hidden, step = HIDDEN.match(name), STEP.match(name)
            if self._local and hidden and int(hidden[1]) < before:
                shutil.rmtree(posixpath.join(self._root, name), ignore_errors=True)  # a late writer may be in it
            elif not self._local and step and int(step[1]) < before and self._inspect(int(step[1])).wrong[:4] == "torn":
                with contextlib.suppress(FileNotFoundError):  # another peer sweeps too
                    self._fs.rm(posixpath.join(self._root, name), recursive=True)


def about(config: Config, data: str, data_note: str) -> About:
    """What this run's checkpoints say of it. Reads the model's configuration and the tokenizer: once per process."""
    from shoal.model import boundary
    from shoal.model.families import cuts, hf_config
    from shoal.runtime.data import open_tokenizer

    if config.device.executor == "emulated":
        return About(config, data, data_note, {"config.json": json.dumps({"model_type": "emulated"}).encode()})
    hf = hf_config(config)
    told = hf.to_json_string(use_diff=False)
    blocks = cuts(config, hf.num_hidden_layers)
    described = {"config.json": boundary.described(told, config.model.boundary, blocks) if blocks else told.encode()}
    return About(config, data, data_note, described | open_tokenizer(config.data.tokenizer).files())


def refuse_foreign(training: Training, config: Config, data: str) -> None:
    """ValueError when a run of this configuration and data cannot go on from that checkpoint."""
    theirs = training.config
    pairs: list[tuple[str, object, object]] = [
        (f"model.{name}", getattr(theirs.model, name), getattr(config.model, name))
        for name in config.model.__struct_fields__
    ]
    pairs += [
        *([("run.stages", theirs.run.stages, config.run.stages)] if config.model.boundary != "none" else []),
        ("train.batch", theirs.train.batch, config.train.batch),  # the cursor is counted in it
        ("train.moments", theirs.train.moments, config.train.moments),
        ("train.local_steps", theirs.train.local_steps, config.train.local_steps),
        ("data.sequence", theirs.data.sequence, config.data.sequence),
        ("run.seed", theirs.run.seed, config.run.seed),
        ("data (SHA-256 of the samples)", training.data[:16], data[:16]),
    ]
    for name, there, here in pairs:
        if there != here:
            raise ValueError(
                f"the checkpoint of step {training.step} of run {training.run!r} has {name} = {there!r}, this run has "
                f"{here!r}; set it back, or start from its weights alone with model.path"
            )


def _written(handle: Any, pieces: Iterable[memoryview]) -> File:
    sha, size = hashlib.sha256(), 0
    for piece in pieces:
        handle.write(piece)
        sha.update(piece)
        size += len(piece)
    return File(size, sha.hexdigest())


def _shard_names(stage: int, stages: int) -> tuple[str, str]:
    number = f"{stage + 1:05}-of-{stages:05}"
    return f"model-{number}.safetensors", f"optimizer/stage-{number}.safetensors"


def _files_of(shard: Record) -> dict[str, File]:
    return dict(zip(_shard_names(shard.stage, shard.stages), (shard.model, shard.optimizer), strict=True))


def _checked(step: int, records: Iterable[str]) -> list[Record]:
    """The records, which came from other peers, one of each stage in order."""
    try:
        shards = [msgspec.json.decode(record, type=Record) for record in records]
    except msgspec.MsgspecError as error:
        raise ValueError(f"a record of step {step} cannot be read: {error}") from error
    shards.sort(key=lambda shard: shard.stage)
    wanted = [(step, stage, len(shards)) for stage in range(len(shards))]
    found = [(shard.step, shard.stage, shard.stages) for shard in shards]
    if not shards or found != wanted:
        raise ValueError(f"records of (step, stage, stages) {found} are not one of each stage of step {step}")
    return shards


def _index(shards: list[Record]) -> bytes:
    names: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            names.setdefault(name, _shard_names(shard.stage, shard.stages)[0])
    size = sum(shard.values_bytes for shard in shards)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}, indent=2).encode()


def _training(step: int, shards: list[Record], about: About, files: dict[str, File]) -> Training:
    config, train = about.config, about.config.train
    return Training(
        format=FORMAT,
        run=config.run.name,
        step=step,
        cursor=step * train.batch * train.local_steps,
        samples=step * train.batch * train.local_steps,
        seed=config.run.seed,
        stages=len(shards),
        schedule=_schedule(train, step, config.run.steps),
        data=about.data,
        data_note=about.data_note,
        config=config,
        files=dict(sorted(files.items())),
    )


def _sealed(text: bytes) -> bytes:
    """With the SHA-256 of the whole in its place, computed with zeros there."""
    zeros = SEAL.sub(b'"seal": "' + b"0" * 64 + b'"', text)
    return SEAL.sub(b'"seal": "' + hashlib.sha256(zeros).hexdigest().encode() + b'"', zeros)


def _schedule(train: Train, step: int, steps: int) -> Schedule:
    local = train.local_steps
    return Schedule(train.schedule, step * local, steps * local, train.warmup, train.learning_rate, train.final_ratio)


def _inside(name: str) -> bool:
    """Whether a file's name stays in its checkpoint: training.json may come from anyone."""
    return not name.startswith("/") and ".." not in name.split("/")


def _shaped(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
