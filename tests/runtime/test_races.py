"""Threads of the task runner: an optimizer step beside the hops races with none of them, and each wait for it is needed."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.races import (
    CheckedEvent,
    Clock,
    Detector,
    Watch,
    host,
    watch_lanes,
    watch_optimizer,
    watch_pieces,
    watch_resident,
    watch_swapping,
)

from shoal.config import Config, Data, Device, Model, Network, Run, Train
from shoal.core import messages as m
from shoal.executor.resident import Resident
from shoal.executor.swap.swapping import Swapping
from shoal.model.cut import Stage
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.data.dataset import open_dataset
from shoal.runtime.tasks.outgoing import BUFFERS
from shoal.runtime.tasks.task_runner import TaskRunner

ANSWER_S = 60.0


def a_config(executor: str, dtype: str = "float32") -> Config:
    return Config(
        run=Run(name="races", stages=1, seed=5),
        model=Model(hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24),
        data=Data(source="text", path="a.txt", sequence=8),
        train=Train(batch=4, microbatch=2, warmup=0, staleness=1, dtype=dtype),
        device=Device(threads=0, executor=executor, memory_bytes=150_000 if executor == "swapping" else 0),
    )


class Driver:
    """Gives tasks. Threads are ordered by their lanes, by answers that were waited for, and by the event of the optimizer step."""

    def __init__(self, runner: TaskRunner, detector: Detector) -> None:
        self.runner, self._detector = runner, detector
        self.failures: list[str] = []

    def give(self, task: m.Task) -> Callable[[], None]:
        """Call the result to wait for the answer."""
        answers: queue.Queue[tuple[m.Done | m.Failed, Clock]] = queue.Queue()
        self.runner.submit(task, lambda answer: answers.put((answer, self._detector.clock(host()))))

        def wait() -> None:
            answer, clock = answers.get(timeout=ANSWER_S)
            self._detector.know(host(), clock)
            if isinstance(answer, m.Failed):
                self.failures.append(answer.reason)

        return wait

    def step(self, number: int) -> Callable[[], None]:
        """One microbatch, its round, and the optimizer step, which goes on beside what comes next."""
        cuts = (0, self.runner._seated().executor.length)
        for task in (
            m.Fetch("f", number, 0, f"x{number}"),
            m.RunBackward("b", number, 0, 0, f"x{number}", "", ""),
            m.Cut("c", number, cuts, (f"part{number}",)),
            m.Add("a", (f"part{number}",), f"sum{number}"),
            m.Gather("g", number, number, (f"sum{number}",)),
        ):
            self.give(task)()
        return self.give(m.Apply("y", number, number, 1.0, False))


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(2000)))
    monkeypatch.chdir(tmp_path)


# Given beside an optimizer step, and where the task runner then waits for it.
BESIDE: list[tuple[m.Task, str]] = [
    (m.RunBackward("b2", 2, 0, 0, "x1", "", ""), "TaskRunner._computing"),  # of the version that is being made
    (m.Export("e", 1), "TaskRunner._run"),
    (m.RunSave("s", step=1, stage=0), "TaskRunner._kept_copy"),
]


def trained(monkeypatch: pytest.MonkeyPatch, detector: Detector, config: Config, beside: m.Task) -> list[str]:
    """Two steps; the second one's hops, and `beside`, are given while the first one's optimizer step goes on. Returns failures."""
    with monkeypatch.context() as patched, Watch(detector):
        watch_lanes(patched, detector)
        watch_swapping(patched, detector)
        watch_optimizer(patched)
        watch_pieces(patched, detector)
        runner = TaskRunner(config, open_dataset(config), Store("checkpoints"))
        runner._stepped = CheckedEvent(detector)
        runner._stepped.set()
        driver = Driver(runner, detector)
        try:
            driver.give(m.Init("i", 0, 0))()
            stepped = driver.step(0)
            driver.give(m.Fetch("f", 1, 0, "x1"))()
            waits = [driver.give(m.RunBackward("b1", 1, 0, 0, "x1", "", "")), driver.give(beside)]
            for wait in (stepped, *waits, driver.step(1)):
                wait()
        finally:
            runner.close()
    return driver.failures


@pytest.mark.parametrize(("beside", "place"), BESIDE, ids=[place for _, place in BESIDE])
@pytest.mark.parametrize("executor", [pytest.param("resident", marks=pytest.mark.slow), "swapping"])
def test_an_optimizer_step_beside_hops_races_with_none_of_them_and_every_wait_for_it_is_needed(
    executor: str, beside: m.Task, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = Detector()
    assert trained(monkeypatch, detector, a_config(executor), beside) == []
    assert detector.races == []
    sites = {site.rpartition(":")[0] for site in detector.sites if site.startswith("TaskRunner")}
    assert place in sites <= {each for _, each in BESIDE}
    needed = Detector(place)
    failures = trained(monkeypatch, needed, a_config(executor), beside)
    assert needed.races or failures


@pytest.mark.parametrize("executor", ["resident", "swapping"])
def test_hops_that_computed_with_the_optimizers_own_tensors_would_race(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Resident, Swapping):
        construct = kind.__init__

        def shared(
            self: Any, stage: Stage, config: Config, *rest: Any, construct: Any = construct, **named: Any
        ) -> None:
            train = msgspec.structs.replace(config.train, staleness=0)
            construct(self, stage, msgspec.structs.replace(config, train=train), *rest, **named)

        monkeypatch.setattr(kind, "__init__", shared)
    detector = Detector()
    trained(monkeypatch, detector, a_config(executor), BESIDE[0][0])
    assert detector.races


# ------------------------------------------------------------------------------------------------ a stage on a played device


def on_a_device(
    monkeypatch: pytest.MonkeyPatch, detector: Detector, drive: Callable[[Driver], None], **changes: Any
) -> TaskRunner:
    """`drive` a resident stage whose device the CPU plays."""
    config = msgspec.structs.replace(a_config("resident"), **changes)
    with monkeypatch.context() as patched, Watch(detector):
        watch_lanes(patched, detector)
        watch_resident(patched, detector)
        watch_optimizer(patched)
        watch_pieces(patched, detector)
        runner = TaskRunner(config, open_dataset(config))
        driver = Driver(runner, detector)
        try:
            drive(driver)
        finally:
            runner.close()
    assert driver.failures == []
    return runner


def two_steps(driver: Driver) -> None:
    driver.give(m.Init("i", 0, 0))()
    stepped = driver.step(0)
    driver.give(m.Fetch("f", 1, 0, "x1"))()
    beside = driver.give(m.RunBackward("b1", 1, 0, 0, "x1", "", ""))
    for wait in (stepped, beside, driver.step(1)):
        wait()


def test_an_optimizer_step_on_a_stream_of_its_own_races_with_no_hop_and_both_its_waits_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Detector()
    on_a_device(monkeypatch, whole, two_steps)
    assert whole.races == []
    sites = [site for site in whole.sites if site.startswith("Delayed")]
    assert len(sites) == 2
    for site in sites:
        without = Detector(site)
        on_a_device(monkeypatch, without, two_steps)
        assert without.races, f"{site} can be left out unnoticed"


SENT = 5  # boundary tensors: more than twice the ring


def hops(driver: Driver) -> None:
    driver.give(m.Init("i", 1, 0))()
    for index in range(SENT):
        for name in (f"x{index}", f"g{index}"):
            driver.runner.put(name, torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(index)))
        waits = [
            driver.give(m.RunForward("f", 0, index, 1, f"x{index}", f"y{index}")),
            driver.give(m.RunBackward("b", 0, index, 1, f"x{index}", f"g{index}", f"d{index}")),
        ]
        for wait in waits:
            wait()
    for index in range(SENT):
        driver.runner.blob(f"d{index}")


@pytest.mark.parametrize("how", ["none", "int8"])
def test_boundary_tensors_leave_through_a_ring_that_races_with_no_hop_and_every_wait_is_needed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of a stage whose results do not cross; the ring never grows."""
    changes = {"run": Run(name="races", stages=3, seed=5), "train": Train(batch=4, microbatch=2, warmup=0)}
    changes["model"] = Model(hidden_size=16, layers=3, heads=2, kv_heads=1, intermediate_size=24)
    changes["network"] = Network(activations=how, gradients=how)
    whole = Detector()
    runner = on_a_device(monkeypatch, whole, hops, **changes)
    assert whole.races == []
    assert runner._outgoing._ring.qsize() == BUFFERS
    plain = TaskRunner(msgspec.structs.replace(a_config("resident"), **changes))
    hops(Driver(plain, Detector()))
    plain.close()
    for name in (f"{kind}{index}" for kind in "yd" for index in range(SENT)):
        one, other = runner.blob(name), plain.blob(name)
        assert (one.codec, one.shape, bytes(one.data)) == (other.codec, other.shape, bytes(other.data))
    sites = [site for site in whole.sites if site.startswith("Outgoing")]
    assert len(sites) == 2  # encoding waits for the hop, the host for the copy
    for site in sites:
        without = Detector(site)
        on_a_device(monkeypatch, without, hops, **changes)
        assert without.races, f"{site} can be left out unnoticed"
