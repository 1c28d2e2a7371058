"""Rows as tokens: documents of text; chats and prompts with their completions, of which only the answers are learned; preference pairs.

A token whose loss does not count is written as ~id (model/cut.py). A chat or prompt is never cut: a sample holds one of them, or with
data.packing as many as fit. What is left of it is filled with tokens that do not count. So a sample is exactly data.sequence tokens of
the corpus, and sampling.py treats it as any other text. A preference pair is two of these, the chosen answer behind its prompt and then the
rejected one, and both begin with the same tokens that do not count.

A chat is written by the tokenizer's chat template (tokenizer.py). A row that cannot be trained on is named, and refused or skipped
(data.wrong_rows).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.config.sections.data import Data, field_of, paired
from shoal.runtime.data.tokenizer import Span, Tokenizer, Tokens, encode_document

log = logging.getLogger(__name__)

WARNINGS = 20  # of skipped rows that are written one by one
FILL = ~np.zeros(1, dtype=np.int64)  # what follows the last row of a sample: any token, not counted
NOTHING = np.empty(0, dtype=np.int64)
ANSWERS = ("chosen", "rejected")  # fields of a preference pair
FIELDS = {
    "preference": ANSWERS,
    "prompt": ("prompt", "completion"),
    "chat": ("messages",),
    "text": ("text",),
}  # by data.format


class WrongRow(ValueError):
    """A row that cannot be trained on."""


class Rows:
    """Turns rows into the tokens of a corpus. `skipped`: wrong rows left out so far."""

    def __init__(self, data: Data, tokenizer: Tokenizer) -> None:
        self._data, self._tokenizer = data, tokenizer
        self._text = data.format == "text"
        self.skipped = 0
        ids = tokenizer.vocabulary
        unsigned = "<u1" if ids <= 1 << 8 else "<u2" if ids <= 1 << 16 else "<u4"
        self.dtype = np.dtype(unsigned if self._text else "<i4")  # that holds every token

    @property
    def name(self) -> str:
        """Everything but the rows that decides the tokens."""
        data, parts = self._data, [self._tokenizer.fingerprint]
        if data.source in ("jsonl", "huggingface"):
            parts += [field_of(data), data.wrong_rows]
        if not self._text:
            template = hashlib.sha256(self._tokenizer.template.encode()).hexdigest()
            parts += [data.format, template, str((data.sequence, data.packing, data.document_end))]
        return "\0".join(parts)

    def pieces(self, rows: Iterable[tuple[str, object]]) -> Iterator[Tokens]:
        """Consecutive pieces of the corpus, one per row but with data.packing. `rows`: where a row stands, in words, and the row;
        bytes are a line of JSON or a file. ValueError: a wrong row that is not to be skipped."""
        held, room = list[Tokens](), self._data.sequence
        for where, row in rows:
            tokens = self._tokens(where, row)
            if self._text or paired(self._data) or not len(tokens):
                yield tokens
            elif not self._data.packing:
                yield self._filled([tokens])
            else:
                if len(tokens) > room:
                    yield self._filled(held)
                    held, room = [], self._data.sequence
                held.append(tokens)
                room -= len(tokens)
        if held:
            yield self._filled(held)
        if not self._text:
            yield FILL  # the last sample's last target

    def _filled(self, held: list[Tokens]) -> Tokens:
        return np.concatenate([*held, FILL.repeat(self._data.sequence - sum(map(len, held)))])

    def _tokens(self, where: str, row: object) -> Tokens:
        try:
            if not isinstance(row, bytes):
                return self._encoded(row)
            return self._encoded(parsed(row)) if self._data.source == "jsonl" else encode_document(self._tokenizer, row)
        except (WrongRow, UnicodeEncodeError) as error:
            if self._data.wrong_rows == "refuse":
                raise ValueError(f"{where}: {error}; data.wrong_rows=skip leaves such rows out") from error
            self.skipped += 1
            if self.skipped <= WARNINGS:
                log.warning("%s is skipped: %s", where, error)
            return NOTHING

    def _encoded(self, row: object) -> Tokens:
        fields = checked(row, self._data)
        if self._text:
            return encode_document(self._tokenizer, str(fields[field_of(self._data)]).encode())
        if paired(self._data):
            return self._pair(fields)
        if self._data.format == "chat":
            return self._learnable(self._chat(fields[field_of(self._data)]))
        return self._learnable(self._prompt(fields["prompt"], fields["completion"]))

    def _pair(self, row: Mapping[str, Any]) -> Tokens:
        """The chosen answer's sample, and the rejected one's."""
        prompt, filled = row["prompt"], []
        for name in ANSWERS:
            try:
                if isinstance(prompt, str):
                    tokens = self._prompt(prompt, row[name])
                else:
                    tokens = self._chat([*prompt, *row[name]], answers=len(prompt))
                filled.append(self._filled([self._learnable(tokens)]))
            except WrongRow as error:
                raise WrongRow(f"{name}: {error}") from error
        return np.concatenate(filled)

    def _learnable(self, tokens: Tokens) -> Tokens:
        if self._data.document_end >= 0:
            tokens = _ended(tokens, self._data.document_end)
        tokens[:1] = np.minimum(tokens[:1], ~tokens[:1])  # nothing stands before it that could predict it
        if not (tokens >= 0).any():
            raise WrongRow("no token of it is learned: its answers are empty")
        if len(tokens) > self._data.sequence:
            raise WrongRow(
                f"{len(tokens)} tokens are more than a sample of data.sequence = {self._data.sequence} holds"
            )
        return tokens

    def _prompt(self, prompt: str, completion: str) -> Tokens:
        text = prompt + completion
        tokens = self._tokenizer.encode_spans(text, [Span(len(prompt), len(text))])
        return tokens if self._tokenizer.separator is None else np.append(tokens, np.int64(self._tokenizer.separator))

    def _chat(self, messages: Sequence[Mapping[str, Any]], answers: int = 0) -> Tokens:
        """`answers`: where the messages begin whose assistant's tokens count."""
        try:
            return self._tokenizer.encode_chat(messages, answers)
        except ValueError as error:  # the template's own refusals, such as two users in a row
            raise WrongRow(str(error)) from error


