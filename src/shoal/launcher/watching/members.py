"""The members of a run on every machine, for people: where each is and what it serves, who is silent, how many losses the run survives.

For watch.py, from agreed views and the local peers' reports. Decides nothing for the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.core.messages import Member, Peer, View
from shoal.dashboard.terminal import PeerLine
from shoal.runtime.records.report import PeerProgress

HERE = "this machine"
ELSEWHERE = "?"  # the machine of a peer whose record was not received yet


class Members:
    """`machines`: addresses of peers, as the directory announces them. `labels`: this machine's peers."""

    def __init__(self) -> None:
        self.labels: dict[Peer, str] = {}
        self.machines: dict[Peer, str] = {}
        self.recover = ""  # the command that gives up silent members; '' on a guest's machine
        self.stopped_at: float | None = None  # since when no local peer hears a leader

    def update(self, standing: Mapping[str, PeerProgress], now: float) -> None:
        """Local peers have reported."""
        alone = bool(standing) and all(line.alone for line in standing.values())
        self.stopped_at = (now if self.stopped_at is None else self.stopped_at) if alone else None

    def machine(self, peer: Peer) -> str:
        return HERE if peer in self.labels else self.machines.get(peer, ELSEWHERE)

    def name(self, peer: Peer) -> str:
        """As events and commands call it."""
        return self.labels.get(peer, peer[:6])

    def lines(self, view: View | None, standing: Mapping[str, PeerProgress]) -> list[PeerLine]:
        """Peers on other machines, as the newest view lists them."""
        leaders = {line.leader for line in standing.values()}
        everyone = [(m, True) for m in view.members] + [(m, False) for m in view.joining] if view is not None else []
        return [
            PeerLine(
                label=self.name(member.peer),
                stage=member.stage,
                ready=ready,
                leading=member.peer in leaders,
                machine=self.machine(member.peer),
            )
            for member, ready in everyone
            if member.peer not in self.labels
        ]

    def silent(self, view: View, standing: Mapping[str, PeerProgress]) -> list[Peer]:
        """Voters that no local peer hears and that are no living local peer."""
        living = {line.peer for line in standing.values()}
        living.update(peer for line in standing.values() for peer in line.heard)
        return [peer for peer in view.voters if peer not in living]

    def advice(self, view: View, silent: Sequence[Peer]) -> str:
        """What a run without a majority waits for, and what to do."""
        voters, names = len(view.voters), ", ".join(f"{self.name(peer)} ({self.machine(peer)})" for peer in silent)
        words = (
            f"training has stopped: {names or 'the others'} silent; {voters - len(silent)} of {voters} members answer,"
            f" and {voters // 2 + 1} are needed"
        )
        if voters == 2:
            words += ". Two members tolerate no loss; with three the run survives one"
        words += ". It goes on by itself when they are back. If they are gone for good: "
        if not self.recover:
            return words + "`shoal recover` on the machine that founded the run"
        return words + f"{self.recover} --gone {' '.join(self.name(peer) for peer in silent)}"

    def survives(self, view: View | None) -> str:
        """How many losses at once the run survives now, and what would raise it; '' before training."""
        if view is None or not view.started or view.finished:
            return ""
        voters = len(view.voters)
        losses, more = (voters - 1) // 2, 2 if voters % 2 else 1
        words = f"survives the loss of {_peers(losses)}" if losses else "survives no loss"
        words += f" ({losses + 1} with {_peers(more)} more)"
        machines = Counter(self.machine(peer) for peer in view.voters)
        largest, count = max(machines.items(), key=lambda item: (item[1], item[0]))
        if losses < count < voters and losses:
            words += f", but not of {largest} with its {count} of {voters}"
        return words + _single(view.members)


def _single(members: Sequence[Member]) -> str:
    """Stages whose state one peer alone holds."""
    replicas = Counter(member.stage for member in members)
    single = sorted(stage for stage, count in replicas.items() if count == 1)
    if not single:
        return ""
    stages = f"stage {single[0]} has" if len(single) == 1 else f"stages {', '.join(map(str, single))} have"
    return f"; {stages} one replica, without which the run goes back to its newest checkpoint"


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"
