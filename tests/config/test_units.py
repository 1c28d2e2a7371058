"""Quantities with units, as people write them."""

from __future__ import annotations

import pytest

from shoal import units


@pytest.mark.parametrize(
    ("text", "ending", "value"),
    [
        ("200 Mbit/s", "_Bps", 25e6),
        ("200Mb/s", "_Bps", 25e6),
        ("200 Mbps", "_Bps", 25e6),
        ("25 MB/s", "_Bps", 25e6),
        ("1 GiB/s", "_Bps", 2.0**30),
        ("80 ms", "_s", 0.08),
        ("2 min", "_s", 120.0),
        ("1.5 h", "_s", 5400.0),
        ("-1 s", "_s", -1.0),
        ("24 GiB", "_bytes", 24 * 2.0**30),
        ("500 MB", "_bytes", 5e8),
        ("1e3 B", "_bytes", 1000.0),
        ("7", "_s", 7.0),
        (" .5 s ", "_s", 0.5),
    ],
)
def test_a_quantity_is_read_in_the_unit_of_its_name(text: str, ending: str, value: float) -> None:
    assert units.parse(text, ending) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "ending"),
    [("80 MB", "_s"), ("80 ms", "_Bps"), ("many", "_s"), ("", "_s"), ("200 Mbit", "_Bps"), ("1 2 s", "_s"), ("5 gib", "_bytes")],
)  # fmt: skip
def test_a_unit_that_does_not_fit_is_refused_with_an_example(text: str, ending: str) -> None:
    with pytest.raises(ValueError, match='try "'):
        units.parse(text, ending)


def test_the_ending_of_a_name_says_its_unit() -> None:
    assert [units.suffix(name) for name in ("heartbeat_s", "bandwidth_Bps", "blob_bytes", "steps")] == [
        "_s",
        "_Bps",
        "_bytes",
        "",
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1000, "1000 B"), (1 << 28, "256 MiB"), (2**50, "1024 TiB"), (3 * 2**10, "3 KiB")]
)
def test_an_exact_size_reads_back(count: int, text: str) -> None:
    assert units.exact_size(count) == text
    assert units.parse(text, "_bytes") == count


def test_durations_and_sizes_are_short_for_people() -> None:
    assert [units.duration(s) for s in (0.08, 4.2, 185, 3720)] == ["80 ms", "4.2 s", "3 min 05 s", "1 h 02 min"]
    assert [units.size(n) for n in (12, 2048, 3 << 20, 24 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "24.0 GiB"]


def test_a_duration_never_shows_sixty_seconds() -> None:
    assert units.duration(59.97) == "1 min 00 s"
    assert units.duration(0.9996) == "1.0 s"
