"""Machines of one network, as network namespaces on a bridge of this machine. Needs root and `ip`."""

from __future__ import annotations

import os
import subprocess

import pytest

PREFIX = 16


class Network:
    """Machines are 10.X.0.1, 10.X.0.2 and so on; this one is 10.X.255.254, and their way to anywhere else. X is the test's own."""

    def __init__(self) -> None:
        self._begin = f"10.{100 + os.getpid() % 100}"
        self.bridge_ip = f"{self._begin}.255.254"
        self._names: dict[str, str] = {}  # by address
        self.bridge = f"sh{os.getpid()}"
        try:
            ip("link", "add", self.bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need root and iproute2: {getattr(error, 'stderr', error)}")
        ip("address", "add", f"{self.bridge_ip}/{PREFIX}", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def machine(self, number: int) -> str:
        """Its address; the same number is the same machine."""
        address = f"{self._begin}.{number // 250}.{number % 250 + 1}"
        if address not in self._names:
            name, cable = f"{self.bridge}-{number}", f"{self.bridge}c{number}"
            self._names[address] = name
            ip("netns", "add", name)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable, "master", self.bridge, "up")
            ip("-n", name, "address", "add", f"{address}/{PREFIX}", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "via", self.bridge_ip)
        return address

    def words(self, address: str) -> list[str]:
        """What makes a command one of that machine. The process stays the same."""
        return ["ip", "netns", "exec", self._names[address]]

    def add(self, address: str, more: str) -> None:
        """That machine has this address, too, which no other reaches."""
        ip("-n", self._names[address], "address", "add", f"{more}/32", "dev", "lo")

    def end(self) -> None:
        for name in self._names.values():
            ip("netns", "del", name)
        ip("link", "del", self.bridge)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
