"""How machines of a run find one another, for the people who start it: what the founder prints for guests, and what a guest's machine
finds at the addresses of its invite, before anything heavy starts.

For launcher.py and cli/join.py. What a peer learns later, when it has called, is in runtime/entry.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.config import Config
from shoal.core.messages import Peer
from shoal.launcher.process import spawn
from shoal.runtime.records.report import replace
from shoal.transport.addresses import AUTO, hosts, is_loopback

if TYPE_CHECKING:
    from shoal.transport.directory.directory import Directory, PeerRecord

ASK_S = 0.5  # between two look-ups of a run's peers
CONNECT_S = 4.0  # a kernel answers however busy its machine is; twice within this time TCP asks again
HOSTS = 4  # of one peer in an invite
OTHERS = 3  # further peers there
INVITE = "guests.invite"  # in the run's directory
PORT = "founder.port"  # there too
PORTS = range(20_000, 32_000, 3)  # with the next two each; systems take none of these for connections to others
_TCP = re.compile(r"/ip[46]/([^/]+)/tcp/(\d+)")
_REFUSED = (
    "refuses the connection: that machine is up, but nobody listens on TCP port {port}. The run has ended or was started again on another"
    " port (ask for a new invite), or that machine's firewall rejects the port"
)
_SILENT = "does not answer within {wait:g} s: a firewall on the way drops TCP port {port}, that machine is off, or that address is not its"
_NO_ROUTE = "cannot be reached ({error}): no way leads from here to that address; connect to its network, or ask for another invite"


def private(config: Config, here: int) -> Config:
    """The configuration of a founder's peer: one whose run has all its peers on this machine listens to this machine alone."""
    if config.network.host != AUTO or here < config.run.peers:
        return config
    return msgspec.structs.replace(config, network=msgspec.structs.replace(config.network, host="127.0.0.1"))


def founding(config: Config, directory: Path, number: int, warn: Callable[[str], None]) -> Config:
    """The configuration of the founder's peer with that number, from 0. The first one of a run that others may join listens on the same
    port in every session, beside the same key (`launch.PeerSpec.key`): invites of an earlier session go on leading to the run."""
    if number or config.network.port or is_loopback(config.network.host):
        return config
    port = _kept_port(config, directory / PORT, warn)
    return msgspec.structs.replace(config, network=msgspec.structs.replace(config.network, port=port))


def _kept_port(config: Config, file: Path, warn: Callable[[str], None]) -> int:
    from shoal.launcher import preflight  # imports numpy, and `shoal invite` needs none of this

    with contextlib.suppress(FileNotFoundError):
        text = file.read_text(errors="replace").strip()
        kept = int(text) if re.fullmatch(r"\d{1,5}", text) and 0 < int(text) < 65535 else 0
        if kept and not any(preflight.address(config, kept)):
            return kept
        warn(f"port {kept or text!r} of the session before is not free: invites of that time find this run no more")
    free = (port for port in random.sample(PORTS, len(PORTS)) if not any(preflight.address(config, port)))
    if port := next(free, 0):
        replace(file, f"{port}\n".encode())
    return port


def refuse_private(config: Config, addresses: Sequence[str]) -> None:
    """ValueError: nobody on another machine could use an invite with these addresses."""
    if config.network.host == AUTO and addresses and all(map(is_loopback, hosts(addresses))):
        raise ValueError(
            "this run listens to this machine alone (127.0.0.1), as all its peers were started here: an invite would be of no use. End"
            " it with Ctrl-C, and go on with: shoal run CONFIG --resume network.host=0.0.0.0"
        )


def serving(directory: Path) -> str:
    """What to do with a swarm whose stages are all served."""
    words = f'shoal generate {directory} "a few words", or shoal chat {directory}'
    return f"every stage is served; for texts, while this command lasts: {words}"


def reached(addresses: Sequence[str]) -> str:
    return ", ".join(hosts(addresses))


