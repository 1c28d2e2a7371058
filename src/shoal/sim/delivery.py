"""Messages between simulated processes: from a node through the network to another node, or to nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from shoal.core import messages as m
from shoal.sim.context import Context, Values
from shoal.sim.lines import Downlinks, QueuedBlobs, Uplinks
from shoal.sim.processes import Processes

SAMPLE = 61  # every so many messages one is encoded, decoded and compared
SAMPLE_HOSTILE = 7  # the same where somebody tries to make them other messages
STRANGER = "stranger.0"
REFUSED = 0.7  # how often the sender learns that its target does not live
CHUNKS_OF_ROUNDS = (m.ReduceChunk, m.GatherChunk)
Parcel = tuple[m.Peer, m.Peer, m.Message, Values]  # from, to
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(m.Message)


class Delivery:
    """`swallows`: whether a hostile peer keeps a message from arriving."""

    def __init__(self, context: Context, processes: Processes) -> None:
        # No peers: they send texts; None: unreachable
        self.clients: dict[m.Peer, Callable[[m.Peer, m.Message | None], None]] = {}
        self.swallows: Callable[[m.Peer, m.Peer, Values], bool] | None = None
        self.sent_bytes: Counter[m.Peer] = Counter()  # over lines, by sender
        self._context = context
        self._processes = processes
        wire = context.case.wire
        if wire is not None:
            self._uplinks = Uplinks(wire, context.kernel, self._leave)
            self._downlinks = Downlinks(wire)
            processes.on_death = self._uplinks.forget
        self._proposed: m.View | None = None  # the newest view that an honest peer proposes
        self.refused = REFUSED
        self.sample = SAMPLE_HOSTILE if context.case.hostile else SAMPLE
        self._messages = 0
        self._known: set[tuple[m.Peer, bool]] = set()  # whose transport knows its line, up or down

    def carry(self, source: m.Peer, target: m.Peer, message: m.Message, values: Values, *, honest: bool = True) -> None:
        """Hand a message to the network. `honest`: its sender is."""
        context = self._context
        kernel, case = context.kernel, context.case
        self._messages += 1
        if honest and self._messages % self.sample == 0:
            self._check_encoding(source, message)
        if self.swallows is not None and self.swallows(source, target, values):
            return
        if honest and type(message) is m.Propose:
            self._propose(message.entry.view)
        parcel = (source, target, message, values)
        if target == source:
            kernel.at(kernel.now, self._arrive, parcel)
            return
        if values and case.wire is not None:
            self._over_lines(parcel)
            return
        nbytes, priority = 0, 0
        if values:
            priority = m.rank(message)
            chunk = type(message) in CHUNKS_OF_ROUNDS
            nbytes = case.scenario.values if chunk else case.scenario.boundary_bytes * len(values)
        for at in context.network.arrivals(source, target, nbytes, kernel.now, priority):
            kernel.at(at, self._arrive, parcel)
        if context.network.faults.stranger:
            self._stray(parcel)

    def _stray(self, parcel: Parcel) -> None:
        """A stranger may send the same, sooner or later."""
        context, (_, target, message, values) = self._context, parcel
        if context.chance.random() < context.network.faults.stranger and type(message) is not m.Join:
            parcel = (STRANGER, target, message, values)
            context.kernel.after(context.chance.uniform(0.0, 10.0), self._arrive, parcel)

    def withdraw(self, source: m.Peer, voids: Callable[[m.Peer, m.Message], bool]) -> None:
        """What waits at its line and is void does not go."""
        if self._context.case.wire is not None:
            self._uplinks.withdraw(source, voids)

    def current_views(self) -> list[m.View]:
        """The views that a survivor may hold: the newest agreed one and what is proposed after it."""
        newest = self._context.watch.newest
        views = [newest] if newest is not None else []
        if newest is not None and self._proposed is not None and self._proposed.number > newest.number:
            views.append(self._proposed)
        return views

    def forget_proposals(self) -> None:
        """The run begins again."""
        self._proposed = None

    def _propose(self, view: m.View) -> None:
        if self._proposed is None or view.number > self._proposed.number:
            self._proposed = view

    def _over_lines(self, parcel: Parcel) -> None:
        """Over the sender's uplink and the receiver's downlink."""
        source, target, message, values = parcel
        network, kernel = self._context.network, self._context.kernel
        if target in self._processes.died_s:  # its connections carry nothing
            for at in network.arrivals(source, target, 0, kernel.now):
                kernel.at(at, self._arrive, parcel)
        elif (source, target) not in network.cut:
            self._uplinks.put(source, target, message, values)

    def _leave(self, queued: QueuedBlobs) -> None:
        """What has not left when its sender dies is lost."""
        source, target = queued.source, queued.target
        if source in self._processes.died_s:
            return
        self.sent_bytes[source] += queued.nbytes
        kernel = self._context.kernel
        for at in self._context.network.arrivals(source, target, queued.nbytes, kernel.now, queued.rank):
            kernel.at(at, self._reach, queued)

    def _reach(self, queued: QueuedBlobs) -> None:
        """The last byte is at the target's line."""
        source, target = queued.source, queued.target
        if (source, True) not in self._known:
            self._measured(source, up=True)
        kernel = self._context.kernel
        at = self._downlinks.through(source, target, queued.nbytes, queued.rank, kernel.now)
        kernel.at(at, self._arrive_over_line, (source, target, queued.message, queued.values))

    def _arrive_over_line(self, parcel: Parcel) -> None:
        if (parcel[1], False) not in self._known:
            self._measured(parcel[1], up=False)
        self._arrive(parcel)

    def _measured(self, peer: m.Peer, *, up: bool) -> None:
        """Its transport knows then what its line carries."""
        node, wire = self._processes.nodes.get(peer), self._context.case.wire
        if node is None or wire is None:
            return
        self._known.add((peer, up))
        if (line := wire.measured(node.line, peer, up=up)) != node.line:
            node.line = line
            node.receive(line)

    def _arrive(self, parcel: Parcel) -> None:
        source, target, message, values = parcel
        node = self._processes.nodes.get(target)
        if node is not None:
            node.deliver(source, message, values)
        elif target in self.clients:
            self.clients[target](source, message)
        elif self._context.chance.random() < self.refused and (
            source in self._processes.nodes or source in self.clients
        ):
            self._context.kernel.after(0.05, self._refused, (source, target))

    def _refused(self, pair: tuple[m.Peer, m.Peer]) -> None:
        node = self._processes.nodes.get(pair[0])
        if node is not None:
            node.receive(m.Unreachable(pair[1]))
        elif pair[0] in self.clients:
            self.clients[pair[0]](pair[1], None)

    def _check_encoding(self, peer: m.Peer, message: m.Message) -> None:
        """A message must be the same after encoding and decoding."""
        watch = self._context.watch
        try:
            same = _DECODER.decode(_ENCODER.encode(message)) == message
        except (msgspec.ValidationError, OverflowError) as error:  # beyond 64 bits: its driver would end
            watch.report(peer, "wire", f"{message}: {error}")
            return
        if not same and "nan" not in repr(message):
            watch.report(peer, "wire", f"{message} is another message after decoding")
