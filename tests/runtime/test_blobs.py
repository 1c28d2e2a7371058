"""What is kept beyond memory lies on disk, is the same bytes, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.runtime.tasks import blobs, coding
from shoal.runtime.tasks.blobs import SMALL, Blobs
from shoal.transport.base import Blob

VALUES = SMALL  # 4 bytes each


def a_table(tmp_path: Path, most: int = 2 * 4 * VALUES) -> tuple[Blobs, list[Callable[[], None]]]:
    """Room for two tensors; what would be written is collected."""
    works: list[Callable[[], None]] = []
    return Blobs(most, tmp_path, works.append), works


def fill(table: Blobs, count: int) -> list[torch.Tensor]:
    tensors = [torch.randn(64, VALUES // 64) for _ in range(count)]
    for number, tensor in enumerate(tensors):
        table.put(f"b{number}", tensor)
    return tensors


def test_the_oldest_go_to_disk_and_are_the_same(tmp_path: Path) -> None:
    table, works = a_table(tmp_path)
    tensors = fill(table, 5)
    assert len(works) == 3 and table.memory_bytes == 5 * 4 * VALUES
    for work in works:
        work()
    assert (table.memory_bytes, table.disk_bytes) == (2 * 4 * VALUES, 3 * 4 * VALUES)
    for number, tensor in enumerate(tensors):
        held = table.get(f"b{number}")
        assert isinstance(held, torch.Tensor) and torch.equal(held, tensor)
        assert (held.data_ptr() == tensor.data_ptr()) is (number > 2), "the youngest stay where they are"
    for number in range(5):
        table.drop(f"b{number}")
    assert (table.memory_bytes, table.disk_bytes) == (0, 0)
    assert (table.most_memory_bytes, table.most_disk_bytes) == (5 * 4 * VALUES, 3 * 4 * VALUES)
    assert list(tmp_path.iterdir()) == [], "files without a name: nothing is left behind by a SIGKILL"


@pytest.mark.parametrize("how", ["bf16", "int8", "int4"])
def test_what_is_encoded_goes_as_it_is(how: str, tmp_path: Path) -> None:
    table, works = a_table(tmp_path, most=1)
    tensor = torch.randn(4, 512, 256)
    code = coding.packed(tensor, how)
    table.put("b", code)
    works[0]()
    held = table.get("b")
    assert table.disk_bytes == coding.nbytes(code) and isinstance(held, Blob | torch.Tensor)
    assert torch.equal(coding.plain(held), coding.plain(code))


def test_what_is_dropped_while_it_is_written_is_gone(tmp_path: Path) -> None:
    table, works = a_table(tmp_path)
    fill(table, 4)
    table.drop("b0")
    works[0]()
    write = table._mapped

    def meanwhile(held: coding.Held) -> coding.Held:
        table.drop("b1")
        return write(held)

    table._mapped = meanwhile  # type: ignore[method-assign]
    works[1]()
    assert table.get("b0") is None and table.get("b1") is None
    assert (table.memory_bytes, table.disk_bytes, len(table)) == (2 * 4 * VALUES, 0, 2)


def test_small_ones_stay_and_nothing_goes_where_none_should(tmp_path: Path) -> None:
    table, works = a_table(tmp_path, most=1)
    table.put("small", torch.zeros(SMALL // 4 - 1))
    assert works == []
    assert (table.memory_bytes, table.disk_bytes) == (SMALL - 4, 0), "what stays is counted too"
    table, works = a_table(tmp_path, most=0)
    fill(table, 9)
    assert works == [] and table.memory_bytes == 9 * 4 * VALUES


def test_a_full_disk_costs_nothing_but_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(**_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blobs.tempfile, "TemporaryFile", full)
    table, works = a_table(tmp_path)
    tensors = fill(table, 4)
    for work in works:
        work()
    more = fill(table, 9)
    assert "No space left on device" in caplog.text and len(works) == 2, "tried, told, and left alone"
    held = table.get("b1")
    assert isinstance(held, torch.Tensor) and torch.equal(held, more[1]) and tensors
    assert table.memory_bytes == 9 * 4 * VALUES, "what was put twice counts once"


def test_a_reader_beside_the_writer_always_sees_the_tensor(tmp_path: Path) -> None:
    thread: list[threading.Thread] = []

    def later(work: Callable[[], None]) -> None:
        thread.append(threading.Thread(target=work))
        thread[-1].start()

    table = Blobs(1, tmp_path, later)
    for number in range(20):
        tensor = torch.full((VALUES,), float(number))
        table.put("b", tensor)
        for _ in range(20):
            held = table.get("b")
            assert isinstance(held, torch.Tensor) and held.sum() == number * VALUES
        thread[-1].join()
        table.drop("b")
    assert table.disk_bytes == 0 and len(os.listdir(tmp_path)) == 0
