"""Which addresses of this machine others can use: those of its interfaces, the one on the way to a given host first.

For build.py, daemon.py and tls.py (`network.host = "auto"`), launcher and commands. What a router makes of an address is known to the
other side alone (runtime/entry.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Iterable

AUTO = "auto"
MOST = 8  # announced: containers and virtual machines have bridges without end
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_FAR = {
    socket.AF_INET: "192.0.2.1",
    socket.AF_INET6: "2001:db8::1",
}  # documentation: nobody has these, the default route leads there
_MULTIADDR = re.compile(r"/ip[46]/([^/]+)/")


def listening(host: str, run: Iterable[str]) -> str:
    """The address to bind for network.host. `run`: hosts of the run's peers; on the loopback alone there is nobody else to hear."""
    if host != AUTO:
        return host
    hosts = list(run)
    if hosts and all(map(is_loopback, hosts)):
        return hosts[0]
    v6 = all(":" in each for each in hosts) if hosts else not usable(socket.AF_INET) and bool(usable(socket.AF_INET6))
    return "::" if v6 else "0.0.0.0"


def announced(bound: str, run: Iterable[str] = ()) -> tuple[str, ...]:
    """Where others reach a socket bound to `bound`; for one bound to all interfaces, the likeliest first: on the way to the run's hosts."""
    if not ipaddress.ip_address(bound).is_unspecified:
        return (bound,)
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    towards = [toward(host) for host in run if (":" in host) == (":" in bound) and not is_loopback(host)]
    return tuple(dict.fromkeys((*filter(None, towards), *usable(family))))[:MOST] or (
        "::1" if ":" in bound else "127.0.0.1",
    )


def usable(family: int) -> tuple[str, ...]:
    """This machine's addresses for other machines, the one on the way out first."""
    outward = toward(_FAR[socket.AddressFamily(family)])
    result = _of_interfaces() if family == socket.AF_INET else ()
    return tuple(each for each in dict.fromkeys((outward, *result)) if each and not _is_private_to_machine(each))


def toward(host: str) -> str:
    """This machine's address on the way to that host; '' when no way leads there, or it is no IP address."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only asks for the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""


def hosts(addresses: Iterable[str]) -> tuple[str, ...]:
    """Of bootstrap addresses: HOST:PORT, or libp2p's /ip4/HOST/tcp/PORT/p2p/ID."""
    result = []
    for address in addresses:
        match = _MULTIADDR.match(address)
        result.append(match[1] if match else address.rpartition(":")[0])
    return tuple(dict.fromkeys(host for host in result if host and not host.startswith("/")))


def ports(transport: str, discovery: str, port: int) -> list[int]:
    """Those that a peer with this `network.port` listens on, in order: of TLS, of libp2p's daemon and of the gossip directory, as far as it
    has them; zeros where any port will do."""
    count = (transport != "libp2p") + (transport != "tls" or discovery == "dht") + (discovery == "gossip")
    step = 1 if port + count <= 65536 else -1
    return [port + step * each if port else 0 for each in range(count)]


def usable_elsewhere(host: str) -> bool:
    """It is an IP address that other machines may reach."""
    try:
        return not _is_private_to_machine(host)
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _is_private_to_machine(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return address.is_loopback or address.is_link_local


def _of_interfaces() -> list[str]:
    """IPv4 addresses by interface. Linux alone lists them without another library; elsewhere the way out has to do."""
    if sys.platform != "linux":
        return []
    import fcntl

    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                result.append(socket.inet_ntoa(reply[20:24]))
    return result
