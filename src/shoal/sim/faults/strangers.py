"""Hostile peers beside an honest swarm: what they do, when, and what it costs the others.

An outsider has a pass and is in no view. A joiner and a member are machines of ours behind a mask, which changes, withholds and adds
messages. A black hole is an honest peer whose messages with blobs are lost in one direction. All of them begin after training has, and
most go on when everything else heals. They are fewer than half of the members, found no run, and act honestly while they lead or while no
honest replica serves their stage: a run cannot replace a leader that decides alone, or the only copy of a stage.

The invariants hold for honest peers alone (swarm.py, checkers.py). `Strangers` also counts evictions: `wronged` are honest peers that
lived and were not cut off, `evicted` says for how long each hostile peer acted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from shoal.core import messages as m
from shoal.core.consensus.certificates import seal
from shoal.sim.context import Context
from shoal.sim.delivery import Delivery
from shoal.sim.faults import edges
from shoal.sim.faults.hostile import REPEATED, REPORTS, Hostile
from shoal.sim.faults.leading import LyingLeader
from shoal.sim.faults.lies import BOOKS, FALSE, Lies, Situation, soon, unasked
from shoal.sim.node import Node
from shoal.sim.processes import Processes
from shoal.sim.signatures import sign
from shoal.sim.tasks.oddities import noisy
from shoal.sim.tasks.storage import Blob
from shoal.sim.tasks.task_runner import BAD, HUGE, norm_sq

Sent = tuple[m.Message, tuple[Blob, ...]]

FUZZ_S, BURST = 0.5, 8  # every so often so many attacks with messages of one type
NAG_S = 0.25  # between two messages of those who do one thing again and again
PURGE = 0.1  # of these times a leader that evicts whom it likes does so
ABSENT_S = 5.0  # until somebody whose process does not live tries again
# Never reach a machine, or only with the operator's signature
# By what messages it shows that something is computed wrongly
SHOWS: dict[str, type[m.Message]] = {
    "wrong": m.GatherChunk, "invent": m.BoundaryTensor, "poison": m.Gradient, "lazy": m.Gradient, "long": m.Gradient
}  # fmt: skip
BY_DRIVER = m.Override, m.Ping, m.Pong, m.Measure, m.Measured
FUZZED = tuple(kind for kind in edges.KINDS if kind not in BY_DRIVER)


class Strangers:
    """All hostile peers of one simulation."""

    def __init__(self, context: Context, processes: Processes, delivery: Delivery) -> None:
        self.context, self.processes, self.delivery = context, processes, delivery
        self.rng = context.case.rng("strangers")
        self.by_key = {one.key: one for one in context.case.hostile}
        self.acting: dict[int, bool] = {}
        self.began_s: dict[int, float] = {}
        self.inside_s: dict[int, float] = {}  # since when that one has its way as one of the view
        self.wronged: list[str] = []
        self.evicted: dict[str, list[float]] = {}
        self.lied_s: dict[str, float] = {}  # when each changed a message, or a result, first
        self.proposed: dict[int, list[m.View]] = {}  # by leaders, under their number
        self._views: dict[int, m.View] = {}
        self._loops: dict[str, Callable[[Hostile, m.Peer], Iterator[tuple[m.Peer, m.Message]]]] = {
            "fuzz": self._fuzz,
            "coup": self._coup,
            "purge": self._purge,
            **{act: partial(self._unasked, act) for act in (*REPEATED[2:], *REPORTS)},
        }

    # ------------------------------------------------------------------------------------------------------- life

    def begin(self) -> None:
        """Training has begun."""
        for one in self.by_key.values():
            self.context.kernel.after(one.at_s, self._start, one)

    def heal(self) -> None:
        for one in self.by_key.values():
            if one.stops:
                self.acting[one.key] = False

    def of(self, key: int) -> Hostile | None:
        """Who hides behind the process of that key; a black hole is honest."""
        one = self.by_key.get(key)
        return one if one is not None and one.role != "hole" else None

    def put_on(self, node: Node) -> None:
        """A node that has just started gets its mask if it is hostile; no fault may rely on it then."""
        one = self.of(node.process.key)
        node.mask = HostileMask(self, one, node) if one is not None else None
        node.condition.away = node.process.key in self.by_key

    def name_of(self, one: Hostile) -> m.Peer:
        """Of its process that lives, if it has one."""
        alive = (name for name, node in self.processes.nodes.items() if node.process.key == one.key)
        return next(alive, f"p{one.key}.0")

    def _start(self, one: Hostile) -> None:
        context = self.context
        if context.over or (one.stops and context.timeline.healed_s is not None):
            return
        context.note(f"====== {one}")
        self.acting[one.key] = True
        self.began_s[one.key] = context.kernel.now
        if one.role == "joiner":
            self.processes.boot((one.key, 0))
        elif one.role == "hole":
            for node in self.processes.nodes.values():
                node.condition.away |= node.process.key == one.key
        newest = context.watch.newest
        if newest is not None and any(self._key(member.peer) == one.key for member in newest.members):
            self.inside_s[one.key] = context.kernel.now
        for act in one.acts:
            if act in self._loops:
                context.kernel.after(0.0, self._nag, (one, act))

    def _nag(self, given: tuple[Hostile, str]) -> None:
        one, act = given
        context = self.context
        if context.over or not self.acting[one.key]:
            return
        name = self.name_of(one)
        node = self.processes.nodes.get(name)
        if node is None and one.role != "outsider":
            context.kernel.after(ABSENT_S, self._nag, given)
            return
        if node is None or not node.machine.leading or one.role == "leader":
            for to, message in self._loops[act](one, name):
                self.context.count(act)
                inside = any(member.peer == name for member in self._view().members)
                sealed = seal(name, to, message, partial(sign, name))  # it signs its own, never another's
                self.delivery.carry(name, to, sealed, _blobs(message, context.settings, inside), honest=False)
        context.kernel.after(FUZZ_S if act == "fuzz" else NAG_S, self._nag, given)

    # --------------------------------------------------------------------------------------------------- what is said

    def _view(self) -> m.View:
        newest = self.context.watch.newest
        assert newest is not None
        return newest

    def honest(self) -> list[Node]:
        return [node for node in self.processes.nodes.values() if node.mask is None]

    def facts(self, name: m.Peer, peer: m.Peer) -> edges.Facts:
        term = max((node.machine.register.term for node in self.honest()), default=1)
        return edges.Facts(name, peer, self._view(), min(term, 2**52), self.context.watch.rounds.newest)

    def _someone(self) -> m.Peer:
        nodes = self.honest()
        return self.rng.choice(nodes).name if nodes else "p0.0"

    def _leader(self) -> m.Peer:
        leading = [node.name for node in self.honest() if node.machine.leading]
        return leading[0] if leading else self._someone()

    def _fuzz(self, one: Hostile, name: m.Peer) -> Iterator[tuple[m.Peer, m.Message]]:
        to = self._leader() if self.rng.random() < 0.4 else self._someone()
        attacks = list(edges.attacks(self.rng.choice(FUZZED), self.facts(name, to)))
        for label, message in self.rng.sample(attacks, min(BURST, len(attacks))):
            self.context.note(f"{name:6} attacks {to} with {label}")
            yield to, message

    def _coup(self, one: Hostile, name: m.Peer) -> Iterator[tuple[m.Peer, m.Message]]:
        """What ended or took over a run with one message."""
        to = self._someone()
        attack = self.rng.choice(list(coups(self.facts(name, to))))
        if self.context.notes is not None:
            self.context.note(f"{name:6} attacks {to} with {attack!r:.150}")
        yield to, attack

    def counted(self, act: str) -> None:
        self.context.count(act)

    def _purge(self, one: Hostile, name: m.Peer) -> Iterator[tuple[m.Peer, m.Message]]:
        """While it leads it convicts somebody honest now and then. Nothing is sent for that but the next view."""
        node, someone = self.processes.nodes.get(name), self._someone()
        if node is not None and node.machine.leading and self.rng.random() < PURGE:
            node.machine.leadership.facts.convict((someone, "is guilty, says its leader"))
            self.context.count("purge")
        yield from ()

    def _unasked(self, act: str, one: Hostile, name: m.Peer) -> Iterator[tuple[m.Peer, m.Message]]:
        rounds, stages = self.context.watch.rounds.newest, self.context.settings.stages
        situation = Situation(self._view(), rounds, stages, self._someone())
        for message in unasked(act, situation, self.rng):
            yield self._leader(), message

    # ------------------------------------------------------------------------------------------------------ what follows

    def propose(self, view: m.View) -> None:
        """A machine that leads puts it forward: no other may ever be agreed."""
        known = self.proposed.setdefault(view.number, [])
        if view not in known:
            known.append(view)

    def agreed(self, node: Node, view: m.View) -> None:
        """An honest peer holds that view for agreed."""
        if node.machine.leading:
            self.propose(view)
        if view not in self.proposed.get(view.number, ()):
            text = f"view {view.number} was proposed by nobody who leads: {view!r:.400}"
            self.context.watch.report(node.name, "forged", text)
        if view.number in self._views:
            return
        self._views[view.number] = view
        if view.last is not None and all(digest in self.context.world.reduced for digest in view.last.digests):
            scale = self.context.case.settings.scale(view.last.counted)
            wanted = sum(map(norm_sq, view.last.digests)) ** 0.5 * scale
            if not math.isclose(view.last.norm, wanted, rel_tol=1e-9):
                text = f"step {view.last.step} is clipped by the norm {view.last.norm:g}, not {wanted:g}"
                self.context.watch.report(node.name, "norm", text)
        before = self._views.get(view.number - 1)
        if before is not None:
            self._count(before, view)

    def _count(self, before: m.View, view: m.View) -> None:
        """Who joined, was made to download again, or was evicted from one view to the next."""
        then = {one.peer for one in before.members + before.joining}
        now = {one.peer for one in view.members + view.joining}
        for peer in sorted(now - then):
            if self._key(peer) in self.acting:
                self.inside_s[self._key(peer)] = self.context.kernel.now
        for peer in sorted({one.peer for one in view.joining} & {one.peer for one in before.members}):
            node = self.processes.nodes.get(peer)
            again = any(
                f"{peer} {what}" in view.reason for what in ("downloads its state again", "parts", "takes its place")
            )
            if node is not None and not node.condition.away and again:
                self._wrong(peer, view)
        for peer in sorted(then - now):
            self._evict(peer, view)

    def _evict(self, peer: m.Peer, view: m.View) -> None:
        one, node = self.by_key.get(self._key(peer)), self.processes.nodes.get(peer)
        if one is not None and self.acting.get(one.key):
            since_s = self.inside_s.pop(one.key, self.began_s[one.key])
            self.evicted.setdefault(str(one), []).append(round(self.context.kernel.now - since_s, 1))
        elif one is None and node is not None and node.available and not node.condition.leaving and not view.finished:
            self._wrong(peer, view)

    def _wrong(self, peer: m.Peer, view: m.View) -> None:
        self.wronged.append(f"{self.context.kernel.now:.1f} s: {peer}, since {view.reason}")

    def _key(self, peer: m.Peer) -> int:
        number = peer[1:].partition(".")[0]
        return int(number) if number.isascii() and number.isdigit() else -1  # of a name that an attack made up

    def alone(self) -> str:
        """A stage that only hostile peers serve though no honest one was evicted: no run can go on without its state."""
        if self.wronged:
            return ""
        for stage in range(self.context.settings.stages):
            of = [one.peer for one in self._view().members if one.stage == stage]
            if of and all(self._key(peer) in self.by_key for peer in of):
                return f"stage {stage} is served by {', '.join(of)} alone, all of them hostile"
        return ""

    def beside(self, node: Node) -> bool:
        """Does an honest peer serve that one's stage, too?"""
        view = self._view()
        stage = next((one.stage for one in view.members + view.joining if one.peer == node.name), None)
        of = [one.peer for one in view.members if one.stage == stage and self._key(one.peer) not in self.by_key]
        return stage is None or any(peer in self.processes.nodes for peer in of)

    def excused(self, node: Node) -> bool:
        """A black hole, or an honest peer that accusations keep out: counted in `wronged`."""
        return node.process.key in self.by_key or any(self.acting.values())

    def swallows(self, source: m.Peer, target: m.Peer, values: tuple[Blob, ...]) -> bool:
        """Does a black hole take that message?"""
        if not values or source == target:
            return False
        for peer, way in ((source, "out"), (target, "in")):
            one, node = self.by_key.get(self._key(peer)), self.processes.nodes.get(peer)
            if one is not None and one.role == "hole" and way in one.acts and self.acting.get(one.key):
                if node is not None and self.beside(node):
                    self.context.count(way)
                    return True
        return False


