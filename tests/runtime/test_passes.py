"""A peer's gate: the authority's list reaches everybody, whoever is on it is shut out, and people are warned long before a pass ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shoal.core.messages import Passes, PassesRequest, StandingRequest
from shoal.runtime import passes
from shoal.runtime.passes import Gate
from shoal.transport.base import Incoming, Lost
from shoal.transport.emulated.memory import Hub, MemoryTransport
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, Invite, read_invite

DAY_S = 86400.0
NOW = 1_800_000_000.0
RUN = Authority.new()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "SPREAD_S", 0.01)
    monkeypatch.setattr(passes, "RESEND_S", 0.0)


def an_invite(days: float = 30) -> Invite:
    return read_invite(RUN.invite((), NOW + days * DAY_S, issued=NOW), 0.0)


def a_list(version: int, *revoked: str) -> bytes:
    return RUN.pass_list(version, (), tuple(RUN.revoked(what, NOW) for what in revoked))


class Peer:
    """A gate, and the little of a node that it needs."""

    def __init__(self, hub: Hub, invite: Invite) -> None:
        self.now = NOW
        self.identity = Identity.new()
        self.membership = invite.membership(self.identity, lambda: self.now)
        self.name = self.identity.name
        self.transport = MemoryTransport(hub, self.name)
        self.gate = Gate(self.transport, self.membership)
        self.warnings: list[str] = []
        self.refused: list[str] = []
        self.passed: list[Incoming] = []
        self.changes = 0
        self.gate.notices.show, self.gate.refused, self.gate.changed = (
            self.warnings.append,
            self.refused.append,
            self._changed,
        )

    def _changed(self) -> None:
        self.changes += 1

    async def receive(self) -> None:
        while True:
            item = await self.transport.receive()
            if isinstance(item, Lost):
                self.gate.lost(item.peer, item.reason)
            elif not self.gate.takes(item):
                self.passed.append(item)


@asynccontextmanager
async def together(*peers: Peer, knowing: Callable[[Peer], tuple[str, ...]]) -> Any:
    for peer in peers:
        await peer.transport.start()
        peer.gate.known = lambda peer=peer: knowing(peer)  # type: ignore[misc]
    tasks = [asyncio.create_task(work) for peer in peers for work in (peer.receive(), peer.gate.serve())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in peers:
            await peer.transport.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_list_told_to_one_peer_reaches_all_at_once_and_shuts_out_who_is_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "SPREAD_S", 3600.0)

    async def story() -> None:
        hub, invite, bad = Hub(), an_invite(), an_invite()
        peers = [Peer(hub, invite) for _ in range(40)]
        rogue = Peer(hub, bad)
        names = tuple(peer.name for peer in (*peers, rogue))
        async with together(*peers, rogue, knowing=lambda _: names):
            peers[0].gate.hear(a_list(3, bad.grant.id))
            await until(lambda: all(peer.membership.standing.version == 3 for peer in peers))
            await until(lambda: all(peer.changes for peer in peers))
            rogue.transport.send(peers[1].name, StandingRequest())
            peers[2].transport.send(peers[1].name, StandingRequest())
            await until(lambda: peers[1].passed)
            assert [item.peer for item in peers[1].passed] == [peers[2].name]

    asyncio.run(story())


def test_whoever_was_away_when_a_list_went_round_hears_of_it_all_the_same() -> None:
    async def story() -> None:
        hub, invite = Hub(), an_invite()
        ann, bob = Peer(hub, invite), Peer(hub, invite)
        here: list[str] = []
        async with together(ann, bob, knowing=lambda peer: tuple(here) if peer is ann else ()):
            ann.gate.hear(a_list(5))
            await until(lambda: ann.changes)  # it has told whom it knew: nobody
            here.append(bob.name)  # who knows nobody, and does not speak
            await until(lambda: bob.membership.standing.version == 5)

    asyncio.run(story())


def test_a_newcomer_learns_the_list_when_it_first_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "SPREAD_S", 3600.0)

    async def story() -> None:
        hub, invite = Hub(), an_invite()
        ann, bob = Peer(hub, invite), Peer(hub, invite)
        ann.membership.take_list(a_list(5))
        async with together(ann, bob, knowing=lambda _: ()):
            bob.transport.send(ann.name, StandingRequest())
            await until(lambda: bob.membership.standing.version == 5)
            assert ann.passed and not bob.passed, "what is about passes reaches no machine"

    asyncio.run(story())


def test_a_forged_list_is_not_taken_and_an_old_one_changes_nothing() -> None:
    async def story() -> None:
        hub, invite = Hub(), an_invite()
        ann, bob = Peer(hub, invite), Peer(hub, invite)
        forged = Authority.new().pass_list(9, (), (RUN.revoked(invite.grant.id, NOW),))
        async with together(ann, bob, knowing=lambda _: ()):
            for version, data in ((2, a_list(2)), (1, a_list(1, invite.grant.id)), (9, forged), (10, a_list(10))):
                bob.transport.send(ann.name, Passes(version, data))
            bob.transport.send(ann.name, StandingRequest())
            await until(lambda: ann.passed)
            assert ann.membership.standing.version == 2 and not ann.refused, "nor is a liar listened to again"

    asyncio.run(story())


def test_nobody_has_a_large_list_sent_for_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "RESEND_S", 3600.0)
    monkeypatch.setattr(passes, "SPREAD_S", 3600.0)

    async def story() -> None:
        hub, invite = Hub(), an_invite()
        ann, bob = Peer(hub, invite), Peer(hub, invite)
        ann.membership.take_list(a_list(5))
        async with together(ann, knowing=lambda _: ()):
            await bob.transport.start()
            for _ in range(50):
                bob.transport.send(ann.name, PassesRequest(0))
            bob.transport.send(ann.name, StandingRequest())
            await until(lambda: ann.passed)
            bob.transport.send(bob.name, StandingRequest())
            got = []
            while not isinstance((item := await bob.transport.receive()).message, StandingRequest):
                got.append(item.message)
            assert sum(isinstance(message, Passes) for message in got) == 1
            await bob.transport.close()

    asyncio.run(story())


def test_a_peer_that_is_revoked_hears_it_from_the_list_and_ends() -> None:
    async def story() -> None:
        hub, invite = Hub(), an_invite()
        ann = Peer(hub, invite)
        async with together(ann, knowing=lambda _: ()):
            ann.gate.hear(a_list(1, ann.identity.key_id))
            await until(lambda: ann.refused)
            assert "its key" in ann.refused[0] and "revoked by the run's authority" in ann.refused[0]

    asyncio.run(story())


@pytest.mark.parametrize(("days", "warned"), [(23.9, False), (24.1, True), (30.5, True)])
def test_people_are_warned_a_fifth_of_the_lifetime_before_a_pass_ends(days: float, warned: bool) -> None:
    ann = Peer(Hub(), an_invite(days=30))
    ann.now = NOW + days * DAY_S
    for _ in range(3):  # as serve() does every few seconds
        ann.gate._check_own_pass(3600.0)
    assert len(ann.warnings) == int(warned) and not ann.refused
    assert not warned or "`shoal invite CONFIG --renew`" in ann.warnings[0]


def test_a_renewed_pass_is_warned_of_again_only_before_its_own_end() -> None:
    async def story() -> None:
        invite = an_invite(days=30)
        ann = Peer(Hub(), invite)
        ann.now = NOW + 25 * DAY_S
        async with together(ann, knowing=lambda _: ()):
            await until(lambda: len(ann.warnings) == 1)
            longer = RUN.renewed(invite.grant, NOW + 25 * DAY_S, NOW + 55 * DAY_S)
            ann.gate.hear(RUN.pass_list(1, (longer,), ()))
            await until(lambda: ann.changes)
            ann.now = NOW + 50 * DAY_S
            await until(lambda: len(ann.warnings) == 2)

    asyncio.run(story())


def test_a_newcomer_whose_invite_is_over_and_was_not_renewed_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PATIENCE_S", 0.0)

    async def story() -> None:
        ann, bob = Peer(Hub(), an_invite(days=30)), Peer(Hub(), an_invite(days=30))
        ann.now = bob.now = NOW + 31 * DAY_S
        ann.gate.inside = lambda: False  # bob has been let in before: it stays as long as it is connected
        async with together(ann, bob, knowing=lambda _: ()):
            await until(lambda: ann.refused and bob.warnings)
            assert "expired at 2027-02-14" in ann.refused[0] and "new invite" in ann.refused[0]
            assert not bob.refused

    asyncio.run(story())


def test_why_others_refuse_is_told_once_for_each_reason() -> None:
    gate = Peer(Hub(), an_invite()).gate
    reasons: list[str] = []
    gate.notices.show = reasons.append
    for number in range(100):
        gate.lost("a", "it refuses: its pass is expired")
        gate.lost("a", "connection refused")
        gate.lost("b", f"it refuses: {number}")
    assert reasons[0] == "a: it refuses: its pass is expired" and len(reasons) == passes.REFUSALS


def test_messages_about_passes_are_bounded() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(["Passes", 1, b"x" * (1 << 20)], Passes)
