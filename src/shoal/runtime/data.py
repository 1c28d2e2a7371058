"""Token samples for a run: where the text comes from, how it becomes tokens, and which sample has which number.

One global cursor: microbatch `index` of `step` holds the samples (step * microbatches + index) * microbatch + b, and
sample i depends on the corpus, the sequence length and the run's seed alone, so any peer reads it the same, whatever
their number, and a resumed run goes on at the next one. Every epoch visits each sample once, in an order of its own.
Who trains on which microbatch is core's matter. A corpus of files is tokenised once and indexed freely; a streamed
Hugging Face dataset is read block by block and shuffled within a block, since it cannot be indexed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from shoal import guest
from shoal.config import Config, Data, Train, microbatches

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.int64]
Stored = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Documents = Callable[[int], Iterator[bytes]]  # documents from that number on

BYTES = 256  # vocabulary of the built-in tokenizer; id = byte
SEPARATOR = 0  # between documents: NUL is in no text
BLOCK_TOKENS = 1 << 20  # a streamed corpus is shuffled within blocks of so many: 8 MiB in memory, seconds to tokenise
STREAM_BLOCKS = 2  # kept in memory: neighbouring steps may straddle a border
# Directories and files of the library that differ between distributions of the same Python, or belong to a machine.
NOT_LIBRARY = frozenset(
    ["__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"]
)
NOT_LIBRARY_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


class Tokenizer(Protocol):
    """`vocabulary` ids at most; `separator` stands between documents, if there is such an id."""

    vocabulary: int
    separator: int | None
    fingerprint: str

    def encode(self, text: bytes) -> Tokens: ...

    def decode(self, tokens: Tokens) -> str: ...

    def files(self) -> dict[str, bytes]:
        """What a model directory needs for `AutoTokenizer.from_pretrained`."""


class Samples(Protocol):
    digest: str  # SHA-256: peers with equal digests have equal samples
    describe: str  # for people

    def sample(self, i: int) -> Tokens: ...


class Dataset:
    """Samples by number, and microbatches by step and index."""

    def __init__(self, samples: Samples, train: Train) -> None:
        self._samples = samples
        self._train = train
        self.digest = samples.digest
        self.describe = samples.describe

    def sample(self, i: int) -> Tokens:
        """Sample `i`: sequence + 1 tokens, int64."""
        return self._samples.sample(i)

    def microbatch(self, step: int, index: int) -> torch.Tensor:
        """Tokens (B, L + 1), int64: inputs and, shifted by one, targets."""
        size = self._train.microbatch
        first = (step * microbatches(self._train) + index) * size
        return torch.from_numpy(np.stack([self.sample(first + b) for b in range(size)]))


def open_dataset(config: Config, cache: Path | None = None) -> Dataset:
    """The run's data. With `cache`, tokens are kept in files there, mapped and shared by the peers of a machine.

    ValueError: unknown source, path or field missing, vocabulary too small, corpus shorter than one sequence."""
    tokenizer = open_tokenizer(config.data.tokenizer)
    limit = vocabulary(config)
    if tokenizer.vocabulary > limit:
        raise ValueError(
            f"data.tokenizer = {config.data.tokenizer!r} has {tokenizer.vocabulary} ids, "
            f"the model's vocabulary {limit}; set model.vocab_size to at least {tokenizer.vocabulary}"
        )
    if config.data.source == "huggingface":
        return Dataset(_streamed(config.data, tokenizer, config.run.seed), config.train)
    corpus = _corpus(config.data)
    tokens, digest = _tokens(corpus, tokenizer, cache)
    note = f"{corpus.name}: {corpus.count} documents, {len(tokens)} tokens, sha256 {digest[:16]}"
    return Dataset(PackedSamples(tokens, config.data.sequence, config.run.seed, digest, note), config.train)


def vocabulary(config: Config) -> int:
    """Token ids of the run's model: below this."""
    if not config.model.path:
        return config.model.vocab_size
    from shoal.model.families import hf_config

    return int(hf_config(config).vocab_size)


# ------------------------------------------------------------------------------------------------------- numbering


