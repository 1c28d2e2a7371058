"""One host of wan_nat.py: calls every other peer of a run through the configured transport, until each has answered. Ends with its lab.

python caller.py FOLDER HOST                joins by FOLDER/invite, once that is there, and prints one JSON line per peer that has
                                            answered: its name, the seconds since the start, and over what
python caller.py FOLDER HOST founder        is what the invite leads to: its addresses are written to FOLDER/addresses
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from shoal import build
from shoal import config as configuration
from shoal.core.messages import Refused
from shoal.transport.base import Incoming
from shoal.transport.daemon import Daemon, multiaddr, protobuf, public_key
from shoal.transport.identity.identity import key_id, key_id_of
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.relay import RelayRoute

AGAIN_S = 0.5  # between two calls of a peer that has not answered


def routes(transport: Any) -> Any:
    """The carrier's table of both kinds."""
    return transport._both


async def connections(daemon: Daemon) -> dict[str, str]:
    """By key: over what this daemon is connected to that peer."""
    pb = protobuf()
    reply = await daemon.ask(pb.Request(type=pb.Request.LIST_PEERS), 5.0)
    result = {}
    for peer in reply.peers:
        text = " ".join(str(multiaddr(raw)) for raw in peer.addrs)
        result[key_id(public_key(peer.id))] = "relayed" if "p2p-circuit" in text else "connection"
    return result


async def call(folder: Path, host: str, founder: bool) -> None:
    start_s = time.monotonic()
    config = configuration.load(None, ["network.transport=auto", "network.discovery=dht", "network.host=0.0.0.0"])
    if founder:
        authority = Authority.load(folder / "authority.key")
        text = authority.invite((), time.time() + 3600, "nat", b"{}")
    else:
        while not (folder / "invite").exists():
            await asyncio.sleep(0.05)
        start_s = time.monotonic()
        text = (folder / "invite").read_text()
    async with build.operator(config, read_invite(text, time.time())) as (transport, directory):
        print(json.dumps({"started_s": time.monotonic() - start_s}), flush=True)
        (folder / f"{host}.name").write_text(transport.name)
        await directory.announce()
        if founder:
            invite = authority.invite(directory.addresses, time.time() + 3600, "nat", b"{}", peers=64)
            (folder / ".invite").write_text(invite)
            (folder / ".invite").rename(folder / "invite")
        await asyncio.gather(look_up(directory), ask(transport, folder), answer(transport, start_s))


async def look_up(directory: Any) -> None:
    announced = directory.own.addresses
    while True:
        await directory.peers()
        if directory.own.addresses != announced:
            announced = directory.own.addresses
            await directory.announce()
        await asyncio.sleep(AGAIN_S)


answered: set[str] = set()


async def ask(transport: Any, folder: Path) -> None:
    while True:
        for file in folder.glob("*.name"):
            name = file.read_text()
            if name and name != transport.name and name not in answered:
                transport.send(name, Refused(0, 0, 0, 0, 0, False, ""))
        await asyncio.sleep(AGAIN_S)


async def answer(transport: Any, start_s: float) -> None:
    while True:
        item = await transport.receive()
        if not isinstance(item, Incoming):
            continue
        index = item.message.index
        if index == 0:
            transport.send(item.peer, Refused(0, 0, 1, 0, 0, False, ""))
        elif item.peer not in answered:
            answered.add(item.peer)
            both = routes(transport)
            over = "direct"
            if isinstance(both.route(item.peer), RelayRoute):
                over = "relayed"
            elif not isinstance(both.route(item.peer), tuple):
                over = "libp2p " + (await connections(both.libp2p.daemon)).get(key_id_of(item.peer), "?")
            print(json.dumps({"peer": item.peer, "s": time.monotonic() - start_s, "over": over}), flush=True)


if __name__ == "__main__":
    folder, host, *words = sys.argv[1:]
    asyncio.run(call(Path(folder), host, bool(words)))
