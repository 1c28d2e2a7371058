"""Records of spot instances: both formats read alike, and what makes no sense is refused by its line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from shoal.sim.faults.preemption import Change, most, read, some

OURS = Path(__file__).parents[2] / "configs" / "traces" / "aws-g4dn-spot.csv"


def test_the_record_that_comes_with_shoal_is_the_one_its_page_describes() -> None:
    changes = read(OURS)
    assert sum(change.joins for change in changes) == 79
    assert sum(not change.joins for change in changes) == 74
    assert most(changes) == 24
    present, seconds = 0, 0.0
    for change, after in pairwise(changes):
        present += 1 if change.joins else -1
        seconds += present * (after.at_s - change.at_s)
    assert seconds / (changes[-1].at_s - changes[0].at_s) == pytest.approx(12.8, abs=0.05)


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("# a comment\n1000,add,a\n2000,add,b\n2500,remove,a\n")
    (tmp_path / "a.txt").write_text(
        '[1000, "add", {"nodes": ["a"]}]\n[1500, "no-op", {"nodes": []}]\n[2000, "add", {"nodes": ["b"]}]\n'
        '[2500, "remove", {"nodes": ["a"]}]\n'
    )
    assert read(tmp_path / "a.csv") == (Change(1.0, "a", True), Change(2.0, "b", True), Change(2.5, "a", False))
    assert read(tmp_path / "a.txt") == read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1000,add,a\n1000,add,a\n", "line 2: a is there already"),
        ("1000,remove,a\n", "line 1: a is not there"),
        ("1000,come,a\n", "line 1: '1000,come,a': wanted milliseconds"),
        ("-5,add,a\n", "line 1: -5.0 milliseconds"),
        ("nan,add,a\n", "line 1: nan milliseconds"),
        ('[5, "add", {"nodes": 3}]\n', "line 1: Expected"),
        ("2000,add,a\n1000,add,b\n", "not in order of time"),
        ("", "holds no change"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.csv") as refused:
        read(path)
    assert said in str(refused.value)


def test_a_smaller_cluster_keeps_whole_nodes() -> None:
    kept = some(read(OURS), 3)
    assert len({change.node for change in kept}) == 27  # of 79
    present: set[str] = set()
    for change in kept:
        assert change.joins != (change.node in present)
        (present.add if change.joins else present.remove)(change.node)
