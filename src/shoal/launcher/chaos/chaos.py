"""Carries out a schedule of acts on the local peers of a run. For `shoal chaos`.

Peers are signalled from here, each as the very process that its launcher wrote down (launcher/process.py), and nothing else is; the
launcher starts those that are to come (rundir.WantedPeers). Links are cut by the peers themselves (transport/emulated/faulty.py), in
a run with network.fault_injection. However it ends, short of SIGKILL, nobody is left stopped; a cut ends by itself in any case.
"""

from __future__ import annotations

import heapq
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from shoal import units
from shoal.launcher import process
from shoal.launcher.chaos import schedule
from shoal.launcher.chaos.injection_points import INJECTION_POINTS, TraceTail
from shoal.launcher.chaos.schedule import LINKS, Act
from shoal.launcher.files import rundir
from shoal.launcher.files.rundir import LocalPeer, PeersFile, WantedPeers
from shoal.launcher.process import Process
from shoal.runtime.records.report import replace
from shoal.transport.emulated.faulty import FAULTS, Fault

LOOK_S = 0.25  # between looks at the run
RETRY_S = 1.0  # an act that would stop the run for good is put off: the run has to take in the last one first
PATIENCE_S = 60.0  # then it is given up
PERIOD_S = 0.2  # of a slowed peer: running for 1/by of it, stopped for the rest; well below a heartbeat
STRIKE_S = 0.003  # between looks at the traces for a moment to strike at
STRIKE_PATIENCE_S = 600.0  # such a moment may be a checkpoint, of which there are few


