"""Every task says which blobs it reads and makes, where it runs and who asked for it; the runner and the simulator follow that."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from shoal.core import messages as m
from shoal.sim.tasks.pace import SECONDS
from shoal.sim.tasks.task_runner import _WORK

NO_BLOBS = {"id", "digest", "digests", "seed", "record", "records", "shard", "session", "sessions"}  # fields of words
TASKS: tuple[type[m.TaskBase], ...] = get_args(m.Task)


def a_task(kind: type[m.TaskBase], asker: str = "s") -> Any:
    """With a name of its own in every field that can hold one."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        values = {
            str: field.name,
            int: 1,
            float: 0.5,
            float | None: 0.5,
            bool: True,
            tuple[str, ...]: (f"{field.name}0", f"{field.name}1"),
        }
        values |= {tuple[int, ...]: (0, 1, 2), tuple[int, int]: (1, 1), tuple[tuple[str, ...], ...]: (("here",),)}
        fields[field.name] = values[field.type]
    return kind(**fields | {"id": f"{asker}/7"})


@pytest.mark.parametrize("kind", TASKS)
def test_every_name_in_a_task_is_a_blob_that_it_reads_or_makes(kind: type[m.TaskBase]) -> None:
    task, names = a_task(kind), set[str]()
    for field in msgspec.structs.fields(kind):
        value = getattr(task, field.name)
        if field.name not in NO_BLOBS and field.type in (str, tuple[str, ...]):
            names.update([value] if isinstance(value, str) else value)
    assert set(task.reads) | set(task.makes) == names
    assert not set(task.reads) & set(task.makes)


@pytest.mark.parametrize("kind", TASKS)
def test_every_task_has_a_lane_a_purpose_and_an_asker(kind: type[m.TaskBase]) -> None:
    assert kind.lane in get_args(m.Lane) and kind.purpose in get_args(m.Purpose)
    assert [a_task(kind, asker).asker for asker in m.ASKERS] == list(get_args(m.Asker))


def test_the_simulator_knows_every_task() -> None:
    assert set(_WORK) == set(TASKS)
    assert set(SECONDS) | {m.RunForward, m.RunBackward, m.RunAudit} == set(TASKS)


def test_what_a_task_does_not_read_or_make_has_no_name() -> None:
    assert m.RunBackward("s/1", 0, 0, 0, "x", "", "").reads == ("x",)
    assert m.RunBackward("s/1", 0, 0, 0, "x", "", "").makes == ()
