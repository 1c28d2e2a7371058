"""Everything that can be checked before anything starts: data, model directory, tokenizer, device, address and port, room on disk.

For `shoal run`, `join`, `train` and `plan`. Nothing here imports torch or transformers, so that what is wrong is said at once and all
together; what needs them (does the model's family have a pipeline plan, does a stage fit) is checked by build.py. Each fault says
where, what was found, and what would work.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from shoal import importing
from shoal.config import Config, Device, Tune
from shoal.config.sections.data import Data
from shoal.dashboard import steplog
from shoal.escaping import Faults, describe
from shoal.launcher import devices
from shoal.launcher.files import adapter_files
from shoal.launcher.files.adapter_files import TOKENIZER_FILES
from shoal.launcher.planning import problem
from shoal.planner.inputs.memory import Optimizer
from shoal.planner.inputs.profile import profile
from shoal.runtime.checkpoints import weight_files
from shoal.runtime.checkpoints.catalog import url_of
from shoal.runtime.checkpoints.storage import Storage
from shoal.runtime.data.corpus import Corpus, open_corpus, parts
from shoal.runtime.data.heldout import held_out
from shoal.runtime.data.rows import WrongRow, checked, parsed
from shoal.runtime.data.tokenizer import byte_letters
from shoal.transport.addresses import listening, ports
from shoal.units import size

HEAD_BYTES = 1 << 16  # of a file of text that are looked at
FILES = 64  # of a corpus that are looked into
HUB_S = 1.5  # for the Hugging Face hub to say whether it has a tokenizer; a slow line passes


def refuse(faults: Iterable[str]) -> None:
    """Raise all of them as one error, if there are any."""
    if lines := list(dict.fromkeys(faults)):
        raise Faults(lines)


def machine(config: Config) -> Iterator[str]:
    """What this machine lacks to train by that configuration."""
    yield from room(config)
    yield from steplog.missing(config)
    yield from files(config)
    if config.device.executor != "emulated":
        yield from device(config.device)


def files(config: Config) -> Iterator[str]:
    """What of the files that the run reads is not here or wrong."""
    if config.device.executor != "emulated":
        yield from model(config)
        yield from libraries(config.tune)
        yield from adapter_files.faults(config)
        if not config.run.serve:
            yield from data(config.data)
            if config.eval.path:
                text = held_out(config.data, config.eval.path)
                yield from (line.replace("data.path", "eval.path") for line in data(text))
            yield from tokenizer(config)


# --------------------------------------------------------------------------------------------------------------- data


def data(settings: Data) -> Iterator[str]:
    """Is the text there, and is it text? Its first bytes are looked at."""
    if settings.source == "huggingface":
        if importlib.util.find_spec("datasets") is None:
            yield "data.source = 'huggingface' needs the extra: pip install 'shoal[data]'"
        return
    if settings.source == "dataset":
        yield from _located(settings.factory, "data.factory")
    if settings.source in ("python", "dataset"):
        return
    try:
        corpus = open_corpus(settings)
        if settings.weights:
            parts(corpus, settings.weights)
        total_bytes = sum(file.stat().st_size for file in corpus.files)
        if not total_bytes:
            yield f"data.path = {settings.path!r}: {_counted(corpus)} and no text in it; name files that hold some"
        elif settings.source == "text" and settings.tokenizer == "bytes" and total_bytes <= settings.sequence:
            yield (
                f"data.path = {settings.path!r}: {total_bytes} bytes of text are fewer than one sample of data.sequence + 1 ="
                f" {settings.sequence + 1}; give more text, or a smaller data.sequence"
            )
        for file in corpus.files[:FILES]:
            if wrong := _no_text(file, corpus, settings):
                yield wrong
                return
    except (ValueError, OSError) as error:
        yield describe(error)


def _located(reference: str, setting: str) -> Iterator[str]:
    try:
        importing.locate(reference, setting)
    except ValueError as error:
        yield str(error)


def _counted(corpus: Corpus) -> str:
    return f"{corpus.count} files" if corpus.count > 1 else "one file"


def _no_text(file: Path, corpus: Corpus, settings: Data) -> str:
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if b"\0" in head:
        return f"{file} is binary, not text: byte {head.index(0)} is NUL; name text files with data.path"
    if not corpus.lines or settings.wrong_rows != "refuse":
        return ""
    lines = head.split(b"\n")
    for number, line in enumerate(lines if len(head) < HEAD_BYTES else lines[:-1], 1):  # whole ones
        try:
            if line.strip():
                checked(parsed(line), settings)
        except WrongRow as error:
            return f"{file}:{number}: {error}; data.wrong_rows=skip leaves such rows out"
    return ""


# -------------------------------------------------------------------------------------------------- model and tokenizer


def model(config: Config) -> Iterator[str]:
    """Is model.path a directory with a configuration and whole weights, or model.factory a module that peers can import?"""
    faults = list(shape(config))
    yield from faults
    if config.model.path and not faults:
        yield from weight_files.faults(Path(config.model.path).expanduser(), f"model.path = {config.model.path!r}")


def libraries(tune: Tune) -> Iterator[str]:
    """What adapters need and is not installed here."""
    needed = {"peft": f"tune.method = {tune.method!r}"} if tune.method != "full" else {}
    needed |= {"bitsandbytes": f"tune.quantize = {tune.quantize!r}"} if tune.quantize != "none" else {}
    for library, setting in needed.items():
        if importlib.util.find_spec(library) is None:
            yield f"{setting} needs {library}, which is not installed; try pip install 'shoal[tune]'"


def shape(config: Config) -> Iterator[str]:
    """`model` without the weights, which a plan or a forecast does not read."""
    if config.model.factory:
        yield from _located(config.model.factory, "model.factory")
    if not config.model.path:
        return
    place, where = Path(config.model.path).expanduser(), f"model.path = {config.model.path!r}"
    if not (place / "config.json").is_file():
        what = "has no config.json" if place.is_dir() else "is no directory"
        hub = config.model.path if re.fullmatch(r"\w[\w.-]*/[\w.-]+", config.model.path) else "OWNER/MODEL"
        yield f"{where} {what}; give a Hugging Face model directory, or a URL of one such as hf://{hub}"
        return
    try:
        layers = problem.shape(config).layers
        if 0 < layers < config.run.stages:
            yield f"run.stages = {config.run.stages} is more than the {layers} blocks of {where}; try {layers} or fewer"
    except (ValueError, OSError) as error:
        if "its family's shape is not known here" not in str(error):
            yield describe(error)


def tokenizer(config: Config) -> Iterator[str]:
    """Is it 'bytes', a directory with a tokenizer in it, or a name that is in the cache or on the hub; and that of the model?"""
    name = config.data.tokenizer
    if config.data.source == "dataset":
        return
    place, where = Path(name).expanduser(), f"data.tokenizer = {name!r}"
    yield from _another(config, place, where)
    if name == "bytes":
        return
    if place.exists():
        if not any((place / file).is_file() for file in TOKENIZER_FILES):
            yield f"{where} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])}); name a directory that does, or 'bytes'"
        elif config.data.format == "chat" and not _has_template(place):
            yield f"{where} has no chat template, which data.format = 'chat' needs; put a chat_template.jinja there"
        elif (place / "tokenizer.json").is_file():
            yield from _vocabulary(config, place / "tokenizer.json", where)
    elif name != config.model.path:  # which `shape` tells
        yield from _not_here(name, where)


def _not_here(name: str, where: str) -> Iterator[str]:
    """Is it in the cache or on the hub?"""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        yield f"{where}: no such directory; name one with a tokenizer.json, a tokenizer of the Hugging Face hub, or 'bytes'"
        return
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    if (cache.expanduser() / f"models--{name.replace('/', '--')}").is_dir():
        return
    if why := _not_on_hub(name):
        yield f"{where}: neither 'bytes', nor a directory here, nor in {cache}, and {why}"


def _has_template(place: Path) -> bool:
    if (place / "chat_template.jinja").is_file() or (place / "additional_chat_templates").is_dir():
        return True
    try:
        return bool(json.loads((place / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (ValueError, AttributeError, OSError):
        return False


def _vocabulary(config: Config, file: Path, where: str) -> Iterator[str]:
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for what it cannot read
        yield f"{file} is no tokenizer: {' '.join(str(error).split())}"
        return
    known, setting = config.model.vocab_size, "model.vocab_size"
    if config.model.path:
        try:
            known, setting = problem.shape(config).vocabulary, "model.extra.vocab_size"
        except (ValueError, OSError):
            return  # which `model` tells, or dataset.py once the family's own configuration is read
    if ids > known:
        yield f"{where} has {ids} ids, {setting} = {known}; set {setting} to at least {ids}"


def _another(config: Config, place: Path, where: str) -> Iterator[str]:
    """Does it write text in other tokens than the model in model.path has learned? Only files here are compared."""
    model = Path(config.model.path).expanduser()
    if not config.model.path or model == place or not (theirs := _ids(model)):
        return
    ours = {letter: byte for byte, letter in enumerate(byte_letters())} if str(place) == "bytes" else _ids(place)
    if other := next((token for token, number in ours.items() if theirs.get(token, number) != number), ""):
        yield (
            f"{where} is not the tokenizer of model.path = {config.model.path!r}: {other!r} is token {ours[other]}, and"
            f" {theirs[other]} there; set data.tokenizer={config.model.path}"
        )


def _ids(place: Path) -> dict[str, int]:
    """The tokens of a directory's tokenizer; none where it has none that can be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab()
    except Exception:  # noqa: BLE001 - the library raises bare Exception; `_vocabulary` tells of the run's own
        return {}


