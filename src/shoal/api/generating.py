"""Text from a model: of a checkpoint on this machine, by transformers' own `generate`; or of a living run, through its peers.

For `shoal generate` and `shoal chat`. Through the peers only tokens leave this machine, and the likeliest next tokens come back: the
choice among them is made here, by transformers' own rules, so that a seed gives the same text either way. A run's checkpoint is an ordinary
model directory, so that a whole model here is what every other program loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

import msgspec

from shoal import config as configuration
from shoal.config import Config, settings
from shoal.core.messages import MOST_SCORES, Peer
from shoal.escaping import escaped, escaped_lines
from shoal.launcher import reach
from shoal.launcher.files import adapter_files, rundir, saved
from shoal.launcher.invite_text import invite_text
from shoal.launcher.invites import Office
from shoal.model import remote
from shoal.transport.identity.invite import Authority, Invite, read_invite

PASS_S = 3600.0 * 24  # the pass of a client's own connection
T = TypeVar("T")
Take = Callable[[int], None]  # called with each new token


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. `temperature` 0: always the likeliest."""

    tokens: int
    temperature: float
    top_k: int  # among this many; 0: all
    top_p: float  # among the likeliest whose probabilities add up to this
    seed: int


class Source(Protocol):
    """A model that adds tokens to a text."""

    tokenizer: Any  # of transformers
    positions: int | None  # of the longest text; None: not known

    def generate(self, tokens: list[int], sampling: Sampling, take: Take) -> list[int]:
        """The tokens that the model adds to `tokens`. ValueError: the text is refused."""


