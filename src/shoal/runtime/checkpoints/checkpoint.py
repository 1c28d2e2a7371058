"""Checkpoints of a whole run: written stage by stage by different peers, made visible at once, read by any cut.

`URL/step-N/` is a Hugging Face model directory (config, safetensors shards with their index, tokenizer) with, beside it,
the optimizer's state (`optimizer/`) and `training.json` (marker.py): step, cursor, schedule, seed, configuration, size and SHA-256 of
every file. A checkpoint without `training.json` does not count. Locally all is written in a hidden directory that is
renamed at the end; on other storage, which cannot rename, `training.json` is simply written last. When to save, who
writes and who publishes is core's matter; an error is its caller's to report, and leaves older checkpoints as they are.
Which checkpoints there are, and what is wrong with them: catalog.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.config import Config
from shoal.core.messages import ABOUT, Lack
from shoal.runtime import state as states
from shoal.runtime.checkpoints import marker, weight_files
from shoal.runtime.checkpoints.catalog import STEP, Catalog, folder
from shoal.runtime.checkpoints.marker import FORMAT, MARKER, Training
from shoal.runtime.checkpoints.storage import File
from shoal.runtime.state import State

INDEX = "model.safetensors.index.json"
MODEL = "model/"  # prefix of parameters in a stage's state; all else is the optimizer's
KEY_LENGTH = 8  # letters of the run's key in the name of what is not a checkpoint yet, or no more: 40 bits
HIDDEN = re.compile(r"^\.step-(\d{1,15})\.([0-9a-z]*\.)?(part|gone)$")


Copies = tuple[tuple[str, ...], ...]  # of each shard: the places that hold it


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer tells of the shard that it wrote."""

    step: int
    stage: int
    stages: int
    model: File
    optimizer: File
    tensors: tuple[str, ...]  # names in the model's file
    values_bytes: int  # of those tensors


RECORDS = msgspec.json.Decoder(Record)  # at import, see marker.py


class About(msgspec.Struct, frozen=True):
    """What a checkpoint says of its run beside the tensors. `files`: the model's configuration, the tokenizer."""

    config: Config
    data: str
    data_note: str
    files: dict[str, bytes]
    base: str = ""  # see Training


class Lacking(ValueError):
    """Files of a checkpoint are missing or damaged here. `lacks`: the shards that they belong to."""

    def __init__(self, reason: str, lacks: Iterable[Lack]) -> None:
        super().__init__(reason)
        self.lacks = tuple(lacks)


class Unloadable(ValueError):
    """A checkpoint is damaged, gone or foreign. `older`: the step of the newest older one that can be read, 0 for none; None where it is
    not the checkpoint's fault. `lacks`: what would have to be brought from other places."""

    def __init__(self, reason: str, older: int | None, lacks: tuple[Lack, ...] = ()) -> None:
        super().__init__(reason)
        self.older, self.lacks = older, lacks


