"""Adapters in use, with real processes: greedy text through three stages is that of transformers with PEFT, unmerged, also when peers
of the route are killed; and so is that of a run which goes on training them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.e2e.test_run import CONFIG, Start, assert_balanced, end, start, steps_done, summary, wait_for
from tests.e2e.test_serve import GREEDY, PROMPT, a_checkpoint, ended, generated, kill, serving
from tests.model.test_adapter_import import an_adapter
from tests.model.test_adapters import based
from tests.runtime.test_node import TINY

from shoal.api.generating import Local, Swarm, door

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture


def tuning(folder: Path, steps: int, *more: str) -> tuple[str, ...]:
    """The command that tunes the model in `folder`/base."""
    before, _, rest = CONFIG.partition("[model]")
    tune = '[model]\npath = "base"\n[tune]\nmethod = "lora"\nrank = 4\n'
    (folder / "tiny.toml").write_text(before + tune + rest[rest.index("[data]") :])
    return ("run", "tiny.toml", "data.sequence=64", f"run.steps={steps}", *more)


def with_peft(base: Path, adapter: Path, tokens: list[int]) -> list[int]:
    """What transformers' own `generate` adds, with the adapter beside its base model."""
    import transformers
    from peft import PeftModel

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
    given = torch.tensor([tokens])
    out = PeftModel.from_pretrained(model, adapter).generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=GREEDY.tokens,
        do_sample=False,
        pad_token_id=0,
    )
    added: list[int] = out[0, len(tokens) :].tolist()
    return added


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_the_adapters_of_a_run_are_served_unmerged_though_two_peers_of_the_route_are_killed(
    start: Start, tmp_path: Path, quantize: str
) -> None:
    base = a_checkpoint(tmp_path / "base", "llama")
    end(start(*tuning(tmp_path, 6, "train.learning_rate=0.05", f"tune.quantize={quantize}")))
    checkpoint = tmp_path / "runs/tiny/checkpoints/step-6"
    server = start("serve", "runs/tiny", "network.discovery=gossip")
    directory = tmp_path / "runs/serve-tiny-step-6"
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
        assert swarm.replays >= 2
    assert added == Local(checkpoint, None, "cpu").generate(tokens, GREEDY, lambda token: None)
    assert added != Local(base, None, "cpu").generate(tokens, GREEDY, lambda token: None), "the adapters say something"
    if quantize == "none":
        end(start("export", "runs/tiny", "--adapter", "adapter"))
        assert added == with_peft(base, tmp_path / "adapter", tokens)

    options = ("--temperature", "0", "--tokens", "20")
    (alone, _), (text, words) = (
        generated(tmp_path, place, *options) for place in ("runs/tiny", "runs/serve-tiny-step-6")
    )
    assert text == alone and "through the peers of run 'serve-tiny-step-6'" in words
    assert "serving ended: interrupted" in ended(server)


def test_an_adapter_of_peft_is_served_and_said_by_a_run_that_trains_it_on(start: Start, tmp_path: Path) -> None:
    base = a_checkpoint(tmp_path / "base", "llama")
    adapter = an_adapter(based(TINY, base), tmp_path / "adapter")
    expected = with_peft(base, adapter, list(PROMPT.encode()))
    server = start("serve", "adapter", "run.peers=3", "network.discovery=gossip")
    wait_for(lambda: server.poll() is not None or serving(tmp_path / "runs/serve-adapter", [0, 1, 2]))
    assert server.poll() is None, end(server)
    entry = door(str(tmp_path / "runs/serve-adapter"))
    assert entry is not None
    with Swarm(entry) as swarm:
        assert swarm.generate(list(PROMPT.encode()), GREEDY, lambda token: None) == expected
    ended(server)

    still = ("train.learning_rate=1e-30", "tune.rank=2", "tune.alpha=64", "tune.adapter=adapter")
    launcher = start(*tuning(tmp_path, 400, *still))  # steps that change nothing
    wait_for(lambda: launcher.poll() is not None or 1 <= steps_done(tmp_path) < 400)
    entry = door(str(tmp_path / "runs/tiny"))
    assert entry is not None
    with Swarm(entry) as swarm:
        short = msgspec.structs.replace(GREEDY, tokens=8)
        assert swarm.generate(list(PROMPT.encode()), short, lambda token: None) == expected[:8]
        assert launcher.poll() is None and steps_done(tmp_path) < 400, "it trained all the while"
    end(launcher)
    assert_balanced(summary(tmp_path), 400)


def test_a_base_model_or_a_library_that_is_not_here_is_named_at_once(start: Start, tmp_path: Path) -> None:
    base = a_checkpoint(tmp_path / "base", "llama")
    an_adapter(based(TINY, base), tmp_path / "adapter")
    output = end(start("serve", "adapter", "--base", "nowhere"), code=2)
    assert "is not at nowhere; say where it lies with --base DIR" in output
    for library, says in (("peft", "needs PEFT"), ("bitsandbytes", "needs bitsandbytes")):
        hidden = tmp_path / library
        (hidden / library).mkdir(parents=True)
        (hidden / library / "__init__.py").write_text("raise ImportError('hidden')")
        output = end(start("serve", "adapter", "tune.quantize=nf4", first=str(hidden)), code=2)
        assert says in output and "Traceback" not in output
