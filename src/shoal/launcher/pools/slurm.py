"""Peers as Slurm jobs, one each. Slurm remembers them, by the names of the jobs, and puts a job that lost its node or was preempted back
into its queue; so does the job itself when its peer ends for another reason than the run's end.

Slurm's SIGTERM (a preemption's grace time, 150 s before a time limit) goes to the job's step: the peer leaves at the end of the step.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shoal.exit_codes import ExitCode
from shoal.launcher.pools.pool import Peers, States

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
FIELDS = "JobID:32,Name:64,State:32,exit_code:32"

# A drained job has lost its right to be requeued: the last lines do nothing then.
_SCRIPT = """#!/bin/sh
#SBATCH --job-name={name} --ntasks=1 --requeue --open-mode=append --signal=TERM@150
#SBATCH --output={log}
srun {command}
code=$?
case $code in 0 | 2) exit $code ;; esac
scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


class SlurmPool:
    poll_s = 5.0

    def __init__(self, peers: Peers, options: Sequence[str] = ()) -> None:
        """`options`: more of sbatch's, such as --partition=spot."""
        self._peers, self._options = peers, tuple(options)
        self._jobs: dict[int, tuple[int, str]] = {}  # job and its state, by the peer's number

    def states(self) -> States:
        listing = _call("squeue", "--me", "--noheader", "--states=all", f"--Format={FIELDS}")
        states: dict[int, int | None] = {}
        self._jobs = {}
        for line in sorted(listing.splitlines(), key=lambda line: int(line.split()[0])):
            job, name, state, code = line.split()
            title, _, number = name.rpartition("-")
            if title != self._peers.title or states.get(int(number), 0) is None:
                continue
            states[int(number)] = _exit_code(state, int(code)) if state in ENDED else None
            self._jobs[int(number)] = int(job), state
        return states

    def start(self, number: int) -> None:
        """The invite lies in a file that the nodes share with this machine: an argument shows in `squeue` and `ps`."""
        folder = Path(self._peers.base, self._peers.title).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        invite = folder / "invite"
        with open(os.open(invite, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(self._peers.invite)
        script = _SCRIPT.format(
            name=f"{self._peers.title}-{number}",
            log=folder / f"{number}.out",
            command=shlex.join(self._peers.local(f"@{invite}", number)),
        )
        _call("sbatch", "--parsable", *self._options, given=script)

    def drain(self, number: int) -> None:
        job, state = self._jobs[number]
        _call("scontrol", "update", f"JobId={job}", "Requeue=0")
        _call("scancel", *(() if state == "PENDING" else ("--signal=TERM",)), str(job))

    def stop(self, number: int) -> None:
        _call("scancel", str(self._jobs[number][0]))

    def log(self, number: int) -> str:
        return f"{self._peers.directory(number)}.log"


def _exit_code(state: str, status: int) -> int:
    """`status` is that of wait(2); 0 in a job that was ended from outside."""
    return 0 if state == "COMPLETED" else os.waitstatus_to_exitcode(status) or ExitCode.FAILED


def _call(*words: str, given: str = "") -> str:
    """ValueError: what Slurm says is wrong."""
    done = subprocess.run(words, input=given, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout
