"""A model at a URL, as a directory on this machine: small files are copied, weights are read tensor by tensor when a stage needs them.

What was read stays, for this machine's other peers and for later runs. A shard that lacks tensors has another name than a whole one, so
that no other program takes it for the model. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from shoal.config import Config
from shoal.escaping import UNDECODABLE, escaped
from shoal.units import size

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PARTIAL = ".partial"  # follows the name of a shard that lacks tensors
FETCHED = ".fetched"  # beside it: a line for each tensor that it has
SOURCE = ".shoal-source.json"
CONFIG = "config.json"
TOKENIZER = (  # its files, as far as a model has them
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json merges.txt vocab.txt"
    " spiece.model chat_template.jinja chat_template.json"
).split()
SMALL = [CONFIG, "generation_config.json", *TOKENIZER]
SMALL_BYTES = 256 << 20  # of a file that is copied whole
HEADER_BYTES = 100 << 20  # safetensors' own limit
PART_BYTES = 16 << 20  # that one request asks for
ATTEMPTS = 4  # to read a part; a second is waited before the second one, then twice as long each time
TELL_S = 2.0
REASON_LETTERS = 300  # of what another program says went wrong

Tell = Callable[[str], object]
_tell: Tell = lambda text: None  # noqa: E731 - who hears of progress in this process


class Source(msgspec.Struct, frozen=True):
    """Where the files of a directory come from. `shards`: their sizes in bytes, when the directory was made. `base`, `name`: of a model
    that other peers have, see lent.Description."""

    url: str
    shards: dict[str, int]
    base: str = ""
    name: str = ""


class Span(NamedTuple):
    """Bytes of a tensor in its file."""

    start: int
    stop: int


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Entry(msgspec.Struct):
    """A tensor in a header of safetensors."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_INDEXES = msgspec.json.Decoder(_Index)
_HEADERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(Entry)


def shards_of(index: bytes, where: str) -> dict[str, str]:
    """The file of each tensor, from an index. ValueError: it is none, or names what is no file of that directory."""
    try:
        shards = _INDEXES.decode(index).weight_map
    except UNDECODABLE as error:
        raise ValueError(
            f"{where} is no index of weights ({type(error).__name__}); copy the model directory again"
        ) from None
    for name in sorted(set(shards.values())):
        if Path(name).name != name or not name.isprintable() or name.startswith("."):
            raise ValueError(f"{where} names {name!r}, which is no file of that directory")
    return shards


def header(stream: IO[bytes]) -> tuple[dict[str, Entry], int]:
    """The tensors in a file of safetensors, and where their data begin. ValueError: it is none."""
    header_bytes = int.from_bytes(stream.read(8), "little")
    if header_bytes > HEADER_BYTES:
        raise ValueError("is no safetensors file, or its beginning alone")
    try:
        tensors = _HEADERS.decode(stream.read(header_bytes))
        tensors.pop("__metadata__", None)
        return {name: _ENTRIES.decode(entry) for name, entry in tensors.items()}, 8 + header_bytes
    except UNDECODABLE:
        raise ValueError("is no safetensors file: its header cannot be read") from None


def spans(stream: IO[bytes], there_bytes: int) -> dict[str, Span]:
    """Of each tensor of a safetensors file of so many bytes, read from its beginning. ValueError: says what is wrong with it."""
    entries, first = header(stream)
    offsets = {name: entry.data_offsets for name, entry in entries.items()}
    need_bytes = first + max((stop for _, stop in offsets.values()), default=0)
    if any(not 0 <= start <= stop for start, stop in offsets.values()) or there_bytes != need_bytes:
        raise ValueError(f"has {there_bytes:,} bytes of {need_bytes:,}: it is torn")
    return {name: Span(first + start, first + stop) for name, (start, stop) in offsets.items()}


def _spans(url: str, name: str, head: bytes, there_bytes: int) -> dict[str, Span]:
    try:
        return spans(BytesIO(head), there_bytes)
    except ValueError as error:
        raise ValueError(f"{url}/{name} {error}") from None


# ------------------------------------------------------------------------------------------------------- the directory


def is_url(path: str) -> bool:
    return "://" in path


def show(text: str) -> None:
    """Beside a command's output, which another program may read (--json)."""
    print(text, file=sys.stderr)


def local(config: Config, tell: Tell = show) -> Config:
    """The configuration with directories of this machine, below run.dir, for a model or a tokenizer at a URL. Weights come later.

    ValueError: nothing there can be read."""
    model, data = config.model, config.data
    if is_url(model.path):
        model = msgspec.structs.replace(model, path=directory(model.path, config.run.dir, tell))
    if is_url(data.tokenizer):
        same = data.tokenizer.rstrip("/") == config.model.path.rstrip("/")
        place = model.path if same else directory(data.tokenizer, config.run.dir, tell, weights=False)
        data = msgspec.structs.replace(data, tokenizer=place)
    return msgspec.structs.replace(config, model=model, data=data)


def directory(url: str, runs: str, tell: Tell = show, *, weights: bool = True) -> str:
    """What stands for the model at that URL here, below `runs`. It is made once. `weights`: else the tokenizer alone. ValueError: it
    cannot be read, or is no model."""
    url = url.rstrip("/")
    name = re.sub(r"[^\w.-]", "-", url.rpartition("/")[2])[:80]
    digest = hashlib.sha256(f"{url} {weights}".encode()).hexdigest()[:12]
    here = Path(runs) / ".cache" / "models" / f"{name}-{digest}"
    here.mkdir(parents=True, exist_ok=True)
    with _locked(here / ".lock"):
        if not (here / SOURCE).is_file():
            later = f"; its weights are read when they are needed, into {here}" if weights else ""
            tell(f"reads the description of the model at {url}{later}")
            shards = _describe(url, here, weights)
            write(here / SOURCE, msgspec.json.encode(Source(url, shards)))
    return str(here)


def source_of(path: str | Path) -> Source | None:
    """Where that directory's files come from; None: it is no copy of a model at a URL."""
    try:
        return msgspec.json.decode((Path(path) / SOURCE).read_bytes(), type=Source)
    except (OSError, ValueError, *UNDECODABLE):  # ValueError: what an adapter names as its base can be no path at all
        return None


def name_of(path: str) -> str:
    """How other machines and programs name the model in that directory."""
    source = source_of(path)
    return source.name or source.url.removeprefix("hf://") if source is not None else str(Path(path).resolve())


def _describe(url: str, here: Path, weights: bool) -> dict[str, int]:
    """Copy what is small. Returns the sizes of the shards."""
    files, copied = _Files(url), 0
    for name in SMALL:
        content = files.small(name)
        if content is None and name == CONFIG and weights:
            raise ValueError(f"{url} has no {CONFIG}; give the URL of a directory with a Hugging Face model")
        if content is not None:
            write(here / name, content)
            copied += 1
    if not weights:
        if not copied:
            raise ValueError(f"{url} has none of the files of a tokenizer, such as tokenizer.json")
        return {}
    index = files.small(INDEX)
    if index is not None:
        names = sorted(set(shards_of(index, f"{url}/{INDEX}").values()))
        write(here / INDEX, index)
    else:
        names = [SINGLE]
    shards = {}
    for name in names:
        there_bytes = files.size(name)
        if there_bytes is None:
            raise ValueError(f"{url} has no {name}; weights must be safetensors")
        shards[name] = there_bytes
    if index is None:
        tensors = _spans(url, SINGLE, files.head(SINGLE, shards[SINGLE]), shards[SINGLE])
        write(here / INDEX, json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE)}).encode())
    return shards


class _Files:
    """Of the directory at a URL, by fsspec. What goes wrong there is a ValueError with the URL, a missing file is None."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url}: {error}") from error

    def size(self, name: str) -> int | None:
        """The size of a file."""
        try:
            count = self._fs.info(f"{self._root}/{name}")["size"]
        except Exception as error:  # each storage has its own
            if _missing(error):
                return None
            raise self._trouble(name, error) from error
        if not isinstance(count, int):
            raise ValueError(f"{self.url}/{name}: the server does not say how large it is, so parts cannot be read")
        return count

    def small(self, name: str) -> bytes | None:
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as stream:
                content: bytes = stream.read(SMALL_BYTES + 1)
        except Exception as error:  # each storage has its own
            if _missing(error):
                return None
            raise self._trouble(name, error) from error
        if len(content) > SMALL_BYTES:
            raise ValueError(f"{self.url}/{name} has more than {size(SMALL_BYTES)}, too much for such a file")
        return content

    def head(self, name: str, there_bytes: int) -> bytes:
        """A safetensors file as far as its header goes."""
        header_bytes = int.from_bytes(self.part(name, 0, 8), "little") if there_bytes >= 8 else 0
        if not 0 < header_bytes <= min(HEADER_BYTES, there_bytes - 8):
            raise ValueError(f"{self.url}/{name} is no safetensors file")
        return self.part(name, 0, 8 + header_bytes)

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Those bytes. A line that breaks is tried again."""
        for attempt in range(ATTEMPTS):
            try:
                with self._fs.open(f"{self._root}/{name}", "rb", cache_type="none") as stream:
                    stream.seek(start)
                    content: bytes = stream.read(stop - start)
                if len(content) == stop - start:
                    return content
                problem: Exception = EOFError(f"{len(content):,} bytes of {stop - start:,} came")
            except Exception as error:  # each storage has its own
                if _missing(error):
                    raise self._trouble(name, error) from error
                problem = error
            if attempt + 1 < ATTEMPTS:
                time.sleep(2.0**attempt)
        raise self._trouble(name, problem) from problem

    def _trouble(self, name: str, error: Exception) -> ValueError:
        cause = error.__cause__ or error  # fsspec's HTTP says "not found" of a server that does not answer
        words = str(cause) or type(cause).__name__
        return ValueError(f"{self.url}/{name} cannot be read: {escaped(words)[:REASON_LETTERS]}")


def _missing(error: Exception) -> bool:
    """It says that there is no such file, and is not fsspec's word for a server that does not answer."""
    cause = error.__cause__
    known = cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == 404
    return isinstance(error, FileNotFoundError) and known


# ------------------------------------------------------------------------------------------------------------- weights


def report_to(tell: Tell) -> None:
    """Who hears, in this process, of weights that are being read. `tell` is called on the thread that reads."""
    global _tell
    _tell = tell


class Weights:
    """Of a directory made here: fetches tensors."""

    def __init__(self, here: Path, source: Source) -> None:
        self._here, self._source = here, source
        self._files: _Files | None = None
        self._same: set[str] = set()  # shards that are there as they were
        self._read_bytes, self._told_s = 0, time.monotonic()

    def file(self, shard: str, name: str) -> Path:
        """The file that has that tensor by now. ValueError: it cannot be fetched."""
        whole, partial = self._here / shard, self._here / (shard + PARTIAL)
        if whole.is_file():
            return whole
        with _locked(self._here / (shard + ".lock")):
            if whole.is_file():
                return whole
            tensors = self._begin(shard, partial)
            fetched = self._here / (shard + FETCHED)
            there = _lines(fetched)
            if name not in there:
                if name not in tensors:
                    raise ValueError(f"{self._source.url}/{shard} holds no tensor {name!r}")
                self._fetch(shard, partial, tensors[name])
                with fetched.open("a") as stream:
                    stream.write(f"\n{json.dumps(name)}\n")  # the line before may be torn
                there.add(name)
            if there >= tensors.keys():
                partial.rename(whole)
                fetched.unlink()
                return whole
        return partial

    def _begin(self, shard: str, partial: Path) -> dict[str, Span]:
        """The tensors of a file that has the size of the whole; only its header is there at first."""
        there_bytes = self._source.shards[shard]
        if not partial.is_file():
            head = self._at(shard).head(shard, there_bytes)
            _spans(self._source.url, shard, head, there_bytes)
            draft = partial.with_name(partial.name + ".new")
            with draft.open("wb") as out:
                out.write(head)
                out.truncate(there_bytes)
            draft.rename(partial)
        with partial.open("rb") as stream:
            return spans(stream, there_bytes)

    def _fetch(self, shard: str, partial: Path, span: Span) -> None:
        files = self._at(shard)
        with partial.open("r+b") as out:
            for start in range(span.start, span.stop, PART_BYTES):
                stop = min(start + PART_BYTES, span.stop)
                out.seek(start)
                out.write(files.part(shard, start, stop))
                self._read_bytes += stop - start
                if time.monotonic() - self._told_s > TELL_S:
                    self._told_s = time.monotonic()
                    _tell(f"reads weights from {files.url}: {size(self._read_bytes)} so far")
            out.flush()
            os.fsync(out.fileno())

    def _at(self, shard: str) -> _Files:
        """What is at the URL, where that shard is the one that was first seen. ValueError: it is another by its size."""
        files = self._files = self._files or _Files(self._source.url)
        if shard not in self._same:
            now_bytes, then_bytes = files.size(shard) or 0, self._source.shards[shard]
            if now_bytes != then_bytes:
                raise ValueError(
                    f"{files.url}/{shard} has {now_bytes:,} bytes, and had {then_bytes:,} when it was first seen: the model there is"
                    f" another by now. To read that one: delete {self._here}"
                )
            self._same.add(shard)
        return files


def _lines(fetched: Path) -> set[str]:
    """The tensors that are there. The last line may be torn: that one is fetched again."""
    names = set()
    for line in fetched.read_text().splitlines() if fetched.is_file() else ():
        with suppress(json.JSONDecodeError):
            names.add(json.loads(line))
    return names


def complete(path: str | Path) -> None:
    """Fetch all that is missing, for a program that reads whole files."""
    source, here = source_of(path), Path(path)
    if source is not None and not source.shards:
        raise ValueError(
            f"{here} has no weights but those of a stage, from other peers; name a directory with the whole model"
        )
    if source is not None:
        weights = Weights(here, source)
        for name, shard in shards_of((here / INDEX).read_bytes(), str(here / INDEX)).items():
            weights.file(shard, name)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """For one process at a time; another waits."""
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def write(path: Path, content: bytes) -> None:
    """At once: nobody reads half of it."""
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(path)