def parsed(line: bytes) -> object:
    """WrongRow: it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: lists in lists in lists
        raise WrongRow(f"not a line of JSON ({error}); data.source = 'text' reads plain text") from error


def checked(row: object, data: Data) -> Mapping[str, Any]:
    """The row's fields. WrongRow: they are not those of data.format."""
    if not isinstance(row, Mapping):
        raise WrongRow(f"no field {field_of(data)!r}; it has a {type(row).__name__}; set data.field")
    if data.format == "chat":
        _check_messages(_field(row, field_of(data), data), field_of(data))
        return row
    if paired(data):
        return _checked_pair(row, data)
    for name in ("prompt", "completion") if data.format == "prompt" else (field_of(data),):
        if not isinstance(_field(row, name, data), str):
            raise WrongRow(f"field {name!r} holds a {type(row[name]).__name__}, not text; set data.field")
    return row


def _checked_pair(row: Mapping[str, Any], data: Data) -> Mapping[str, Any]:
    """Texts, or lists of messages, with the prompt in a field of its own, or in both chats."""
    chosen, rejected = (_field(row, name, data) for name in ANSWERS)
    if chosen == rejected:
        raise WrongRow("fields 'chosen' and 'rejected' are the same, so nothing is preferred")
    chats = isinstance(chosen, list) and isinstance(rejected, list)
    if chats and "prompt" not in row:
        row = {**row, **_shared_prompt(row["chosen"], row["rejected"])}
    prompt, kind = _field(row, "prompt", data), list if chats else str
    if wrong := next((name for name in ("prompt", *ANSWERS) if not isinstance(row[name], kind)), ""):
        raise WrongRow(
            f"field {wrong!r} holds a {type(row[wrong]).__name__}, and prompt, chosen and rejected are all texts or all lists of messages"
            + ("; leave 'prompt' out where the chats begin with it" if isinstance(prompt, str) and chats else "")
        )
    if chats:
        _check_messages(prompt, "prompt", answered=False)
        for name in ANSWERS:
            _check_messages(row[name], name)
    return row


def _shared_prompt(chosen: list[Any], rejected: list[Any]) -> dict[str, list[Any]]:
    """The messages that both chats begin with, and the rest of each."""
    least = min(len(chosen), len(rejected))
    shared = next((at for at in range(least) if chosen[at] != rejected[at]), least)
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _field(row: Mapping[str, Any], name: str, data: Data) -> object:
    if name in row:
        return row[name]
    fits = next(
        (form for form, fields in FIELDS.items() if form != data.format and all(one in row for one in fields)), ""
    )
    advice = f"; rows with these are data.format={fits}" if fits else "" if paired(data) else "; set data.field"
    raise WrongRow(f"no field {name!r}; it has {', '.join(map(repr, sorted(row))) or 'none'}{advice}")


def _check_messages(messages: object, field: str, answered: bool = True) -> None:
    """`answered`: one of them must be the assistant's."""
    if not isinstance(messages, list):
        raise WrongRow(f"field {field!r} holds a {type(messages).__name__}, not a list of messages; set data.field")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise WrongRow(f"message {number} of {field!r} has no role")
    if answered and all(message["role"] != "assistant" for message in messages):
        raise WrongRow(f"no message of {field!r} is the assistant's")


def _ended(tokens: Tokens, end: int) -> Tokens:
    """With the token behind it that ends a document, so that the next row of its sample does not attend to it."""
    ids = np.where(tokens < 0, ~tokens, tokens)
    if (ids[:-1] == end).any():
        raise WrongRow(f"token {end} (data.document_end) stands within it, and would cut it in two")
    return tokens if ids[-1] == end else np.append(tokens, ~np.int64(end))
