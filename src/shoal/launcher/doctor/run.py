"""What `shoal doctor INVITE` finds between this machine and a run: its version, its peers, who reaches whom, and how fast.

A visitor with a pass, as `shoal probe --run` is one: it takes no part. Whether this machine is reached from outside is asked with
the measurements that peers answer anyway (runtime/measure.py): a peer answers over a connection that it opens itself, so each
answer is a call back. They bound and ration what they answer; here three peers move MOST_BYTES each way. Where the run uses libp2p
only if TLS fails, TLS alone is tried first, so that it is known which of the two is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Iterator, Sequence

import msgspec

from shoal import build
from shoal.config import Config
from shoal.core.messages import Measured, Peer
from shoal.launcher import reach
from shoal.launcher.doctor.finding import Finding, Show, bad, good, graded, judged, skipped, warning
from shoal.runtime.entry import Entry
from shoal.runtime.measure import Meter
from shoal.transport.addresses import hosts, is_loopback
from shoal.transport.base import Incoming, Lost
from shoal.transport.directory.records import TTL_S, PeerRecord
from shoal.transport.emulated.shaped import Reachable
from shoal.transport.identity.invite import Invite
from shoal.transport.identity.passes import date
from shoal.units import duration

ADDRESSES = "invite's addresses"
PEERS = 3  # that are measured, the first that answer
ASKED = 8  # to call back: those with the newest records, as some may have ended
MOST_BYTES = 4 << 20  # of one transfer
LOOK_S = 15.0  # for peers to be found
STILL_S = 2.0  # no other peer has been found for so long
ANSWER_S = 5.0  # for a call back; asked twice
SPEED_Bps = (0.0, 125_000.0)  # a warning below 1 Mbit/s
AHEAD_S, STALE_S = 3.0, 40.0  # by which a record is newer than this clock; older, as peers renew theirs every 20 s
WRONG_S = 60.0  # beyond it peers take one another's records for expired
SKEW_S = 60.0


class Visit(msgspec.Struct, kw_only=True):
    """What came of one visit."""

    transport: str
    records: list[PeerRecord] = []
    asked: list[Peer] = []
    answered: list[Peer] = []
    links: list[tuple[Peer, Measured, Measured]] = []  # peer; to it, from it
    words: str = ""  # why there was no answer
    seen: str = ""  # this machine's address, as peers see it
    own: PeerRecord | None = None
    multiaddrs: tuple[str, ...] = ()  # as libp2p's daemon reports them


def checks_before(invite: Invite, now: float) -> Iterator[Finding]:
    """Of the invite alone, and of its addresses."""
    until = f"until {date(invite.grant.expires)}"
    detail = f"to {invite.title}, for {invite.grant.peers} peers at a time, {until}"
    if invite.grant.ends_s <= now:
        yield warning(
            "invite",
            f"{detail}, which is over",
            "it counts only if the run has renewed it since; else ask for a new one",
        )
    else:
        yield good("invite", detail)
    if now < invite.grant.issued - SKEW_S:
        late = duration(invite.grant.issued - now)
        yield bad("clock and invite", f"the invite was made {late} from now, by this clock", "set this machine's clock")
    yield from judged(ADDRESSES, reach.problems(invite.addresses), ", ".join(invite.addresses) + " can be called")


async def checks(config: Config, invite: Invite, show: Show) -> None:
    """Of the run's peers."""
    visit, own = Visit(transport=""), set[Peer]()
    for transport in ("tls", "auto") if config.network.transport == "auto" else (config.network.transport,):
        network = msgspec.structs.replace(config.network, transport=transport)
        try:
            visit = await visited(msgspec.structs.replace(config, network=network), invite, own)
        except (ValueError, OSError) as error:
            show(bad("peers", str(error)))
            return
        if visit.answered or not visit.records:
            break
    for finding in (*found_peers(visit, invite), clock(visit.records, time.time()), *reachability(visit)):
        show(finding)
    alone = all(map(is_loopback, hosts(invite.addresses)))
    for finding in ways(visit, config.network.transport, alone):
        show(finding)
    for finding in speeds(visit.links):
        show(finding)


def found_peers(visit: Visit, invite: Invite) -> Iterator[Finding]:
    count = len(visit.records)
    if count:
        yield good("peers", f"{count} peer{'s' * (count > 1)} of {invite.title} found")
    else:
        advice = "ask for a new invite; check this machine's clock, too: records of peers count for 90 s"
        yield bad("peers", visit.words or "none found", advice)


def clock(records: Sequence[PeerRecord], now: float) -> Finding:
    """This clock beside those of peers: each writes into its record when it expires, which is TTL_S after it was written."""
    if not records:
        return skipped("clock and peers", "no peer was found")
    age_s = now - max(record.expires_s for record in records) + TTL_S
    if -AHEAD_S <= age_s <= STALE_S:
        return good(
            "clock and peers", "the same within some seconds" if age_s < TTL_S / 4 else f"the same within {STALE_S:g} s"
        )
    words = f"at least {duration(-age_s)} behind theirs" if age_s < 0 else f"up to {duration(age_s)} ahead of theirs"
    detail = f"this machine's is {words}"
    advice = "set it, by NTP: beyond a minute peers do not find one another"
    return (
        bad("clock and peers", detail, advice) if abs(age_s) > WRONG_S else warning("clock and peers", detail, advice)
    )


