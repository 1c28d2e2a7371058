"""The run's samples and microbatches: where the text comes from, and which sample has which number.

One global cursor: microbatch `index` of `step` holds the samples (step * microbatches + index) * microbatch + b. Sample i depends on
the corpus, the sequence length and the run's seed alone (sampling.py), so every peer reads the same sample, whatever the number of
peers, and a resumed run goes on at the next one. core decides who trains on which microbatch. A corpus of files (corpus.py) is tokenised
once and indexed freely; a streamed Hugging Face dataset is read block by block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shoal.config import Config, Data, Train, microbatches
from shoal.config.sections.data import token_rows
from shoal.runtime.data.corpus import Corpus, open_corpus, parts, read_tokens
from shoal.runtime.data.heldout import HeldOut, held_out
from shoal.runtime.data.mapped import MappedSamples
from shoal.runtime.data.rows import Rows
from shoal.runtime.data.sampling import MixedSamples, PackedSamples, Samples, StreamedSamples
from shoal.runtime.data.tokenizer import Tokenizer, Tokens, open_tokenizer

if TYPE_CHECKING:  # `shoal invite` reads the digest alone, and need not wait for torch
    import torch


class Dataset:
    """Samples by number, and microbatches by step and index. `rows`: of tokens in a sample, which overlap by a token that does not count
    in the row before."""

    def __init__(self, samples: Samples, train: Train, heldout: HeldOut | None = None, rows: int = 1) -> None:
        self._samples, self._heldout = samples, heldout
        self._train, self._rows = train, rows
        self._lock = Lock()  # microbatches are fetched on one thread, borders looked up on another
        self.digest = samples.digest
        self.describe = samples.describe
        if heldout is not None:
            self.digest = hashlib.sha256(f"{samples.digest} {heldout.digest}".encode()).hexdigest()
            self.describe += f"; held out: {heldout.describe}"

    def sample(self, i: int) -> Tokens:
        """Sample `i`: sequence + 1 tokens, of a preference pair 2 x sequence + 1, int64; ~id for one whose loss does not count."""
        return self._samples.sample(i)

    def microbatch(self, step: int, index: int) -> torch.Tensor:
        """Tokens (B, L + 1), int64: inputs and, shifted by one, targets; of preference pairs (2 B, L + 1), chosen and rejected in turn.
        From index `microbatches` of a step on they are held-out ones, the same at every step."""
        import torch

        from shoal.model.cut import rows_of

        size, count = self._train.microbatch, microbatches(self._train)
        trained = index < count
        first = (step * count + index if trained else index - count) * size
        with self._lock:
            read = self.sample if trained else self._held_out
            samples = np.stack([read(first + b) for b in range(size)])
        return rows_of(torch.from_numpy(samples), self._rows)

    def _held_out(self, i: int) -> Tokens:
        if self._heldout is None:
            raise ValueError("this peer has no held-out samples")
        return self._heldout.sample(i)


def open_dataset(config: Config, cache: Path | None = None) -> Dataset:
    """The run's data, with what it holds out. With `cache`, tokens are kept in files there, mapped and shared by the peers of a machine.

    ValueError: unknown source, path or field missing, vocabulary too small, corpus shorter than one sequence."""
    heldout = open_held_out(config, config.eval.path, config.eval.samples, cache) if config.eval.path else None
    return Dataset(_samples(config, cache), config.train, heldout, token_rows(config.data))


def _samples(config: Config, cache: Path | None) -> Samples:
    if config.data.source == "dataset":
        return MappedSamples(config)
    tokenizer = open_tokenizer(config.data.tokenizer)
    refuse_unfit(config, tokenizer)
    if config.data.source == "huggingface":
        return _streamed(config.data, Rows(config.data, tokenizer), config.run.seed)
    corpus, weights = open_corpus(config.data), config.data.weights
    samples = [_packed(part, config, tokenizer, cache) for part in (parts(corpus, weights) if weights else [corpus])]
    return MixedSamples(samples, weights, config.run.seed) if weights else samples[0]


def open_held_out(config: Config, path: str | Path, samples: int = 0, cache: Path | None = None) -> HeldOut:
    """Text that is not trained on, at most `samples` of it; 0 takes all. ValueError: no such file, a wrong row, no token to predict, or
    another vocabulary."""
    data = held_out(config.data, path)
    tokenizer = open_tokenizer(data.tokenizer)
    refuse_unfit(msgspec.structs.replace(config, data=data), tokenizer)
    corpus = open_corpus(data)
    stock = read_tokens(corpus, Rows(data, tokenizer), cache)
    note = f"{corpus.name}: {corpus.count} documents, {len(stock.tokens)} tokens"
    if stock.skipped:
        note += f"; {stock.skipped} wrong rows skipped"
    heldout = HeldOut(stock.tokens, data.sequence * token_rows(data), samples, stock.digest, note)
    if not heldout.count:
        raise ValueError(f"{path}: {len(stock.tokens)} tokens, of which none can be predicted; name a longer text")
    return heldout


def refuse_unfit(config: Config, tokenizer: Tokenizer) -> None:
    """ValueError: the tokenizer does not fit the model, or the data."""
    limit = vocabulary(config)
    if tokenizer.vocabulary > limit:
        setting = "model.extra.vocab_size" if config.model.path else "model.vocab_size"
        raise ValueError(
            f"data.tokenizer = {config.data.tokenizer!r} has {tokenizer.vocabulary} ids, "
            f"the model's vocabulary {limit}; set {setting} to at least {tokenizer.vocabulary}"
        )
    if config.data.document_end not in (-1, tokenizer.separator):
        raise ValueError(
            f"data.document_end = {config.data.document_end}, but data.tokenizer = {config.data.tokenizer!r} ends documents with"
            f" {tokenizer.separator}; set data.document_end={-1 if tokenizer.separator is None else tokenizer.separator}"
        )
    if config.data.format == "chat" and not tokenizer.template:
        raise ValueError(
            f"data.format = 'chat', but data.tokenizer = {config.data.tokenizer!r} has no chat template; put a chat_template.jinja"
            " beside its files, or name the tokenizer of a model made for chats"
        )


def _packed(corpus: Corpus, config: Config, tokenizer: Tokenizer, cache: Path | None) -> PackedSamples:
    stock, length = (
        read_tokens(corpus, Rows(config.data, tokenizer), cache),
        config.data.sequence * token_rows(config.data),
    )
    if stock.skipped and len(stock.tokens) <= length:
        raise ValueError(
            f"data.path: {corpus.name} has no sample left: {stock.skipped} rows are wrong and skipped;"
            " data.wrong_rows=refuse says what is wrong with the first"
        )
    note = f"{corpus.name}: {corpus.count} documents, {len(stock.tokens)} tokens, sha256 {stock.digest[:16]}"
    if stock.skipped:
        note += f"; {stock.skipped} wrong rows skipped"
    return PackedSamples(stock.tokens, length, config.run.seed, stock.digest, note)


def vocabulary(config: Config) -> int:
    """Token ids of the run's model: below this."""
    if config.model.factory:
        from shoal.model import sequential

        if (own := sequential.own_sequential(config)) is not None:
            return sequential.vocabulary(own)
    elif not config.model.path:
        return config.model.vocab_size
    from shoal.model.families import hf_config

    return int(hf_config(config).vocab_size)


def _streamed(data: Data, rows: Rows, seed: int) -> StreamedSamples:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data.source = 'huggingface' needs the extra: pip install 'shoal[data]'") from error
    if not data.path:
        raise ValueError("data.source = 'huggingface' needs data.path = the dataset's name, or 'name:subset'")
    name, _, subset = data.path.partition(":")
    label = f"data.path = {data.path!r}, data.split = {data.split!r}"
    try:
        stream = datasets.load_dataset(name, subset or None, split=data.split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:  # not found, no such split, no network
        raise ValueError(f"{label}: cannot open this dataset: {error}") from error

    def documents(first: int) -> Iterator[Tokens]:
        return rows.pieces((f"{label}: row {number}", row) for number, row in enumerate(stream.skip(first), first))

    next(documents(0), None)  # a missing column or an unreachable host shows before training starts
    place = f"{name}:{subset}:{data.split}"
    return StreamedSamples(documents, data.sequence * token_rows(data), seed, f"{place}\0{rows.name}", place)