class Store:
    """Checkpoints at a local path or any fsspec URL, of the run with that key's id: another run's are never read, overwritten or deleted.
    None: nobody's in particular, and all are alike. ValueError when that kind of storage is not at hand."""

    def __init__(self, url: str, authority: str | None = None, most_bytes: int = 0) -> None:
        """`most_bytes`: that checkpoints may take here; 0: what the disk has."""
        self.catalog = Catalog(url, authority)
        self.url = url
        self._storage = self.catalog.storage
        self._most_bytes = most_bytes

    @cached_property
    def place(self) -> str:
        """The name of the place, made at the first call; '' when nothing can be written there."""
        return self._storage.place(make=True)

    def refuse_full(self, nbytes: int) -> None:
        """ValueError: so many bytes more have no room here."""
        free = self._storage.free_bytes()
        if free is not None and free < nbytes:
            raise ValueError(f"{self.url} has no room for {nbytes} bytes: {free} are free on its disk")
        if self._most_bytes and self._storage.local and self._storage.used_bytes() + nbytes > self._most_bytes:
            raise ValueError(
                f"{self.url} has no room for {nbytes} bytes: {self._storage.used_bytes()} of checkpoint.disk_bytes = "
                f"{self._most_bytes} are taken"
            )

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` is, once published."""
        return self.catalog.path(step)

    def write_shard(self, step: int, stage: int, stages: int, state: State) -> str:
        """Write a stage's parameters and optimizer state. Returns the record that `publish` wants, as JSON.

        One checkpoint is written at a time: what was begun for older steps is given up, and would only take space.
        OSError (no space, no access): this shard's files are removed again. ValueError: what lies there is not this run's."""
        draft = self.begin(step)
        model = {name.removeprefix(MODEL): tensor for name, tensor in state.items() if name.startswith(MODEL)}
        optimizer = {name: tensor for name, tensor in state.items() if not name.startswith(MODEL)}
        self.refuse_full(sum(tensor.numel() * tensor.element_size() for tensor in state.values()))
        note = {"format": "pt", "step": str(step), "stage": str(stage)}
        names = marker.shard_names(stage, stages)
        files = []
        try:
            for name, tensors in zip(names, (model, optimizer), strict=True):
                files.append(self._storage.write(f"{draft}/{name}", states.stream(tensors, note)))
        except BaseException:
            for name in names:
                self._storage.delete(f"{draft}/{name}")
            raise
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
        record = Record(step, stage, stages, files[0], files[1], tuple(model), size)
        return msgspec.json.encode(record).decode()

    def begin(self, step: int) -> str:
        """Where the checkpoint of `step` is written until it is published. ValueError: what lies in its place is not this run's."""
        self.refuse_taken(step)
        self._sweep(before=step)
        draft = self.unfinished(step)
        if not self._storage.local:
            self._storage.delete(f"{draft}/{MARKER}")  # what was there under this step is being replaced
        return draft

    def publish(self, step: int, records: Iterable[str], about: About, copies: Copies = (), epoch: int = 0) -> str:
        """Make the checkpoint of `step` whole and visible, and return its path. Asked again, it answers the same; with other copies, what
        has come since is added to what is visible. `copies`: the places that hold each shard; () when all are here. `epoch`: of the
        session, in which it is written.

        ValueError: the records are not one of each stage, or a shard is not here. OSError: as the storage has it."""
        shards = _checked(step, records)
        with self._storage.alone():  # or a peer of this place would replace what another has just made visible
            return self._publish(step, shards, about, copies, epoch)

    def _publish(self, step: int, shards: list[Record], about: About, copies: Copies, epoch: int) -> str:
        files = {name: file for shard in shards for name, file in _files_of(shard).items()}
        self.refuse_taken(step)
        ours = self.catalog.inspect(step)
        if ours.training is not None and not ours.wrong and files.items() <= ours.training.files.items():
            if not self.catalog.read(ours).wrong:  # trained again after it was damaged, it has the same hashes
                return self._add(ours.training, copies) if copies != ours.training.copies else self.path(step)
        draft = self.unfinished(step)
        training = _training(step, shards, about, files, self.catalog.authority or "", copies)
        training = msgspec.structs.replace(training, epoch=epoch)
        for name, file in files.items():
            if (not copies or training.belongs(name, self.place)) and self._storage.size(
                f"{draft}/{name}"
            ) != file.bytes:
                raise ValueError(f"{name} of step {step} is not at {self.url}")
        for name, content in {**about.files, INDEX: _index(shards)}.items():
            files[name] = self._storage.write(f"{draft}/{name}", [memoryview(content)])
        training = msgspec.structs.replace(training, files=dict(sorted(files.items())))
        self._storage.write(f"{draft}/{MARKER}", [memoryview(marker.encoded(training))])
        if self._storage.local:
            self._reveal(step, {*files, MARKER})
        return self.path(step)

    def _add(self, training: Training, copies: Copies) -> str:
        """To a checkpoint that is visible: the shards that belong here, too, now that another place is lost. Its path."""
        training = msgspec.structs.replace(training, copies=copies)
        visible, draft = folder(training.step), self.unfinished(training.step)
        for name, file in training.files.items():
            if training.belongs(name, self.place) and self._storage.size(f"{visible}/{name}") != file.bytes:
                if self._storage.size(f"{draft}/{name}") != file.bytes:
                    raise ValueError(f"{name} of step {training.step} is not at {self.url}")
                self._storage.rename(f"{draft}/{name}", f"{visible}/{name}")
        self._storage.write(f"{visible}/{MARKER}", [memoryview(marker.encoded(training))])
        if self._storage.local:
            self._storage.sync()
        return self.path(training.step)

    def prune(self, keep: int, best: int = 0) -> tuple[str, ...]:
        """Delete this run's checkpoints but the newest `keep` (0: none) and that of step `best`, and what was left unfinished before."""
        whole = [entry for entry in self.catalog.entries() if not entry.wrong]
        old = [entry.step for entry in whole[keep:] if entry.step != best] if keep > 0 else []
        for step in old:
            self._remove(step)
        if whole:
            self._sweep(before=whole[0].step)
        return tuple(self.path(step) for step in old)

    def delete_undone(self, step: int, epoch: int) -> tuple[str, ...]:
        """Delete this run's checkpoints of later steps than `step` that older epochs than `epoch` have written. Several peers may do so at
        once. Returns their paths."""
        undone = []
        for entry in self.catalog.entries():
            if entry.step > step and not entry.wrong and entry.training is not None and entry.training.epoch < epoch:
                with suppress(FileNotFoundError):
                    self._remove(entry.step)
                    undone.append(self.path(entry.step))
        return tuple(undone)

    def load(self, step: int, like: State) -> dict[str, torch.Tensor]:
        """The tensors that `like` has, in its order, from whichever shards hold them: any cut reads any other's.

        Unloadable: files are damaged or not here, or it is a checkpoint of another model."""
        try:
            return self._load(step, like)
        except ValueError as error:
            older, _ = self.catalog.soundest(before=step, others=True)
            lacks = error.lacks if isinstance(error, Lacking) else ()
            raise Unloadable(str(error), older.step if older is not None else 0, lacks) from error

    def _load(self, step: int, like: State) -> dict[str, torch.Tensor]:
        training = self._open(step)
        found: dict[str, torch.Tensor] = {}
        bad: dict[int, str] = {}  # shards that cannot be read here: why
        for name, file in sorted(training.files.items()):
            shard = training.shard_of(name)
            if shard is None:
                continue
            try:
                found |= self._load_file(step, name, file, like)
            except (ValueError, OSError) as error:
                reason = f"{self.path(step)}: {name} is missing" if isinstance(error, FileNotFoundError) else str(error)
                bad.setdefault(shard, reason)
        for name, tensor in like.items():
            here = found.get(name)
            if here is None and bad:
                raise self._lacking(training, like, bad)
            if here is None or here.shape != tensor.shape or here.dtype != tensor.dtype:
                what = "does not hold it" if here is None else f"has {_shaped(here)}"
                raise ValueError(f"{self.path(step)}: foreign: the model has {name}, {_shaped(tensor)}; this {what}")
        return {name: found[name] for name in like}

    def _open(self, step: int) -> Training:
        """The marker of a checkpoint whose small files are whole here. Lacking: they are not."""
        entry = self.catalog.inspect(step)
        training = entry.training
        if entry.wrong.startswith(("foreign", "of another run")) and self._storage.size(f"{folder(step)}/{MARKER}"):
            raise ValueError(f"{entry.path}: {entry.wrong}")
        if training is None:
            raise Lacking(f"{entry.path}: {entry.wrong}", (Lack(0, ABOUT),))
        for name, file in sorted(training.files.items()):
            fault = "" if training.shard_of(name) is not None else self.catalog.fault(step, name, file)
            if fault:
                raise Lacking(f"{entry.path}: damaged: {fault}", (Lack(0, ABOUT),))
        return training

    def _lacking(self, training: Training, like: State, bad: dict[int, str]) -> Lacking:
        """Of the shards that cannot be read, those that hold what `like` has."""
        index = json.loads(self._storage.read(f"{folder(training.step)}/{INDEX}", states.MAX_HEADER_BYTES))
        needed = {training.shard_of(file) for name, file in index["weight_map"].items() if MODEL + name in like}
        shards = [shard for shard in sorted(bad) if shard in needed] or sorted(bad)
        lacks = (Lack(shard, marker.content_of(training.shard_files(shard).values())) for shard in shards)
        return Lacking(bad[shards[0]], lacks)

    def _load_file(self, step: int, name: str, file: File, like: State) -> dict[str, torch.Tensor]:
        prefix = "" if name.startswith("optimizer/") else MODEL
        sha = hashlib.sha256()
        with self._storage.open(f"{folder(step)}/{name}") as handle:

            def read(count: int) -> bytes:
                data: bytes = handle.read(count)
                sha.update(data)
                return data

            if not _holds(handle, prefix, like):
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

    def refuse_taken(self, step: int) -> None:
        """ValueError: something else lies where the checkpoint of `step` belongs."""
        entry = self.catalog.inspect(step)
        unmarked = not self._storage.local and entry.training is None and MARKER in entry.wrong and "no " in entry.wrong
        if entry.wrong.startswith(("of another run", "foreign")) and not unmarked:
            raise ValueError(
                f"{entry.path} is there, {entry.wrong}: it is not overwritten; give another checkpoint.url"
            )

    def unfinished(self, step: int) -> str:
        """The folder in which that checkpoint is written."""
        return self._hidden(step, "part") if self._storage.local else folder(step)

    def _hidden(self, step: int, ending: str) -> str:
        """What is written, or deleted, under a name that no other run's peers touch."""
        key = f"{self.catalog.authority[:KEY_LENGTH]}." if self.catalog.authority else ""
        return f".step-{step}.{key}{ending}"

    def _reveal(self, step: int, names: set[str]) -> None:
        draft = self.unfinished(step)
        self._storage.keep_only(draft, names)  # without drafts of peers that died while writing
        if self._storage.exists(folder(step)):
            self._hide(step)
        self._storage.rename(draft, folder(step))
        self._storage.sync()
        self._storage.delete_folder(self._hidden(step, "gone"))

    def _remove(self, step: int) -> None:
        """Delete a checkpoint so that at no moment half of it looks whole."""
        if self._storage.local:
            self._hide(step)
            self._storage.delete_folder(self._hidden(step, "gone"))
        else:
            self._storage.delete(f"{folder(step)}/{MARKER}")
            self._storage.delete_folder(folder(step))

    def _hide(self, step: int) -> None:
        gone = self._hidden(step, "gone")
        self._storage.delete_folder(gone)  # left by a peer that died while deleting
        self._storage.rename(folder(step), gone)

    def _sweep(self, before: int) -> None:
        """Delete what was begun for older steps and never finished."""
        for name in self._storage.names():
            hidden, step = HIDDEN.match(name), STEP.match(name)
            if (
                self._storage.local
                and hidden
                and int(hidden[1]) < before
                and name == self._hidden(int(hidden[1]), hidden[3])
            ):
                self._storage.delete_folder(name)  # a late writer may be in it
            elif step and int(step[1]) < before and self.catalog.unfinished(self.catalog.inspect(int(step[1]))):
                self._storage.delete_folder(name)  # another peer sweeps too


def about(config: Config, data: str, data_note: str) -> About:
    """What this run's checkpoints say of it. Reads the model's configuration and the tokenizer: once per process."""
    from shoal.model import sequential
    from shoal.model.families import cuts, hf_config
    from shoal.model.layers import adapters, also, boundary
    from shoal.model.remote import name_of
    from shoal.model.stages import on_meta
    from shoal.runtime.data.tokenizer import open_tokenizer

    if config.device.executor == "emulated":
        return About(config, data, data_note, {"config.json": json.dumps({"model_type": "emulated"}).encode()})
    tokenizer = {} if config.data.source == "dataset" else open_tokenizer(config.data.tokenizer).files()
    if sequential.own_sequential(config) is not None:
        fields = {"model_type": sequential.MODEL_TYPE, "factory": config.model.factory}
        return About(config, data, data_note, {"config.json": json.dumps(fields).encode()} | tokenizer)
    hf = hf_config(config)
    told = hf.to_json_string(use_diff=False)
    blocks = cuts(config, hf.num_hidden_layers)
    described = {"config.json": boundary.config_json(told, config.model.boundary, blocks) if blocks else told.encode()}
    base = ""
    if config.tune.method != "full":  # transformers then looks for the frozen weights where they are, or says so
        lora: Any = adapters.settings(config.tune, name_of(config.model.path))  # not annotated by PEFT
        if config.tune.also:
            lora.modules_to_save = also.peft_names(on_meta(hf), config.tune)
        described["adapter_config.json"] = json.dumps(lora.to_dict(), indent=2, default=list).encode()
        base = weight_files.fingerprint(Path(config.model.path))
    return About(config, data, data_note, described | tokenizer, base)


def _holds(handle: Any, prefix: str, like: State) -> bool:
    """Whether the header names any tensor of `like`; one that cannot be read is for `unpack` to refuse."""
    size = int.from_bytes(handle.read(8), "little")
    try:
        places = states.parse(handle.read(min(size, states.MAX_HEADER_BYTES)))[0]
    except ValueError:
        return True
    finally:
        handle.seek(0)
    return any(prefix + short in like for short in places)


def _files_of(shard: Record) -> dict[str, File]:
    return dict(zip(marker.shard_names(shard.stage, shard.stages), (shard.model, shard.optimizer), strict=True))


def _checked(step: int, records: Iterable[str]) -> list[Record]:
    """The records, which came from other peers, one of each stage in order."""
    try:
        shards = [RECORDS.decode(record) for record in records]
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
            names.setdefault(name, marker.shard_names(shard.stage, shard.stages)[0])
    size = sum(shard.values_bytes for shard in shards)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}, indent=2).encode()


def _training(
    step: int, shards: list[Record], about: About, files: dict[str, File], authority: str, copies: Copies
) -> Training:
    config, train = about.config, about.config.train
    return Training(
        format=FORMAT,
        run=config.run.name,
        step=step,
        cursor=step * train.batch * train.local_steps,
        samples=step * train.batch * train.local_steps,
        seed=config.run.seed,
        stages=len(shards),
        schedule=marker.schedule(train, step, config.run.steps),
        data=about.data,
        data_note=about.data_note,
        config=config,
        files=files,
        authority=authority,
        copies=copies,
        model=marker.model_digest(config),
        base=about.base,
    )


def _shaped(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
