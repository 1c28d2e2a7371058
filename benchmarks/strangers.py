"""A run of real peers, attacked by somebody with a valid invite: does anybody die, stop, lose count, or swell?

    python benchmarks/strangers.py [--seconds 20] [--rate 400]        # a small run of its own, from beginning to end
    python benchmarks/strangers.py runs/NAME [--invite INVITE]        # a run that is being trained on this machine

The attacker sends each message type with each field at each of its edges (sim/faults/edges.py), and what once ended runs with one
message (sim/faults/strangers.py), to every peer in turn: as an outsider, who has a pass and is in no view, then as a joiner, who asked to
take part and beats, then as a member, a whole peer that trains and signs and sends all of this besides. What is sent is bounded in
number, rate and time, and goes to peers of 127.0.0.1 only. Told of each phase: steps/s by commits.jsonl, peers that died, memory of
the largest peer. The last line is one JSON object: steps/s while attacked; `setting` has what they were before. The exit code is 1 if a
process died, no step was committed in a phase, a peer grew by more than --growth, or (of a run of its own) it did not finish with a
balanced account.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec

from report import Target, parse, report
from shoal import build
from shoal import config as configuration
from shoal.build import operator
from shoal.core import messages as m
from shoal.executor.answers import known_answers
from shoal.launcher.files import rundir
from shoal.runtime.node import Node
from shoal.sim.faults import edges
from shoal.sim.faults.strangers import coups
from shoal.transport.base import Blob, Incoming
from shoal.transport.directory.directory import Directory
from shoal.transport.emulated.shaped import Reachable
from shoal.transport.identity.invite import Authority, Invite, read_invite

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.tiny

from tests.tiny import DATA, tiny  # noqa: E402

PEERS, STAGES = 4, 2
START_S, END_S = 300.0, 300.0
ADMITTED_S = 60.0  # to become a member: it downloads its stage and enters with a step
PASS_S = 3600.0
SETTLE_S = 3.0  # what was sent last takes effect, and steps are counted over no shorter time
LONGEST = 20_000  # messages of one phase
TURN = 16  # messages between two looks at the clock
MIB = 1 << 20
VALUES = Blob("float32", (4,), bytes(16))


class Phase(msgspec.Struct):
    name: str
    sent: int = 0
    seconds: float = 0.0
    steps: int = 0
    died: int = 0
    largest_mib: float = 0.0  # of any peer process, at the end
    swollen_mib: float = 0.0  # by which one peer has grown at most since the beginning of the first phase

    @property
    def rate(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


class Watched:
    """The run, seen from outside: its directory and its processes."""

    def __init__(self, directory: Path, wanted: int) -> None:
        self.directory, self.wanted = directory, wanted
        self.processes = {seat.label: seat.process.pid for seat in rundir.locals_of(directory).peers}
        self.before = {label: resident_mib(pid) for label, pid in self.processes.items()}

    def steps(self) -> int:
        path = self.directory / "commits.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def dead(self) -> list[str]:
        """Whose process has ended before the run had."""
        if self.steps() >= self.wanted:
            return []
        return [label for label, pid in self.processes.items() if not resident_mib(pid)]

    def over(self, phase: Phase, began_s: float, steps: int) -> Phase:
        now = {label: resident_mib(pid) for label, pid in self.processes.items()}
        phase.seconds, phase.steps = time.monotonic() - began_s, self.steps() - steps
        phase.died, phase.largest_mib = len(self.dead()), max(now.values(), default=0.0)
        phase.swollen_mib = max((now[label] - self.before[label] for label in now if now[label]), default=0.0)
        return phase


def resident_mib(process: int) -> float:
    """0: there is no such process any more."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:")), 0.0)


