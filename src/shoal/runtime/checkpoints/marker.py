"""training.json, the file that makes a directory a checkpoint: what it says, how it is sealed, whether this run can go on from it.

For catalog.py and checkpoint.py. Imports no torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.config import Config, Model, Train
from shoal.escaping import UNDECODABLE
from shoal.model import remote
from shoal.runtime.checkpoints import weight_files
from shoal.runtime.checkpoints.storage import File

FORMAT = 1
MARKER = "training.json"
SHARD_FILE = re.compile(r"(?:model-|optimizer/stage-)(\d{5})-of-\d{5}\.safetensors")
# Settings that a run cannot change when it goes on from a checkpoint, beside all of [model]; every other one may change.
FIXED = {
    "train.batch": "the place in the data is counted in it",
    "train.optimizer": "the optimizer's state has that form",
    "train.moments": "the optimizer's state has that form",
    "train.local_steps": "the optimizer's state has that form",
    "data.sequence": "samples are cut by it",
    "run.seed": "the order of the samples is drawn from it",
}
SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"')


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
    authority: str = ""  # id of the key that founded the run; before November 2026 none was written
    model: str = ""  # digest of what the model is; likewise
    copies: tuple[tuple[str, ...], ...] = ()  # the places that hold each shard; none: all of them are here
    adopted: tuple[str, ...] = ()  # keys of the runs whose it was before, by `--adopt`
    base: str = ""  # fingerprint of the frozen weights beside which adapters were trained; before 24 November 2026 none was written
    epoch: int = 0  # of the session that wrote it; what an older epoch wrote of later steps was undone
    seal: str = "0" * 64  # SHA-256 of this file, with zeros here; before November 2026 there was none

    def shard_files(self, shard: int) -> dict[str, File]:
        """A shard's files. KeyError: there is no such shard."""
        return {name: self.files[name] for name in shard_names(shard, self.stages)}

    def shard_of(self, name: str) -> int | None:
        """Which shard a file belongs to; None of one that every place has."""
        found = SHARD_FILE.fullmatch(name)
        return int(found[1]) - 1 if found is not None else None

    def elsewhere(self, name: str, place: str) -> bool:
        """Does another place hold a copy of that file?"""
        shard = self.shard_of(name)
        places = self.copies if shard is None else self.copies[shard : shard + 1]
        return any(one != place for held in places for one in held)

    def belongs(self, name: str, place: str) -> bool:
        """Is that file meant to be at `place`?"""
        shard = self.shard_of(name)
        return shard is None or not self.copies[shard : shard + 1] or place in self.copies[shard]


class Unreadable(ValueError):
    """Why a training.json is none of this version's: 'damaged: ...' or 'foreign: ...'."""


# At import: msgspec 0.22 crashes when two threads decode a type for the first time
_DECODER = msgspec.json.Decoder(Training)


def encoded(training: Training) -> bytes:
    """The file's content, sealed."""
    return _sealed(msgspec.json.format(msgspec.json.encode(training), indent=2))


def decoded(text: bytes) -> Training:
    """Unreadable says why it cannot be used. Whether it is as it was written, `intact` says."""
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        number = msgspec.json.decode(found.get("format", msgspec.Raw(b"null")))
        if number != FORMAT:
            raise Unreadable(f"foreign: {MARKER} has format {number!r}, this version reads {FORMAT}")
        return _DECODER.decode(msgspec.json.encode(found))
    except UNDECODABLE as error:
        raise Unreadable(f"damaged: {MARKER} cannot be read: {error}") from error


def shard_names(stage: int, stages: int) -> tuple[str, str]:
    """A stage's files: parameters, and the optimizer's state."""
    number = f"{stage + 1:05}-of-{stages:05}"
    return f"model-{number}.safetensors", f"optimizer/stage-{number}.safetensors"


def content_of(files: Iterable[File]) -> str:
    """Names a shard by what its files hold."""
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()


def intact(text: bytes) -> bool:
    """Is every byte what was written? True of files from before there were seals."""
    return b'"seal"' not in text or (len(SEAL.findall(text)) == 1 and _sealed(text) == text)


def schedule(train: Train, step: int, steps: int) -> Schedule:
    local = train.local_steps
    return Schedule(train.schedule, step * local, steps * local, train.warmup, train.learning_rate, train.final_ratio)


def model_digest(config: Config) -> str:
    """Of what the model is: its settings, the seed, and for a pretrained one the configuration in its directory, wherever that lies now."""
    plain = msgspec.to_builtins(Model())
    settings = {name: value for name, value in msgspec.to_builtins(config.model).items() if value != plain[name]}
    settings.pop("path", None)  # settings at their defaults are left out, so that a new one changes no digest
    sha = hashlib.sha256(msgspec.json.encode([sorted(settings.items()), config.run.seed]))
    if config.model.path:
        sha.update((Path(config.model.path) / "config.json").read_bytes())
    return sha.hexdigest()


def refuse_foreign(training: Training, config: Config, data: str = "") -> None:
    """ValueError when a run of this configuration and data cannot go on from that checkpoint. `data`: digest of the samples; '' where
    nobody has opened them."""
    theirs = training.config
    why = {f"model.{name}": "the parameters are of that model" for name in config.model.__struct_fields__} | FIXED
    if training.base:
        del why["model.path"]  # the frozen weights are compared, wherever they lie now
    if config.model.boundary != "none":
        why["run.stages"] = "boundary layers stand at the cuts"
    pairs = [(name, _setting(theirs, name), _setting(config, name), reason) for name, reason in why.items()]
    if data:
        pairs.append(
            ("data (SHA-256 of the samples)", training.data[:16], data[:16], "samples would count twice, or never")
        )
    if data and training.model:
        name = "model (SHA-256 of its description)"
        pairs.append((name, training.model[:16], model_digest(config)[:16], "the parameters are of that model"))
    if (
        training.base and config.tune.method != "full" and remote.source_of(config.model.path) is None
    ):  # else weights are not here
        name = f"the frozen weights in model.path = {config.model.path!r} (SHA-256 of the ends of their tensors)"
        base = weight_files.fingerprint(Path(config.model.path))
        pairs.append((name, training.base[:16], base[:16], "the adapters were trained beside those"))
    for name, there, here, reason in pairs:
        if there != here:
            raise ValueError(
                f"the checkpoint of step {training.step} of run {training.run!r} has {name} = {there!r}, this run has "
                f"{here!r}: {reason}; set it back, or start from its weights alone with model.path"
            )


def changes(training: Training, config: Config) -> list[str]:
    """The settings in which a run differs from the checkpoint that it goes on from, each with both values."""
    there, here = msgspec.to_builtins(training.config), msgspec.to_builtins(config)
    return [
        f"{section}.{name}: {value!r} -> {here[section][name]!r}"
        for section, fields in there.items()
        for name, value in fields.items()
        if value != here[section][name]
    ]


def _setting(config: Config, path: str) -> object:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _sealed(text: bytes) -> bytes:
    """With the SHA-256 of the whole in its place, computed with zeros there."""
    zeros = SEAL.sub(b'"seal": "' + b"0" * 64 + b'"', text)
    return SEAL.sub(b'"seal": "' + hashlib.sha256(zeros).hexdigest().encode() + b'"', zeros)
