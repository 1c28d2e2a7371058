"""Samples by number, from tokens in memory or from a stream of documents.

Sample i depends on the corpus, the sequence length and the run's seed alone. Every epoch visits each sample once, in an order of its
own. A stream is read block by block and shuffled within a block, since it cannot be indexed.
"""

from __future__ import annotations

import hashlib
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Thread
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.runtime.data.tokenizer import Tokens

Stored = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32] | npt.NDArray[np.int32]
Documents = Callable[[int], Iterator[Tokens]]  # tokens of the documents from that number on

BLOCK_TOKENS = 1 << 20  # a streamed corpus is shuffled within blocks of so many: 8 MiB in memory, seconds to tokenise
MIX = 1000  # consecutive samples in which each of several corpora has its share
STREAM_BLOCKS = 3  # kept in memory: consecutive steps can need two blocks, and one is read ahead


log = logging.getLogger(__name__)


class Samples(Protocol):
    digest: str  # SHA-256: peers with equal digests have equal samples
    describe: str  # for people

    def sample(self, i: int) -> Tokens: ...


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


class MixedSamples:
    """Several corpora: of every MIX consecutive samples each gives as many as its weight asks for, in an order drawn from the seed. Each
    has epochs of its own."""

    def __init__(self, parts: Sequence[Samples], weights: Mapping[str, float], seed: int) -> None:
        self._parts = parts
        self._counts = _shares(weights)
        self._starts = list(accumulate(self._counts, initial=0))
        self._seed = seed
        given = [(part.digest, count) for part, count in zip(parts, self._counts, strict=True)]
        self.digest = hashlib.sha256(repr(given).encode()).hexdigest()
        shares = (f"{count / MIX:.1%} {part.describe}" for part, count in zip(parts, self._counts, strict=True))
        self.describe = "; ".join(shares)

    def sample(self, i: int) -> Tokens:
        block, offset = divmod(i, MIX)
        place = permuted(offset, MIX, (self._seed, block, len(self._parts)))
        at = bisect_right(self._starts, place) - 1
        return self._parts[at].sample(block * self._counts[at] + place - self._starts[at])


def _shares(weights: Mapping[str, float]) -> list[int]:
    """Samples of MIX from each, as near to its weight as whole numbers are. ValueError: none from one of them."""
    exact = {name: weight / math.fsum(weights.values()) * MIX for name, weight in weights.items()}
    counts = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: counts[name] - exact[name])[: MIX - sum(counts.values())]:
        counts[name] += 1
    if rare := next((name for name, count in counts.items() if not count), ""):
        raise ValueError(
            f"data.weights: {rare!r} has less than one sample in {MIX}; give it more weight or leave it out"
        )
    return list(counts.values())


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


class StreamedSamples:
    """A corpus that can only be read from front to back, such as a streamed dataset.

    Samples are shuffled within blocks; while one is used, the next is read and tokenised on another thread. Going back reopens the
    stream at the block's first document; a resumed run reads on from the beginning to its place, since no one knows where that
    is in the documents."""

    def __init__(self, documents: Documents, sequence: int, seed: int, name: str, describe: str) -> None:
        self._documents = documents
        self._sequence = sequence
        self._seed = seed
        self._block_samples = max(64, BLOCK_TOKENS // sequence)
        self._starts = [(0, 0)]  # of each block known: its first document, and how many of that one's tokens to skip
        self._blocks: dict[int, npt.NDArray[np.int32]] = {}
        self._reader: Iterator[npt.NDArray[np.int32]] | None = None
        self._next = 0  # the block that the reader gives next
        self._ahead: Thread | None = None  # that reads block _next; nothing else uses the reader meanwhile
        self._count: int | None = None  # samples of an epoch, once the end was seen
        self.digest = hashlib.sha256(name.encode()).hexdigest()
        self.describe = f"{describe}, streamed; sha256 of its name and tokenizer {self.digest[:16]}"

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

    def _block(self, number: int) -> npt.NDArray[np.int32]:
        """Block `number` of the epoch; at the stream's end, whatever the last read gave."""
        block = self._blocks.get(number)
        if block is None:
            if self._ahead is not None:
                self._ahead.join()
            block = self._blocks.get(number)
        if block is None:
            block = self._read_block(number)
        idle = self._ahead is None or not self._ahead.is_alive()
        if idle and self._next == number + 1 and self._reader is not None:
            self._ahead = Thread(target=self._read_ahead, args=(self._next,), name="shoal-data", daemon=True)
            self._ahead.start()
        return block

    def _read_ahead(self, number: int) -> None:
        try:
            self._read_block(number)
        except Exception as error:  # noqa: BLE001 - a library's or the network's: whoever needs the block reads it again
            log.warning("block %d of the data could not be read ahead: %s", number, error)

    def _read_block(self, number: int) -> npt.NDArray[np.int32]:
        if self._reader is None or self._next > number:
            self._next = min(number, len(self._starts) - 1)
            self._reader = self._read(self._next)
        block = np.empty(0, dtype=np.int32)
        while self._next <= number:
            try:
                block = next(self._reader)
            except StopIteration:
                self._reader = None
                return np.empty(0, dtype=np.int32)
            except BaseException:
                self._reader = None  # a broken generator gives nothing more: the next sample opens the stream anew
                raise
            self._blocks[self._next] = block
            self._next += 1
            while len(self._blocks) > STREAM_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
        return block

    def _read(self, number: int) -> Iterator[npt.NDArray[np.int32]]:
        """Blocks from `number` on; each begins with the last token of the one before."""
        wanted = self._block_samples * self._sequence
        document, skip = self._starts[number]
        held: list[Tokens] = []  # whole documents, the first of them numbered `document` and used from `skip` on
        total = -skip
        for tokens in self._documents(document):
            held.append(tokens)
            total += len(tokens)
            while total > wanted:
                joined = np.concatenate(held)[skip:]
                yield joined[: wanted + 1].astype(np.int32)
                skip += wanted
                total -= wanted
                while skip >= len(held[0]):
                    skip -= len(held.pop(0))
                    document += 1
                number += 1
                if len(self._starts) == number:
                    self._starts.append((document, skip))
        tail = np.concatenate([*held, np.empty(0, dtype=np.int64)])[skip:].astype(np.int32)
        samples = max(0, len(tail) - 1) // self._sequence
        self._count = number * self._block_samples + samples
        if self._count == 0:
            raise _too_short(len(tail), self._sequence)
        yield tail
