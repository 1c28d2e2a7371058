"""`log.to`: the figures of each committed step, for the tools that people have: JSON lines, TensorBoard, Weights & Biases.

A sink is anything with `write` and `close`. Sinks work in a thread of their own: a slow disk or a service that does not answer keeps
nobody waiting, and one that fails is left out from then on, which is said once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.config import Config, to_tree
from shoal.dashboard.series import Series, StepFigures
from shoal.dashboard.terminal import Snapshot
from shoal.escaping import escaped
from shoal.runtime.records.account import CommittedStep
from shoal.traffic import KINDS

Figures = dict[str, float]
WAITING_MOST = 10_000  # steps that wait for the sinks; more are dropped, which is said
CLOSE_S = 30.0  # for the sinks to write what waits
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # by sink, which is the extra's name too


class Sink(Protocol):
    """Where figures go."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def missing(config: Config) -> Iterator[str]:
    """What log.to needs and is not installed."""
    for name in config.log.to:
        package = PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            yield f"log.to has {name!r}, and {package} is not installed; try: pip install 'shoal[{name}]'"


class StepLog:
    """`before`: the steps of a run that is resumed. `warn` is called by `flush` and `close`, in their thread."""

    def __init__(
        self, config: Config, directory: Path, warn: Callable[[str], None], before: Sequence[CommittedStep] = ()
    ) -> None:
        self._warn = warn
        self._series = Series(config)
        self._series.replace(before)
        self._new: list[StepFigures] = []
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: queue.Queue[tuple[int, Figures] | None] = queue.Queue(WAITING_MOST)
        self._thread = threading.Thread(target=self._work, args=(config, directory), name="log", daemon=True)
        if config.log.to:
            self._thread.start()

    def add(self, step: CommittedStep) -> None:
        """A step is committed; it is written with the next snapshot."""
        if self._thread.is_alive():
            self._new.append(self._series.add(step))

    def flush(self, snapshot: Snapshot) -> None:
        """Hand the new steps to the sinks. `snapshot`: of now."""
        for figures in self._new:
            try:
                self._waiting.put_nowait((figures.step, named(figures, snapshot)))
            except queue.Full:
                self._problems.put(f"log.to: step {figures.step} is left out, {WAITING_MOST} steps wait to be written")
        self._new.clear()
        self._say()

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        self._say()

    def _say(self) -> None:
        while not self._problems.empty():
            self._warn(self._problems.get())

    def _work(self, config: Config, directory: Path) -> None:
        sinks: dict[str, Sink] = {}
        for name in config.log.to:
            self._try(name, partial(_open, sinks, name, config, directory))
        while (item := self._waiting.get()) is not None:
            step, figures = item
            for kind, sink in list(sinks.items()):
                if not self._try(kind, partial(sink.write, step, figures)):
                    del sinks[kind]
        for kind, sink in sinks.items():
            self._try(kind, sink.close)

    def _try(self, name: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - of another project's code, whatever it is: training goes on
            self._problems.put(f"log.to: nothing more is written to {name}: {escaped(' '.join(str(error).split()))}")
            return False
        return True


def _open(sinks: dict[str, Sink], name: str, config: Config, directory: Path) -> None:
    sinks[name] = SINKS[name](config, directory)


def named(figures: StepFigures, snapshot: Snapshot) -> Figures:
    """What a sink gets: the step's own figures, and the run's at that time. What is not known is left out."""
    known = {name: value for name, value in msgspec.structs.asdict(figures).items() if value is not None}
    del known["step"]
    joins = [peer.join_s for peer in snapshot.peers if peer.join_s]
    return {
        **known,
        "peers": len(snapshot.peers),
        "redone": snapshot.redone,
        "lost": snapshot.lost,
        "counted_twice": snapshot.counted_twice,
        "undone": snapshot.undone,
        **{f"sent_{kind}_bytes": getattr(snapshot.sent, kind) for kind in KINDS},
        "memory_bytes": sum(peer.kept.memory for peer in snapshot.peers),
        "queue_s": max((peer.queue_s for peer in snapshot.peers), default=0.0),
        **({"join_s": max(joins)} if joins else {}),
    }


class JsonLines:
    """metrics.jsonl in the run's directory, a line for each step. After the run went back a step is there twice: the later one counts."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._file = open(directory / "metrics.jsonl", "a", encoding="utf-8", buffering=1)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in tensorboard/ of the run's directory."""

    def __init__(self, config: Config, directory: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"), flush_secs=10)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the same name; resumed under its id, which wandb.id in the run's directory holds. Its own environment variables decide
    project, mode (WANDB_MODE=offline) and key."""

    def __init__(self, config: Config, directory: Path) -> None:
        import wandb

        path = directory / "wandb.id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shoal"),
            name=config.run.name,
            id=path.read_text(),
            resume="allow",
            dir=str(directory),
            config=to_tree(config),
            settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
        )
        self._run.define_metric("*", step_metric="step")  # a run may go back, wandb's own count may not

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Config, Path], Sink]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