class HostileMask:
    """Before a machine of ours: what it sends is changed, withheld, or sent besides."""

    def __init__(self, strangers: Strangers, one: Hostile, node: Node) -> None:
        self.strangers, self.one, self.node = strangers, one, node
        books = strangers.rng.choice(BOOKS)
        self._sent = 0
        self._leads = LyingLeader(
            one.acts, node.machine, lambda: bool(strangers.acting.get(one.key)), strangers.counted
        )
        self._lies = Lies[Blob](node.name, strangers.context.settings, strangers._view, _heavy, books)

    def sends(self, target: m.Peer, message: m.Message, values: tuple[Blob, ...]) -> Sent | None:
        """What leaves instead; None: nothing."""
        if self.one.role == "leader":
            changed = self._leads.sends(target, message)
            return None if changed is None else (changed, values)
        acts = self._acts()
        self._compute_wrongly(acts)
        if not acts:
            return message, values
        for act, shows in SHOWS.items():
            if act in self.one.acts and isinstance(message, shows):
                self._count(act)
        sent: Sent | None = message, values
        for act in self.one.acts:
            if sent is not None:
                before = sent
                sent = self._noise(*before) if act == "noise" else self._lies.sends(act, *before)
                if sent != before:
                    self._count(act)
        return sent

    def answers(self, source: m.Peer, message: m.Message) -> bool:
        """Does it answer in its machine's place?"""
        if "soon" not in self.one.acts or not isinstance(message, m.Forward | m.Backward) or not self._acts():
            return False
        self._count("soon")
        self.strangers.delivery.carry(self.node.name, source, soon(message), (), honest=False)
        return True

    def _acts(self) -> bool:
        strangers, node = self.strangers, self.node
        return bool(strangers.acting.get(self.one.key)) and not node.machine.leading and strangers.beside(node)

    def _compute_wrongly(self, acts: bool) -> None:
        oddities = self.node.runner.oddities
        self.node.runner.rounds.wrong = acts and "wrong" in self.one.acts
        oddities.invents, oddities.poisons, oddities.idles, oddities.overweighs = (
            acts and act in self.one.acts for act in ("invent", "poison", "lazy", "long")
        )

    def _count(self, act: str) -> None:
        self.strangers.lied_s.setdefault(str(self.one), self.strangers.context.kernel.now)
        self.strangers.context.count(act)

    def _noise(self, message: m.Message, values: tuple[Blob, ...]) -> Sent:
        """Another one with every tensor that leaves."""
        if not isinstance(message, m.BoundaryTensor):
            return message, values
        self._sent += 1
        return message, tuple(noisy(value, f"{self.node.name}/{self._sent}") for value in values)


