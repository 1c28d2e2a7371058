"""The members of a run on every machine, for people: where each is and what it serves, who is silent, how many losses the run survives.

For watch.py, from agreed views and the local peers' reports. Decides nothing for the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.core.consensus.certificates import can_agree, casting_voter
from shoal.core.leader.rules.removal import LEAVE_S
from shoal.core.messages import Member, Peer, View
from shoal.core.names import key_of
from shoal.dashboard.leaderboard import Eviction
from shoal.dashboard.terminal import PeerLine
from shoal.runtime.records.report import PeerProgress

HERE = "this machine"
LAST_REPLICA_S = 120.0  # that a stage's last replica waits to be replaced; or a leader for the others to follow another
EVICTIONS_KEPT = 1024
ELSEWHERE = "?"  # the machine of a peer whose record was not received yet


class Members:
    """`machines`, `regions` and `addresses`: where peers are, and where joiners find the run through them, as the directory announces it.
    `labels`: this machine's peers."""

    def __init__(self) -> None:
        self.labels: dict[Peer, str] = {}
        self.machines: dict[Peer, str] = {}
        self.addresses: dict[Peer, tuple[str, ...]] = {}
        self.regions: dict[Peer, str] = {}
        self.join = ""  # the command that adds a peer; '' on a guest's machine
        self.recover = ""  # the command that gives up silent members; '' on a guest's machine
        self.evictions: list[Eviction] = []  # for what the peers did, the newest last
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

    def entries(self, view: View | None) -> tuple[str, ...]:
        """An address of each member on another machine, for joiners."""
        others = [m.peer for m in view.members if m.peer not in self.labels] if view is not None else []
        return tuple(address for peer in others for address in self.addresses.get(peer, ())[:1])

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
                region=self.regions.get(member.peer, ""),
            )
            for member, ready in everyone
            if member.peer not in self.labels
        ]

    def leavers(self, before: View | None, view: View) -> list[str]:
        """Peers of other machines that this view lets go because they asked."""
        if before is None or view.finished:
            return []
        stays = {member.peer for member in view.members + view.joining}
        left = [one for one in before.members if one.peer not in stays and f"{one.peer} leaves" in view.reason]
        counts = Counter(member.stage for member in view.members)
        return [
            f"{self.name(one.peer)} on {self.machine(one.peer)} has left stage {one.stage}, which {_peers(counts[one.stage])} "
            f"serve{'s' if counts[one.stage] == 1 else ''} now; {_peers(len(view.members))} in all"
            for one in left
            if one.peer not in self.labels
        ]

    def evicted(self, before: View | None, view: View) -> None:
        """Note whom this view evicts for what it did, in this session or another."""
        times = {one.key: one.times for one in before.evicted} if before is not None else {}
        known = {one.key for one in view.evicted if before is not None and one.times > times.get(one.key, 0)}
        stays = {member.peer for member in view.members + view.joining}
        for one in before.members + before.joining if before is not None else ():
            if one.peer not in stays and key_of(one.peer) in known:
                reason = view.reason.partition(f"{one.peer} ")[2].partition("; ")[0]
                self.evictions = [*self.evictions, Eviction(view.work, view.epoch, one.peer, reason)][-EVICTIONS_KEPT:]

    def irreplaceable(self, view: View | None) -> bool:
        """A stage is served here alone, no peer of another machine is on its way there, and none can be spared for it."""
        if view is None or not view.started:
            return False
        others = Counter(one.stage for one in view.members if one.peer not in self.labels)
        served = others.keys() | {one.stage for one in view.joining if one.peer not in self.labels}
        return any(one.stage not in served for one in view.members) and max(others.values(), default=0) < 2

    def leaving(self, view: View | None, saved: int) -> list[str]:
        """What this machine's Ctrl-C does, and what a second one would cost."""
        members = view.members if view is not None and view.started else ()
        others = [one for one in members if one.peer not in self.labels]
        spare = not self.irreplaceable(view)
        bare = sorted({one.stage for one in members} - {one.stage for one in others})
        lines = [f"leaving at the end of the step, at most {LEAVE_S:.0f} s from now"]
        again = "Ctrl-C again to go at once: the others notice it seconds later and compute again what these peers did"
        if bare:
            stages = f"{'stages' if len(bare) > 1 else 'stage'} {', '.join(map(str, bare))}"
            lines[0] += f", but for {stages}, which only this machine serves"
            back = f"back to the checkpoint of step {saved:,}" if saved else "back to step 0: nothing is saved"
            again = f"Ctrl-C again to go at once: the run loses {stages} and goes {back}"
            lines.append(
                f"a peer of another stage downloads {stages} first; what these peers hold is saved meanwhile"
                if spare
                else f"nobody else can take {stages} over: training stops without this machine. It leaves when step"
                f" {view.step if view is not None else 0:,} is saved"
            )
        if view is not None and members and not can_agree(view, set(view.voters) - set(self.labels)):
            again += "; the others have no majority without these peers, and wait for them or for `shoal recover`"
        return [*lines, again]

    def silent(self, view: View, standing: Mapping[str, PeerProgress]) -> list[Peer]:
        """Voters that no local peer hears and that are no living local peer."""
        living = {line.peer for line in standing.values()}
        living.update(peer for line in standing.values() for peer in line.heard)
        return [peer for peer in view.voters if peer not in living]

    def advice(self, view: View, silent: Sequence[Peer]) -> str:
        """What peers without a quorum wait for, and what to do."""
        voters, names = len(view.voters), ", ".join(f"{self.name(peer)} ({self.machine(peer)})" for peer in silent)
        words = (
            f"training has stopped here: {names or 'the others'} silent; {voters - len(silent)} of {voters} members answer,"
            f" and {voters // 2 + 1} are needed"
        )
        casting = casting_voter(view.voters, view.founder)
        if casting in silent and len(silent) <= voters // 2:
            words += (
                f", or {voters // 2} with {self.name(casting)} ({self.machine(casting)}), which has the casting vote. If only the line"
                " to it is cut, the run goes on there"
            )
        if voters == 2:
            words += ". With three members the run survives the loss of any one"
        words += ". Peers here go on by themselves when the others are back. If they are gone for good: "
        if not self.recover:
            return words + "`shoal recover` on the machine that founded the run"
        return words + f"{self.recover} --gone {' '.join(self.name(peer) for peer in silent)}"

    def unserved(self, view: View, stages: int) -> str:
        """What a run that lost all replicas of a stage waits for, and the command that serves it; '' if it lost none."""
        served = {member.stage for member in view.members + view.joining}
        if not view.epoch or view.started or view.finished or len(served) == stages:
            return ""
        without = ", ".join(str(stage) for stage in range(stages) if stage not in served)
        words = f"no peer is left to serve stage {without} (of {stages}): training waits for one more"
        return words + (f". On any machine, this one included: {self.join}" if self.join else "")

    def survives(self, view: View | None) -> str:
        """How many losses at once the run survives now, and what would raise it; '' before training."""
        if view is None or not view.started or view.finished:
            return ""
        voters, casting = len(view.voters), casting_voter(view.voters, view.founder)
        losses, more = (voters - 1) // 2, 2 if voters % 2 else 1
        words = f"survives the loss of {_peers(losses)}" if losses else "survives no loss"
        if casting:
            words = (
                f"survives the loss of {_peers(losses + 1)} other than {self.name(casting)}, which has the casting vote"
            )
        words += f" ({'any ' if casting else ''}{losses + 1} with {_peers(more)} more)"
        if fatal := self._fatal(view):
            words += f", but not of {fatal}"
        return words + _single(view.members)

    def _fatal(self, view: View) -> str:
        """The machine with the most voters of those without which the others, if any, are no quorum; '' if there is none."""
        machines = Counter(self.machine(peer) for peer in view.voters)
        for machine, count in sorted(machines.items(), key=lambda item: (-item[1], item[0])):
            others = [peer for peer in view.voters if self.machine(peer) != machine]
            if others and not can_agree(view, others):
                return f"{machine} with its {count} of {len(view.voters)}"
        return ""


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