async def welcome(directory: Path, addresses: Sequence[str], missing: int) -> str:
    """What to do on the machines of the `missing` peers, with an invite for them."""
    file = directory / INVITE
    process = await spawn(  # a process of its own: it imports torch, which a launcher has no use for
        *(sys.executable, "-m", "shoal.cli.main", "invite", str(directory / "config.toml"), "--name", "guests"),
        *("--out", str(file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    waiting = f"waiting for {missing} peer{'s' if missing > 1 else ''} from other machines; this one is reached at {reached(addresses)}"
    if process.returncode:
        return f"{waiting}. No invite was made: {errors.decode(errors='replace').strip()}"
    return (
        f"{waiting}. There, with shoal installed:\n\n  shoal join -\n\nand paste this invite:\n\n  {file.read_text().strip()}\n\n"
        f"The invite is a secret, and an argument would show it to every user of that machine. It is in {file}, too: copied there,"
        f" shoal join @{INVITE}"
    )


def keep(directory: Path, invite: str) -> Path:
    """A guest's invite in its own directory, for the command that takes part again."""
    file = directory / INVITE
    write_secret(file, invite.strip())
    return file


def write_secret(file: Path, text: str) -> None:
    """Readable by its owner alone, also where there was a file that others could read."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
        os.fchmod(out.fileno(), 0o600)  # before it holds anything new
        out.truncate()
        out.write(f"{text}\n")


def few(addresses: Sequence[str], first: Sequence[str] = ()) -> tuple[str, ...]:
    """For an invite, which is to be short: `first`, one peer at all its hosts, and one address of each of some others in case that one has
    ended; those on other machines before those on its own."""

    def port(address: str) -> str:  # or libp2p's id
        return re.split("[:/]", address)[-1]

    left = [address for address in addresses if address not in first]
    same = [address for address in left if port(address) == port(left[0])][:HOSTS]
    here, others = hosts(same), dict[str, str]()
    for address in left:
        if port(address) != port(left[0]):
            others.setdefault(port(address), address)
    return (*first, *same, *sorted(others.values(), key=lambda each: hosts([each])[0] in here)[:OTHERS])


async def discovered(
    directory: Directory, own: Container[Peer], look_s: float, still_s: float, least: int = 1
) -> list[PeerRecord]:
    """Records of a run's peers, but one's own, by name: once `least` are known and no more turn up for `still_s`, or `look_s` are over."""
    records: dict[Peer, PeerRecord] = {}
    began_s = still_since_s = time.monotonic()
    while True:
        count = len(records)
        records |= {record.peer: record for record in await directory.peers() if record.peer not in own}
        now = time.monotonic()
        if len(records) != count:
            still_since_s = now
        if (len(records) >= least and now - still_since_s > still_s) or now - began_s > look_s:
            return sorted(records.values(), key=lambda record: record.peer)
        await asyncio.sleep(ASK_S)


def problems(addresses: Sequence[str]) -> list[str]:
    """Of each address of an invite what is in the way; [] when one can be connected to."""
    return asyncio.run(_problems(addresses))


async def _problems(addresses: Sequence[str]) -> list[str]:
    """Of each address; [] when one can be connected to, or is of a kind that only libp2p can call."""
    places = []
    for address in addresses:
        match = _TCP.match(address)
        host, _, port = (match[1], "", match[2]) if match else address.rpartition(":")
        if not port.isdigit() or "/" in host:
            return []
        places.append((host, int(port)))
    answers = await asyncio.gather(*(_problem(*place) for place in dict.fromkeys(places)))
    return [] if not all(answers) else list(answers)


async def _problem(host: str, port: int) -> str:
    """Why no connection can be made there; '' when one can."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"{host} {_SILENT.format(wait=CONNECT_S, port=port)}"
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            alone = ". 127.0.0.1 is this machine itself" if is_loopback(host) else ""
            return f"{host} {_REFUSED.format(port=port)}{alone}"
        return f"{host} {_NO_ROUTE.format(error=error.strerror or error)}"
    writer.close()
    return ""