def _heavy(message: m.Message, value: Blob) -> Blob:
    """Finite, and whatever is made of it is not."""
    if value is BAD:
        return value
    return (*value[:4], (*value[4], HUGE) if isinstance(message, m.ReduceChunk) else HUGE[0])


def coups(facts: edges.Facts) -> Iterator[m.Message]:
    """Each of these once ended a run, or took it over, whoever sent it."""
    replace = msgspec.structs.replace
    view, far, proof = facts.view, 2**53, m.Proof(facts.name, (m.Signed(facts.name),))
    for term in (facts.term + 1, facts.term + 2**20, 2**32):
        yield m.Vote(term, granted=False)
        yield m.Vote(term, granted=True, by=m.Signed(facts.name))
        yield m.Accept(term, 0)
        yield m.VoteRequest(term, far, far)
        yield m.Lead(term, view.number, facts.term)
        yield m.Lead(term, view.number, facts.term, votes=proof.signed)
        after = replace(view, number=view.number + 1, reason="because I say so")
        alone = replace(after, members=(m.Member(facts.name, 0),), joining=(), owners=(0,) * len(view.owners))
        for forged in (replace(after, phase=m.Phase.FINISHED), alone, replace(alone, epoch=view.epoch + 1, number=far)):
            yield m.Propose(m.Entry(term, forged, view.voters), term, proof)
            yield m.Propose(m.Entry(term, forged, ()), term)
    over = replace(view, number=view.number + 1, phase=m.Phase.FINISHED)
    yield m.Propose(m.Entry(facts.term, over, ()), facts.term, proof)
    yield m.Accept(facts.term, view.number + 1, over.digest, m.Signed(facts.name))
    yield m.Vote(facts.term, granted=True, by=m.Signed(facts.name))
    yield m.Dismissed(far)
    yield m.RoundWaits(view.epoch, view.step, facts.round, (facts.peer,), (facts.peer,))
    yield m.Booker(view.epoch, view.step, 0, 0, facts.peer)
    yield m.RoundFailed(view.epoch, view.step, facts.round, "because I say so", facts.peer)
    yield m.Redirect(facts.name)
    yield m.Leave("because I say so")
    yield m.Join(m.Holding(view.epoch, 0, view.step), seat=2**20 - 1)
    yield m.Round(view.epoch, view.step, far, view.number, ((m.Share(facts.name, ()),),))


def _blobs(message: m.Message, settings: m.Settings, inside: bool) -> tuple[Blob, ...]:
    """What a driver lets in with it. A member's word counts, so its own blobs are such as no driver lets in."""
    if not isinstance(message, m.BULK) or (isinstance(message, m.Chunk) and message.gone):
        return ()
    if inside or not math.isfinite(getattr(message, "loss", None) or 0.0):
        return (BAD,)
    match message:
        case m.Forward() | m.Backward():
            if 0 < message.stage < settings.stages - 1:
                return ()
            x: Blob = ("x", message.step, message.index, message.stage, FALSE)
            return (x,)
        case m.BoundaryTensor():
            return (("g" if message.gradient else "x", message.step, message.index, message.stage, FALSE),)
        case m.ReduceChunk() | m.GatherChunk():
            return (("part", 0, 0, 1, (HUGE,)),)
    return (("state", None, 0),)