def reachability(visit: Visit) -> Iterator[Finding]:
    name = "reached from outside"
    count = f"{len(visit.answered)} of {len(visit.asked)} peers that were asked have called back"
    if not visit.records:
        yield skipped(name, "no peer was found that could call back")
    elif not visit.answered:
        yield bad(name, visit.words or "no peer calls back", "then `shoal doctor` again")
    elif visit.transport == "tls":
        yield good(name, f"{count}, over TLS")
    else:
        advice = "open or forward network.port for direct calls, which are faster"
        yield warning(name, f"{count}, over libp2p alone", advice)


def ways(visit: Visit, transport: str, alone: bool) -> Iterator[Finding]:
    """What stands between this machine and the others, and whether libp2p gets through it. `transport`: the run's."""
    if alone or visit.own is None or not _outside(visit.seen):
        reason = (
            "the run is on this machine alone" if alone else "no peer has said from where this machine's calls arrive"
        )
        yield from (skipped(name, reason) for name in ("router (NAT)", "relay", "hole punching"))
        return
    direct = bool(visit.answered) and visit.transport == "tls"
    if visit.seen in visit.own.hosts:
        yield good(
            "router (NAT)", f"none that translates addresses: peers see {visit.seen}, an address of this machine"
        )
    elif direct:
        yield good("router (NAT)", f"peers see {visit.seen}, a router's address, and it lets their calls through")
    else:
        advice = "forward network.port on the router, or let the run use network.transport=auto"
        yield warning(
            "router (NAT)", f"peers see {visit.seen}, a router's address, and it keeps their calls out", advice
        )
    if transport == "tls":
        yield from (
            skipped(name, "the run's network.transport = 'tls' uses none") for name in ("relay", "hole punching")
        )
    elif direct:
        yield from (
            skipped(name, "not needed: peers reach this machine directly") for name in ("relay", "hole punching")
        )
    else:
        yield from _through_libp2p(visit)


def _through_libp2p(visit: Visit) -> Iterator[Finding]:
    """What the addresses that the daemon reports tell."""
    circuits = [address for address in visit.multiaddrs if "/p2p-circuit" in address]
    if circuits:
        yield good("relay", f"libp2p's daemon holds {len(circuits)} address(es) at relays of the run")
        yield good("hole punching", "possible: libp2p tries it over the relay; the daemon does not report the outcome")
        return
    called = bool(visit.answered)
    detail = "none yet; peers that this machine has called answer over that connection" if called else "none"
    advice = "two machines without an open port need one: a peer of the run on a public address, and minutes"
    yield warning("relay", detail, advice)
    yield warning("hole punching", "not possible without a relay", "as for the relay")


def speeds(links: Sequence[tuple[Peer, Measured, Measured]]) -> Iterator[Finding]:
    for peer, up, down in links:
        name = f"speed to {peer[:6]}"
        if up.reason or down.reason:
            yield warning(name, f"not measured: {up.reason or down.reason}", "try again when that peer is less busy")
            continue
        rates = [link.bandwidth_Bps for link in (up, down)]
        detail = f"{_mbit(rates[0])} up, {_mbit(rates[1])} down, {1e3 * up.delay_s:.3g} ms one way"
        yield graded(
            name,
            min(rates),
            SPEED_Bps,
            detail,
            "slow for tensors: network.activations and .averaging make them smaller",
        )
    if not links:
        yield skipped("speed", "no peer has called back")


async def visited(config: Config, invite: Invite, own: set[Peer]) -> Visit:
    """`own`: names of this visitor's earlier visits, whose records are there for a while; its name is added."""
    visit = Visit(transport=config.network.transport)
    messages: list[str] = []
    async with build.operator(config, invite, tell=messages.append) as (transport, directory):
        meter, entry = Meter(transport), Entry(directory, invite.addresses)
        receiving = asyncio.create_task(_receive(transport, meter, entry))
        try:
            own.add(transport.name)
            await directory.announce()  # peers answer over connections of their own
            visit.records = await reach.discovered(directory, own, LOOK_S, STILL_S)
            newest = sorted(visit.records, key=lambda record: -record.expires_s)
            visit.asked = [record.peer for record in newest[:ASKED]]
            answers = await asyncio.gather(*(_calls_back(meter, peer) for peer in visit.asked))
            visit.answered = [peer for peer, answer in zip(visit.asked, answers, strict=True) if answer]
            membership = directory.membership
            visit.own, visit.seen = directory.own, membership.seen
            entry.see(membership.seen)  # as a router's address, which it adds to those that are announced
            visit.words = entry.words([record.peer for record in visit.records])
            visit.multiaddrs = (*directory.addresses, *directory.own.multiaddrs)
            for peer in visit.answered[:PEERS]:  # one after the other, so that they do not share the line
                up = await meter.link(peer, MOST_BYTES)
                ((_, down),) = await meter.ask([(peer, (transport.name,))], MOST_BYTES)
                visit.links.append((peer, up, down))
        finally:
            receiving.cancel()
    return visit


async def _receive(transport: Reachable, meter: Meter, entry: Entry) -> None:
    while True:
        item = await transport.receive()
        if isinstance(item, Lost):
            entry.failed(item.peer, item.reason)
        elif isinstance(item, Incoming):
            meter.takes(item)  # what peers ask a newcomer is nothing to a visitor


async def _calls_back(meter: Meter, peer: Peer) -> bool:
    for _ in range(2):  # the first message may be lost: the peer must learn the address to answer to
        with contextlib.suppress(TimeoutError):
            await meter.ping(peer, patience_s=ANSWER_S)
            return True
    return False


def _outside(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _mbit(rate_Bps: float) -> str:
    return f"{8e-6 * rate_Bps:.4g} Mbit/s"
