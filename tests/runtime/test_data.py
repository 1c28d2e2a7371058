"""Sample i is the same for everyone and for ever; every epoch visits each sample once; bad input is refused by name."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.config import Config, Data, Model, Run, Train
from shoal.runtime.data import corpus, dataset, sampling, tokenizer
from shoal.runtime.data.rows import Rows


def a_config(source: str = "text", path: str = "", **fields: object) -> Config:
    section = msgspec.structs.replace(Data(source=source, path=path, sequence=16), **fields)
    return Config(run=Run(seed=3), data=section, train=Train(batch=8, microbatch=2))


def a_text(folder: Path, name: str = "a.txt", size: int = 1000) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(32 + (i * 7) % 90 for i in range(size)))
    return path


def test_an_epoch_visits_every_sample_once_and_the_next_one_in_another_order() -> None:
    for count in (1, 2, 3, 17, 64, 1000):
        orders = [[sampling.permuted(i, count, (5, epoch)) for i in range(count)] for epoch in range(2)]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(count))
    assert orders[0] != orders[1]
    assert orders[0] != list(range(count))


def test_the_permutation_never_changes_between_releases() -> None:
    """A resumed run would otherwise train on other samples than its checkpoint says."""
    assert [sampling.permuted(i, 10, (0, 0)) for i in range(10)] == [2, 0, 6, 7, 4, 3, 8, 1, 9, 5]


def test_sample_numbers_follow_step_and_index_alone(tmp_path: Path) -> None:
    held = dataset.open_dataset(a_config(path=str(a_text(tmp_path))))
    again = dataset.open_dataset(a_config(path=str(tmp_path)))
    for step, index in ((5, 3), (0, 0), (5, 2)):  # in any order, as peers ask
        tokens = held.microbatch(step, index)
        assert tokens.shape == (2, 17)
        assert str(tokens.dtype) == "torch.int64"
        first = (step * 4 + index) * 2
        for b in range(2):
            np.testing.assert_array_equal(tokens[b].numpy(), again.sample(first + b))
    assert held.digest == again.digest


def test_windows_cover_the_corpus_and_overlap_by_the_predicted_token(tmp_path: Path) -> None:
    path = a_text(tmp_path, size=16 * 20)
    held = dataset.open_dataset(a_config(path=str(path)))  # 320 bytes and a separator: 20 samples
    windows = {bytes(held.sample(i).astype(np.uint8)) for i in range(20)}
    text = path.read_bytes() + b"\0"
    assert windows == {text[i * 16 : i * 16 + 17] for i in range(20)}
    orders = [[held.sample(epoch * 20 + i).tolist() for i in range(20)] for epoch in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_another_seed_gives_another_order(tmp_path: Path) -> None:
    config = a_config(path=str(a_text(tmp_path)))
    other = msgspec.structs.replace(config, run=Run(seed=4))
    one, two = dataset.open_dataset(config), dataset.open_dataset(other)
    assert [one.sample(i).tolist() for i in range(20)] != [two.sample(i).tolist() for i in range(20)]


def test_the_order_of_files_is_by_relative_path_wherever_they_lie(tmp_path: Path) -> None:
    for root in ("x", "y/deeper"):
        for name in ("b.txt", "a/z.txt", "a.txt"):
            (tmp_path / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / name).write_text(f"text of {name} " * 10)
    digests = {
        dataset.open_dataset(a_config(path=path)).digest
        for path in (str(tmp_path / "x"), str(tmp_path / "y/deeper"), str(tmp_path / "x" / "**" / "*.txt"))
    }
    assert len(digests) == 1


def test_tokens_from_the_cache_equal_tokens_from_the_text(tmp_path: Path) -> None:
    config = a_config(path=str(a_text(tmp_path / "text")))
    plain = dataset.open_dataset(config)
    for _ in range(2):  # written, then mapped
        cached = dataset.open_dataset(config, tmp_path / "cache")
        assert cached.digest == plain.digest
        np.testing.assert_array_equal(cached.sample(7), plain.sample(7))
    a_text(tmp_path / "text", size=1001)
    assert dataset.open_dataset(config, tmp_path / "cache").digest != plain.digest
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix not in (".tokens", ".sha256")]


def test_the_library_is_the_offline_default_and_says_what_it_is() -> None:
    held = dataset.open_dataset(a_config("python"))
    assert "library of Python" in held.describe
    assert held.digest[:16] in held.describe
    assert held.sample(0).max() < 256
    assert dataset.open_dataset(a_config("python")).digest == held.digest


def test_json_lines_give_their_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": f"document {i} " * 5}) + "\n" for i in range(9)) + "\n")
    held = dataset.open_dataset(a_config("jsonl", str(path), field="body"))
    assert b"document" in b"".join(held.sample(i).astype(np.uint8).tobytes() for i in range(4))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no field 'text'; it has 'body'; set data\.field"):
        dataset.open_dataset(a_config("jsonl", str(path)))
    path.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r"no field 'text'; it has 'messages'; rows with these are data\.format=chat"):
        dataset.open_dataset(a_config("jsonl", str(path)))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("not json", r"x\.jsonl:2: not a line of JSON"),
        ("[1, 2]", r"x\.jsonl:2: no field 'text'; it has a list"),
        ('{"text": 5}', r"x\.jsonl:2: field 'text' holds a int, not text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, match: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=match):
        dataset.open_dataset(a_config("jsonl", str(tmp_path)))


def test_bad_sources_and_paths_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty").mkdir()
    for config, match in (
        (a_config("text", str(tmp_path / "none.txt")), r"data\.path = .*none\.txt.*no such file or directory"),
        (a_config("text", str(tmp_path / "*.md")), r"data\.path = .*no file matches"),
        (a_config("text", str(tmp_path / "empty")), r"no \.txt files in this directory"),
        (a_config("text"), r"needs data\.path"),
        (a_config("books", "x"), r"data\.source = 'books': choose one of"),
        (a_config("text", str(tmp_path)), r"6 tokens, fewer than one sample of data\.sequence \+ 1 = 17"),
        (a_config("python", tokenizer=str(tmp_path / "tok")), r"data\.tokenizer = .*neither 'bytes' nor"),
    ):
        with pytest.raises(ValueError, match=match):
            dataset.open_dataset(config)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    config = msgspec.structs.replace(a_config(path=str(a_text(tmp_path))), model=Model(vocab_size=255))
    with pytest.raises(ValueError, match=r"256 ids.*vocabulary 255; set model\.vocab_size to at least 256"):
        dataset.open_dataset(config)


def test_the_byte_tokenizer_in_a_model_directory_gives_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    mine = tokenizer.open_tokenizer("bytes")
    for name, content in mine.files().items():
        (tmp_path / name).write_bytes(content)
    text = "def f(x):\n\treturn 'é ü ∀ 🐟\x7f'  # two  spaces\r\n"
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.encode(text) == mine.encode(text.encode()).tolist()
    assert loaded.decode(mine.encode(text.encode()).tolist()) == text == mine.decode(mine.encode(text.encode()))
    held = tokenizer.open_tokenizer(str(tmp_path))  # and by path, as any Hugging Face tokenizer
    assert held.encode(text.encode()).tolist() == mine.encode(text.encode()).tolist()
    assert held.vocabulary == 256
    assert {"tokenizer.json", "tokenizer_config.json"} <= held.files().keys()


def a_mixture(folder: Path, **weights: float) -> Config:
    """Of a directory, a file and a directory below another; a letter each."""
    for letter, name in zip("xyz", ("books/a.txt", "code.txt", "web/one/b.txt"), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(letter * 16 * (20 if letter == "y" else 300))
    return a_config(path=str(folder), weights=weights or {"books": 5.0, "code.txt": 2.0, "web/one": 3.0})


def test_sources_are_mixed_by_their_weights_exactly_and_each_has_its_own_epochs(tmp_path: Path) -> None:
    held = dataset.open_dataset(a_mixture(tmp_path))
    for first in (0, 1000, 7000):
        letters = collections.Counter(chr(held.sample(i)[1]) for i in range(first, first + 1000))
        assert letters == {"x": 500, "y": 200, "z": 300}
    early = collections.Counter(chr(held.sample(i)[1]) for i in range(100))
    assert min(early.values()) >= 8  # not one after the other
    again = dataset.open_dataset(a_mixture(tmp_path), tmp_path / "cache")
    assert held.digest == again.digest
    assert all((held.sample(i) == again.sample(i)).all() for i in (5, 3, 12345))
    other = dataset.open_dataset(a_mixture(tmp_path, **{"books": 1.0, "code.txt": 1.0, "web": 1.0}))
    assert other.digest != held.digest


def test_every_sample_of_a_mixed_source_is_seen_once_in_its_epoch() -> None:
    class Numbers:
        digest = describe = "numbers"

        def __init__(self) -> None:
            self.asked: list[int] = []

        def sample(self, i: int) -> tokenizer.Tokens:
            self.asked.append(i)
            return np.zeros(1, dtype=np.int64)

    parts = [Numbers(), Numbers(), Numbers()]
    mixed = sampling.MixedSamples(parts, {"a": 1.0, "b": 1.0, "c": 0.002}, seed=4)
    for i in range(3000):
        mixed.sample(i)
    assert [sorted(part.asked) for part in parts] == [list(range(3 * count)) for count in (500, 499, 1)]


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"books": 1.0, "web": 1.0}, "code.txt is below none of its names"),
        ({"books": 1.0, "web": 1.0, "web/one": 1.0, "code.txt": 1.0}, "is below 'web' and 'web/one'"),
        ({"books": 1.0, "web": 1.0, "code.txt": 1.0, "more": 1.0}, "no file of data.path is below 'more'"),
        ({"books": 1.0, "web": 1.0, "code.txt": 1e-6}, "'code.txt' has less than one sample in 1000"),
    ],
)
def test_weights_that_do_not_fit_the_files_are_refused(tmp_path: Path, weights: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataset.open_dataset(a_mixture(tmp_path, **weights))


def test_peers_that_start_together_tokenise_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(path=str(a_text(tmp_path / "text")))
    written: list[Path] = []
    write = corpus._write_cache

    def slowly(one: corpus.Corpus, rows: Rows, place: Path, note: Path) -> None:
        written.append(place)
        start.wait(60)  # until the others ask, or have not for a minute
        write(one, rows, place, note)

    start = threading.Event()
    monkeypatch.setattr(corpus, "_write_cache", slowly)
    with ThreadPoolExecutor(3) as threads:
        peers = [threads.submit(dataset.open_dataset, config, tmp_path / "cache") for _ in range(3)]
        start.set()
        assert len({peer.result().digest for peer in peers}) == 1
    assert len(written) == 1


class Reading:
    """Documents, counting how often they were opened."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts
        self.opened: list[int] = []

    def __call__(self, first: int) -> Iterator[tokenizer.Tokens]:
        self.opened.append(first)
        return map(a_document, self.texts[first:])


