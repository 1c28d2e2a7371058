"""`shoal serve` with real processes: greedy text through three stages is transformers' own, with peers killed in its middle, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from tests.chats import IDS, a_tokenizer
from tests.e2e.test_run import (
    LONG_S,
    SOURCE,
    Start,
    alive,
    assert_balanced,
    children,
    end,
    start,
    steps_done,
    summary,
    wait_for,
)
from tests.model.test_families import of_family

from shoal.api.generating import Sampling, Swarm, door
from shoal.config import Data
from shoal.core.messages import Peer
from shoal.launcher.files import rundir
from shoal.model import stages
from shoal.runtime.data.tokenizer import ByteTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture
PROMPT = "once upon a time"
GREEDY = Sampling(tokens=60, temperature=0.0, top_k=0, top_p=1.0, seed=0)


def a_checkpoint(folder: Path, family: str, vocabulary: int = 256) -> Path:
    """A random model of that family, over bytes."""
    import transformers

    config = msgspec.structs.replace(of_family(family, vocab_size=vocabulary), data=Data(sequence=128))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(stages.hf_config(config))
    model.save_pretrained(folder)
    for name, content in ByteTokenizer().files().items():
        (folder / name).write_bytes(content)
    return folder


def expected(checkpoint: Path, tokens: list[int]) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    given = torch.tensor([tokens])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=GREEDY.tokens, do_sample=False, pad_token_id=0
    )
    added: list[int] = out[0, len(tokens) :].tolist()
    return added


def serving(directory: Path, stages: Sequence[int] = (0, 0, 1, 1, 2, 2)) -> bool:
    """Peers of these stages are ready."""
    status = directory / "status.json"
    if not status.exists():
        return False
    peers = json.loads(status.read_bytes())["peers"]
    return sorted(peer["stage"] for peer in peers if peer["ready"]) == list(stages)


def kill(directory: Path, peer: Peer) -> None:
    (process,) = [local.process.pid for local in rundir.locals_of(directory).peers if local.peer == peer]
    os.kill(process, signal.SIGKILL)


def ended(server: subprocess.Popen[str]) -> str:
    peers = list(children(server.pid))
    server.send_signal(signal.SIGINT)
    output = end(server, code=130)
    wait_for(lambda: not any(alive(peer) for peer in peers))
    return output


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_greedy_text_is_that_of_transformers_though_two_peers_of_its_route_are_killed(
    start: Start, tmp_path: Path, family: str
) -> None:
    checkpoint = a_checkpoint(tmp_path / "model", family)
    server = start("serve", "model", "network.discovery=gossip")
    directory = tmp_path / "runs/serve-model"
    wait_for(lambda: server.poll() is not None or serving(directory))
    assert server.poll() is None, end(server)

    entry = door(str(directory))
    assert entry is not None
    with Swarm(entry) as swarm:
        tokens = swarm.tokenizer(PROMPT).input_ids
        added: list[int] = []

        def take(token: int) -> None:
            added.append(token)
            if len(added) in (10, 30):
                kill(directory, swarm.route[1 if len(added) == 10 else 0])

        assert swarm.generate(tokens, GREEDY, take) == added
        assert added == expected(checkpoint, tokens)
        assert swarm.replays >= 2

    options = ("--temperature", "0", "--tokens", "20")
    (alone, _), (text, words) = (generated(tmp_path, place, *options) for place in ("model", "runs/serve-model"))
    assert text == alone
    assert "through the peers of run 'serve-model'" in words and "a round trip through 3 stages" in words
    assert "serving ended: interrupted" in ended(server)


def generated(directory: Path, place: str, *options: str) -> tuple[str, str]:
    """The text, and apart from it what is said to the person: a replica that was killed a moment ago is named in the middle of the text."""
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "generate", place, PROMPT, *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        timeout=LONG_S,
    )
    words = done.stderr.decode(errors="replace")
    assert done.returncode == 0, words
    return done.stdout.decode(errors="replace"), words


def test_a_chat_is_written_by_the_tokenizers_template_and_refused_without_one(start: Start, tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "model", "llama", IDS)
    refused = end(start("chat", "model", stdin="hello\n"), code=2)
    assert "its tokenizer has no chat template" in refused
    a_tokenizer(checkpoint)
    server = start("serve", "model", "run.peers=3", "network.discovery=gossip")
    directory = tmp_path / "runs/serve-model"
    wait_for(lambda: server.poll() is not None or serving(directory, [0, 1, 2]))
    answers = [
        end(start("chat", place, "--temperature", "0", "--tokens", "8", stdin="hello\nand then?\n"))
        for place in ("model", "runs/serve-model")
    ]
    assert answers[0].strip() and answers[0] in answers[1]
    long = "a" * 200
    too_long = end(start("generate", "runs/serve-model", long), code=2)
    assert "the model has 128 positions" in too_long
    ended(server)


def test_a_run_that_trains_continues_a_text_and_its_losses_stay_the_same(start: Start, tmp_path: Path) -> None:
    settings = ("run.steps=60", "data.sequence=64")
    end(start("run", "tiny.toml", *settings))
    undisturbed = summary(tmp_path)
    launcher = start("run", "tiny.toml", *settings)
    wait_for(lambda: launcher.poll() is not None or 1 <= steps_done(tmp_path) < 60)
    entry = door(str(tmp_path / "runs/tiny"))
    assert entry is not None
    added: list[int] = []
    with Swarm(entry) as swarm:
        swarm.generate(list(b"hello"), msgspec.structs.replace(GREEDY, tokens=5), added.append)
        assert launcher.poll() is None and steps_done(tmp_path) < 60, "it trained all the while"
    assert len(added) == 5
    end(launcher)
    account = summary(tmp_path)
    assert_balanced(account, 60)
    assert account["losses"] == pytest.approx(undisturbed["losses"], rel=1e-4)
