"""So much a second and so much at once, for each and for all; strangers fill no log."""

from __future__ import annotations

import logging

import pytest

from shoal.transport import budget
from shoal.transport.budget import Allowance, Budget, Budgets, Warnings, address_group


def test_a_bucket_empties_at_once_and_fills_with_time() -> None:
    one = Budget(Allowance(per_s=2.0, at_once=10.0))
    assert [one.take(100.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert not one.take(100.4) and one.take(100.5)
    assert one.left(1000.0) == 10.0
    assert one.take(1000.0, 50.0), "what is larger than the bucket passes when that is full"
    assert not one.take(1010.0)


def test_a_debt_is_told_in_seconds() -> None:
    one = Budget(Allowance(per_s=10.0, at_once=20.0))
    one.spend(0.0, 20.0)
    assert one.debt_s(0.0) == 0.0
    one.spend(0.0, 5.0)
    assert one.debt_s(0.0) == 0.5 and one.debt_s(0.4) == pytest.approx(0.1) and one.debt_s(0.6) == 0.0


def test_one_who_asks_for_much_leaves_the_others_theirs_until_all_is_used() -> None:
    many = Budgets(each=Allowance(1.0, 10.0), total=Allowance(5.0, 25.0))
    assert sum(many.take("greedy", 0.0) for _ in range(1000)) == 10
    assert all(many.take("other", 0.0) for _ in range(10))
    assert sum(many.take(f"name {number}", 0.0) for number in range(100)) == 5, "names are free: all have one bound"


def test_names_that_are_free_take_no_memory_without_end() -> None:
    many = Budgets(each=Allowance(1.0, 1.0), total=Allowance(1e9, 1e9))
    for number in range(3 * budget.NAMES):
        many.take(number, 0.0)
    assert len(many) <= budget.NAMES


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_address_stands_for_all_that_one_person_has(address: str, place: str) -> None:
    assert address_group(address) == place


def test_the_first_warnings_are_told_in_full_then_one_line_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    warnings = Warnings(logging.getLogger("strangers"))
    for number in range(10_000):
        warnings.warn("refused", f"refused number {number}", now=number * 0.005)  # 50 s
    warnings.warn("another kind", "something else", now=50.0)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[: budget.FIRST] == [f"refused number {number}" for number in range(budget.FIRST)]
    assert len(texts) <= budget.FIRST + 50 / budget.SUMMARY_S + 1
    assert texts[-1] == "something else"
    counts = [int(text.split()[1]) for text in texts if "more in" in text]
    assert sum(counts) >= 7_900, "what is kept back is counted"
