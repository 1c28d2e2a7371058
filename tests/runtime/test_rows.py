"""Chats and prompts become samples in which the answers alone count; a row that cannot be trained on is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.chats import IDS, MARKED, TEMPLATE, a_chat, a_tokenizer, some_chats

from shoal import config as configuration
from shoal.config import Config, Data, Model, Run, Train
from shoal.runtime.data import dataset, rows, sampling
from shoal.runtime.data.rows import Rows
from shoal.runtime.data.tokenizer import Tokens, open_tokenizer

SEQUENCE = 128


def a_config(folder: Path, rows: list[object] | None = None, template: str = TEMPLATE, **fields: Any) -> Config:
    path = folder / "rows.jsonl"
    if rows is None:
        some_chats(path, 30)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = {"source": "jsonl", "format": "chat", "path": str(path), "sequence": SEQUENCE}
    data = Data(**wanted | {"tokenizer": a_tokenizer(folder / "tokenizer", template)} | fields)
    return Config(run=Run(seed=3), data=data, model=Model(vocab_size=IDS), train=Train(batch=8, microbatch=2))


def samples(config: Config, cache: Path | None = None) -> list[Tokens]:
    """One epoch."""
    data = dataset.open_dataset(config, cache)
    assert isinstance(data._samples, sampling.PackedSamples)
    return [data.sample(i) for i in range(data._samples.count)]


def learned(config: Config, tokens: Tokens) -> str:
    return open_tokenizer(config.data.tokenizer).decode(tokens[tokens >= 0])


def written(config: Config, tokens: Tokens) -> str:
    return open_tokenizer(config.data.tokenizer).decode(np.where(tokens < 0, ~tokens, tokens))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_a_chat_is_one_sample_whose_loss_counts_the_answers_alone(tmp_path: Path, template: str) -> None:
    config = a_config(tmp_path, template=template)
    answers, texts = [], []
    for tokens in samples(config):
        assert len(tokens) == SEQUENCE + 1 and tokens[0] < 0 and tokens[-1] < 0
        answers.append(learned(config, tokens))
        texts.append(written(config, tokens).rstrip("\0"))
    chats = [a_chat(number) for number in range(30)]
    said = [[f"{turn['content']}<|end|>" for turn in chat if turn["role"] == "assistant"] for chat in chats]
    assert sorted(answers) == sorted(map("".join, said))
    whole = ["".join(f"<|turn|>{turn['role']}\n{turn['content']}<|end|>" for turn in chat) for chat in chats]
    assert sorted(text.partition("\0")[0] for text in texts) == sorted(whole)


def test_packed_chats_are_whole_and_in_order_and_end_with_the_token_that_keeps_them_apart(tmp_path: Path) -> None:
    config = a_config(tmp_path, packing=True, document_end=IDS - 1)
    one_each = samples(a_config(tmp_path))
    packed = samples(config)
    assert len(packed) < len(one_each) == 30
    assert sorted("".join(learned(config, tokens) for tokens in packed)) == sorted(
        "".join(learned(config, tokens) for tokens in one_each)
    )
    chats = [chat for tokens in packed for chat in written(config, tokens[:-1]).rstrip("\0").split("<|between|>")[:-1]]
    assert sorted(chats) == sorted(written(config, tokens[:-1]).rstrip("\0") for tokens in one_each)
    assert all((np.where(tokens < 0, ~tokens, tokens) == IDS - 1).any() for tokens in packed)


def test_a_prompt_does_not_count_and_its_completion_does(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": "2 + 2 = ", "completion": "vier €"}, {"prompt": "", "completion": "all of it"}]
    for tokenizer, end in (("bytes", "\0"), (a_tokenizer(tmp_path / "tokenizer"), "<|between|>")):
        config = a_config(tmp_path, rows, format="prompt", tokenizer=tokenizer)
        answers = sorted(learned(config, tokens) for tokens in samples(config))
        assert answers == ["ll of it" + end, "vier €" + end]  # nothing stands before the first token of a row


def test_the_cache_gives_the_same_samples_and_knows_what_was_skipped(tmp_path: Path) -> None:
    rows: list[object] = [{"messages": a_chat(number)} for number in range(5)]
    config = a_config(tmp_path, [*rows, {"messages": []}], wrong_rows="skip")
    plain = samples(config)
    for _ in range(2):  # written, then mapped
        held = dataset.open_dataset(config, tmp_path / "cache")
        assert all((held.sample(i) == tokens).all() for i, tokens in enumerate(plain))
        assert held.describe.endswith("; 1 wrong rows skipped")
    other = a_config(tmp_path, [*rows, {"messages": []}], MARKED.replace("user", "x"), wrong_rows="skip")
    assert dataset.open_dataset(other, tmp_path / "cache").sample(0).shape == plain[0].shape
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 2  # the template decides the tokens too


LONG = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * SEQUENCE}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "no field 'messages'; it has a list; set data.field"),
        ({"chat": []}, "no field 'messages'; it has 'chat'; set data.field"),
        ({"text": "a"}, "no field 'messages'; it has 'text'; rows with these are data.format=text"),
        ({"prompt": "a", "completion": "b"}, "no field 'messages'; it has .*; rows with these are data.format=prompt"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "no field 'messages'; it has .*; rows with these are data.format=preference",
        ),
        ({"messages": []}, "no message of 'messages' is the assistant's"),
        ({"messages": "hello"}, "field 'messages' holds a str, not a list of messages"),
        ({"messages": [{"content": "hello"}]}, "message 1 of 'messages' has no role"),
        ({"messages": a_chat(0)[:1]}, "no message of 'messages' is the assistant's"),
        ({"messages": LONG}, r"\d+ tokens are more than a sample of data\.sequence = 128 holds"),
        ({"messages": [{"role": "assistant"}]}, r"the chat template does not write it \(UndefinedError"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "surrogates not allowed|does not write it"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_refused_or_skipped_by_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: object, reason: str
) -> None:
    good = {"messages": a_chat(3)}
    template = TEMPLATE.replace("{{ message.content }}", "{{ message.content + '' }}")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{reason}.*; data\.wrong_rows=skip leaves such rows out"):
        samples(a_config(tmp_path, [good, row, good], template))
    with caplog.at_level(logging.WARNING):
        assert len(samples(a_config(tmp_path, [good, row, good], template, wrong_rows="skip"))) == 2
    assert "rows.jsonl:2 is skipped" in caplog.text


def test_a_corpus_of_wrong_rows_alone_is_refused_by_their_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no sample left: 2 rows are wrong and skipped"):
        samples(a_config(tmp_path, [{"messages": []}] * 2, wrong_rows="skip"))


def test_a_line_that_is_not_json_is_skipped_too_and_text_rows_likewise(tmp_path: Path) -> None:
    config = a_config(tmp_path, [{"text": "x" * 100}] * 2, format="text", tokenizer="bytes", wrong_rows="skip")
    with Path(config.data.path).open("a") as file:
        file.write('{"text": \n{"texts": "y"}\n')
    assert "; 2 wrong rows skipped" in dataset.open_dataset(config).describe
    assert b"y" not in b"".join(tokens.astype(np.uint8).tobytes() for tokens in samples(config))


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path: Path) -> None:
    """Such as those that leave out earlier thoughts."""
    rewriting = TEMPLATE.replace("{{ message.content }}", "{% if loop.last %}{{ message.content }}{% endif %}")
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:1: the chat template writes message 2 otherwise once others follow"
    ):
        samples(a_config(tmp_path, template=rewriting))


def test_the_token_that_ends_documents_may_not_stand_within_a_chat(tmp_path: Path) -> None:
    """Where it ends every turn, each would be a document by itself."""
    config = a_config(tmp_path, document_end=IDS - 2)
    rows = Rows(config.data, open_tokenizer(config.data.tokenizer))
    with pytest.raises(ValueError, match=r"x: token 257 \(data\.document_end\) stands within it"):
        list(rows.pieces([("x", {"messages": a_chat(1)})]))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer = .* has no chat template; put a chat_template\.jinja"):
        dataset.open_dataset(a_config(tmp_path, template=""))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("data.source=text", "data.source = 'text' has none; try data.source=jsonl"),
        ("data.tokenizer=bytes", "needs a tokenizer with a chat template"),
        ("train.local_steps=4", "the mean over those of all peers is not known in local steps"),
        ('plan.allow=["local_steps"]', "no local_steps in plan.allow"),
        ("data.format=text data.packing=true", "data.packing"),
        ("data.format=prompt data.field=x", "data.field"),
        ("data.source=huggingface data.packing=true", "data.source = 'huggingface' is streamed"),
    ],
)
def test_settings_that_do_not_fit_a_format_are_refused(words: str, match: str) -> None:
    base = ["data.format=chat", "data.source=jsonl", "data.path=x.jsonl", "data.tokenizer=t"]
    configuration.load(None, base)
    with pytest.raises(ValueError, match=match):
        configuration.load(None, [*base, *words.split()])


def test_streamed_rows_are_the_same_samples_and_skipped_ones_shift_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BLOCK_TOKENS", 1)  # 64 samples, the least
    config = a_config(tmp_path, wrong_rows="skip")
    tokenizer = open_tokenizer(config.data.tokenizer)
    given = [{"messages": a_chat(number) if number % 3 else []} for number in range(150)]

    def documents(first: int) -> Any:
        return Rows(config.data, tokenizer).pieces((f"row {at}", given[at]) for at in range(first, len(given)))

    stream = sampling.StreamedSamples(documents, SEQUENCE, 1, "fake", "fake")
    epoch = [stream.sample(i).tolist() for i in range(100)]
    assert len({tuple(tokens) for tokens in epoch}) > 40
    assert stream.sample(99).tolist() == epoch[99] and stream.sample(3).tolist() == epoch[3]
    assert sorted(map(tuple, epoch)) == sorted(tuple(stream.sample(100 + i).tolist()) for i in range(100))


def test_a_line_of_lists_in_lists_is_a_wrong_row() -> None:
    with pytest.raises(rows.WrongRow, match="not a line of JSON"):
        rows.parsed(b"[" * 100_000)
