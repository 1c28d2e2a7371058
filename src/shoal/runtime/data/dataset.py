"""The run's samples and microbatches: where the text comes from, and which sample has which number.

One global cursor: microbatch `index` of `step` holds the samples (step * microbatches + index) * microbatch + b. Sample i depends on
the corpus, the sequence length and the run's seed alone (sampling.py), so every peer reads the same sample, whatever the number of
peers, and a resumed run goes on at the next one. core decides who trains on which microbatch. A corpus of files (corpus.py) is tokenised
once and indexed freely; a streamed Hugging Face dataset is read block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from shoal.config import Config, Data, Train, microbatches
from shoal.runtime.data.corpus import Corpus, open_corpus, parts, read_tokens
from shoal.runtime.data.mapped import MappedSamples
from shoal.runtime.data.rows import Rows
from shoal.runtime.data.sampling import MixedSamples, PackedSamples, Samples, StreamedSamples
from shoal.runtime.data.tokenizer import Tokenizer, Tokens, open_tokenizer

if TYPE_CHECKING:  # `shoal invite` reads the digest alone, and need not wait for torch
    import torch


class Dataset:
    """Samples by number, and microbatches by step and index."""

    def __init__(self, samples: Samples, train: Train) -> None:
        self._samples = samples
        self._train = train
        self._lock = Lock()  # microbatches are fetched on one thread, borders looked up on another
        self.digest = samples.digest
        self.describe = samples.describe

    def sample(self, i: int) -> Tokens:
        """Sample `i`: sequence + 1 tokens, int64; ~id for one whose loss does not count."""
        return self._samples.sample(i)

    def microbatch(self, step: int, index: int) -> torch.Tensor:
        """Tokens (B, L + 1), int64: inputs and, shifted by one, targets."""
        import torch

        size = self._train.microbatch
        first = (step * microbatches(self._train) + index) * size
        with self._lock:
            return torch.from_numpy(np.stack([self.sample(first + b) for b in range(size)]))


def open_dataset(config: Config, cache: Path | None = None) -> Dataset:
    """The run's data. With `cache`, tokens are kept in files there, mapped and shared by the peers of a machine.

    ValueError: unknown source, path or field missing, vocabulary too small, corpus shorter than one sequence."""
    if config.data.source == "dataset":
        return Dataset(MappedSamples(config), config.train)
    tokenizer = open_tokenizer(config.data.tokenizer)
    refuse_unfit(config, tokenizer)
    if config.data.source == "huggingface":
        return Dataset(_streamed(config.data, Rows(config.data, tokenizer), config.run.seed), config.train)
    corpus, weights = open_corpus(config.data), config.data.weights
    samples = [_packed(part, config, tokenizer, cache) for part in (parts(corpus, weights) if weights else [corpus])]
    return Dataset(MixedSamples(samples, weights, config.run.seed) if weights else samples[0], config.train)


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
    stock = read_tokens(corpus, Rows(config.data, tokenizer), cache)
    note = f"{corpus.name}: {corpus.count} documents, {len(stock.tokens)} tokens, sha256 {stock.digest[:16]}"
    if stock.skipped:
        note += f"; {stock.skipped} wrong rows skipped"
    return PackedSamples(stock.tokens, config.data.sequence, config.run.seed, stock.digest, note)


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
    return StreamedSamples(documents, data.sequence, seed, f"{place}\0{rows.name}", place)
