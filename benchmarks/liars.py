"""Six real peers of which one lies, in every way in turn: how fast do the other five train, and for how long is the liar believed?

    python benchmarks/liars.py [--seconds 20] [--kinds withhold,sums@10,...]

Each kind has a run of its own with the model of the quickstart: six processes, three stages of two replicas. The sixth is a whole
peer with a valid invite whose messages are changed, withheld or delayed from the first step on (sim/faults/lies.py), or that sends
others besides; it founds nothing and never leads. `KIND@STEP`: it is honest before that step. Every few runs one is honest. Printed of
each: steps/s and their share of the last honest run's, the loss of the last step that both reached, at most step 39, over the honest
one, after how many steps and seconds the liar was evicted first, how often an honest peer was evicted or had to download its state
again, and how many committed steps were undone since they held what the liar had contributed (run.undo). The last line is one JSON
object: the smallest share of steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import torch

from report import Target, parse, report
from shoal import build, codec
from shoal import config as configuration
from shoal.config import Config
from shoal.core import messages as m
from shoal.executor.answers import known_answers
from shoal.launcher.peer import die_with
from shoal.runtime.node import Node
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.coding import Held
from shoal.sim.faults import edges
from shoal.sim.faults.lies import Lies, Situation, unasked
from shoal.sim.faults.strangers import coups
from shoal.transport.base import Blob
from shoal.transport.identity.invite import Authority, read_invite

PEERS, LIAR = 6, 5
QUICKSTART = Path(__file__).resolve().parents[1] / "src/shoal/cli/quickstart.toml"
LISTENING_S, START_S = 60.0, 120.0
NAG_S = 0.25  # between two messages of those who do one thing again and again
SLOW_S = 1.5  # by which a slow liar delays its answers
LOSS_STEP = 39
HONEST_AGAIN = 5  # kinds between two honest runs, with which those are compared
POISON, CONSTANT = 0.5, 5.0  # of the norm of each gradient; a loss
HEAVY = 1e14  # below what a driver refuses
KINDS = (
    "honest", "withhold", "held", "missing", "refuse", "busy", "idle", "slow", "rate",
    "sums", "digest", "digest+sums", "norm", "overflow", "noise", "invent", "poison", "lazy", "parts", "wrong sums", "wrong totals",
    "mute", "gone", "coming", "books:all", "books:twice", "books:impossible", "frozen", "far", "loss",
    "complain", "culprit", "waits", "unable", "nonfinite", "coup", "queries", "fuzz",
)  # fmt: skip

Sent = tuple[m.Message, tuple[Blob, ...]]


class Seen(msgspec.Struct):
    """A view as one honest peer took it, at `at_s` of the machine's clock."""

    at_s: float
    number: int
    step: int
    started: bool
    members: tuple[str, ...]
    joining: tuple[str, ...]
    reason: str
    loss: float | None
    undone_steps: int = 0  # for evictions, so far


class Outcome(msgspec.Struct):
    kind: str
    rate: float
    share: float = 1.0
    losses: dict[int, float] = {}
    loss_ratio: float = 1.0
    evicted_steps: int | None = None
    evicted_s: float | None = None
    evictions: int = 0
    harmed: int = 0
    undone_steps: int = 0


# ------------------------------------------------------------------------------------------------------------ lying