class PackedSamples:
    """A corpus that is one array of tokens: windows of sequence + 1, overlapping by the one that is predicted."""

    def __init__(self, tokens: Stored, sequence: int, seed: int, digest: str, describe: str) -> None:
        self._tokens = tokens
        self._sequence = sequence
        self._seed = seed
        self.count = (len(tokens) - 1) // sequence
        self.digest = digest
        self.describe = describe
        if self.count < 1:
            raise _too_short(len(tokens), sequence)

    def sample(self, i: int) -> Tokens:
        epoch, position = divmod(i, self.count)
        start = permuted(position, self.count, (self._seed, epoch)) * self._sequence
        return self._tokens[start : start + self._sequence + 1].astype(np.int64)


def _too_short(tokens: int, sequence: int) -> ValueError:
    return ValueError(
        f"data: the corpus has {tokens} tokens, fewer than one sample of data.sequence + 1 = {sequence + 1}; "
        "add text or shorten data.sequence"
    )


def permuted(position: int, count: int, key: tuple[int, ...]) -> int:
    """Where a seeded permutation of range(count) takes `position`.

    A Feistel network that walks its cycle back into range: no table, and the same on every machine and library version,
    unlike a random generator's shuffle."""
    bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    rounds = np.frombuffer(hashlib.sha256(repr(key).encode()).digest(), dtype="<u4").tolist()
    while True:
        left, right = position >> bits, position & mask
        for salt in rounds:
            left, right = right, left ^ (_mix(right ^ (salt << 32)) & mask)
        position = left << bits | right
        if position < count:
            return position


def _mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


# ---------------------------------------------------------------------------------------------------------- streams


class StreamedSamples:
    """A corpus that can only be read from front to back, such as a streamed dataset.

    Samples are shuffled within blocks. Going back reopens the stream at the block's first document; a resumed run reads
    on from the beginning to its place, since no one knows where that is in the documents."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer, sequence: int, seed: int, name: str) -> None:
        self._documents = documents
        self._tokenizer = tokenizer
        self._sequence = sequence
        self._seed = seed
        self._block_samples = max(64, BLOCK_TOKENS // sequence)
        self._starts = [(0, 0)]  # of each block known: its first document, and how many of that one's tokens to skip
        self._blocks: dict[int, npt.NDArray[np.uint32]] = {}
        self._reader: Iterator[npt.NDArray[np.uint32]] | None = None
        self._next = 0  # the block that the reader gives next
        self._count: int | None = None  # samples of an epoch, once the end was seen
        self.digest = hashlib.sha256(f"{name}\0{tokenizer.fingerprint}".encode()).hexdigest()
        self.describe = f"{name}, streamed; sha256 of its name and tokenizer {self.digest[:16]}"

    def sample(self, i: int) -> Tokens:
        while True:
            epoch, position = divmod(i, self._count) if self._count else (0, i)
            number, offset = divmod(position, self._block_samples)
            block = self._block(number)
            samples = (len(block) - 1) // self._sequence
            if offset < samples:
                start = permuted(offset, samples, (self._seed, epoch, number)) * self._sequence
                return block[start : start + self._sequence + 1].astype(np.int64)
            assert self._count is not None  # a short block is the last one: the next turn knows the epoch's length

    def _block(self, number: int) -> npt.NDArray[np.uint32]:
        """Block `number` of the epoch; at the stream's end, whatever the last read gave."""
        if number in self._blocks:
            return self._blocks[number]
        if self._reader is None or self._next > number:
            self._next = min(number, len(self._starts) - 1)
            self._reader = self._read(self._next)
        block = np.empty(0, dtype=np.uint32)
        while self._next <= number:
            try:
                block = next(self._reader)
            except StopIteration:
                self._reader = None
                return np.empty(0, dtype=np.uint32)
            except BaseException:
                self._reader = None  # a broken generator gives nothing more: the next sample opens the stream anew
                raise
            self._blocks[self._next] = block
            self._next += 1
            while len(self._blocks) > STREAM_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
        return block

    def _read(self, number: int) -> Iterator[npt.NDArray[np.uint32]]:
        """Blocks from `number` on; each begins with the last token of the one before."""
        wanted = self._block_samples * self._sequence
        document, skip = self._starts[number]
        held: list[Tokens] = []  # whole documents, the first of them numbered `document` and used from `skip` on
        total = -skip
        for text in self._documents(document):
            held.append(self._encode(text))
            total += len(held[-1])
            while total > wanted:
                joined = np.concatenate(held)[skip:]
                yield joined[: wanted + 1].astype(np.uint32)
                skip += wanted
                total -= wanted
                while skip >= len(held[0]):
                    skip -= len(held.pop(0))
                    document += 1
                number += 1
                if len(self._starts) == number:
                    self._starts.append((document, skip))
        tail = np.concatenate([*held, np.empty(0, dtype=np.int64)])[skip:].astype(np.uint32)
        samples = max(0, len(tail) - 1) // self._sequence
        self._count = number * self._block_samples + samples
        if self._count == 0:
            raise _too_short(len(tail), self._sequence)
        yield tail

    def _encode(self, text: bytes) -> Tokens:
        return _separated(self._tokenizer, text)


