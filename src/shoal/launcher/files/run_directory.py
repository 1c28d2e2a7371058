"""The directory of a run, as its launcher keeps it: status, addresses and peers for other commands, commits for the account.

A user may delete or move the directory during a run. It is made again then, with everything the launcher knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from shoal.core.messages import Peer
from shoal.dashboard import plot
from shoal.dashboard.leaderboard import Eviction
from shoal.dashboard.steplog import StepLog
from shoal.dashboard.terminal import Snapshot
from shoal.escaping import escaped_json
from shoal.launcher.files import rundir
from shoal.launcher.files.output_files import OutputFiles
from shoal.launcher.files.proofs import ProofFile
from shoal.launcher.files.standing import EVICTIONS
from shoal.runtime.records.account import CommittedStep
from shoal.runtime.records.report import Proven

STATUS_IDLE_S = 10.0  # between two of status.json when no step and no reason is new: only rates and bytes have changed
STATUS_BPS = 4096  # of status.json: 14 MB an hour at most
REWRITE_STEPS = 1024  # commits until commits.jsonl is written anew with short lines for old steps
WATCHED_S = 10.0  # after `shoal watch` has read status.json: each one is written


class StatusFile:
    """status.json: written when a reader could see a difference, and at most STATUS_BPS bytes a second unless somebody watches."""

    def __init__(self, files: OutputFiles, watched: Path) -> None:
        self._files, self._watched = files, watched
        self._written: object = None  # the facts of the last one
        self._next_s = self._due_s = float("-inf")

    def write(self, snapshot: Snapshot, now: float) -> None:
        """`now` infinite: at the end, whatever was written before."""
        facts = (snapshot.step, snapshot.state, len(snapshot.peers), snapshot.happenings[-1:])
        unwatched = now < self._next_s or (facts == self._written and now < self._due_s)
        if unwatched and not self._is_watched():
            return
        data = escaped_json(
            msgspec.json.encode(msgspec.structs.replace(snapshot, losses=plot.thinned(snapshot.losses)))
        )
        if self._files.put("status.json", data):
            self._written = facts
            self._next_s, self._due_s = now + len(data) / STATUS_BPS, now + STATUS_IDLE_S

    def _is_watched(self) -> bool:
        try:
            return abs(time.time() - self._watched.stat().st_mtime) < WATCHED_S
        except OSError:  # never
            return False


class RunDirectory:
    """`warn` is called with what the user should know."""

    def __init__(self, path: Path, claim: IO[str], warn: Callable[[str], None], log: StepLog) -> None:
        """`claim`: on the directory, by which no second launcher uses it."""
        self.path = path
        self.lost = ""  # why nothing may be written any more: another launcher has the directory
        self._claim, self._warn, self._log = claim, warn, log
        self._founding, self._identity = rundir.founding(path), rundir.identity(path)
        self._files = OutputFiles(path, warn)
        self._proofs = ProofFile(path, warn)
        self._committed = 0  # since commits.jsonl was last written anew
        self._unmakeable = ""  # why it could not be made again, as last warned of
        self._listed: dict[str, object] = {}  # what was written to bootstrap.json, peers.json, names.json
        self._status = StatusFile(self._files, path / rundir.WATCHED)

    def commit(self, step: CommittedStep) -> None:
        self._files.commit(step)
        self._committed += 1
        self._log.add(step)

    def prove(self, line: Proven) -> None:
        self._proofs.add(line)

    def write_status(self, snapshot: Snapshot, now: float) -> None:
        self._status.write(snapshot, now)
        self._files.flush()
        self._log.flush(snapshot)

    def write_lists(
        self,
        addresses: tuple[str, ...],
        peers: rundir.PeersFile,
        names: dict[str, Peer],
        evictions: tuple[Eviction, ...] = (),
    ) -> None:
        """For joiners, for `shoal chaos`, for commands that name peers, and for `shoal leaderboard`. Only what has changed is written."""
        lists = {rundir.BOOTSTRAP: addresses, "peers.json": peers, "names.json": names, EVICTIONS: evictions}
        for name, content in lists.items():
            if content and content != self._listed.get(name) and self._files.put(name, msgspec.json.encode(content)):
                self._listed[name] = content

    def keep(self, steps: Sequence[CommittedStep]) -> None:
        """Make the directory again if it was deleted or moved away. `steps`: all commits so far, of which old ones may have become short:
        they are written anew now and then, so that the file grows by a short line per step."""
        if self.lost:
            return
        if rundir.identity(self.path) == self._identity:
            if self._committed >= REWRITE_STEPS:
                self._committed = 0
                self._files.shorten(steps)
            return
        try:
            self._claim = rundir.make_anew(self.path, self._founding, self._claim)
            self._files.rewrite(steps)
        except ValueError as error:
            self.lost = str(error)
            return
        except OSError as error:
            if error.strerror != self._unmakeable:
                self._unmakeable = error.strerror or str(error)
                self._warn(
                    f"{self.path} was deleted or moved away, and cannot be made anew: {self._unmakeable}; nothing is written down"
                )
            return
        self._identity, self._unmakeable, self._listed = rundir.identity(self.path), "", {}
        self._status = StatusFile(self._files, self.path / rundir.WATCHED)
        self._warn(
            f"{self.path} was deleted or moved away; it is made anew, with the commits so far, and training goes on."
            " Checkpoints, logs and traces that lay in it are gone: the next checkpoint is the first again"
        )

    def close(self) -> None:
        self._files.close()
        self._log.close()