class Liar:
    """Stands between an honest node and its transport."""

    def __init__(self, kind: str, node: Node, config: Config) -> None:
        kind, _, step = kind.partition("@")
        base, _, books = kind.partition(":")
        self.honest_until = int(step or 0)
        self.acts, self.node, self.config = base.split("+"), node, config
        self.rng, self.name = np.random.default_rng(0), node.machine.name
        settings = node.machine.settings
        self.lies = Lies[Blob](self.name, settings, lambda: node.machine.view, self.heavy, books or "all")
        if "invent" in self.acts:
            self.invent()
        if "wrong totals" in self.acts:
            self.add_up_wrong()
        if {"poison", "lazy"} & {*self.acts}:
            self.add_wrong("lazy" in self.acts)
        self.really = node.transport.send
        node.transport.send = self.send  # type: ignore[method-assign]

    @property
    def acting(self) -> bool:
        view = self.node.machine.view
        begun = view is not None and view.started and view.step >= self.honest_until
        return begun and not self.node.machine.leading

    def add_up_wrong(self) -> None:
        """Noise for the sums of its chunks: the same for itself and all others, so that their digests agree."""
        averaging = self.node.runner._sums.averaging  # type: ignore[attr-defined]
        really = averaging.sum

        def wrong(total: torch.Tensor, parts: tuple[str, ...]) -> Held:
            if self.acting:
                total += torch.from_numpy(self.random(total.numpy())).float()
            return really(total, parts)

        averaging.sum = wrong

    def invent(self) -> None:
        """Noise for the results of its hops, which it keeps and believes itself."""
        outgoing = self.node.runner._outgoing  # type: ignore[attr-defined]
        really = outgoing.put

        def wrong(tensor: torch.Tensor, how: str) -> Held:
            made_up = torch.from_numpy(self.random(tensor.numpy())).to(tensor.dtype) if self.acting else tensor
            return really(made_up, how)

        outgoing.put = wrong

    def add_wrong(self, nothing: bool) -> None:
        """What it adds to its sum is the gradient and noise of half its norm; or `nothing`, and zeros and a constant loss are sent."""
        runner = self.node.runner
        really = runner._backward  # type: ignore[attr-defined]

        def wrong(task: m.RunBackward, x: torch.Tensor, grad: torch.Tensor | None) -> m.Result:
            executor = runner._seat.executor  # type: ignore[attr-defined]
            before = executor.sum.clone() if self.acting else None
            result: m.Result = really(task, x, grad)
            if before is None or task.heldout:
                return result
            if nothing:
                executor.sum.copy_(before)
                if task.out:
                    held = runner.get(task.out)
                    runner._blobs.put(task.out, torch.zeros_like(coding.plain(held)))  # type: ignore[attr-defined]
                return msgspec.structs.replace(result, loss=CONSTANT if result.loss is not None else None)
            added = (executor.sum - before).norm()
            noise = torch.from_numpy(self.rng.normal(0.0, 1.0, len(before))).float()
            executor.sum.add_(noise * (POISON * added / noise.norm()))
            return result

        runner._backward = wrong  # type: ignore[attr-defined]

    def heavy(self, message: m.Message, value: Blob) -> Blob:
        return self.values(value, lambda array: np.full_like(array, HEAVY))

    def values(self, value: Blob, change: Callable[[np.ndarray], np.ndarray]) -> Blob:
        """The blob with other values, where it is plain fp32."""
        if value.codec != codec.RAW or value.dtype != "float32":
            return value
        array = np.frombuffer(value.data, dtype=np.float32)
        data = change(array).astype(np.float32).tobytes()
        return msgspec.structs.replace(value, data=data, largest=None)

    def random(self, array: np.ndarray) -> np.ndarray:
        return self.rng.normal(0.0, 10.0 * float(np.std(array)) + 1e-6, array.shape)

    def send(self, peer: m.Peer, message: m.Message, blobs: tuple[Blob, ...] = ()) -> int:
        if not self.acting:
            return self.really(peer, message, blobs)
        sent: Sent | None = (message, blobs)
        for act in self.acts:
            sent = None if sent is None else self.changed(act, peer, *sent)
        if sent is None:
            return 0
        if "slow" in self.acts and not isinstance(message, m.Heartbeat | m.Lead | m.Accept | m.Vote):
            asyncio.get_running_loop().call_later(SLOW_S, partial(self.really, peer, *sent))
            return 1
        return self.really(peer, *sent)

    def changed(self, act: str, peer: m.Peer, message: m.Message, blobs: tuple[Blob, ...]) -> Sent | None:
        kinds: dict[str, type[m.Message]] = {
            "noise": m.BoundaryTensor, "parts": m.ReduceChunk, "wrong sums": m.GatherChunk
        }  # fmt: skip
        if act not in kinds:
            return self.lies.sends(act, message, blobs)
        if isinstance(message, kinds[act]):
            return message, tuple(self.values(blob, self.random) for blob in blobs)
        return message, blobs

    async def nag(self) -> None:
        """What it sends unasked, as long as it is a member."""
        random, node = Random(1), self.node
        while True:
            await asyncio.sleep(NAG_S)
            view = node.machine.view
            others = [one.peer for one in view.members if one.peer != self.name] if view is not None else []
            if not self.acting or view is None or len(others) == len(view.members) or not others:
                continue
            for act in self.acts:
                for peer, message in self.unasked(act, view, others, random):
                    try:
                        self.really(peer, node.signing.seal(peer, message))
                    except ValueError:  # longer than its kind may be
                        continue

    def unasked(
        self, act: str, view: m.View, others: list[m.Peer], random: Random
    ) -> Iterator[tuple[m.Peer, m.Message]]:
        machine, someone = self.node.machine, random.choice(others)
        facts = edges.Facts(self.name, someone, view, machine.register.term, machine.server._rounds.active or 0)
        if act == "coup":
            yield from ((someone, attack) for attack in coups(facts))
        elif act == "fuzz":
            attacks = [one for _, one in edges.attacks(random.choice(edges.KINDS), facts)]
            yield from ((someone, attack) for attack in random.sample(attacks, min(50, len(attacks))))
        elif act == "queries":
            for index in range(len(view.owners)):
                for stage in range(machine.settings.stages):
                    yield someone, m.Query(view.epoch, view.work, index, stage, 1, True)
                    yield someone, m.TensorRequest(view.epoch, view.work, index, stage, False)
                    yield someone, m.BooksRequest(view.epoch, view.work, view.number)
            yield someone, m.Join(answers=machine.settings.answers)
            yield someone, m.VoteRequest(facts.term + 1, view.number, view.number)
        elif machine.leader is not None:
            situation = Situation(view, facts.round, machine.settings.stages, someone)
            yield from ((machine.leader, message) for message in unasked(act, situation, random))


