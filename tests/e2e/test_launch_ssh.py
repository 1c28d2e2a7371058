"""`shoal launch ssh` against a real sshd on loopback, under three host names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.launching import PEERS, SHOAL, Launched, free_port, survives
from tests.e2e.test_run import Start, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command that reaches this machine, whatever host is named."""
    if SSHD is None or os.getuid() != 0:
        pytest.skip("needs sshd (tools/launch.sh installs it) and root, as sshd does")
    folder = tmp_path / "ssh"
    folder.mkdir()
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/sshd.pid\n"
        f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPasswordAuthentication no\n"
    )
    (folder / "config").write_text(
        f"Host *\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/key\n StrictHostKeyChecking no\n"
        f" UserKnownHostsFile {folder}/known\n LogLevel ERROR\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks up what it does for strangers
    daemon = subprocess.Popen([SSHD, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")])
    try:
        wait_for(lambda: (folder / "sshd.pid").exists() or daemon.poll() is not None)
        assert daemon.poll() is None, (folder / "sshd.log").read_text()
        yield f"ssh -F {folder / 'config'}"
    finally:
        daemon.terminate()
        daemon.wait()


def test_peers_on_hosts_are_replaced_and_drained_and_outlive_their_launcher(
    ssh: str, start: Start, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# mine\n" + "".join(f"box{number}\n" for number in range(PEERS)))
    run = Launched(start, tmp_path, "ssh", "--hosts", str(hosts), "--ssh", ssh, "--shoal", SHOAL)

    def keeper(number: int) -> int:
        (file,) = (tmp_path / "runs").glob(f"shoal-*/*/{number}.pid")
        return int(file.read_text())

    survives(run, tmp_path, run.lose, lambda number: os.killpg(keeper(number), signal.SIGTERM))
