"""Which checkpoints lie in a directory and what is wrong with each: read without torch, by whoever starts, resumes or recovers a run.

checkpoint.py writes them and reads their tensors.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from pathlib import Path

import msgspec

from shoal.config import Config
from shoal.runtime.checkpoints import marker
from shoal.runtime.checkpoints.marker import MARKER, Training
from shoal.runtime.checkpoints.storage import File, Storage

STEP = re.compile(r"^step-(\d{1,15})$")


class Entry(msgspec.Struct, frozen=True):
    """A checkpoint found in the directory; `wrong` says why it cannot be used, '' for one that is as it was written. `elsewhere`: files
    that other places hold. `repairable`: what is wrong can be had from another place, as its marker says."""

    step: int
    path: str
    wrong: str = ""
    training: Training | None = None
    elsewhere: tuple[str, ...] = ()
    repairable: bool = False


class Catalog:
    """Checkpoints at a local path or any fsspec URL. `authority`: whose can be used, by the id of the run's key; None for anybody's.
    ValueError when that kind of storage is not at hand."""

    def __init__(self, url: str, authority: str | None = None) -> None:
        self.authority = authority
        self.storage = Storage(url)
        self.url = url
        self._place: str | None = None

    @property
    def place(self) -> str:
        """The name of this place; '' when it has none."""
        if self._place is None:
            self._place = self.storage.place(make=False)
        return self._place

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` is, once published."""
        return self.storage.path(folder(step))

    def entries(self) -> list[Entry]:
        """All that look like checkpoints here, newest first."""
        steps = {int(match[1]) for name in self.storage.names() if (match := STEP.match(name))}
        return [self.inspect(step) for step in sorted(steps, reverse=True)]

    def newest(self) -> tuple[Training | None, tuple[str, ...]]:
        """The newest complete checkpoint, and what is wrong with any newer one."""
        refused: list[str] = []
        for entry in self.entries():
            if not entry.wrong:
                return entry.training, tuple(refused)
            refused.append(f"{entry.path}: {entry.wrong}")
        return None, tuple(refused)

    def soundest(self, before: float = math.inf, others: bool = False) -> tuple[Training | None, tuple[Entry, ...]]:
        """The newest checkpoint of a step below `before` of which every byte is what was written, and the newer ones, with what is wrong
        with each. Reads all of them: as long as it takes to load one. `others`: what other places hold will do."""
        entry, refused = self.soundest_entry(before, others)
        return entry.training if entry is not None else None, refused

    def soundest_entry(self, before: float = math.inf, others: bool = False) -> tuple[Entry | None, tuple[Entry, ...]]:
        """The same, with what is wrong with it where that can be had from other places."""
        refused: list[Entry] = []
        for entry in self.entries():
            if entry.step >= before:
                continue
            entry = entry if entry.wrong else self.read(entry)
            if not others and not entry.wrong and entry.elsewhere:
                wrong = f"elsewhere: {entry.elsewhere[0]} is kept by other machines"
                entry = msgspec.structs.replace(entry, wrong=wrong, repairable=True)
            if not entry.wrong or (others and entry.repairable):
                return entry, tuple(refused)
            refused.append(entry)
        return None, tuple(refused)

    def open(self, step: int) -> Training:
        """The checkpoint of `step`. ValueError says what is wrong with it."""
        entry = self.inspect(step)
        if entry.training is None or entry.wrong:
            raise ValueError(f"{entry.path}: {entry.wrong}")
        return entry.training

    def inspect(self, step: int) -> Entry:
        """What training.json and the sizes of the files say; their content is not read."""
        place, path = folder(step), self.path(step)
        if self.storage.size(f"{place}/{MARKER}") is None:
            if self.storage.size(f"{place}/config.json") is not None:
                return Entry(step, path, f"foreign: no {MARKER}")
            return Entry(step, path, f"torn: no {MARKER}; it was never finished")
        with self.storage.open(f"{place}/{MARKER}") as handle:
            text = handle.read()
        try:
            training = marker.decoded(text)
        except marker.Unreadable as error:
            return Entry(step, path, str(error))
        if training.step != step:
            return Entry(step, path, f"foreign: {MARKER} is of step {training.step}")
        if self.authority is not None and training.authority != self.authority:
            return Entry(step, path, f"of another run: {whose(training)}", training)
        return self._compared(training, intact=marker.intact(text))

    def _compared(self, training: Training, *, intact: bool) -> Entry:
        """The sizes of the files here, compared with those that the marker names. `intact`: the marker is what was written."""
        step, place, elsewhere = training.step, folder(training.step), list[str]()
        for name, file in sorted(training.files.items()):
            size = self.storage.size(f"{place}/{name}") if _inside(name) else None
            if size is None and training.copies and not training.belongs(name, self.place):
                elsewhere.append(name)
            elif size != file.bytes:
                wrong = f"{name} is missing" if size is None else f"{name} has {size} bytes, not {file.bytes}"
                return self._damaged(step, wrong, training if intact else None, name)
        if not intact:
            return Entry(step, self.path(step), f"damaged: {MARKER} is not what was written")
        return Entry(step, self.path(step), "", training, tuple(elsewhere))

    def _damaged(self, step: int, wrong: str, training: Training | None, name: str) -> Entry:
        repairable = training is not None and bool(training.copies) and training.elsewhere(name, self.place)
        return Entry(step, self.path(step), f"damaged: {wrong}", training, repairable=repairable)

    def read(self, entry: Entry) -> Entry:
        """The same, with what is wrong with the content of its files."""
        assert entry.training is not None
        for name, file in sorted(entry.training.files.items()):
            wrong = "" if name in entry.elsewhere else self.fault(entry.step, name, file)
            if wrong:
                return self._damaged(entry.step, wrong, entry.training, name)
        return entry

    def fault(self, step: int, name: str, file: File) -> str:
        """Why that file of the checkpoint of `step` is not what was written; '' when it is."""
        try:
            digest = self.storage.hash(f"{folder(step)}/{name}")
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:  # a disk that fails
            return f"{name} cannot be read: {error.strerror or error}"
        return "" if digest == file.sha256 else f"{name} has SHA-256 {digest[:16]}, not {file.sha256[:16]}"

    def newest_bytes(self, beside: Path) -> int:
        """Size of the newest checkpoint, if it lies on the same disk as `beside`, else 0: about what the next one will take."""
        root = self.storage.root
        if not self.storage.local:
            return 0
        try:
            if os.stat(root).st_dev != os.stat(beside).st_dev:
                return 0
            names = self.storage.names()
            step = max((int(match[1]) for name in names if (match := STEP.match(name))), default=None)
            place = Path(root, f"step-{step}")
            return sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) if step is not None else 0
        except OSError:  # there is none yet, or it is deleted just now
            return 0

    def within(self, directory: Path) -> bool:
        """Do they lie in that directory?"""
        return self.storage.local and Path(self.storage.root).resolve().is_relative_to(directory.resolve())

    def adopt(self, step: int, name: str) -> None:
        """Another run's checkpoint becomes this one's, called `name`."""
        assert self.authority is not None
        with self.storage.open(f"{folder(step)}/{MARKER}") as handle:
            training = marker.decoded(handle.read())
        adopted = (*training.adopted, training.authority)
        training = msgspec.structs.replace(training, run=name, authority=self.authority, adopted=adopted)
        self.storage.write(f"{folder(step)}/{MARKER}", [memoryview(marker.encoded(training))])

    def unfinished(self, entry: Entry) -> bool:
        """Is this what a storage that cannot rename holds of a checkpoint while it is written?"""
        return not self.storage.local and entry.wrong.startswith("torn")

    def set_aside(self, step: int, ending: str = "damaged") -> str:
        """Take a checkpoint out of the way of the one that will be written in its place. Returns where it is now."""
        if not self.storage.local:  # it cannot be renamed; without this file it does not count
            self.storage.delete(f"{folder(step)}/{MARKER}")
            return f"{self.path(step)}, without its {MARKER}"
        number, aside = 1, f"{folder(step)}.{ending}"
        while self.storage.exists(aside):
            number += 1
            aside = f"{folder(step)}.{ending}.{number}"
        self.storage.rename(folder(step), aside)
        return self.storage.path(aside)


def url_of(config: Config) -> str:
    """Where a run of that configuration keeps its checkpoints."""
    return config.checkpoint.url or posixpath.join(config.run.dir, config.run.name, "checkpoints")


def whose(training: Training | None) -> str:
    """The run that a checkpoint belongs to, in words."""
    if training is None:
        return "nobody known"
    key = f"key {training.authority[:8]}" if training.authority else "from before checkpoints carried their run's key"
    return f"run {training.run!r} ({key})"


def folder(step: int) -> str:
    """Of a published checkpoint."""
    return f"step-{step}"


def _inside(name: str) -> bool:
    """Whether a file's name stays in its checkpoint: training.json may come from anyone."""
    return not posixpath.isabs(name) and ".." not in name.split("/")