# -------------------------------------------------------------------------------------------------------- processes


def child(number: int, kind: str, config: Config, invite: str, answers: m.KnownAnswers, folder: Path) -> None:
    """One peer, until it is killed."""
    die_with(os.getppid())
    os.chdir(folder)
    log = os.open(folder / f"p{number}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    asyncio.run(take_part(number, kind, config, invite, answers, folder))


async def take_part(number: int, kind: str, config: Config, invite: str, answers: m.KnownAnswers, folder: Path) -> None:
    role, loading = build.PeerRole(first=number == 0), Future[build.Loaded]()
    loaded = build.load(config)
    build.check(config)
    loaded.checked.set_result(None)
    loading.set_result(loaded._replace(answers=answers))
    async with build.peer(config, role, read_invite(invite, 0.0), loading, None) as node:
        name = folder / f"{number}.json"
        name.with_suffix(".new").write_bytes(
            msgspec.json.encode((node.machine.name, node.contacts.directory.addresses))
        )
        name.with_suffix(".new").rename(name)
        tasks = []
        if number == LIAR and kind != "honest":
            liar = Liar(kind, node, config)
            tasks.append(asyncio.create_task(liar.nag()))
        else:
            watch(node, folder / f"{number}.views")
        await node.run()


def watch(node: Node, path: Path) -> None:
    """Write down every view that this peer takes."""
    file, really, newest = path.open("ab", buffering=0), node.handle, -1

    def handle(event: m.Event) -> None:
        nonlocal newest
        really(event)
        view = node.machine.view
        if view is not None and view.number > newest:
            newest = view.number
            members, joining = (tuple(one.peer for one in of) for of in (view.members, view.joining))
            loss = view.last.loss if view.last is not None else None
            undone = view.undoing.steps if view.undoing is not None else 0
            seen = Seen(time.monotonic(), newest, view.step, view.started, members, joining, view.reason, loss, undone)
            file.write(msgspec.json.encode(seen) + b"\n")

    node.handle = handle  # type: ignore[method-assign]


def views(folder: Path) -> list[Seen]:
    """Of all honest peers, each once, as it was taken first."""
    first: dict[int, Seen] = {}
    for path in folder.glob("*.views"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            seen = msgspec.json.decode(line, type=Seen)
            if seen.number not in first or seen.at_s < first[seen.number].at_s:
                first[seen.number] = seen
    return [first[number] for number in sorted(first)]


def played(
    kind: str,
    config: Config,
    answers: m.KnownAnswers,
    seconds: float,
    enough: Callable[[list[Seen]], bool] = lambda seen: False,
) -> Outcome:
    """For so many seconds, or until what was seen is `enough`."""
    with tempfile.TemporaryDirectory() as name:
        folder, authority, processes = Path(name), Authority.new(), list[int]()
        try:
            addresses: tuple[str, ...] = ()
            for number in range(PEERS):
                invite = authority.invite(addresses, time.time() + 3600.0, "liars")
                process = os.fork()
                if not process:
                    try:
                        child(number, kind, config, invite, answers, folder)
                    finally:
                        os._exit(0)
                processes.append(process)
                if not number:
                    addresses = waited(lambda: listening(folder / "0.json"), LISTENING_S, folder)[1]
            began_s = waited(lambda: next((one.at_s for one in views(folder) if one.started), None), START_S, folder)
            while time.monotonic() < began_s + seconds and not enough(views(folder)):
                time.sleep(0.2)
            liar = waited(lambda: listening(folder / f"{LIAR}.json"), LISTENING_S, folder)[0]
        finally:
            for process in processes:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        if keep := os.environ.get("LIARS_LOGS"):
            for path in [*folder.glob("*.views"), *folder.glob("*.log")]:
                (Path(keep) / f"{kind}-{path.name}".replace(" ", "-")).write_bytes(path.read_bytes())
        return outcome(kind, views(folder), liar, began_s, seconds)


def listening(path: Path) -> tuple[str, tuple[str, ...]] | None:
    return msgspec.json.decode(path.read_bytes(), type=tuple[str, tuple[str, ...]]) if path.exists() else None


def waited(look: Callable[[], object], most_s: float, folder: Path) -> object:
    until_s = time.monotonic() + most_s
    while (value := look()) is None:
        if time.monotonic() > until_s:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise SystemExit(f"the run does not begin within {most_s:.0f} s:\n{logs}")
        time.sleep(0.1)
    return value


def outcome(kind: str, seen: list[Seen], liar: str, began_s: float, seconds: float) -> Outcome:
    seen = [one for one in seen if began_s <= one.at_s <= began_s + seconds]
    first, last = seen[0], seen[-1]
    losses = {one.step - 1: one.loss for one in seen if one.loss is not None}
    result = Outcome(kind, (last.step - first.step) / seconds, losses=losses, undone_steps=last.undone_steps)
    key = liar.partition(".")[0]
    for before, after in itertools.pairwise(seen):
        there = {*before.members, *before.joining}
        for peer in there - {*after.members, *after.joining}:
            if peer.startswith(key):
                result.evictions += 1
                if result.evicted_s is None:
                    result.evicted_s, result.evicted_steps = after.at_s - began_s, before.step - first.step
            else:
                result.harmed += 1
        again = {*before.members} & {*after.joining}
        result.harmed += sum(not peer.startswith(key) and f"{peer} downloads" in after.reason for peer in again)
    return result


def compare(one: Outcome, honest: Outcome) -> None:
    one.share = one.rate / honest.rate if honest.rate else 0.0
    both = [step for step in one.losses if step in honest.losses and step <= LOSS_STEP]
    if both:
        one.loss_ratio = one.losses[max(both)] / honest.losses[max(both)]


def line_of(one: Outcome) -> str:
    out = "never" if one.evicted_s is None else f"{one.evicted_steps} steps, {one.evicted_s:.0f} s"
    ratio = f"{one.loss_ratio:8.3f}" if math.isfinite(one.loss_ratio) and abs(one.loss_ratio) < 1e3 else "    huge"
    evicted = f"{out:>18} {one.evictions:5} {one.harmed:7}"
    return f"{one.kind:17} {one.rate:7.2f} {one.share:6.0%} {ratio} {evicted} {one.undone_steps:6}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25.0, help="of each run, from its first step on")
    parser.add_argument("--spot-checks", type=float, default=0.1, metavar="SHARE", help="run.spot_checks")
    parser.add_argument("--kinds", default="", metavar="A,B", help=f"of {', '.join(KINDS[1:])}; default all")
    given = parse(parser)
    wanted: tuple[str, ...] = ("honest", *(kind for kind in given.kinds.split(",") if kind)) if given.kinds else KINDS
    if unknown := [kind for kind in wanted if any(act not in KINDS for act in kind.partition("@")[0].split("+"))]:
        raise SystemExit(f"{', '.join(unknown)}: unknown; there are {', '.join(KINDS)}")
    tree = QUICKSTART.read_text().replace("steps = 80", "steps = 5000").replace("every = 40", "every = 0")
    network = '\n[network]\nhost = "127.0.0.1"\ndiscovery = "gossip"\ntransport = "tls"\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quickstart.toml"
        path.write_text(tree.replace("[run]\n", f"[run]\nspot_checks = {given.spot_checks}\n") + network)
        config = configuration.load(path)
    answers, outcomes = known_answers(config), list[Outcome]()
    print(
        f"{'liar':17} {'steps/s':>7} {'share':>6} {'loss':>8} {'evicted after':>18} {'times':>5} {'harmed':>7} {'undone':>6}",
        flush=True,
    )
    for number, kind in enumerate(wanted):
        if number % HONEST_AGAIN == 1:  # the machine may have other work by now
            honest = played("honest", config, answers, given.seconds)
        one = played(kind, config, answers, given.seconds)
        outcomes.append(one)
        compare(one, one if kind == "honest" else honest)
        print(line_of(one), flush=True)
    rows = [{**msgspec.to_builtins(one), "losses": None} for one in outcomes]
    least = min((one.share for one in outcomes[1:]), default=1.0)
    report(
        "liars",
        least,
        "of the honest run's steps/s",
        Target(0.5, "higher"),
        {"runs": json.loads(json.dumps(rows))},
        given.record,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
