"""Continues fixed prompts with the model that a run trains: a process of its own beside `shoal run`, for launcher/watching/samples.py.

    python -m shoal.api.prompts RUN PARENT

It reads a Request a line from standard input and writes a Sample a line to standard output. While the run lives its peers make the
text, token by token, as for `shoal generate` (generating.py); at its end the last checkpoint does, on this machine. Always the likeliest
token, so that two steps differ by their parameters alone. It ends with its input, or when process PARENT does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal import config as configuration
from shoal import host
from shoal.api import generating
from shoal.api.generating import Sampling, Source
from shoal.config import Config
from shoal.escaping import describe
from shoal.launcher.files import adapter_files, saved
from shoal.launcher.process import die_with
from shoal.launcher.watching.samples import Request, Sample

LOADED_SHARE = 0.5  # of this machine's free memory that a checkpoint may take


def main(run: Path) -> None:
    config = configuration.load(run / "config.toml")
    swarm: Source | None = None
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        try:
            if request.checkpoint:
                source: Source = local(Path(request.checkpoint))
            else:
                source = swarm = swarm or living(run)
            samples(config, source, request.step, write)
        except (ValueError, OSError) as error:
            write(Sample(request.step, problem=describe(error)))
        write(Sample(request.step, done=True))


def living(run: Path) -> Source:
    """The way to the run's peers, kept open. ValueError: there is none (yet)."""
    entry = generating.door(str(run))
    if entry is None:
        raise ValueError(f"{run}: the run is not alive")
    return generating.Swarm(entry, tells_steps=False).__enter__()  # until this process ends


def local(checkpoint: Path) -> Source:
    """ValueError: it is not a model that can be loaded here."""
    places = [checkpoint]
    if adapter_files.there(checkpoint):
        places.append(Path(saved.adapted(checkpoint).model.path))  # whose weights are loaded beside the adapters
    nbytes = sum(file.stat().st_size for place in places for file in place.glob("*.safetensors"))
    free = host.free_bytes()
    if free is not None and nbytes > LOADED_SHARE * free:
        raise ValueError(
            f"the model of the last checkpoint has {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free here: serve it"
            f" (`shoal serve {checkpoint}`)"
        )
    return generating.Local(checkpoint, None, "cpu")


def samples(config: Config, source: Source, step: int, tell: Callable[[Sample], object]) -> None:
    """One of each of eval.prompts. ValueError: a prompt is longer than the model's positions, or a chat template refuses it."""
    how = Sampling(tokens=config.eval.prompt_tokens, temperature=0.0, top_k=0, top_p=1.0, seed=0)
    for prompt in config.eval.prompts:
        tokens = generating.asked(source, prompt, chat=config.data.format == "chat")
        generating.refuse_long(source, tokens)
        began_s = time.monotonic()
        added = source.generate(tokens, how, lambda token: None)
        steps = source.versions if isinstance(source, generating.Swarm) else (step, step)
        text = source.tokenizer.decode(added, skip_special_tokens=True)
        tell(Sample(step, steps, prompt, text, round(time.monotonic() - began_s, 3)))


def write(sample: Sample) -> None:
    _out.write(msgspec.json.encode(sample) + b"\n")
    _out.flush()


if __name__ == "__main__":
    _out: Any = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    die_with(int(sys.argv[2]))
    main(Path(sys.argv[1]))
    os._exit(0)  # taking torch apart takes a second
