"""`shoal.evaluate`: the mean loss and perplexity of a model on text that it was not trained on. For `shoal eval`, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal.config import Config, Data
from shoal.dashboard import account
from shoal.launcher.files import adapter_files, saved
from shoal.runtime.checkpoints import marker


class Evaluation(msgspec.Struct, frozen=True):
    """Of one text. `loss`: mean of the natural logarithms over the counted tokens; `perplexity` is e to it. Of preference pairs: the mean
    loss of DPO, and how the adapters' rewards of the two answers compare."""

    path: str
    samples: int
    tokens: int  # predicted and counted, each once; 0: samples are preference pairs
    loss: float
    accuracy: float | None = None  # of pairs: the share whose chosen answer has the larger reward
    margin: float | None = None  # of pairs: the mean difference of their rewards

    @property
    def perplexity(self) -> float:
        return account.perplexity(self.loss)


Progress = Callable[[int, int, float], None]  # samples done, samples, mean loss so far


def evaluate(
    place: str | Path,
    paths: Iterable[str | Path],
    *settings: str,
    samples: int = 0,
    base: str | None = None,
    on_progress: Progress = lambda done, count, loss: None,
) -> list[Evaluation]:
    """The model of a run's newest checkpoint, a checkpoint, or any model directory, on each of the files, directories or globs.

    settings: of [data] and [device], as for `shoal run`; what they do not say is as in training: tokenizer, format (a chat counts the
    assistant's tokens alone), data.sequence. samples: at most so many of each, evenly spaced; 0 takes all. base: where the base model of
    adapters lies now. The whole model is in memory, in train.dtype.
    ValueError: no checkpoint, no such text, a wrong row, or a tokenizer that does not fit the model."""
    from shoal.executor.serving import Chain
    from shoal.runtime.data.dataset import open_held_out

    source = saved.checkpoint(str(place))
    config = config_of(source, base, settings)
    texts = [(str(path), open_held_out(config, path, samples)) for path in paths]
    if not texts:
        raise ValueError(f"nothing to evaluate {place} on; name files of held-out text")
    chain, results = Chain(config, source), []
    for path, text in texts:
        numbered = map(text.sample, range(text.count))
        if configuration.paired(config):
            results.append(preferred(path, text.count, chain.margins(numbered), on_progress))
        else:
            results.append(mean(path, text.count, chain.losses(numbered), on_progress))
    return results


def mean(path: str, samples: int, losses: Iterator[Sequence[tuple[float, int]]], on_progress: Progress) -> Evaluation:
    """Of (sum of the losses, counted tokens) of each sample, batch by batch; added without rounding, so the order does not matter."""
    sums: list[float] = []
    tokens = 0
    for batch in losses:
        sums += [loss for loss, _ in batch]
        tokens += sum(counted for _, counted in batch)
        on_progress(len(sums), samples, math.fsum(sums) / max(1, tokens))
    if not tokens:
        raise ValueError(f"{path}: no token of it counts")
    return Evaluation(path, samples, tokens, math.fsum(sums) / tokens)


def preferred(path: str, samples: int, margins: Iterator[float], on_progress: Progress) -> Evaluation:
    """Of preference pairs, by the margins of their rewards."""
    losses: list[float] = []
    held: list[float] = []
    for margin in margins:
        held.append(margin)
        losses.append(math.log1p(math.exp(-abs(margin))) + max(0.0, -margin))  # -log sigmoid
        on_progress(len(held), samples, math.fsum(losses) / len(losses))
    accuracy = sum(margin > 0 for margin in held) / len(held)
    return Evaluation(path, samples, 0, math.fsum(losses) / len(losses), accuracy, math.fsum(held) / len(held))


def config_of(source: Path, base: str | None, settings: Sequence[str]) -> Config:
    """Of the run that wrote the checkpoint; of any other directory of a model or an adapter the defaults, with its tokenizer."""
    if adapter_files.there(source):
        config = saved.adapted(source, base)
        if not (source / marker.MARKER).is_file():  # PEFT's, which knows no length of samples
            config = msgspec.structs.replace(
                config, data=msgspec.structs.replace(config.data, sequence=Data().sequence)
            )
    elif (source / marker.MARKER).is_file():
        config = marker.decoded((source / marker.MARKER).read_bytes()).config
    else:
        config = configuration.load(
            None, [f"model.path={source}", f"data.tokenizer={source}", "data.source=text", "data.path=-"]
        )
    tree = configuration.to_tree(config)
    tree["tune"]["adapter"] = (
        ""  # what is measured here, and trained on by nobody: preference pairs may be compared with its base
    )
    if any(
        setting.startswith("data.format=") for setting in settings
    ):  # rows: from JSON lines, not from what training read
        del tree["data"]["source"]
        tree["data"]["path"] = tree["data"]["path"] or "-"
    config, adapter = configuration.from_tree(configuration.overridden(tree, settings)), config.tune.adapter
    return msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, adapter=adapter))