class Chaos:
    """One call of the command. Times count from the moment at which it began, after training had begun."""

    def __init__(self, directory: Path, rng: Random, lose_stages: bool) -> None:
        self.directory, self.rng, self.lose_stages = directory, rng, lose_stages
        self.locals: PeersFile = rundir.locals_of(directory)
        self.over = False  # the run is finished, or its launcher has ended
        self._began_s = time.monotonic()
        self._wanted = 0
        self._away: dict[str, bool] = {}  # labels of peers killed (True), stopped or cut off by this
        self._held: dict[str, Process] = {}  # stopped now and then, to be continued at the end
        self._faults: list[Fault] = []  # of links, now
        self._armed: list[tuple[Act, float]] = []  # wait for their moment, until then
        self._traces = TraceTail(directory)
        self._looked_s = float("-inf")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def run(self, acts: tuple[Act, ...]) -> None:
        """Until the schedule or the run is over."""
        self._wait_for_training()
        self._began_s = time.monotonic()
        self._wanted = len(self.locals.peers)
        self._want(0)
        for act in acts:
            begin = partial(self._arm, act) if act.on else partial(self._do, act, act.at_s + PATIENCE_S)
            self._at(act.at_s, begin)
        while not self.over and (self._due or self._held or self._armed):
            while self._due and self._due[0][0] <= self._now():
                heapq.heappop(self._due)[2]()
            if self._now() - self._looked_s >= LOOK_S:
                self._look()
            self._strike()
            rest_s = self._due[0][0] - self._now() if self._due else LOOK_S
            time.sleep(min(STRIKE_S if self._armed else LOOK_S, max(0.0, rest_s)))
        self._wait_for_peers()
        self._say("the run is over" if self.over else "the schedule is over; the run goes on")

    def end(self) -> None:
        """Nobody stays stopped, and the launcher decides again how many peers there are."""
        for held in self._held.values():
            process.send(held, signal.SIGCONT)
        self._held.clear()
        (self.directory / FAULTS).unlink(missing_ok=True)
        (self.directory / "wanted.json").unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------------ acts

    def _do(self, act: Act, until_s: float) -> None:
        if act.kind == "add":
            self._want(+1)
            self._say(f"add: {self._wanted} peers are wanted; {act.why}")
            return
        self._look()
        free = tuple(peer for peer in self.locals.peers if peer.label not in self._held)
        run = msgspec.structs.replace(self.locals, peers=free)
        choice = schedule.choose(act, run, frozenset(self._away), self.rng, self.lose_stages)
        if choice.labels:
            hit = [peer for peer in free if peer.label in choice.labels]
            if act.kind in LINKS:
                self._break(act, hit)
            else:
                for peer in hit:
                    self._hit(act, peer)
        elif choice.later and self._now() < until_s:
            if self._now() - act.at_s < RETRY_S:
                self._say(f"{act.kind} is put off: {choice.why_not}")
            self._at(self._now() + RETRY_S, partial(self._do, act, until_s))
        else:
            self._say(f"{act.kind} is left out: {choice.why_not}")

    def _hit(self, act: Act, peer: LocalPeer) -> None:
        if act.kind == "remove":
            self._want(-1)
        number = signal.SIGKILL if act.kind in ("kill", "remove") else signal.SIGSTOP
        if not process.send(peer.process, number):
            self._say(f"{act.kind} {peer.label}: it had ended already")
            return
        where = "" if peer.stage is None else f" (stage {peer.stage})"
        lasting = f" for {units.duration(act.length_s)}" if number == signal.SIGSTOP else ""
        by = f" {act.by:g}x" if act.kind == "slow" else ""
        self._say(f"{act.kind} {peer.label}{where}{by}{lasting}: {act.why}")
        if number == signal.SIGKILL:
            self._away[peer.label] = True
            return
        self._held[peer.label] = peer.process
        if act.kind == "stop":
            self._away[peer.label] = False
            self._at(self._now() + act.length_s, partial(self._wake, peer.label))
        else:
            self._halt(peer.label, self._now() + act.length_s, act.by)

    def _break(self, act: Act, side: list[LocalPeer]) -> None:
        """Cut or slow the links of these, who keep theirs among one another."""
        others = [peer.peer for peer in schedule.named(act.off, self.locals) if peer.peer] if act.off else []
        others = [peer for peer in others if peer not in {near.peer for near in side}]
        if act.off and not others:
            self._say(f"{act.kind} is left out: nobody else here is {act.off}")
            return
        fault = Fault(
            side=tuple(peer.peer for peer in side),
            others=tuple(others),
            direction=act.direction,
            link=act.link if act.kind == "lag" else None,
            large=act.kind == "hole",
            until_s=time.monotonic() + act.length_s,
        )
        self._faults.append(fault)
        self._tell_faults()
        labels = [peer.label for peer in side]
        if act.kind in ("cut", "hole"):
            for label in labels:
                self._away.setdefault(label, False)
        self._say(f"{act.kind} {', '.join(labels)}{act.how()}: {act.why}")
        self._at(self._now() + act.length_s, partial(self._heal, fault, labels))

    def _heal(self, fault: Fault, labels: list[str]) -> None:
        self._faults.remove(fault)
        self._tell_faults()
        for label in labels:
            self._back(label)
        self._say(f"links of {', '.join(labels)} are as before")

    def _tell_faults(self) -> None:
        replace(self.directory / FAULTS, msgspec.json.encode(self._faults))

    def _halt(self, label: str, until_s: float, by: float) -> None:
        """One period of a slow peer: stopped for most of it."""
        if self._now() >= until_s or not process.send(self._held[label], signal.SIGSTOP):
            self._wake(label)
            return
        self._at(self._now() + PERIOD_S * (1 - 1 / by), partial(self._let, label, until_s, by))

    def _let(self, label: str, until_s: float, by: float) -> None:
        process.send(self._held[label], signal.SIGCONT)
        self._at(self._now() + PERIOD_S / by, partial(self._halt, label, until_s, by))

    def _back(self, label: str) -> None:
        """It is no longer stopped or cut off."""
        if not self._away.get(label):
            self._away.pop(label, None)

    def _wake(self, label: str) -> None:
        lived = process.send(self._held.pop(label), signal.SIGCONT)
        self._back(label)
        self._say(f"continue {label}" if lived else f"{label} has ended meanwhile")

    # ---------------------------------------------------------------------------------------------------- moments

    def _arm(self, act: Act) -> None:
        if not self._armed:
            self._traces.skip()
        self._armed.append((act, self._now() + STRIKE_PATIENCE_S))
        self._say(f"{act.kind}: waiting for {act.who} to begin {INJECTION_POINTS[act.on].words}")

    def _strike(self) -> None:
        """At the first peer that is seen to begin what an act waits for. Should the run have to be spared, at the next."""
        if not self._armed:
            return
        news = self._traces.new_lines(peer.label for peer in self.locals.peers)
        for act, until_s in list(self._armed):
            if self._strike_with(act, news):
                self._armed.remove((act, until_s))
            elif self._now() >= until_s:
                self._armed.remove((act, until_s))
                self._say(f"{act.kind} is left out: {act.who} did not begin {INJECTION_POINTS[act.on].words} in time")

    def _strike_with(self, act: Act, news: dict[str, bytes]) -> bool:
        moment = INJECTION_POINTS[act.on]
        for peer in schedule.named(act.who, self.locals):
            if moment.tag not in news[peer.label]:
                continue
            named = msgspec.structs.replace(act, who=peer.label, on="", why=f"it began {moment.words}; {act.why}")
            if schedule.choose(named, self.locals, frozenset(self._away), self.rng, self.lose_stages).labels:
                self._do(named, 0)
                return True
        return False

    # -------------------------------------------------------------------------------------------------------- run

    def _wait_for_training(self) -> None:
        if not self.locals.started:
            self._say("waiting for training to begin")
        while not self.locals.started and not self.over:
            time.sleep(LOOK_S)
            self._look()

    def _wait_for_peers(self) -> None:
        """The launcher starts those that are still to come only while this is at work, and takes whoever it sees ended later for lost."""
        until_s = self._now() + PATIENCE_S
        while not self.over and self._now() < until_s:
            labels = {peer.label for peer in self.locals.peers}
            seen = not any(self._away.get(label) for label in labels)
            if seen and len(labels - self._away.keys()) >= self._wanted:
                return
            time.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        self._looked_s = self._now()
        try:
            self.locals = rundir.locals_of(self.directory)
        except ValueError:  # its launcher has ended
            self.over = True
        self.over = self.over or self.locals.finished

    def _want(self, more: int) -> None:
        me = process.identify(os.getpid())
        assert me is not None
        self._wanted = max(0, self._wanted + more)
        replace(self.directory / "wanted.json", msgspec.json.encode(WantedPeers(peers=self._wanted, by=me)))

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._serial), do))

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _say(self, words: str) -> None:
        print(f"{schedule.clock(self._now())}  {words}", flush=True)
