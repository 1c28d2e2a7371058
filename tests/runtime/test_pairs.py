"""Preference pairs become two rows of tokens each, of which the answers count; a pair that cannot be trained on is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.chats import IDS, MARKED, TEMPLATE, a_tokenizer
from tests.preferences import a_pair, chatted, some_pairs

from shoal import config as configuration
from shoal.config import Config, Data, Eval, Model, Run, Train
from shoal.model.cut import counted
from shoal.runtime.data import dataset, sampling
from shoal.runtime.data.tokenizer import open_tokenizer

SEQUENCE = 48
SYSTEM = {"role": "system", "content": "s"}


def a_config(folder: Path, rows: list[object], template: str = TEMPLATE, **fields: Any) -> Config:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = {"source": "jsonl", "format": "preference", "path": str(path), "sequence": SEQUENCE}
    data = Data(**wanted | {"tokenizer": a_tokenizer(folder / "tokenizer", template)} | fields)
    return Config(run=Run(seed=3), data=data, model=Model(vocab_size=IDS), train=Train(batch=4, microbatch=2))


def of_epoch(config: Config) -> list[tuple[str, str]]:
    """(what is written, what counts) of each row, chosen and rejected in turn, sorted by pair."""
    data = dataset.open_dataset(config)
    assert isinstance(data._samples, sampling.PackedSamples)
    decode = open_tokenizer(config.data.tokenizer).decode
    pairs = []
    for number in range(data._samples.count):
        step, index = divmod(number // 2, 2)
        rows = data.microbatch(step, index)[number % 2 * 2 :][:2].numpy()
        assert rows.shape == (2, SEQUENCE + 1)
        plain = [[int(token) if token >= 0 else ~int(token) for token in row] for row in rows]
        texts = [decode(torch.tensor(row).numpy()).partition("\0")[0] for row in plain]
        pairs.append([(text, decode(row[row >= 0])) for text, row in zip(texts, rows, strict=True)])
    return [row for pair in sorted(pairs) for row in pair]


@pytest.mark.parametrize(("tokenizer", "end"), [("bytes", ""), ("", "<|between|>")])
def test_of_a_pair_of_texts_each_answer_counts_behind_the_same_prompt(tmp_path: Path, tokenizer: str, end: str) -> None:
    pairs = [a_pair(number) for number in range(4)]
    rows: list[object] = [*pairs]
    config = a_config(tmp_path, rows, **({"tokenizer": tokenizer} if tokenizer else {}))
    wanted = [(p["prompt"] + p[name] + end, p[name] + (end or "\0")) for p in pairs for name in ("chosen", "rejected")]
    assert of_epoch(config) == wanted


EARLIER = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_of_a_pair_of_chats_only_the_answer_behind_the_prompt_counts(tmp_path: Path, template: str) -> None:
    pair = chatted(a_pair(3))
    with_prompt = {**pair, "prompt": EARLIER + pair["prompt"]}
    within = {name: with_prompt["prompt"] + pair[name] for name in ("chosen", "rejected")}
    for row in (with_prompt, within):
        (chosen, one), (rejected, other) = of_epoch(a_config(tmp_path, [row, row], template))[:2]
        start = "<|turn|>user\n1<|end|><|turn|>assistant\none<|end|><|turn|>user\nd?<|end|><|turn|>assistant\n"
        assert chosen.startswith(start) and rejected.startswith(start)
        assert (one, other) == ("DD<|end|>", "d<|end|>")


def test_the_first_token_of_a_row_does_not_count_nor_what_fills_it(tmp_path: Path) -> None:
    config = a_config(tmp_path, [{"prompt": "", "chosen": "abc", "rejected": "xy"}] * 2, tokenizer="bytes")
    assert of_epoch(config)[:2] == [("abc", "bc\0"), ("xy", "y\0")]
    tokens = dataset.open_dataset(config).microbatch(0, 0)
    assert tokens.shape == (4, SEQUENCE + 1) and tokens.is_contiguous()
    assert (tokens[:, 0] < 0).all() and (tokens[:, 4:] < 0).all()


def test_held_out_pairs_fill_up_with_such_as_do_not_count(tmp_path: Path) -> None:
    config = a_config(tmp_path, [a_pair(number) for number in range(8)])
    held = some_pairs(tmp_path / "held.jsonl", 3, chats=True)
    data = dataset.open_dataset(msgspec.structs.replace(config, eval=Eval(path=held)))
    halves = [data.microbatch(7, 2 + index) for index in range(2)]
    assert [half.shape for half in halves] == [(4, SEQUENCE + 1)] * 2
    assert [counted(half, pairs=True) for half in halves] == [2, 1]
    assert torch.equal(data.microbatch(1, 3), halves[1])


ROW = a_pair(0)
CHAT = chatted(ROW)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "no field 'rejected'; it has 'chosen', 'prompt'"),
        ({"chosen": "a", "rejected": "b"}, "no field 'prompt'; it has 'chosen', 'rejected'"),
        ([1], "no field 'prompt'; it has a list"),
        ({**ROW, "rejected": ROW["chosen"]}, "fields 'chosen' and 'rejected' are the same, so nothing is preferred"),
        (
            {**ROW, "rejected": 3},
            "field 'rejected' holds a int, and prompt, chosen and rejected are all texts or all lists",
        ),
        ({**ROW, "chosen": CHAT["chosen"]}, "field 'chosen' holds a list, and prompt"),
        ({**CHAT, "prompt": "a?"}, "field 'prompt' holds a str, .*; leave 'prompt' out where the chats begin with it"),
        ({**CHAT, "rejected": [{"content": "x"}]}, "message 1 of 'rejected' has no role"),
        ({**CHAT, "rejected": CHAT["prompt"]}, "no message of 'rejected' is the assistant's"),
        ({**ROW, "chosen": "x" * SEQUENCE}, r"chosen: \d+ tokens are more than a sample of data\.sequence = 48 holds"),
        ({**ROW, "rejected": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_pair_that_cannot_be_trained_on_is_refused_or_skipped_by_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: object, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"pairs\.jsonl:2: .*{reason}.*; data\.wrong_rows=skip leaves such rows out"):
        dataset.open_dataset(a_config(tmp_path, [ROW, row, ROW]))
    assert len(of_epoch(a_config(tmp_path, [ROW, row, ROW], wrong_rows="skip"))) == 4
    assert "pairs.jsonl:2 is skipped" in caplog.text


def test_an_empty_answer_is_learned_by_the_token_that_ends_it_and_refused_without_one(tmp_path: Path) -> None:
    row = {**ROW, "rejected": ""}
    assert of_epoch(a_config(tmp_path, [row, row], tokenizer="bytes"))[1] == ("a?", "\0")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            "tune.method=full",
            "data.format = 'preference' compares with the frozen base, and tune.method = 'full' changes it",
        ),
        ("tune.adapter=x", r"not with tune\.adapter = 'x' in it; merge that adapter \(shoal export RUN --merge DIR\)"),
        (
            "data.packing=true",
            "data.packing = True has no effect: each answer of a preference pair is a row of its own",
        ),
        ("data.document_end=0", "data.document_end = 0 has no effect: each answer"),
        ("data.field=x", "reads the fields prompt, chosen and rejected"),
        ("data.source=text", "data.source = 'text' has none; try data.source=jsonl"),
        ("train.local_steps=2", "is not known in local steps"),
        (
            "data.format=prompt tune.beta=0.2",
            "tune.beta = 0.2 has no effect: data.format = 'prompt' holds no preference pairs",
        ),
        ("tune.beta=0", "tune.beta"),
        (
            "device.executor=swapping device.memory_bytes=1GiB",
            "whose rows device.executor = 'swapping' does not compute yet",
        ),
        ("device.count=2", "shares out all of a stage's weights"),
    ],
)
def test_settings_that_do_not_fit_pairs_are_refused(words: str, match: str) -> None:
    base = ["data.format=preference", "data.source=jsonl", "data.path=x.jsonl", "tune.method=lora", "model.path=x"]
    configuration.load(None, base)
    with pytest.raises(ValueError, match=match):
        configuration.load(None, [*base, *words.split()])


def test_a_step_takes_two_rows_of_each_pair_and_four_between_stages() -> None:
    words = ["data.format=preference", "data.source=jsonl", "data.path=x.jsonl", "tune.method=lora", "model.path=x"]
    config = configuration.load(None, [*words, "data.sequence=64", "train.batch=8", "train.microbatch=2"])
    assert (configuration.token_rows(config), configuration.boundary_rows(config)) == (4, 8)
    assert configuration.tokens_per_step(config) == 8 * 2 * 64
    settings = configuration.settings(config)
    assert (settings.tokens, settings.microbatches, settings.scale(8)) == (2, 4, 1.0)
