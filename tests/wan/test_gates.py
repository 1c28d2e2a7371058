"""The laboratory's routers and firewalls (benchmarks/wan/nat.h): who gets through each, and what becomes of idle connections."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

# Sends and receives datagrams as its input says, and prints what has arrived: "HOST PORT", or "nothing".
AGENT = """
import socket, sys
sockets = {port: socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for port in ("5000", "6000", "6001", "6002")}
for port, sock in sockets.items():
    sock.bind(("0.0.0.0", int(port)))
    sock.settimeout(0.3)
print("bound", flush=True)
for line in sys.stdin:
    word, port, *to = line.split()
    if word == "send":
        sockets[port].sendto(b"x", (to[0], int(to[1])))
        print("sent", flush=True)
    else:
        try:
            print(*sockets[port].recvfrom(9)[1], flush=True)
        except TimeoutError:
            print("nothing", flush=True)
"""
# Listens on b, and answers each byte; on a: sends a byte, waits, sends another.
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 9)) as listener:
    print("listening", flush=True)
    with listener.accept()[0] as sock:
        while data := sock.recv(1):
            sock.sendall(data)
"""
IDLE = """
import socket, time
with socket.create_connection(("11.77.0.2", 9), timeout=1) as sock:
    for pause_s in (0.2, 0.2, 1.0):
        time.sleep(pause_s)
        sock.sendall(b"x")
        print(sock.recv(1).decode(), end=" ", flush=True)
"""


class Agent:
    def __init__(self, open_lab: Any, host: str) -> None:
        self.process = open_lab.start(
            host, [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "bound\n"

    def _do(self, words: str) -> str:
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()
        return str(self.process.stdout.readline().strip())

    def send(self, port: int, host: str, to: int) -> None:
        assert self._do(f"send {port} {host} {to}") == "sent"

    def received(self, port: int) -> str:
        return self._do(f"receive {port}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def hosts(real: ModuleType, request: pytest.FixtureRequest) -> Iterator[tuple[Agent, Agent, Agent]]:
    """a behind a gate of that kind, b and c without one."""
    topology = real.Topology(("a", "b", "c"), gate=(real.GateRule("a", request.param),))
    with real.Lab(topology) as open_lab:
        agents = Agent(open_lab, "a"), Agent(open_lab, "b"), Agent(open_lab, "c")
        yield agents
        for agent in agents:
            agent.close()


@pytest.mark.parametrize(
    ("hosts", "admits", "same_port"),
    [
        ("open", {"another address", "another port", "the same port"}, True),
        ("firewall", {"the same port"}, True),
        ("full cone", {"another address", "another port", "the same port"}, True),
        ("address-restricted", {"another port", "the same port"}, True),
        ("port-restricted", {"the same port"}, True),
        ("symmetric", {"the same port"}, False),
    ],
    indirect=["hosts"],
)
def test_a_gate_admits_whom_its_kind_admits(
    hosts: tuple[Agent, Agent, Agent], admits: set[str], same_port: bool
) -> None:
    a, b, c = hosts
    a.send(5000, "11.77.0.2", 6000)
    host, port = b.received(6000).split()
    assert host == "11.77.0.1"
    senders = {"another address": (c, 6000), "another port": (b, 6001), "the same port": (b, 6000)}
    for name, (sender, own_port) in senders.items():
        sender.send(own_port, host, int(port))
        assert (a.received(5000) != "nothing") == (name in admits), name
    a.send(5000, "11.77.0.3", 6002)
    assert (c.received(6002) == f"{host} {port}") == same_port


@pytest.mark.parametrize(
    ("kind", "reset", "end"),
    [
        ("open", False, "TimeoutError"),
        ("port-restricted", True, "ConnectionResetError"),
        pytest.param("open", True, "ConnectionResetError", marks=pytest.mark.slow),
        pytest.param("port-restricted", False, "TimeoutError", marks=pytest.mark.slow),
    ],
)
def test_an_idle_connection_is_forgotten(real: ModuleType, kind: str, reset: bool, end: str) -> None:
    topology = real.Topology(("a", "b"), gate=(real.GateRule("a", kind, idle="500 ms", reset=reset),))
    with real.Lab(topology) as open_lab:
        echo = open_lab.start("b", [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        assert echo.stdout.readline() == "listening\n"
        output = open_lab.start(
            "a", [sys.executable, "-c", IDLE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ).communicate(timeout=60)[0]
        echo.stdout.close()
    assert output.startswith("x x Traceback") and end in output
