"""What a peer's name says, in pure code (core/names.py)."""

from __future__ import annotations

import pytest

from shoal.core.names import UNLIMITED, invite_of, key_of, limit_of


def test_a_name_says_key_invite_and_limit() -> None:
    name = "abcd.17a9.wxyz.16"
    assert (key_of(name), invite_of(name), limit_of(name)) == ("abcd", "wxyz", 16)


def test_peers_of_one_invite_share_its_id_whatever_key_they_hold() -> None:
    assert invite_of("aaaa.1.wxyz.2") == invite_of("bbbb.1.wxyz.2") != invite_of("aaaa.1.other.2")
    assert key_of("aaaa.1.wxyz.2") == key_of("aaaa.2.wxyz.2") != key_of("bbbb.1.wxyz.2")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("p3", "p3"),
        ("p3.1", "p3"),
        (".1", ".1"),
        ("a.1.b.", "a.1.b"),
        ("a.1.b.-4", "a.1.b"),
        ("a.1.b.²", "a.1.b"),
        ("", ""),
    ],
)
def test_any_other_name_is_a_peer_with_an_invite_of_its_own(name: str, key: str) -> None:
    assert (key_of(name), invite_of(name), limit_of(name)) == (key, key, UNLIMITED)


def test_a_limit_beyond_any_run_is_no_limit() -> None:
    assert limit_of("a.1.b." + "9" * 60) == UNLIMITED