def a_document(text: bytes) -> tokenizer.Tokens:
    return tokenizer.encode_document(tokenizer.ByteTokenizer(), text)


def a_stream(
    monkeypatch: pytest.MonkeyPatch, texts: list[bytes], sequence: int = 4
) -> tuple[sampling.StreamedSamples, Reading]:
    monkeypatch.setattr(sampling, "BLOCK_TOKENS", 1)  # 64 samples, the least
    reading = Reading(texts)
    return sampling.StreamedSamples(reading, sequence, 1, "fake", "fake"), reading


def test_a_stream_gives_every_sample_of_the_corpus_once_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [bytes([65 + i % 20]) * (i * 37 % 101) for i in range(60)]
    joined = b"".join(text + b"\0" for text in texts)
    count = (len(joined) - 1) // 4
    held, _ = a_stream(monkeypatch, texts)
    wanted = collections.Counter(joined[i * 4 : i * 4 + 5] for i in range(count))
    orders = [[bytes(held.sample(epoch * count + i).astype(np.uint8)) for i in range(count)] for epoch in range(2)]
    assert collections.Counter(orders[0]) == collections.Counter(orders[1]) == wanted
    assert orders[0] != orders[1]


def test_a_stream_gives_the_same_sample_in_any_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [bytes([65 + i % 20]) * (i * 37 % 101) for i in range(60)]
    held, _ = a_stream(monkeypatch, texts)
    straight = [held.sample(i).tolist() for i in range(1500)]
    jumping, reading = a_stream(monkeypatch, texts)
    for i in (1300, 5, 700, 640, 200, 1499, 0):
        assert jumping.sample(i).tolist() == straight[i]
    assert any(first > 0 for first in reading.opened)  # going back does not start at the first document


