"""`shoal eval`: the same loss as a plain loop of transformers, each token once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.executor import test_pairs as pairs
from tests.preferences import some_pairs

import shoal
from shoal import config as configuration
from shoal.cli import main as program
from shoal.executor import create
from shoal.executor.serving import Chain
from shoal.model import stages
from shoal.model.cut import rows_of
from shoal.runtime.checkpoints import checkpoint
from shoal.runtime.data.dataset import open_held_out
from shoal.runtime.data.tokenizer import encode_document, open_tokenizer

TEXT = "def add(a, b):\n    return a + b\n" * 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama over bytes, with the built-in tokenizer's files beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, vocab_size=256, **shape)).save_pretrained(path)
    for name, content in open_tokenizer("bytes").files().items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "held.txt").write_text(TEXT)
    return tmp_path / "held.txt"


def reference(model: Path, tokens: torch.Tensor, sequence: int) -> float:
    """Every token but the first once, in windows that begin with the last token of the one before."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model).eval()
    total = 0.0
    for start in range(0, len(tokens) - 1, sequence):
        window = tokens[start : start + sequence + 1][None]
        with torch.inference_mode():
            logits = whole(window[:, :-1]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    return total / (len(tokens) - 1)


@pytest.mark.parametrize("sequence", [16, 1000])
def test_the_loss_is_that_of_a_plain_loop(
    model: Path, text: Path, sequence: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        program.main(["eval", str(model), str(text), f"data.sequence={sequence}", "train.dtype=float32", "--json"]) == 0
    )
    line = json.loads(capsys.readouterr().out)
    tokens = torch.tensor(encode_document(open_tokenizer(str(model)), TEXT.encode()))
    assert line["loss"] == pytest.approx(reference(model, tokens, sequence), abs=1e-5)
    assert line["perplexity"] == pytest.approx(math.exp(line["loss"])) and line["tokens"] == len(tokens) - 1


def test_batches_change_nothing(model: Path, text: Path) -> None:
    one = shoal.evaluate(model, [text], "data.sequence=16", "device.sequences=1")
    many = shoal.evaluate(model, [text], "data.sequence=16", "device.sequences=4", "train.microbatch=4")
    assert one[0].loss == pytest.approx(many[0].loss, rel=1e-6) and one[0].tokens == many[0].tokens


def test_samples_lie_evenly_and_are_as_many_as_asked_for(model: Path, text: Path) -> None:
    config = configuration.load(None, ["data.source=text", f"data.path={text}", "data.sequence=16"])
    whole, few = open_held_out(config, text), open_held_out(config, text, samples=3)
    assert few.count == 3
    assert [few.sample(i).tolist() for i in range(3)] == [whole.sample(i * whole.count // 3).tolist() for i in range(3)]
    assert open_held_out(config, text, samples=10_000).count == whole.count


def test_of_chats_the_answers_count(tmp_path: Path) -> None:
    rows = tmp_path / "held.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "2+2=", "completion": str(n)}) + "\n" for n in range(5)))
    config = configuration.load(
        None, ["data.source=jsonl", "data.path=a.jsonl", "data.format=prompt", "data.sequence=16"]
    )
    held = open_held_out(config, rows)
    assert held.count == 5
    for i in range(5):
        counted = [int(token) for token in held.sample(i) if token >= 0]
        assert bytes(counted[:1]) == str(i).encode(), "the completion, and the end of the document"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere", "x.txt"], "nowhere: no such directory"),
        (["MODEL", "missing.txt"], "missing.txt"),
        (["MODEL", "TEXT", "--samples", "-1"], "--samples -1"),
        (["MODEL", "data.sequence=3"], "name files of held-out text"),
        (["MODEL", "TEXT", "data.tokenizer=/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_named(
    words: list[str], complaint: str, model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"MODEL": str(model), "TEXT": str(text)}
    assert program.main(["eval", *(places.get(word, word) for word in words)]) == 2
    assert complaint in capsys.readouterr().err


def test_boundary_layers_stay_between_the_stages(tmp_path: Path) -> None:
    settings = [
        "model.boundary=bottleneck-2x",
        "model.layers=2",
        "model.hidden_size=16",
        "model.heads=2",
        "model.kv_heads=2",
    ]
    config = configuration.load(None, [*settings, "run.stages=2", "model.intermediate_size=24", "data.sequence=16"])
    whole = stages.whole(config)
    save_file({name: value.contiguous() for name, value in whole.state_dict().items()}, tmp_path / "model.safetensors")
    tokens = torch.arange(17)[None] * 3
    (batch,) = Chain(config, tmp_path).losses(tokens.numpy())
    with torch.inference_mode():
        logits = whole(tokens[:, :-1]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
    assert batch == [(pytest.approx(float(expected), rel=1e-5), 16)]


def test_of_preference_pairs_the_loss_of_dpo_its_accuracy_and_margin_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = pairs.a_config(tmp_path, 2)
    executors = [create(config, number) for number in range(2)]
    for executor in executors:
        pairs.moved(executor)
    store = checkpoint.Store(str(tmp_path / "checkpoints"))
    records = [store.write_shard(1, number, 2, executor.state()) for number, executor in enumerate(executors)]
    path = store.publish(1, records, checkpoint.about(config, "", ""))
    held = some_pairs(tmp_path / "held.jsonl", 8)
    whole = pairs.a_config(tmp_path)
    alone = create(whole, 0)
    pairs.moved(alone)
    parts = [open_held_out(whole, held).sample(number) for number in range(8)]
    loss, _, margins = pairs.trl(whole, alone, rows_of(torch.stack([torch.from_numpy(part) for part in parts]), 2))
    assert program.main(["eval", path, held, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loss"] == pytest.approx(float(loss), abs=1e-5) and "perplexity" not in result
    assert result["accuracy"] == pytest.approx((margins > 0).double().mean().item()) and result["samples"] == 8
    assert result["margin"] == pytest.approx(margins.mean().item(), abs=1e-5)
    assert program.main(["eval", path, held]) == 0
    assert "(8 preference pairs)" in capsys.readouterr().out


def test_rows_of_another_format_than_training_read_are_json_lines(model: Path, tmp_path: Path) -> None:
    """Of a directory that no run wrote, data.format alone said that its source, text, has no rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "def ", "completion": "add"}\n')
    (result,) = shoal.evaluate(model, [rows], "data.format=prompt")
    assert (result.samples, result.tokens) == (1, 3)
