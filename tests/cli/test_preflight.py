"""What is wrong is said before anything starts: all of it, where, and what would work; nothing slow is imported for that."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import config as configuration
from shoal.config import Config
from shoal.escaping import Faults
from shoal.exit_codes import ExitCode
from shoal.launcher import preflight, reach


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def settings(*words: str) -> Config:
    return configuration.load(None, words)


def shard(path: Path, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes((struct.pack("<Q", len(header)) + header + bytes(8))[: -cut or None])


def a_model(
    config: str = '{"num_attention_heads": 2, "hidden_size": 4, "num_hidden_layers": 2, "intermediate_size": 4, "vocab_size": 256}',
) -> None:
    Path("m").mkdir(exist_ok=True)
    Path("m/config.json").write_text(config)
    shard(Path("m/model.safetensors"))


BROKEN = ["data.source=text", "data.path=no.txt", "data.tokenizer=./tok", "model.path=nowhere", "run.dir=file/runs"]


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (
            ["run", "c.toml", "--here", "0", "--kill-every", "-1", "--time", "soon", "network.host=192.0.2.1", *BROKEN],
            4,
        ),
        (["train", *BROKEN], 0),
    ],
)
def test_all_faults_are_said_at_once_and_nothing_slow_is_imported(words: list[str], more: int) -> None:
    Path("file").write_text("")
    Path("c.toml").write_text("")
    code = f"import sys; from shoal.cli import main; code = main.main({words!r})\nassert 'torch' not in sys.modules\nsys.exit(code)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.USER_ERROR, ended.stderr
    first, *lines = ended.stderr.splitlines()
    assert first == f"shoal: {4 + more} things are wrong:" and len(lines) == 4 + more
    assert not Path("runs").exists()


def test_everything_that_is_wrong_with_a_configuration_is_said() -> None:
    Path("c.toml").write_text('[run]\nstepz = 3\n[train]\nbatch = "many"\n[nett]\n')
    with pytest.raises(Faults) as refused:
        configuration.load("c.toml")
    assert [line.split(" ")[1] for line in refused.value.lines] == ["run.stepz", "train.batch", "nett"]
    with pytest.raises(Faults) as refused:
        settings("run.stages=9", "run.peers=9", "data.source=text")
    assert len(refused.value.lines) == 2


def faults(*words: str) -> list[str]:
    return list(preflight.machine(settings(*words)))


def test_data_that_is_missing_empty_binary_short_or_no_json_is_refused() -> None:
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("short")
    Path("binary.txt").write_bytes(b"text\0" + bytes(1000))
    Path("lines.jsonl").write_text('{"words": "x"}\n')
    Path("torn.jsonl").write_text('{"text": \n')
    Path("second.jsonl").write_text('{"text": "x"}\n\n{"words": "x"}\n')
    Path("long.jsonl").write_text(
        '{"text": "x"}\n' * (preflight.HEAD_BYTES // 14) + '{"text": "x"}'
    )  # its last line is cut
    for source, path, words_said in (
        ("text", "none.txt", "no such file or directory"),
        ("text", "empty.txt", "one file and no text in it"),
        ("text", "short.txt", "5 bytes of text are fewer than one sample"),
        ("text", "binary.txt", "binary.txt is binary, not text: byte 4 is NUL"),
        ("jsonl", "lines.jsonl", "no field 'text'; it has 'words'"),
        ("jsonl", "torn.jsonl", "not a line of JSON"),
        ("jsonl", "second.jsonl", "second.jsonl:3: no field 'text'; it has 'words'"),
    ):
        assert [words_said in line for line in faults(f"data.source={source}", f"data.path={path}")] == [True], path
    Path("good.txt").write_text("x" * 1000)
    assert faults("data.source=text", "data.path=good.txt") == [] == faults()
    assert faults("data.source=jsonl", "data.path=long.jsonl") == []
    assert faults("data.source=jsonl", "data.path=second.jsonl", "data.wrong_rows=skip") == []


def test_a_model_that_is_not_there_is_told_once_though_its_tokenizer_is_not_there_either() -> None:
    Path("chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    chats = ("data.format=chat", "data.path=chats.jsonl", "tune.method=lora")
    (fault,) = faults(*chats, "model.path=./m")
    assert "'./m' is no directory" in fault and fault.endswith("such as hf://OWNER/MODEL")
    (fault,) = faults(*chats, "model.path=meta/llama")
    assert fault.endswith("such as hf://meta/llama")


def test_a_model_directory_without_whole_weights_is_refused() -> None:
    a_model()
    assert faults("model.path=m", "run.stages=2", "data.sequence=1") == []
    assert "more than the 2 blocks" in faults("model.path=m", "run.stages=3")[0]
    shard(Path("m/model.safetensors"), cut=1)
    assert "it is torn" in faults("model.path=m", "run.stages=1")[0]
    Path("m/model.safetensors").unlink()
    assert "has no model.safetensors" in faults("model.path=m", "run.stages=1")[0]
    Path("m/model.safetensors.index.json").write_text('{"weight_map": {"w": "one.safetensors"}}')
    assert "has no one.safetensors" in faults("model.path=m", "run.stages=1")[0]
    a_model("{")
    assert "is no Hugging Face configuration" in faults("model.path=m", "run.stages=1")[0]


def test_a_tokenizer_that_is_not_there_is_refused() -> None:
    Path("tok").mkdir()
    assert "holds no tokenizer" in faults("data.tokenizer=./tok")[0]
    Path("tok/tokenizer.json").write_text("{}")
    assert "is no tokenizer" in faults("data.tokenizer=tok")[0]
    assert "HF_HUB_OFFLINE keeps it from being downloaded" in faults("data.tokenizer=some/body")[0]
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={chr(300 + i): i for i in range(300)}, merges=[])).save("tok/tokenizer.json")
    assert "has 300 ids, model.vocab_size = 256" in faults("data.tokenizer=tok")[0]
    assert faults("data.tokenizer=tok", "model.vocab_size=300") == []
    a_model()
    of_model = ("data.tokenizer=tok", "model.path=m", "run.stages=1", "data.sequence=1")
    assert "model.extra.vocab_size = 256; set model.extra.vocab_size to at least 300" in faults(*of_model)[0]
    assert faults(*of_model, "model.extra.vocab_size=300") == []


def test_a_tokenizer_that_is_not_the_models_is_refused() -> None:
    from tokenizers import Tokenizer, models

    a_model()
    for folder, letters in (("m", "abc"), ("same", "abcd"), ("other", "bac")):
        Path(folder).mkdir(exist_ok=True)
        vocab = {letter: number for number, letter in enumerate(letters)}
        Tokenizer(models.BPE(vocab=vocab, merges=[])).save(f"{folder}/tokenizer.json")
    words = ("model.path=m", "run.stages=1", "data.sequence=1")
    assert faults(*words, "data.tokenizer=m") == faults(*words, "data.tokenizer=same") == []
    (fault,) = faults(*words, "data.tokenizer=other")
    assert "is not the tokenizer of model.path = 'm': " in fault and fault.endswith("set data.tokenizer=m")
    (fault,) = faults(*words)
    assert "data.tokenizer = 'bytes' is not the tokenizer of model.path = 'm': 'a' is token 97, and 0 there" in fault


def test_chats_without_a_template_or_an_answer_are_refused() -> None:
    from tokenizers import Tokenizer, models

    Path("tok").mkdir()
    Tokenizer(models.BPE(vocab={chr(300 + i): i for i in range(256)}, merges=[])).save("tok/tokenizer.json")
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    words = ("data.source=jsonl", "data.format=chat", "data.path=chats.jsonl", "data.tokenizer=tok")
    row, template = faults(*words)
    skip = "data.wrong_rows=skip leaves such rows out"
    assert row == f"chats.jsonl:1: no message of 'messages' is the assistant's; {skip}"
    assert "data.tokenizer = 'tok' has no chat template" in template
    Path("tok/chat_template.jinja").write_text("{{ messages }}")
    assert faults(*words, "data.wrong_rows=skip") == []


def test_a_device_that_is_not_there_is_refused() -> None:
    kind = "cuda" if sys.platform == "darwin" else "mps"
    (fault,) = faults(f"device.kind={kind}")
    assert f"device.kind = '{kind}'" in fault and "try device.kind=auto" in fault


def test_a_taken_port_and_a_foreign_address_are_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words_said = list(preflight.address(settings("network.host=127.0.0.1"), port))
        assert words_said[0] == f"network.port = {port} is taken on 127.0.0.1; name a free one, or 0 for any"
        beside = list(preflight.address(settings("network.host=127.0.0.1"), port - 1))
        assert f"network.port = {port} (beside network.port = {port - 1}) is taken" in beside[-1]
        assert reach.problems([f"127.0.0.1:{port}", "192.0.2.1:1"]) == []
    assert list(preflight.address(settings(), 0)) == []
    assert "is no address of this machine" in next(preflight.address(settings("network.host=192.0.2.1"), 0))
    assert "is no address" in next(preflight.address(settings("network.host=no.such.host.invalid"), 0))
    (fault,) = reach.problems([f"/ip4/127.0.0.1/tcp/{port}/p2p/x"])
    assert f"127.0.0.1 refuses the connection: that machine is up, but nobody listens on TCP port {port}" in fault


def test_a_directory_that_cannot_be_written_or_has_no_room_is_refused() -> None:
    Path("file").write_text("")
    assert "file is a file; name a directory" in faults("run.dir=file")[0]
    if os.path.isdir("/proc"):
        assert "/proc cannot be written" in faults("checkpoint.url=/proc/saved")[0]
    huge = [
        "model.layers=4096",
        "model.hidden_size=65536",
        "model.heads=512",
        "model.kv_heads=512",
        "model.intermediate_size=262144",
    ]
    assert "a checkpoint takes" in faults(*huge)[0]
    assert faults(*huge, "checkpoint.every=0", "checkpoint.at_end=false") == []