class Attacker:
    """Knows what any member sees: it asks peers how they stand."""

    def __init__(self, transport: Reachable, directory: Directory, kinds: tuple[type[m.Message], ...]) -> None:
        """`kinds`: of the messages that are sent; none: all, and those that once ended runs before them."""
        self.transport, self.directory, self.kinds = transport, directory, kinds
        self.standings: dict[m.Peer, m.Standing] = {}
        self.leader: m.Peer | None = None
        self.joins = False
        self.answers = m.KnownAnswers()  # a joiner's, without which it is refused
        self.admitted = False

    async def listen(self) -> None:
        while True:
            item = await self.transport.receive()
            if not isinstance(item, Incoming):
                continue
            match item.message:
                case m.Standing() as standing:
                    self.standings[item.peer] = standing
                case m.Lead():
                    self.leader = item.peer
                case m.Propose(entry=entry, proof=m.Proof()):
                    here = [one.peer for one in entry.view.members + entry.view.joining]
                    self.admitted |= self.transport.name in here

    async def look(self) -> None:
        await self.directory.announce()
        for record in await self.directory.peers():
            if record.peer != self.transport.name:
                if record.host not in ("127.0.0.1", "localhost"):
                    raise ValueError(f"{record.peer[:6]} is at {record.host}: only peers of 127.0.0.1 are attacked")
                self.transport.send(record.peer, m.StandingRequest())

    async def live(self) -> None:
        """As long as it is to be a joiner: ask, and beat."""
        while True:
            await self.look()
            view = self.view
            if self.joins and view is not None:
                there = self.transport.name in [one.peer for one in view.members + view.joining]
                self.admitted |= there
                for peer in self.standings:
                    self.transport.send(peer, m.Join(answers=self.answers))
                if there:
                    term = max(standing.term for standing in self.standings.values())
                    heartbeat = m.Heartbeat(term, view.number, view.step, False, epoch=view.epoch)
                    for peer in [self.leader] if self.leader else self.standings:
                        self.transport.send(peer, heartbeat)
            await asyncio.sleep(0.5)

    @property
    def view(self) -> m.View | None:
        return max((one.view for one in self.standings.values()), key=lambda view: view.number, default=None)

    def term(self) -> int:
        return max(standing.term for standing in self.standings.values())

    def send(self, peer: m.Peer, message: m.Message, blobs: tuple[Blob, ...] = ()) -> None:
        self.transport.send(peer, message, blobs)

    def attacks(self) -> Iterator[tuple[m.Peer, m.Message]]:
        """Every attack once, at each peer in turn, until all of them have had all."""
        view = self.view
        assert view is not None
        targets = sorted(one.peer for one in view.members if one.peer != self.transport.name)

        def facts(peer: m.Peer) -> edges.Facts:
            newest = self.view or view
            return edges.Facts(self.transport.name, peer, newest, min(self.term(), 2**32))

        for peer in () if self.kinds else targets:
            for attack in coups(facts(peer)):
                yield peer, attack
        for kind, peer in itertools.product(self.kinds or edges.KINDS, targets):
            for _, attack in edges.attacks(kind, facts(peer)):
                yield peer, attack

    async def attack(self, phase: Phase, seconds: float, rate: float) -> None:
        began_s = time.monotonic()
        for peer, message in self.attacks():
            if time.monotonic() - began_s > seconds or phase.sent >= LONGEST:
                return
            with contextlib.suppress(ValueError):  # longer than its kind may be, which no receiver would read
                self.send(peer, message)
                if isinstance(message, m.BULK):
                    self.send(peer, message, (VALUES,))
            phase.sent += 1
            if phase.sent % TURN == 0:
                await asyncio.sleep(max(0.0, began_s + phase.sent / rate - time.monotonic()))


class Insider(Attacker):
    """A whole peer that takes part, and lies."""

    def __init__(self, node: Node, directory: Directory, kinds: tuple[type[m.Message], ...]) -> None:
        super().__init__(node.transport, directory, kinds)
        self.node = node

    @property
    def view(self) -> m.View | None:
        return self.node.machine.view

    @property
    def serves(self) -> bool:
        view = self.view
        return view is not None and any(one.peer == self.node.machine.name for one in view.members)

    def term(self) -> int:
        return self.node.machine.register.term

    def send(self, peer: m.Peer, message: m.Message, blobs: tuple[Blob, ...] = ()) -> None:
        self.transport.send(peer, self.node.signing.seal(peer, message), blobs)


async def as_member(config: configuration.Config, invite: Invite, given: argparse.Namespace, run: Watched) -> Phase:
    loading = Future[build.Loaded]()
    loading.set_result(build.load(config))
    build.check(config)
    loading.result().checked.set_result(None)
    async with build.peer(config, build.PeerRole(), invite, loading, None) as node:
        insider = Insider(node, node.contacts.directory, given.kinds)
        training = asyncio.create_task(node.run())
        until_s = time.monotonic() + ADMITTED_S
        while not insider.serves and time.monotonic() < until_s:
            await asyncio.sleep(0.1)
        phase, began_s, steps = (
            Phase("member" if insider.serves else "member, not admitted"),
            time.monotonic(),
            run.steps(),
        )
        if insider.view is not None:
            await insider.attack(phase, given.seconds, given.rate)
        await asyncio.sleep(SETTLE_S)
        run.over(phase, began_s, steps)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        return phase


async def attacked(directory: Path, invite: Invite, given: argparse.Namespace) -> list[Phase]:
    config = configuration.load(directory / "config.toml")
    run, phases, answers = Watched(directory, config.run.steps), [], known_answers(config)

    async def watch(phase: Phase, seconds: float) -> None:
        began_s, steps = time.monotonic(), run.steps()
        await asyncio.sleep(seconds)
        phases.append(run.over(phase, began_s, steps))

    await watch(Phase("before"), given.quiet)
    for name in ("outsider", "joiner"):
        async with operator(config, invite) as (transport, found):
            attacker = Attacker(transport, found, given.kinds)
            attacker.joins = name == "joiner"
            attacker.answers = answers
            tasks = [asyncio.create_task(attacker.listen()), asyncio.create_task(attacker.live())]
            until_s = time.monotonic() + 20.0
            while time.monotonic() < until_s and (attacker.view is None or (attacker.joins and not attacker.admitted)):
                await asyncio.sleep(0.1)
            if attacker.view is None:
                raise ValueError("no peer answers: is the run being trained, and the invite its own?")
            phase, began_s, steps = Phase(name), time.monotonic(), run.steps()
            if attacker.joins and not attacker.admitted:
                phase.name = "joiner, not admitted"
            await attacker.attack(phase, given.seconds, given.rate)
            await asyncio.sleep(SETTLE_S)
            phases.append(run.over(phase, began_s, steps))
            for task in tasks:
                task.cancel()
    phases.append(await as_member(config, invite, given, run))
    await watch(Phase("after"), given.quiet)
    return phases


