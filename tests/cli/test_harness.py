"""`shoal eval --tasks`: the harness's answers are those of the model in the checkpoint, with its adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.cli.test_eval import model

from shoal.cli import main as program

assert model is not None  # the fixture
WHY = "the extra `lm-eval` is not installed"
pytestmark = pytest.mark.slow
LETTERS = "abcdefghijklmnopqrstuvwxyz"
QUESTIONS = [(f"def f{at}(x):", [f" {LETTERS[at + start :][:5]}" for start in (0, 4, 9)]) for at in range(12)]
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def likeliest(whole: torch.nn.Module, question: str, choices: list[str]) -> int:
    """By a plain loop over the model's own scores."""
    sums = []
    for choice in choices:
        tokens = torch.tensor([list((question + choice).encode())])
        with torch.inference_mode():
            scores = whole(tokens).logits[0].double().log_softmax(-1)
        first = len(question.encode())
        sums.append(sum(float(scores[at - 1, tokens[0, at]]) for at in range(first, tokens.shape[1])))
    return max(range(len(sums)), key=sums.__getitem__)


def tasks(folder: Path, answers: list[int]) -> Path:
    folder.mkdir()
    rows = folder / "rows.jsonl"
    lines = [
        json.dumps({"question": question, "choices": choices, "answer": answer})
        for (question, choices), answer in zip(QUESTIONS, answers, strict=True)
    ]
    rows.write_text("\n".join(lines))
    (folder / "mine.yaml").write_text(TASK.format(rows=rows))
    return folder


def test_the_harness_chooses_what_the_model_finds_likeliest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason=WHY)
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    whole = AutoModelForCausalLM.from_pretrained(model).eval()
    own = [likeliest(whole, *each) for each in QUESTIONS]
    assert len(set(own)) > 1, "the questions are no test otherwise"
    wrong = 4
    for name, answers, share in (
        ("all", own, 1.0),
        ("some", [(answer + 1) % 3 if at < wrong else answer for at, answer in enumerate(own)], 1 - wrong / len(own)),
    ):
        words = ["eval", str(model), "--tasks", "mine", "--tasks-in", str(tasks(tmp_path / name, answers)), "--json"]
        assert program.main(words) == 0
        line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert (line["task"], line["metric"], line["samples"]) == ("mine", "acc", len(QUESTIONS))
        assert line["value"] == pytest.approx(share)


def test_what_cannot_be_measured_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason=WHY)
    for words, said in (
        (["--tasks", "no_such_task"], "knows no task no_such_task"),
        (["--tasks", "mine", "--tasks-in", str(tmp_path / "nowhere")], "no directory of tasks"),
        (["text.txt", "--tasks", "mine"], "leave one out"),
        (["--tasks", "mine", "--shots", "-1"], "--shots -1"),
        ([], "nothing to evaluate"),
    ):
        assert program.main(["eval", str(model), *words]) == 2
        assert said in capsys.readouterr().err