def _streamed(data: Data, tokenizer: Tokenizer, seed: int) -> StreamedSamples:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data.source = 'huggingface' needs the extra: pip install 'shoal[data]'") from error
    if not data.path:
        raise ValueError("data.source = 'huggingface' needs data.path = the dataset's name, or 'name:subset'")
    name, _, subset = data.path.partition(":")
    label = f"data.path = {data.path!r}, data.split = {data.split!r}"
    try:
        rows = datasets.load_dataset(name, subset or None, split=data.split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:  # not found, no such split, no network
        raise ValueError(f"{label}: cannot open this dataset: {error}") from error

    def documents(first: int) -> Iterator[bytes]:
        for row in rows.skip(first):
            yield _field(row, data.field, f"{label}: row")

    next(documents(0), b"")  # a missing column or an unreachable host shows before training starts
    return StreamedSamples(documents, tokenizer, data.sequence, seed, f"{name}:{subset}:{data.split}:{data.field}")


def _field(row: object, field: str, where: str) -> bytes:
    if not isinstance(row, dict) or field not in row:
        names = ", ".join(map(repr, sorted(row))) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ValueError(f"{where}: no field {field!r}; it has {names or 'none'}; set data.field")
    if not isinstance(row[field], str):
        raise ValueError(f"{where}: field {field!r} holds a {type(row[field]).__name__}, not text; set data.field")
    return str(row[field]).encode()


# ------------------------------------------------------------------------------------------------------------ files


class Corpus(msgspec.Struct, frozen=True):
    """Text in files, in an order that does not depend on the machine. `json_field` is set for JSON lines."""

    name: str
    root: Path
    files: tuple[Path, ...]
    json_field: str = ""

    @property
    def count(self) -> int:
        return len(self.files)

    def documents(self) -> Iterator[bytes]:
        for path in self.files:
            if not self.json_field:
                yield path.read_bytes().replace(b"\r\n", b"\n")
                continue
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _field(_json(line, path, number), self.json_field, f"{path}:{number}")


def _json(line: bytes, path: Path, number: int) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path}:{number}: not a line of JSON ({error}); data.source = 'text' reads plain text"
        ) from error


def _corpus(data: Data) -> Corpus:
    if data.source == "python":
        return _library()
    if data.source not in ("text", "jsonl"):
        raise ValueError(f"data.source = {data.source!r}: choose one of python, text, jsonl, huggingface")
    if not data.path:
        raise ValueError(f"data.source = {data.source!r} needs data.path: a file, a directory or a glob")
    suffix = ".txt" if data.source == "text" else ".jsonl"
    root, files = _files(data.path, suffix, data.within)
    if data.within:
        guest.refuse_outside(data.within, files, "data.path")
    field = data.field if data.source == "jsonl" else ""
    return Corpus(f"{data.source} files at {data.path}", root, files, field)


def _files(path: str, suffix: str, within: str = "") -> tuple[Path, tuple[Path, ...]]:
    """The directory that names are relative to, and the files. `within`: nothing is looked for elsewhere, whatever `path` says."""
    place = guest.below(within, path, "data.path") if within else Path(path).expanduser()
    if place.is_file():
        return place.parent, (place,)
    if place.is_dir():
        root, found = place, [p for p in place.rglob(f"*{suffix}") if p.is_file()]
        if not found:
            raise ValueError(
                f"data.path = {path!r}: no {suffix} files in this directory; a glob such as '{path}/**/*' takes others"
            )
    else:
        root = Path(within or ".")
        names = glob.glob(path, root_dir=within, recursive=True) if within else glob.glob(str(place), recursive=True)
        found = [Path(within, name) for name in names if os.path.isfile(Path(within, name))]
        if not found:
            what = "no file matches" if glob.has_magic(path) else "no such file or directory"
            raise ValueError(f"data.path = {path!r}: {what}; it is looked for from {within or Path.cwd()}")
        if place.is_absolute() and not within:
            root = Path(os.path.commonpath([p.parent for p in found]))
    return root, _ordered(root, found)


