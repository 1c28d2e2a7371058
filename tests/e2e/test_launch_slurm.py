"""`shoal launch slurm` on a real Slurm: munged, slurmctld and four slurmd of this machine, with a partition that preempts another."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.launching import PEERS, Launched, free_port, survives
from tests.e2e.test_run import Start, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

PROGRAMS = ("munged", "slurmctld", "slurmd")
NODES = PEERS + 1  # one to move to
# A requeued job waits for the lifetime of credentials, two minutes by default.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=paid Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    where = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin") for name in PROGRAMS}
    if os.getuid() != 0 or None in where.values():
        pytest.skip(f"needs {', '.join(PROGRAMS)} (tools/launch.sh installs them) and root, as slurmd does")
    folder = tmp_path / "slurm"
    folder.mkdir(mode=0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = [f"n{number}" for number in range(NODES)]
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1" for name in names
    )
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, port=free_port(), nodes=nodes))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munged = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "key-file", "pid-file")]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("log", "seed")]
    commands = [["munged", "--foreground", "--force", *munged], ["slurmctld", "-D", "-L", f"{folder}/slurmctld.log"]]
    commands += [["slurmd", "-D", "-N", name, "-L", f"{folder}/slurmd.{name}.log"] for name in names]
    daemons = []
    try:
        for name, *words in commands:
            daemons.append(subprocess.Popen([str(where[name]), *words], start_new_session=True))
            if name == "munged":
                wait_for(lambda: (folder / "munge.socket").exists() or daemons[0].poll() is not None)
        wait_for(lambda: output("sinfo", "-h", "-N", "-t", "idle", "-p", "spot", "-o", "%N").split() == names)
        yield
    finally:
        subprocess.run(["scancel", "--user", "root"], capture_output=True)
        wait_for(lambda: not output("squeue", "--noheader"))
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def test_peers_are_jobs_that_slurm_requeues_and_preempts(slurm: None, start: Start, tmp_path: Path) -> None:
    run = Launched(start, tmp_path, "slurm", "--peers", str(PEERS), "--sbatch", "-p spot")

    def preempt(number: int) -> None:
        """Another job wants this peer's node, and keeps it."""
        jobs = dict(line.split() for line in output("squeue", "-h", "-p", "spot", "-o", "%j %N").splitlines())
        node = next(node for name, node in jobs.items() if name.endswith(f"-{number}"))
        subprocess.run(["sbatch", "-p", "paid", "-w", node, "--wrap", "sleep 1000"], check=True, cwd=tmp_path)

    survives(run, tmp_path, run.lose, preempt)
    print(output("squeue", "--states=all"))
