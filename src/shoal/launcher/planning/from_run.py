"""`shoal forecast --from-run`: a recorded run's machines and churn, a forecast against the run itself, and what would be if."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal import codec, trace
from shoal import config as configuration
from shoal.config import Config
from shoal.forecasting import recorded
from shoal.forecasting.fitted import Fitted, changed, fitted, replayed
from shoal.forecasting.job import Job
from shoal.forecasting.models.played import Played
from shoal.forecasting.models.step_time import StepTime
from shoal.launcher.files import rundir
from shoal.runtime.records.account import surviving

RAW_BYTES = 4  # of a value that is not encoded, as it is averaged
TOLD = (
    "run.inflight",
    "train.batch",
    "network.activations",
    "network.gradients",
    "network.averaging",
    "checkpoint.every",
)


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Factors as text, such as "x2", and settings."""

    bandwidth: str = ""
    delay: str = ""
    speed: str = ""
    settings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.bandwidth or self.delay or self.speed or self.settings)

    def __str__(self) -> str:
        words = [f"{name} {getattr(self, name)}" for name in ("bandwidth", "delay", "speed") if getattr(self, name)]
        return ", ".join([*words, *self.settings])


class FromRun(msgspec.Struct, frozen=True):
    """`replayed_s`: the forecast of the run's own steps, with its own deaths and joins."""

    directory: Path
    config: Config
    fit: Fitted
    step: StepTime
    replayed_s: float


def of_run(directory: str) -> FromRun:
    """ValueError: no finished run is there, or its record is too short, lacks peers or is not true."""
    there = Path(directory)
    if not (there / "config.toml").is_file():
        raise ValueError(f"{directory}: no run is there; name a run's directory, such as runs/quickstart")
    if rundir.running(there):
        raise ValueError(f"{directory}: this run goes on; its trace is whole once it has ended")
    if not trace.find(there).is_file():
        raise ValueError(f"{directory}: the run left no trace; run.trace_bytes = 0 keeps none")
    config, commits = configuration.load(there / "config.toml"), surviving(rundir.commits(there))
    record = recorded.read(trace.find(there))
    members = {share.peer for step in commits for group in step.commit.groups for share in group}
    if elsewhere := members - set(record.peers):
        raise ValueError(
            f"{directory}: {len(elsewhere)} of {len(members)} members have their traces elsewhere, such as {min(elsewhere)}"
        )
    labels = {peer: label for label, peer in rundir.labels(there).items()}
    tokens = configuration.token_rows(config) * config.data.sequence
    try:
        fit = fitted(record, {step.commit.step: step.heard_s for step in commits}, labels, tokens)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    seats = msgspec.structs.replace(
        fit.job.seats, value_bytes=codec.bytes_per_value(config.network.averaging, RAW_BYTES)
    )
    fit = msgspec.structs.replace(fit, job=msgspec.structs.replace(fit.job, seats=seats))
    model = Played(fit.job)
    step = model(np.array(fit.job.stage_of))
    assert step is not None, "every stage has a machine"
    return FromRun(there, config, fit, step, replayed(fit, model))


def what_if(run: FromRun, what: WhatIf) -> Job:
    """The run's job with those changes. ValueError: a change of which the record says nothing."""
    factors = {name: _factor(name, getattr(what, name)) for name in ("bandwidth", "delay", "speed")}
    job = changed(run.fit.job, **factors)
    return _with_settings(job, run, what.settings) if what.settings else job


def _factor(name: str, text: str) -> float:
    if not text:
        return 1.0
    match = re.fullmatch(r"x?([\d.]+)x?", text)
    value = float(match[1]) if match and match[1].count(".") < 2 and match[1] != "." else 0.0
    if not 0 < value < 1e6:
        raise ValueError(f"--{name} {text}: wanted a factor above 0, such as x2 or x0.5")
    return value


def _with_settings(job: Job, run: FromRun, settings: Sequence[str]) -> Job:
    before, after = run.config, configuration.load(run.directory / "config.toml", settings)
    for name in _differing(configuration.to_tree(before), configuration.to_tree(after)):
        if name not in TOLD:
            raise ValueError(f"{name}: a record says nothing of another one; it tells of {', '.join(TOLD)}")
    one, other = before.network, after.network
    seats = job.seats

    def scaled(nbytes: float, how: tuple[str, str]) -> float:
        was, now = (codec.bytes_per_value(each, RAW_BYTES) for each in how)
        return nbytes * now / was

    averaging = one.averaging, other.averaging
    return msgspec.structs.replace(
        job,
        save_every=after.checkpoint.every,
        seats=msgspec.structs.replace(
            seats,
            microbatches=configuration.microbatches(after.train),
            inflight=after.run.inflight,
            boundary_bytes=scaled(seats.boundary_bytes, (one.activations, other.activations)),
            returned_bytes=scaled(seats.back_bytes, (one.gradients, other.gradients)),
            gradient_bytes=tuple(scaled(nbytes, averaging) for nbytes in seats.gradient_bytes),
            value_bytes=codec.bytes_per_value(other.averaging, RAW_BYTES),
        ),
    )


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{field}"
        for section, fields in after.items()
        for field, value in fields.items()
        if before[section][field] != value
    ]