def _not_on_hub(name: str) -> str:
    """Why the hub cannot give it; '' when it can, or when that is not known soon enough."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE keeps it from being downloaded"
    hub, answers = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/"), [""]

    def ask() -> None:
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get("HF_TOKEN")) else {}
        request = urllib.request.Request(f"{hub}/api/models/{name}", headers=headers)
        try:
            urllib.request.urlopen(request, timeout=HUB_S).close()
        except urllib.error.HTTPError as error:
            answers[0] = f"{hub} has no model of that name for you" if error.code in (401, 403, 404) else ""
        except TimeoutError:
            return
        except (OSError, ValueError) as error:
            answers[0] = f"{hub} cannot be reached: {getattr(error, 'reason', error)}"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_S)
    return answers[0]


# ------------------------------------------------------------------------------------------------------------ machine


def device(settings: Device) -> Iterator[str]:
    """Is there such a device, as far as its driver's files and the installed PyTorch say, and what compiling needs?"""
    for refuse_faulty in (devices.refuse_missing, devices.refuse_uncompilable):
        try:
            refuse_faulty(settings, os.environ)
        except ValueError as error:
            yield str(error)


def address(config: Config, port: int) -> Iterator[str]:
    """Is network.host this machine's, and are the ports free? `port` 0: any will do."""
    network = config.network
    host = listening(network.host, ())
    with ExitStack() as stack:
        for each in dict.fromkeys(ports(network.transport, network.discovery, port)):
            try:
                family, kind, _, _, where = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM)[0]
                listener = stack.enter_context(socket.socket(family, kind))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
                listener.listen(1)
            except (socket.gaierror, UnicodeError) as error:
                yield f"network.host = {host!r} is no address: {error}; name one of this machine's"
                return
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    beside = f" (beside network.port = {port})" if each != port else ""
                    yield f"network.port = {each}{beside} is taken on {host}; name a free one, or 0 for any"
                elif error.errno == errno.EADDRNOTAVAIL:
                    yield f"network.host = {host!r} is no address of this machine; name one that is"
                    return
                else:
                    yield f"network.host = {host!r}, network.port = {each}: {error.strerror}"


