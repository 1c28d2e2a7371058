"""Tokenizers: bytes, or one of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.int64]

Messages = Sequence[Mapping[str, Any]]  # of a chat: role, content and whatever else the template reads

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which a chat template marks what the assistant says
BYTES = 256  # vocabulary of the built-in tokenizer; id = byte
SEPARATOR = 0  # between documents: NUL is in no text


class Span(NamedTuple):
    """Characters of a text."""

    start: int
    stop: int


class Tokenizer(Protocol):
    """`vocabulary` ids at most; `separator` stands between documents, if there is such an id; `template` writes chats, if not ""."""

    vocabulary: int
    separator: int | None
    fingerprint: str
    template: str

    def encode(self, text: bytes) -> Tokens: ...

    def encode_spans(self, text: str, spans: Sequence[Span]) -> Tokens:
        """The text's tokens: ~id outside `spans`, whose loss does not count."""

    def encode_chat(self, messages: Messages, answers: int = 0) -> Tokens:
        """A chat's tokens, ~id where the assistant has not written them, or stands before message `answers`. ValueError: the template
        refuses the chat."""

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
    template = ""

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def encode_spans(self, text: str, spans: Sequence[Span]) -> Tokens:
        sizes = [len(letter.encode()) for letter in text]
        starts = np.repeat(np.arange(len(text)), sizes)
        return _learned(self.encode(text.encode()), starts, starts + 1, spans)

    def encode_chat(self, messages: Messages, answers: int = 0) -> Tokens:
        raise ValueError("bytes have no chat template")

    def decode(self, tokens: Tokens) -> str:
        return bytes(int(t) for t in tokens if 0 <= t < BYTES).decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers

        fast = Fast(models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        note = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        return {"tokenizer.json": fast.to_str().encode(), "tokenizer_config.json": json.dumps(note, indent=2).encode()}


def byte_letters() -> list[str]:
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
        templates = self._inner.chat_template or ""
        self.template = str(templates if isinstance(templates, str) else templates.get("default", ""))

    def encode(self, text: bytes) -> Tokens:
        ids = self._inner.encode(text.decode(errors="replace"), add_special_tokens=False, verbose=False)
        return np.asarray(ids, dtype=np.int64)

    def encode_spans(self, text: str, spans: Sequence[Span]) -> Tokens:
        if not self._inner.is_fast:
            raise ValueError(
                "the tokenizer does not say where its tokens stand in the text: it is none of the fast ones"
            )
        text.encode()  # UnicodeEncodeError, a ValueError: half a surrogate pair, which JSON can hold
        encoding = self._inner(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts, stops = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        return _learned(np.asarray(encoding["input_ids"], dtype=np.int64), starts, stops, spans)

    def encode_chat(self, messages: Messages, answers: int = 0) -> Tokens:
        """Which part of the text is the assistant's, the template says itself where it marks it with {% generation %}; else it is what
        each assistant's message adds to the text of the messages before it and the beginning of an answer. A template that
        writes earlier messages otherwise once others follow has no such parts, and is refused."""
        if GENERATION.search(self.template):
            ids, mask = self._masked(messages)
            earlier = int(self._masked(messages[:answers])[1].sum())
            return np.where((mask > 0) & (mask.cumsum() > earlier), ids, ~ids)
        text, spans = self._written(messages, tokenize=False), []
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and at >= answers:
                before = self._written(messages[:at], tokenize=False, add_generation_prompt=True)
                after = self._written(messages[: at + 1], tokenize=False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise ValueError(
                        f"the chat template writes message {at + 1} otherwise once others follow, so its part of the text is not known;"
                        " mark it in the template with {% generation %}"
                    )
                spans.append(Span(len(before), len(after)))
        return self.encode_spans(text, spans)

    def _masked(self, messages: Messages) -> tuple[Tokens, Tokens]:
        """The tokens of a chat, and 1 where the template says that the assistant has written them."""
        if not messages:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        encoding: Any = self._written(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return np.asarray(encoding["input_ids"], dtype=np.int64), np.asarray(
            encoding["assistant_masks"], dtype=np.int64
        )

    def _written(self, messages: Messages, **how: Any) -> Any:
        if not messages:  # before a chat that the assistant begins
            return ""
        try:
            return self._inner.apply_chat_template([dict(message) for message in messages], **how)
        except Exception as error:  # the template's own code runs here, on whatever the row holds
            raise ValueError(f"the chat template does not write it ({type(error).__name__}: {error})") from error

    def decode(self, tokens: Tokens) -> str:
        return str(self._inner.decode([int(t) for t in tokens]))

    def files(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            self._inner.save_pretrained(folder)
            return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}


def _learned(ids: Tokens, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], spans: Sequence[Span]) -> Tokens:
    """~id for each token that stands at characters `starts` to `stops` outside all spans."""
    inside = np.zeros(len(ids), dtype=bool)
    for span in spans:
        inside |= (starts < span.stop) & (stops > span.start)
    return np.where(inside, ids, ~ids)
