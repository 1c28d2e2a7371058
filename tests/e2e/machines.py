"""Two machines of one network, as network namespaces of this one: a fixture for tests that need root (`ip netns`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.test_run import CONFIG, SOURCE

HOSTS = ("10.77.0.1", "10.77.0.2")


class Machine:
    """Runs `shoal` with a network and a directory of its own."""

    def __init__(self, name: str, host: str, directory: Path) -> None:
        self.name, self.host, self.directory = name, host, directory
        directory.mkdir()
        (directory / "tiny.toml").write_text(CONFIG.replace('host = "127.0.0.1"\n', ""))
        self.programs: list[Program] = []

    def shoal(self, *words: str) -> Program:
        program = Program(
            ["ip", "netns", "exec", self.name, sys.executable, "-m", "shoal.cli.main", *words], self.directory
        )
        self.programs.append(program)
        return program


class Program:
    """A process whose output can be read while it runs."""

    def __init__(self, words: list[str], directory: Path) -> None:
        self.process = subprocess.Popen(
            words,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def end(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Connected by one cable, without a way to anywhere else."""
    names = [f"shoal{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {getattr(error, 'stderr', error)}")
    try:
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        both = Machine(names[0], HOSTS[0], tmp_path / "a"), Machine(names[1], HOSTS[1], tmp_path / "b")
        yield both
        for machine in both:
            for program in machine.programs:
                if program.process.poll() is None:
                    program.process.kill()
                    program.process.wait()
    finally:
        for name in names:
            ip("netns", "del", name)