class Words:
    """Shows a text as it grows, as people read it: whole words, nothing that a terminal obeys."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import TextStreamer

        class Streamer(TextStreamer):  # type: ignore[misc]  # not annotated; its way to be told where the text goes
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        def show(text: str) -> None:  # NUL stands between documents in the byte vocabulary
            out.write(escaped_lines(text.replace("\0", "\n")))
            out.flush()

        out = sys.stdout
        self.show = show
        self._streamer = Streamer(tokenizer, skip_special_tokens=True)

    def take(self, token: int) -> None:
        import torch

        self._streamer.put(torch.tensor([token]))

    def end(self) -> None:
        self._streamer.end()
        self.show("\n")


# ------------------------------------------------------------------------------------------------------ on this machine


class Local:
    """A whole model here. See Source."""

    def __init__(self, path: Path, base: str | None, device: str) -> None:
        """ValueError: not a model that can be loaded."""
        import transformers

        from shoal.model import sequential

        described = path / "config.json"  # an adapter of PEFT's has none
        if described.is_file() and json.loads(described.read_text()).get("model_type") == sequential.MODEL_TYPE:
            raise ValueError(
                f"{path}: a model of your own (model.factory); load it with shoal.Checkpoint({str(path)!r}).model()"
            )
        _quiet()
        self.model: Any
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(saved.tokenizer_of(path, base))
            self.model = saved.model_of(path, base).to(device)
        except (OSError, ValueError, KeyError) as error:  # all of them are how transformers says that a file is wrong
            raise ValueError(f"{path}: not a model that can be loaded: {error}") from error
        self._device = device
        self.positions: int | None = getattr(self.model.config, "max_position_embeddings", None)

    def generate(self, tokens: list[int], sampling: Sampling, take: Take) -> list[int]:
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Streamer(BaseStreamer):
            def put(self, value: torch.Tensor) -> None:
                if value.dim() == 1:  # else it is the prompt
                    take(int(value[0]))

            def end(self) -> None:
                """Of one text."""

        given = torch.tensor([tokens], device=self._device)
        torch.manual_seed(sampling.seed)
        chance = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
        with torch.inference_mode():
            out = self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=sampling.tokens,
                pad_token_id=self.tokenizer.pad_token_id or 0,
                streamer=Streamer(),
                **(chance if sampling.temperature else {"do_sample": False}),
            )
        added: list[int] = out[0, len(tokens) :].tolist()
        return added


# ---------------------------------------------------------------------------------------------------- through the peers


class Door(msgspec.Struct, frozen=True):
    """The way into a living run. `tokenizer`: its name or directory."""

    config: Config
    invite: Invite
    passes: bytes
    tokenizer: str


def door(place: str, tokenizer: str = "") -> Door | None:
    """The living run that `place` names, a directory or an invite (@FILE, - or its text); None: it names a model directory, or a run
    that has ended. ValueError: what is missing."""
    directory = Path(place)
    if not place.startswith("@") and (directory / "config.json").is_file():
        return None
    if place == "-" or place.startswith("@") or (not directory.exists() and len(place) > 200):
        return _invited(invite_text([place]), tokenizer)
    if not (directory / "config.toml").is_file() or not rundir.running(directory):
        return None
    if (directory / "authority.key").exists():
        config = configuration.load(directory / "config.toml")
        authority = Authority.load(directory / "authority.key")
        listening = directory / rundir.BOOTSTRAP
        if not listening.exists():
            raise ValueError(
                f"{place}: none of its peers listens yet; try again when it says that it trains, or serves"
            )
        addresses = msgspec.json.decode(listening.read_bytes(), type=tuple[str, ...])
        invite = read_invite(authority.invite(addresses, time.time() + PASS_S, config.run.name), 0.0)
        named = tokenizer or (adapter_files.tokenizer(config) if config.run.serve else config.data.tokenizer)
        return Door(config, invite, Office(directory, authority).pass_list(), named)
    return _invited((directory / reach.INVITE).read_text(), tokenizer)


def _invited(text: str, tokenizer: str) -> Door:
    from shoal import guest

    invite = read_invite(text, 0.0)
    config = guest.visitor(invite.config, ())
    named = tokenizer or ("" if config.run.serve else config.data.tokenizer)
    if not named or (named != "bytes" and not Path(named).exists() and "/" not in named):
        raise ValueError(
            "the invite does not say what the model's tokenizer is; name its directory with --tokenizer DIR"
        )
    if not tokenizer and remote.is_url(named):  # nothing is fetched in a visitor's name because an invite says so
        raise ValueError(f"the run's tokenizer lies at {named}; if that is right, name it: --tokenizer {named}")
    return Door(config, invite, b"", named)


class Swarm:
    """A living run's peers. See Source; use as a context."""

    def __init__(self, entry: Door, tells_steps: bool = True) -> None:
        """`tells_steps`: the person hears when training went on while a text was made."""
        _quiet()
        self._entry, self._tells_steps = entry, tells_steps
        self.tokenizer = _tokenizer(entry.tokenizer)
        self.positions, self._ends, self._vocabulary = _model_facts(entry.config, self.tokenizer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm", daemon=True)
        self._stack = contextlib.AsyncExitStack()
        self.seconds = 0.0  # of all requests
        self.versions: tuple[int, ...] = ()  # steps of the parameters that made the newest text, oldest and newest

    def __enter__(self) -> Swarm:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def cost(self) -> str:
        """What the texts so far took, in words."""
        cost = self._client.cost
        each = max(1, cost.requests)
        return (
            f"{cost.requests} tokens, {cost.requests / max(self.seconds, 1e-9):.1f} per second; each took a round trip through"
            f" {self._entry.config.run.stages} stages, {cost.sent_bytes // each} bytes sent and {cost.received_bytes // each} received"
        )

    @property
    def route(self) -> tuple[Peer, ...]:
        """Of the newest text, by stage."""
        return self._client.client.route

    @property
    def replays(self) -> int:
        """Of the newest text."""
        return self._client.client.replays

    def generate(self, tokens: list[int], sampling: Sampling, take: Take) -> list[int]:
        import torch

        chance = torch.manual_seed(sampling.seed)
        scores = 1 if not sampling.temperature else min(sampling.top_k or MOST_SCORES, MOST_SCORES)
        added: list[int] = []
        versions: set[int] = set()
        while len(added) < sampling.tokens and (self.positions is None or len(tokens) + len(added) < self.positions):
            began_s = time.monotonic()
            predicted = self._run(self._client.next((*tokens, *added), scores))
            self.seconds += time.monotonic() - began_s
            versions |= {predicted.oldest, predicted.newest}
            token = predicted.tokens[0]
            if sampling.temperature:
                token = choose(predicted.tokens, predicted.scores, self._vocabulary, sampling, chance)
            added.append(token)
            take(token)
            if token in self._ends:
                break
        self.versions = (min(versions), max(versions)) if versions else ()
        if len(versions) > 1 and self._tells_steps:
            say(f"training went on meanwhile: made with the parameters of steps {min(versions)} to {max(versions)}")
        return added

    async def _open(self) -> None:
        from shoal.build import operator
        from shoal.runtime.texts import TextClient

        entry = self._entry
        way = operator(entry.config, entry.invite, entry.passes, say)
        transport, directory = await self._stack.enter_async_context(way)
        self._client = TextClient(transport, directory, settings(entry.config), Random(), say)
        self._stack.callback(self._client.close)
        await self._client.ready()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C reaches this thread alone
            future.cancel()
            raise


def choose(tokens: Sequence[int], scores: Sequence[float], vocabulary: int, sampling: Sampling, chance: Any) -> int:
    """One of the likeliest `tokens`, drawn as transformers draws it."""
    import torch
    from transformers.generation import logits_process as rules

    row = torch.full((1, max(vocabulary, max(tokens) + 1)), -torch.inf)
    row[0, list(tokens)] = torch.tensor(list(scores))
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    if sampling.temperature != 1.0:
        row = rules.TemperatureLogitsWarper(sampling.temperature)(nothing, row)
    if sampling.top_p < 1.0:
        row = rules.TopPLogitsWarper(sampling.top_p)(nothing, row)
    return int(torch.multinomial(torch.softmax(row, -1), 1, generator=chance))


def say(text: str) -> None:
    """To the person, beside the text."""
    print(escaped(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def opened(place: str, base: str | None, device: str, tokenizer: str) -> Iterator[Source]:
    """The model that `place` names: of a living run through its peers, else of the newest checkpoint here."""
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not the text
        entry = door(place, tokenizer)
        source = Local(saved.checkpoint(place), base, device) if entry is None else Swarm(entry)
    if isinstance(source, Local):
        yield source
        return
    say(f"through the peers of run {source._entry.config.run.name!r}")
    with source:
        yield source
        say(source.cost + (f"; the text was sent again {source.replays} times" if source.replays else ""))


def asked(source: Source, prompt: str, chat: bool = False) -> list[int]:
    """The tokens of a text to be continued, at least one; of a message to be answered, where the tokenizer has a chat template and `chat`.
    ValueError: the template refuses the message."""
    if chat and source.tokenizer.chat_template:
        return written(source, [{"role": "user", "content": prompt}])
    tokens = source.tokenizer(prompt, add_special_tokens=False).input_ids
    tokens = tokens or source.tokenizer("\n", add_special_tokens=False).input_ids
    return [int(token) for token in tokens]


def written(source: Source, chat: Sequence[dict[str, str]]) -> list[int]:
    """A chat that waits for its next answer, as the tokenizer's template writes it. ValueError: it refuses the chat."""
    try:
        text = source.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the template's own code runs here
        raise ValueError(f"the chat template does not write this chat ({type(error).__name__}: {error})") from error
    return [int(token) for token in source.tokenizer(text, add_special_tokens=False).input_ids]


def refuse_long(source: Source, tokens: Sequence[int]) -> None:
    """ValueError: nothing can be added to such a text."""
    if source.positions is not None and len(tokens) >= source.positions:
        raise ValueError(
            f"the text is {len(tokens)} tokens, and the model has {source.positions} positions: shorten it to"
            f" {source.positions - 1} at most"
        )


def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _tokenizer(name: str) -> Any:
    """transformers' own, of a name or directory; bytes as such a one."""
    import tempfile

    from transformers import AutoTokenizer

    from shoal.runtime.data.tokenizer import ByteTokenizer

    try:
        if name != "bytes":
            place = remote.directory(name, Config().run.dir, weights=False) if remote.is_url(name) else name
            return AutoTokenizer.from_pretrained(place)
        with tempfile.TemporaryDirectory() as folder:
            for file, content in ByteTokenizer().files().items():
                (Path(folder) / file).write_bytes(content)
            return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{name}: no tokenizer that can be loaded: {error}; name one with --tokenizer DIR") from error


def _model_facts(config: Config, tokenizer: Any) -> tuple[int | None, set[int], int]:
    """Positions, tokens that end a text, and the size of the vocabulary. A guest without the model's directory knows its tokenizer's."""
    from transformers import GenerationConfig

    from shoal.model.families import hf_config

    if config.model.factory:
        raise ValueError("the run trains a model of your own (model.factory), whose peers serve no texts")
    if config.model.path and not (Path(config.model.path) / "config.json").is_file():
        ends = tokenizer.eos_token_id
        return None, set() if ends is None else {ends}, len(tokenizer)
    hf = hf_config(config)
    if config.model.path and (Path(config.model.path) / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(config.model.path).eos_token_id
    else:
        ends = GenerationConfig.from_model_config(hf).eos_token_id
    known = {ends} if isinstance(ends, int) else set(ends or ())
    return getattr(hf, "max_position_embeddings", None), known, int(hf.vocab_size)