def _ordered(root: Path, found: list[Path]) -> tuple[Path, ...]:
    """By relative path, as bytes: the same order wherever the corpus lies."""
    return tuple(sorted(found, key=lambda p: p.relative_to(root).as_posix().encode()))


def _library() -> Corpus:
    """The installed Python library's own text, less what distributions leave out or change."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        p
        for p in root.rglob("*.py")
        if not NOT_LIBRARY.intersection(p.relative_to(root).parts) and not p.name.startswith(NOT_LIBRARY_FILES)
    ]
    if not found:
        raise ValueError(
            f"data.source = 'python': no library text in {root}; give text files with data.source = 'text'"
        )
    return Corpus(f"library of Python {platform.python_version()}", root, _ordered(root, found))


def _tokens(corpus: Corpus, tokenizer: Tokenizer, cache: Path | None) -> tuple[Stored, str]:
    """All tokens of the corpus and their digest, from the cache when it holds them."""
    dtype = np.dtype("<u1" if tokenizer.vocabulary <= 1 << 8 else "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    if cache is None:
        held = bytearray()
        digest = _write_tokens(corpus, tokenizer, dtype, held.extend)
        return np.frombuffer(held, dtype=dtype), digest
    place = cache / f"{_cache_key(corpus, tokenizer)}.tokens"
    note = place.with_suffix(".sha256")
    if not note.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            try:
                digest = _write_tokens(corpus, tokenizer, dtype, file.write)
            except BaseException:
                os.unlink(file.name)
                raise
        os.replace(file.name, place)  # peers that start together write the same bytes: any of them may be last
        _write_whole(note, digest.encode())
    if place.stat().st_size == 0:
        return np.empty(0, dtype=dtype), note.read_text()
    return np.memmap(place, dtype=dtype, mode="r"), note.read_text()


def _write_whole(path: Path, text: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _write_tokens(
    corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger], write: Callable[[bytes], object]
) -> str:
    sha = hashlib.sha256()
    for text in corpus.documents():
        data = _separated(tokenizer, text).astype(dtype).tobytes()
        sha.update(data)
        write(data)
    return sha.hexdigest()


def _separated(tokenizer: Tokenizer, text: bytes) -> Tokens:
    tokens = tokenizer.encode(text)
    return tokens if tokenizer.separator is None else np.append(tokens, np.int64(tokenizer.separator))


def _cache_key(corpus: Corpus, tokenizer: Tokenizer) -> str:
    sha = hashlib.sha256(f"{tokenizer.fingerprint}\0{corpus.json_field}".encode())
    for path in corpus.files:
        stat = path.stat()
        sha.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return sha.hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------- tokenizers


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a Hugging Face tokenizer by name or path."""
    return ByteTokenizer() if name == "bytes" else PretrainedTokenizer(name)


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token."""

    vocabulary = BYTES
    separator: int | None = SEPARATOR
    fingerprint = "bytes"

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Tokens) -> str:
        return bytes(int(t) for t in tokens if 0 <= t < BYTES).decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers

        fast = Fast(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        note = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        return {"tokenizer.json": fast.to_str().encode(), "tokenizer_config.json": json.dumps(note, indent=2).encode()}


def _byte_letters() -> list[str]:
    """The letter by which byte-level vocabularies write each byte: itself when printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(BYTES + others.index(byte)) for byte in range(BYTES)]


class PretrainedTokenizer:
    """A Hugging Face tokenizer; its end-of-text token, if it has one, separates documents."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"data.tokenizer = {name!r}: neither 'bytes' nor a tokenizer that can be loaded: {reason}"
            ) from error
        self.vocabulary = len(self._inner)
        self.separator: int | None = self._inner.eos_token_id
        fast = getattr(self._inner, "backend_tokenizer", None)
        told = fast.to_str() if fast is not None else repr(sorted(self._inner.get_vocab().items()))
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    def encode(self, text: bytes) -> Tokens:
        ids = self._inner.encode(text.decode(errors="replace"), add_special_tokens=False, verbose=False)
        return np.asarray(ids, dtype=np.int64)

    def decode(self, tokens: Tokens) -> str:
        return str(self._inner.decode([int(t) for t in tokens]))

    def files(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            self._inner.save_pretrained(folder)
            return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