def test_the_next_block_of_a_stream_is_read_while_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [b"x" * 50, b"y" * 50] * 40
    held, reading = a_stream(monkeypatch, texts)
    held.sample(0)
    assert held._ahead is not None
    held._ahead.join()
    assert list(held._blocks) == [0, 1] and reading.opened == [0]
    held.sample(64)
    held._ahead.join()
    assert list(held._blocks) == [0, 1, 2] and reading.opened == [0]
    whole, _ = a_stream(monkeypatch, texts)
    assert [held.sample(i).tolist() for i in range(1100)] == [whole.sample(i).tolist() for i in range(1100)]


@pytest.mark.parametrize("at", [0, 7])
def test_a_stream_that_broke_goes_on(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """In the block that is asked for, which fails; or in the next one, which is then read again when it is needed."""
    texts = [b"x" * 50, b"y" * 50] * 10
    held, _ = a_stream(monkeypatch, texts)
    whole, _ = a_stream(monkeypatch, texts)
    calls = 0

    def broken(first: int) -> Iterator[tokenizer.Tokens]:
        nonlocal calls
        calls += 1
        for number, text in enumerate(texts[first:]):
            if calls == 1 and number == at:
                raise OSError("connection reset")
            yield a_document(text)

    held._documents = broken
    if at == 0:
        with pytest.raises(OSError, match="reset"):
            held.sample(0)
    assert held.sample(0).tolist() == whole.sample(0).tolist()
    assert held.sample(70).tolist() == whole.sample(70).tolist()
    assert calls == 2


def test_a_stream_shorter_than_one_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = a_stream(monkeypatch, [b"ab"], sequence=8)
    with pytest.raises(ValueError, match="fewer than one sample"):
        held.sample(0)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'shoal\[data\]'"):
        dataset.open_dataset(a_config("huggingface", "some/name"))


def test_a_hugging_face_dataset_is_streamed(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"row {i} " * 9}) + "\n" for i in range(50)))
    held = dataset.open_dataset(a_config("huggingface", str(tmp_path)))
    assert b"row" in bytes(held.sample(0).astype(np.uint8))
    assert (
        held.sample(100).tolist() == dataset.open_dataset(a_config("huggingface", str(tmp_path))).sample(100).tolist()
    )
    for fields, match in (({"field": "body"}, "no field 'body'; it has 'text'"), ({"split": "nosuch"}, "nosuch")):
        with pytest.raises(ValueError, match=match):
            dataset.open_dataset(a_config("huggingface", str(tmp_path), **fields))
    with pytest.raises(ValueError, match="cannot open this dataset"):
        dataset.open_dataset(a_config("huggingface", str(tmp_path / "nothing")))