def room(config: Config) -> Iterator[str]:
    """Can the run's directory and its checkpoints be written, and is there room for a checkpoint?"""
    try:
        storage = Storage(url_of(config))
    except ValueError as error:
        yield describe(error)
        return
    places = {"run.dir": Path(config.run.dir) / config.run.name}
    if config.checkpoint.url and storage.local:
        places["checkpoint.url"] = Path(storage.root)
    for name, place in places.items():
        yield from writable(f"{name} = {str(place)!r}", place)
    need_bytes = _checkpoint_bytes(config)
    disk = _existing(Path(storage.root)) if storage.local else None
    if disk is not None and need_bytes and (free_bytes := shutil.disk_usage(disk).free) < need_bytes:
        yield (
            f"{disk} has {size(free_bytes)} free, and a checkpoint takes {size(need_bytes)}; free some, or name another disk"
            " with checkpoint.url"
        )


def writable(what: str, place: Path) -> Iterator[str]:
    """Can files be made in that directory, or the directory itself?"""
    there = _existing(place)
    if not there.is_dir():
        yield f"{what}: {there} is a file; name a directory"
        return
    try:
        tempfile.TemporaryFile(dir=there).close()  # also where permissions say yes, such as a read-only disk for root
    except OSError as error:
        yield f"{what}: {there} cannot be written ({error.strerror}); name another directory"


def _existing(place: Path) -> Path:
    return next((each for each in (place, *place.absolute().parents) if each.exists()), Path("/"))


def _checkpoint_bytes(config: Config) -> float:
    if config.device.executor == "emulated" or not (config.checkpoint.every or config.checkpoint.at_end):
        return 0.0
    try:
        model = profile(problem.shape(config), problem.work(config))
    except (
        ValueError,
        OSError,
    ):  # what is wrong with the model is said by `model`; another family's shape is not known
        return 0.0
    optimizer = Optimizer(config.train.moments, muon=config.train.optimizer == "muon")
    return optimizer.state_bytes(model.stage(range(model.blocks)))
