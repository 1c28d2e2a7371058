"""Which addresses of this machine are announced, and that a peer's hosts are tried in turn."""

from __future__ import annotations

import time

import pytest

from shoal.core.messages import Peer
from shoal.runtime.entry import Entry
from shoal.transport import addresses
from shoal.transport.directory.records import PeerRecord
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.tls import Tls


def test_an_address_that_was_chosen_is_taken_as_it_is() -> None:
    assert addresses.listening("192.0.2.9", ["127.0.0.1"]) == "192.0.2.9"
    assert addresses.announced("192.0.2.9", ["198.51.100.1"]) == ("192.0.2.9",)


def test_among_peers_of_one_machine_nobody_listens_to_others() -> None:
    assert addresses.listening("auto", ["127.0.0.1"]) == "127.0.0.1"
    assert addresses.listening("auto", ["127.0.0.1", "192.0.2.1"]) == "0.0.0.0"
    assert addresses.listening("auto", ["2001:db8::1"]) == "::"


def test_of_all_interfaces_no_loopback_is_announced_while_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_of_interfaces", lambda: ["127.0.0.1", "169.254.3.4", "10.1.2.3", "10.8.0.2"])
    monkeypatch.setattr(addresses, "toward", lambda host: "10.8.0.2" if host.startswith("10.8.") else "")
    assert addresses.announced("0.0.0.0") == ("10.1.2.3", "10.8.0.2")
    assert addresses.announced("0.0.0.0", ["127.0.0.1", "10.8.0.1"]) == ("10.8.0.2", "10.1.2.3"), "the run's way first"
    monkeypatch.setattr(addresses, "_of_interfaces", lambda: ["127.0.0.1"])
    assert addresses.announced("0.0.0.0") == ("127.0.0.1",), "a machine without a network"


def test_hosts_are_read_from_both_kinds_of_bootstrap_addresses() -> None:
    both = (
        "192.0.2.1:4711",
        "/ip4/192.0.2.2/tcp/4712/p2p/12D3",
        "/ip6/2001:db8::3/tcp/1/p2p/12D3",
        "192.0.2.1:4713",
        "/p2p/12D3",
    )
    assert addresses.hosts(both) == ("192.0.2.1", "192.0.2.2", "2001:db8::3")


def test_every_host_of_a_peer_is_tried_once_and_the_one_that_answers_is_kept() -> None:
    identity, peer = Identity.new(), Identity.new().name
    invite = read_invite(Authority.new().invite((), time.time() + 3600), time.time())
    tls = Tls(identity, "127.0.0.1", 0, invite.membership(identity))
    place = ("192.0.2.1", 7, "192.0.2.2", "192.0.2.3")
    tls.learn(peer, place)
    assert tls.failed(peer, ("192.0.2.1", 7), "no answer") and tls.route(peer) == ("192.0.2.2", 7)
    assert tls.failed(peer, ("192.0.2.1", 7), "the other stream") and tls.route(peer) == ("192.0.2.2", 7)
    tls.reached(peer, ("192.0.2.2", 7))
    tls.learn(peer, place)
    assert tls.route(peer) == ("192.0.2.2", 7), "announced again"
    assert tls.failed(peer, ("192.0.2.2", 7), "") and tls.failed(peer, ("192.0.2.3", 7), "")
    assert not tls.failed(peer, ("192.0.2.1", 7), ""), "none is left"
    tls.learn(peer, ("192.0.2.9", 7))
    assert tls.route(peer) == ("192.0.2.9", 7), "it has moved"
    assert not tls.failed(peer, ("192.0.2.9", 7), "")


class Announced:
    own = PeerRecord(run="r", peer="me", host="192.168.1.7", port=4711, addresses=("10.8.0.2", "/p2p/x"))


def test_an_address_that_only_others_see_is_announced_too() -> None:
    directory = Announced()
    entry = Entry(directory, ("192.0.2.1:80",))
    for known in ("", "10.8.0.2", "127.0.0.1", "no address"):
        assert not entry.see(known)
    assert entry.see("203.0.113.5") and not entry.see("203.0.113.5")
    assert directory.own.hosts == ("192.168.1.7", "203.0.113.5", "10.8.0.2")
    assert entry.see("203.0.113.6") and "203.0.113.5" not in directory.own.addresses, "the router has another one now"
    assert directory.own.multiaddrs == ("/p2p/x",)


def test_a_joiner_reads_whether_it_is_the_invite_the_way_its_firewall_or_its_router() -> None:
    known: list[Peer] = ["ann"]
    entry = Entry(Announced(), ("192.0.2.1:80",))
    assert "no peer of the run answers this invite at 192.0.2.1:80" in entry.words([])
    assert "open TCP port 4711 in this machine's firewall" in entry.words(known)
    entry.see("203.0.113.5")
    assert "203.0.113.5, a router's address, and it has 192.168.1.7" in entry.words(known)
    entry.failed("ann", "timed out")
    assert "ann of the run is found, but cannot be reached from here (timed out)" in entry.words(known)
    entry.heard = True
    assert "no leader admits this one yet" in entry.words(known)
