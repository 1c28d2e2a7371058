"""Tokenizers: bytes, or one of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.int64]

BYTES = 256  # vocabulary of the built-in tokenizer; id = byte
SEPARATOR = 0  # between documents: NUL is in no text


class Tokenizer(Protocol):
    """`vocabulary` ids at most; `separator` stands between documents, if there is such an id."""

    vocabulary: int
    separator: int | None
    fingerprint: str

    def encode(self, text: bytes) -> Tokens: ...

    def decode(self, tokens: Tokens) -> str: ...

    def files(self) -> dict[str, bytes]:
        """What a model directory needs for `AutoTokenizer.from_pretrained`."""


def encode_document(tokenizer: Tokenizer, text: bytes) -> Tokens:
    """The tokens of a document, and the separator behind it."""
    tokens = tokenizer.encode(text)
    return tokens if tokenizer.separator is None else np.append(tokens, np.int64(tokenizer.separator))


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
        definition = fast.to_str() if fast is not None else repr(sorted(self._inner.get_vocab().items()))
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()

    def encode(self, text: bytes) -> Tokens:
        ids = self._inner.encode(text.decode(errors="replace"), add_special_tokens=False, verbose=False)
        return np.asarray(ids, dtype=np.int64)

    def decode(self, tokens: Tokens) -> str:
        return str(self._inner.decode([int(t) for t in tokens]))

    def files(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            self._inner.save_pretrained(folder)
            return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