def told(phases: list[Phase]) -> None:
    print(f"{'phase':22} {'sent':>6} {'seconds':>8} {'steps':>6} {'steps/s':>8} {'died':>5} {'MiB':>7} {'grown':>6}")
    for one in phases:
        print(
            f"{one.name:22} {one.sent:6} {one.seconds:8.1f} {one.steps:6} {one.rate:8.2f} {one.died:5} "
            f"{one.largest_mib:7.0f} {one.swollen_mib:6.0f}"
        )


def verdict(phases: list[Phase], growth_mib: float) -> list[str]:
    wrong = [f"{one.died} peer processes have died ({one.name})" for one in phases if one.died]
    wrong += [f"no step was committed in {one.seconds:.0f} s ({one.name})" for one in phases if not one.steps]
    wrong += [f"a peer has grown by {one.swollen_mib:.0f} MiB" for one in phases[-1:] if one.swollen_mib > growth_mib]
    return wrong


def kinds_of(text: str) -> tuple[type[m.Message], ...]:
    known = {kind.__name__: kind for kind in edges.KINDS}
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no message; there are {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def invite_of(directory: Path, text: str) -> Invite:
    if text:
        return read_invite(text, time.time())
    authority = Authority.load(directory / "authority.key")
    addresses = msgspec.json.decode((directory / "bootstrap.json").read_bytes(), type=tuple[str, ...])
    return read_invite(authority.invite(addresses, time.time() + PASS_S, "attacked"), 0.0)


def own_run(given: argparse.Namespace, folder: Path) -> tuple[list[Phase], list[str]]:
    """A run that has as many steps as it takes: it is told to end when it has been attacked."""
    (folder / "a.txt").write_bytes(DATA)
    config = tiny("attacked", peers=PEERS, stages=STAGES, steps=given.steps, every=10, request_s=10.0)
    network = 'host = "127.0.0.1"\ndelay_s = 0.01\n'  # steps of a tenth of a second on any machine
    (folder / "attacked.toml").write_text(config + network)
    directory = folder / "runs/attacked"
    with open(folder / "log", "wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", "run", "attacked.toml"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        commits, until_s = directory / "commits.jsonl", time.monotonic() + START_S
        while not (commits.exists() and commits.read_bytes().count(b"\n") > 3):
            if launcher.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the run has not begun:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        os.chdir(folder)
        phases = asyncio.run(attacked(directory, invite_of(directory, ""), given))
        try:
            code = launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            return phases, [f"the run does not end: {(folder / 'log').read_text()[-1000:]}"]
        wrong = [f"exit code {code}: {(folder / 'log').read_text()[-2000:]}"] if code else []
        summary = directory / "summary.json"
        account = json.loads(summary.read_bytes()) if summary.exists() else {}
        if not code and not account.get("balanced", False):
            wrong.append(f"the account does not balance: {account}")
        return phases, wrong
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", help="directory of a run that is being trained here; else one of its own")
    parser.add_argument("--invite", default="", help="else made with the directory's authority.key")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack, at most")
    parser.add_argument("--quiet", type=float, default=8.0, metavar="S", help="seconds before and after")
    parser.add_argument("--rate", type=float, default=400.0, help="messages per second, at most")
    parser.add_argument("--growth", type=float, default=64.0, metavar="MIB", help="by which a peer may grow")
    parser.add_argument(
        "--kinds",
        type=kinds_of,
        default=(),
        metavar="A,B",
        help="only messages of these types, such as Heartbeat,Saved",
    )
    parser.add_argument("--steps", type=int, default=400, help="of a run of its own")
    given = parse(parser)
    if not 0 < given.seconds <= 120 or not 0 < given.rate <= 2000:
        raise SystemExit("--seconds: above 0, at most 120; --rate: above 0, at most 2000")
    if given.run:
        directory = Path(given.run)
        phases, wrong = asyncio.run(attacked(directory, invite_of(directory, given.invite), given)), []
    else:
        with tempfile.TemporaryDirectory() as folder:
            here = Path.cwd()
            phases, wrong = own_run(given, Path(folder))
            os.chdir(here)
    told(phases)
    wrong += verdict(phases, given.growth)
    for one in wrong:
        print(f"BROKEN: {one}")
    during = [one.rate for one in phases[1:-1]]
    setting = {
        "phases": [{**msgspec.to_builtins(one), "rate": round(one.rate, 3)} for one in phases],
        "broken": len(wrong),
    }
    report("strangers", min(during), "steps/s while attacked", Target(None, "higher"), setting, given.record)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
