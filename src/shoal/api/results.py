"""`shoal.Run`, a run's directory as objects: its steps, its account, its checkpoints; and `shoal.Checkpoint`, whose model it gives."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal import config as configuration
from shoal.config import Config, tokens_per_step
from shoal.dashboard import account
from shoal.dashboard.account import Summary
from shoal.launcher.files import rundir, saved
from shoal.runtime.checkpoints.catalog import Catalog, url_of
from shoal.runtime.checkpoints.marker import MARKER, Training, decoded
from shoal.runtime.records.account import CommittedStep, surviving

if TYPE_CHECKING:
    import pandas
    from torch import nn


class Step(msgspec.Struct, frozen=True):
    """The metrics of one committed step."""

    step: int  # steps committed, this one included: 1 is the first
    loss: float | None  # mean over the step's microbatches; None: the step was skipped, since a result was not finite
    heldout_loss: float | None  # of held-out tokens, with the parameters before the step; None: it was not measured
    gradient_norm: float  # Euclidean norm of the whole model's averaged gradient, before it is clipped
    tokens: int  # trained on by the run so far, this step included
    elapsed_s: float  # since the first commit, on the launcher's clock; a pause before a resumption counts, too
    redone: int  # (microbatch, stage) results computed again so far, because a peer was lost
    saved: int  # the newest checkpoint's step at this commit; 0: none
    recovered: int  # times the run had gone back to a checkpoint
    reward_accuracy: float | None = None  # of preference pairs: the share whose chosen answer has the larger reward
    reward_margin: float | None = None  # of preference pairs: the mean difference of their rewards


class Run:
    """A run by its directory, finished or not: everything is read from its files when it is asked for."""

    def __init__(self, directory: str | Path) -> None:
        """ValueError: no run is there."""
        self.directory = Path(directory)
        if not (self.directory / "config.toml").is_file():
            raise ValueError(f"{directory}: no run is there; name a run's directory, such as runs/quickstart")

    def __repr__(self) -> str:
        summary = self.summary
        state = f"{summary.steps} steps, loss {summary.final_loss}" if summary is not None else "not finished"
        return f"Run({str(self.directory)!r}: {state})"

    @cached_property
    def config(self) -> Config:
        return configuration.load(self.directory / "config.toml")

    @property
    def summary(self) -> Summary | None:
        """The account of every sample; None while the run lasts, or when its launcher was killed."""
        path = self.directory / "summary.json"
        return account.read(path) if path.exists() else None

    @property
    def steps(self) -> list[Step]:
        """The metrics of every committed step, in order. A step that was undone by going back to a checkpoint is not in it."""
        committed = surviving(rundir.commits(self.directory))
        return [step_of(each, self.config, committed[0].heard_s) for each in committed]

    @property
    def losses(self) -> list[float]:
        """Of the steps that were not skipped."""
        return [step.loss for step in self.steps if step.loss is not None]

    def frame(self) -> pandas.DataFrame:
        """The steps as a DataFrame with a column for each field of `Step`, indexed by `step`. ImportError: pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "Run.frame needs pandas: pip install 'shoal[notebook]'; Run.steps works without"
            ) from error
        frame = pandas.DataFrame([msgspec.structs.asdict(step) for step in self.steps], columns=Step.__struct_fields__)
        return frame.set_index("step")

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The whole checkpoints in local storage, oldest first. Sizes are compared; contents are not read."""
        catalog = Catalog(url_of(self.config))
        if not catalog.storage.local:
            return []
        whole = [entry for entry in catalog.entries() if not entry.wrong and not entry.elsewhere]
        return [Checkpoint(entry.path) for entry in reversed(whole)]


class Checkpoint:
    """A checkpoint directory: a model directory with Shoal's training.json."""

    def __init__(self, path: str | Path) -> None:
        """ValueError: it is no checkpoint of Shoal."""
        self.path = Path(path)
        if not (self.path / MARKER).is_file():
            raise ValueError(
                f"{path}: no checkpoint (it has no {MARKER}); name a directory such as runs/NAME/checkpoints/step-80"
            )
        self.training: Training = decoded((self.path / MARKER).read_bytes())

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    @property
    def step(self) -> int:
        """Steps trained."""
        return self.training.step

    @property
    def samples(self) -> int:
        """Samples trained on, each once."""
        return self.training.samples

    @property
    def config(self) -> Config:
        """Of the run that wrote it."""
        return self.training.config

    def model(self, base: str | None = None) -> nn.Module:
        """The whole model with these weights, on the CPU: an `nn.Sequential` of one's own, the Hugging Face model, or its base model with
        the trained adapters. base: where that lies now, if not where training read it. ValueError: a tensor, the base model or
        model.factory is not here."""
        return saved.model_of(self.path, base)


def step_of(committed: CommittedStep, config: Config, first_s: float) -> Step:
    """`first_s`: when the first commit was received."""
    commit = committed.commit
    done = commit.step + 1
    return Step(
        step=done,
        loss=None if commit.skipped else commit.loss,
        heldout_loss=commit.heldout,
        gradient_norm=commit.norm,
        tokens=done * tokens_per_step(config),
        elapsed_s=committed.heard_s - first_s,
        redone=committed.account.redone,
        saved=committed.saved,
        recovered=committed.recovered,
        reward_accuracy=None if commit.rewards is None else commit.rewards.accuracy,
        reward_margin=None if commit.rewards is None else commit.rewards.margin,
    )
