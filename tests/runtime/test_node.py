"""Whole peers in one process over the network in memory: they train, agree, account for every sample and replay alike."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests import reference

from shoal import codec, trace
from shoal.config import Checkpoint, Config, Data, Device, Model, Network, Run, Train, microbatches, settings
from shoal.core.messages import (
    PROTOCOL,
    Add,
    Backward,
    Booking,
    BoundaryTensor,
    Command,
    Cut,
    Do,
    Event,
    Finish,
    Gather,
    GatherChunk,
    Heartbeat,
    Lead,
    LineMeasured,
    Member,
    Message,
    Override,
    Peer,
    Proof,
    Received,
    ReduceChunk,
    Reduced,
    Result,
    RunBackward,
    Send,
    Signed,
    Standing,
    Task,
    Tick,
    View,
)
from shoal.core.peer import PeerMachine
from shoal.executor import base
from shoal.executor.swap import memory
from shoal.numerics import optimizer
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.data.dataset import open_dataset
from shoal.runtime.node import Node, admissible
from shoal.runtime.records.account import CommitHistory
from shoal.runtime.records.record import Recorder
from shoal.runtime.records.report import AnyLine
from shoal.runtime.signing import Signing
from shoal.runtime.tasks.coding import Held
from shoal.runtime.tasks.task_runner import TaskRunner
from shoal.sim.faults import edges
from shoal.traffic import StoredBytes, Traffic
from shoal.transport.base import Blob, Incoming
from shoal.transport.directory.directory import Directory, PeerRecord
from shoal.transport.emulated.memory import Hub, MemoryTransport
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority

# min_request_timeout_s and heartbeat_timeout_s are long: nothing here may be called slow or dead because the machine is busy.
TINY = Config(
    run=Run(
        name="tiny",
        peers=4,
        stages=2,
        steps=3,
        seed=3,
        heartbeat_s=0.05,
        heartbeat_timeout_s=60.0,
        min_request_timeout_s=60.0,
    ),
    model=Model(hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24),
    data=Data(source="text", path="a.txt", sequence=8),
    train=Train(batch=8, microbatch=2, warmup=0),
    checkpoint=Checkpoint(every=0, at_end=False),
    device=Device(threads=1),
)
LONG_S = 100.0


class Known(Directory):
    """A directory in which everybody is listed."""

    addresses = ()

    def __init__(self, names: list[Peer]) -> None:
        self.names = names

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def announce(self) -> None: ...

    async def peers(self) -> list[PeerRecord]:
        return [PeerRecord(run="r", peer=name, host="", port=0) for name in self.names]


class Heard(Recorder):
    """A recorder that also keeps the views."""

    def __init__(self, header: trace.Header, path: Path) -> None:
        super().__init__(header.peer, None)
        self.trace(header, path)
        self.views: list[View] = []

    def view(self, time_s: float, view: View) -> None:
        self.views.append(view)

    def tell(self, line: AnyLine) -> None: ...


class Swarm:
    """Peers of one run in this process."""

    def __init__(self, config: Config, directory: Path) -> None:
        self.config, self.hub = config, Hub()
        self.names: list[Peer] = []
        self.nodes: list[Node] = []
        self.records: list[Heard] = []
        self.dataset = open_dataset(config)
        self.directory = directory

    def add(self) -> Node:
        number = len(self.names) + 1
        identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32), str(number))
        name = identity.name
        self.names.append(name)
        header = trace.Header(PROTOCOL, name, settings(self.config), seed=f"s/{name}", found=number == 1)
        record = Heard(header, self.directory / f"{number}.jsonl")
        runner = TaskRunner(self.config, self.dataset, Store(str(self.directory / "checkpoints")))
        machine = PeerMachine(name, header.settings, Random(header.seed), header.found)
        node = Node(
            machine, runner, MemoryTransport(self.hub, name), Known(self.names), record, Signing(identity, "run")
        )
        self.records.append(record)
        self.nodes.append(node)
        return node

    async def run(self, long_s: float = LONG_S) -> list[Finish]:
        async with asyncio.timeout(long_s):
            for node in self.nodes:
                await node.transport.start()
            return await asyncio.gather(*(node.run() for node in self.nodes))

    def close(self) -> None:
        for node, record in zip(self.nodes, self.records, strict=True):
            node.runner.close()
            record.close()

    def books(self) -> CommitHistory:
        books = CommitHistory(self.config.run.stages, microbatches(self.config.train))
        for record in self.records:
            for view in record.views:
                books.agree(view, time.monotonic())
        return books


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(3000)))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    swarm = Swarm(TINY, tmp_path)
    for _ in range(TINY.run.peers):
        swarm.add()
    return swarm


def test_a_swarm_trains_and_accounts_for_every_sample(swarm: Swarm) -> None:
    finishes = asyncio.run(swarm.run())
    swarm.close()
    assert all(finish.ok for finish in finishes)
    totals = swarm.books().totals()
    assert totals.balanced, totals.reason
    assert (totals.steps, totals.issued, totals.committed) == (3, 12, 12)
    losses = [step.commit.loss for step in swarm.books().steps]
    assert losses[-1] < losses[0]


def test_replicas_keep_equal_parameters_and_blobs_do_not_pile_up(tmp_path: Path) -> None:
    swarm = Swarm(msgspec.structs.replace(TINY, run=msgspec.structs.replace(TINY.run, steps=12)), tmp_path)
    for _ in range(TINY.run.peers):
        swarm.add()
    asyncio.run(swarm.run())
    swarm.close()
    digests: dict[tuple[int, int], set[str]] = {}
    for record, node in zip(swarm.records, swarm.nodes, strict=True):
        assert record.views[-1].finished
        server = node.machine.server
        digests.setdefault((server.stage, server.step), set()).add(server.digest)
    assert all(len(digest) == 1 for digest in digests.values())
    # Of one step at most: input, output and gradient of every microbatch at every stage, and a round's parts.
    a_step = 4 * TINY.run.stages * 3 + 8
    assert max(node.runner.held() for node in swarm.nodes) <= a_step


def test_a_peer_whose_device_is_lost_leaves_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = Swarm(msgspec.structs.replace(TINY, run=msgspec.structs.replace(TINY.run, peers=5, steps=4)), tmp_path)
    for _ in range(5):
        swarm.add()
    victim, real, passes = swarm.nodes[1], TaskRunner._backward, [0]

    def broken(self: TaskRunner, task: RunBackward, *given: torch.Tensor) -> Result:
        passes[0] += self is victim.runner
        if self is victim.runner and passes[0] >= 2:  # it has booked one microbatch, which others must redo
            raise RuntimeError("CUDA error: unspecified launch failure")
        return real(self, task, *given)

    monkeypatch.setattr(TaskRunner, "_backward", broken)
    monkeypatch.setattr(base, "alive", lambda config: False)

    async def part(node: Node) -> Finish:
        finish = await node.run()
        if not finish.ok:
            await node.transport.close()  # as its process does
        return finish

    async def run() -> list[Finish]:
        async with asyncio.timeout(LONG_S):
            for node in swarm.nodes:
                await node.transport.start()
            return await asyncio.gather(*map(part, swarm.nodes))

    finishes = asyncio.run(run())
    swarm.close()
    lost = finishes.pop(1)
    assert not lost.ok and "the device is lost: RuntimeError: CUDA error" in lost.reason
    assert all(finish.ok for finish in finishes)
    totals = swarm.books().totals()
    assert totals.balanced, totals.reason
    assert (totals.steps, totals.issued, totals.committed, totals.lost) == (4, 16, 16, 0)


def in_memory(held: TaskRunner) -> int:
    """Bytes of all tensors of rounds that are held under names, each storage once."""
    storages = {}
    for name in held._blobs.names():
        tensor = held._blobs.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("local_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_round_takes_no_more_memory_than_it_may(
    local_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every peer and moment: what is held under names, and what the task that runs takes besides, the result apart."""

    def most(round_bytes: int) -> tuple[int, int]:
        directory = tmp_path / str(round_bytes)
        directory.mkdir()
        changed = msgspec.structs.replace
        swarm = Swarm(
            changed(
                TINY,
                run=changed(TINY.run, stages=1, steps=1, averaging_memory_bytes=round_bytes),
                model=changed(TINY.model, hidden_size=32, layers=4),
                train=changed(TINY.train, local_steps=local_steps, local_batch=2 if local_steps > 1 else 0),
            ),
            directory,
        )
        for _ in range(TINY.run.peers):
            swarm.add()
        peaks: list[int] = []
        put, run = TaskRunner.put, TaskRunner._run

        def counted_put(self: TaskRunner, name: str, value: Held) -> int:
            nbytes = put(self, name, value)
            peaks.append(in_memory(self))
            return nbytes

        def counted_run(self: TaskRunner, task: Task, held: dict[str, Held]) -> Result:
            if not isinstance(task, Cut | Add | Gather):
                return run(self, task, held)
            before = in_memory(self)
            with memory.MemoryMeter("cpu") as watch:
                result = run(self, task, held)
            room_bytes = 4 * self._seated().executor.length if isinstance(task, Gather) and task.start == 0 else 0
            peaks.append(before + watch.peak - room_bytes)
            return result

        with monkeypatch.context() as patched:
            patched.setattr(optimizer, "NORM_VALUES", 500)  # squares in fp64 take up to 8 MiB, whatever the limit
            patched.setattr(TaskRunner, "put", counted_put)
            patched.setattr(TaskRunner, "_run", counted_run)
            finishes = asyncio.run(swarm.run())
        swarm.close()
        assert all(finish.ok for finish in finishes)
        return max(peaks), 4 * swarm.nodes[0].runner._seated().executor.length

    limit = 60_000
    peak, gradient_bytes = most(limit)
    assert gradient_bytes > 2 * limit
    assert limit / 2 < peak <= limit
    assert most(1 << 30)[0] > 2 * gradient_bytes


def test_bytes_on_the_wire_are_those_of_the_formulas(tmp_path: Path) -> None:
    """Every Send to somebody else that the trace holds, at the size that codec.py says its tensors have."""
    network = Network(activations="int8", gradients="bf16", averaging="int8")
    swarm = Swarm(msgspec.structs.replace(TINY, network=network), tmp_path)
    for _ in range(TINY.run.peers):
        swarm.add()
    asyncio.run(swarm.run())
    swarm.close()
    shape = (TINY.train.microbatch, TINY.data.sequence, TINY.model.hidden_size)
    activation, gradient = codec.nbytes("int8/1/1024", shape), codec.nbytes("bf16/1", shape)
    received = Traffic()
    for node, path in zip(swarm.nodes, sorted(tmp_path.glob("[0-9]*.jsonl")), strict=True):
        activations = gradients = averaging = 0
        bounds: tuple[int, ...] = ()
        items = list(trace.read(path))
        for command in [command for item in items if isinstance(item, trace.TraceRecord) for command in item.commands]:
            if isinstance(command, Do) and isinstance(command.task, Cut):
                bounds = command.task.bounds
            if not isinstance(command, Send) or command.peer == node.machine.name:
                continue
            match command.message:
                case BoundaryTensor(gradient=False):
                    activations += activation
                case BoundaryTensor():
                    gradients += gradient
                case ReduceChunk(chunk=chunk) | GatherChunk(chunk=chunk):
                    averaging += codec.nbytes("int8/1/1024", (bounds[chunk + 1] - bounds[chunk],))
        sent, received_bytes = node.reporter.tally.totals()
        received += received_bytes
        assert (sent.activations, sent.gradients, sent.averaging) == (activations, gradients, averaging)
        assert sent.control > 0
        carried = [item for item in items if isinstance(item, trace.TrafficRecord)]
        assert [item.step for item in carried] == sorted(item.step for item in carried)
        assert (carried[-1].sent, carried[-1].received) == (sent, received_bytes)
        assert carried[-1].kept == node.reporter.kept_most
        assert node.reporter.kept_most.memory >= max(node.reporter.kept_most.store, activation)
        assert node.reporter.kept_most.store > 0
        assert node.reporter.kept == StoredBytes()
    totals = [node.reporter.tally.totals()[0] for node in swarm.nodes]
    assert sum(sent.activations for sent in totals) == received.activations > 0
    assert sum(sent.gradients for sent in totals) == received.gradients > 0
    assert sum(sent.averaging for sent in totals) == received.averaging > 0


def test_replicas_that_encode_everything_keep_equal_parameters(tmp_path: Path) -> None:
    network = Network(activations="int8", gradients="int8", averaging="int8")
    swarm = Swarm(msgspec.structs.replace(TINY, network=network), tmp_path)
    for _ in range(TINY.run.peers):
        swarm.add()
    finishes = asyncio.run(swarm.run())
    swarm.close()
    assert all(finish.ok for finish in finishes)
    assert swarm.books().totals().balanced, swarm.books().totals().reason
    digests: dict[tuple[int, int], set[str]] = {}
    for node in swarm.nodes:
        server = node.machine.server
        digests.setdefault((server.stage, server.step), set()).add(server.digest)
    assert all(len(digest) == 1 for digest in digests.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("round_bytes", [1 << 30, 1 << 15], ids=["at once", "in pieces"])
def test_eighteen_replicas_of_the_whole_model_have_one_processs_bits(round_bytes: int, tmp_path: Path) -> None:
    """More than stand in one row: what they sum up is told by the commits' order of additions, and by nothing else."""
    run = msgspec.structs.replace(TINY.run, peers=18, stages=1, steps=2, averaging_memory_bytes=round_bytes)
    train = msgspec.structs.replace(TINY.train, batch=48)  # 24 microbatches: some peers bring two
    config = msgspec.structs.replace(TINY, run=run, train=train)
    swarm = Swarm(config, tmp_path)
    for _ in range(18):
        swarm.add()
    finishes = asyncio.run(swarm.run(8 * LONG_S))
    swarm.close()
    assert all(finish.ok for finish in finishes)
    length = swarm.nodes[0].runner._seated().executor.length
    assert (settings(config).piece_values < length) is (round_bytes < 1 << 30)
    commits = [step.commit for step in swarm.books().steps]
    assert [len(commit.groups[0]) for commit in commits] == [18, 18]
    _, trained = reference.follow(config, swarm.dataset, map(reference.as_recorded, commits))
    servers = [
        node.machine.server for node in swarm.nodes
    ]  # who finished before its last step was applied holds the one before
    assert all(server.digest == trained[server.step - 1].digests[0] for server in servers)
    assert max(server.step for server in servers) == 2


def test_what_was_recorded_replays_without_a_difference(swarm: Swarm, tmp_path: Path) -> None:
    asyncio.run(swarm.run())
    swarm.close()
    trace.merge([[path] for path in sorted(tmp_path.glob("*.jsonl"))], tmp_path / "all.jsonl")
    replayed = trace.replay(tmp_path / "all.jsonl")
    assert replayed.peers == 4 and replayed.commands > 100
    assert replayed.differing == 0, replayed.first


def test_a_lone_peer_that_serves_the_whole_model_talks_to_itself(tmp_path: Path) -> None:
    run = msgspec.structs.replace(TINY.run, peers=1, stages=1)
    swarm = Swarm(msgspec.structs.replace(TINY, run=run), tmp_path)
    node = swarm.add()
    (finish,) = asyncio.run(swarm.run())
    swarm.close()
    assert finish.ok
    assert swarm.books().totals().balanced
    assert node.runner.held() == 0


class Listener:
    """A machine that notes events and does nothing, in the place of PeerMachine."""

    name = "a" * 32 + ".1"
    view = None
    leading = alone = False
    leader = None
    deadline: float | None = None

    def heard(self, now: float) -> tuple[Peer, ...]:
        return ()

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.until = 0
        real = PeerMachine(self.name, settings(TINY), Random(1), False)
        self.server, self.trainer, self.heartbeat = real.server, real.trainer, real.heartbeat

    def handle(self, event: Event, now: float) -> list[Command]:
        self.events.append(event)
        return [Finish(True, "heard enough")] if len(self.events) >= self.until else []


def hear(tmp_path: Path, *sent: tuple[object, tuple[Blob, ...]]) -> list[Event]:
    """What reaches a machine of these messages from one peer, which are followed by a harmless one."""

    async def run() -> list[Event]:
        hub, machine = Hub(), Listener()
        machine.until = 2  # the first Tick, and the harmless message
        transport, other = MemoryTransport(hub, machine.name), MemoryTransport(hub, "b" * 32 + ".1")
        header = trace.Header(PROTOCOL, machine.name, settings(TINY), seed="", found=False)
        runner, record = TaskRunner(TINY), Heard(header, tmp_path / "t.jsonl")
        signing = Signing(Identity.new(), "run")
        node = Node(machine, runner, transport, Known([]), record, signing)  # type: ignore[arg-type]
        await transport.start()
        await other.start()
        for message, blobs in sent:
            other.send(machine.name, message, blobs)  # type: ignore[arg-type]
            machine.until += bool(blobs)
        other.send(machine.name, Heartbeat(1, 1, 1, True), ())
        async with asyncio.timeout(LONG_S):
            await node.run()
        runner.close()
        record.close()
        return [event for event in machine.events if type(event).__name__ == "Received"]

    return asyncio.run(run())


def floats(*shape: int, value: float = 1.0) -> Blob:
    import torch

    from shoal.runtime.tasks.kinds import blob_of

    return blob_of(torch.full(shape, value))


def test_a_message_with_a_number_that_is_not_finite_never_reaches_the_machine(tmp_path: Path) -> None:
    events = hear(
        tmp_path, (Heartbeat(1, 1, 1, True, rate=float("nan")), ()), (Reduced(0, 0, 1, "d", float("inf")), ())
    )
    assert [event.message for event in events] == [Heartbeat(1, 1, 1, True)]  # type: ignore[attr-defined]


def test_wrong_tensors_reach_the_machine_as_a_fault_and_take_no_memory(tmp_path: Path) -> None:
    request = Backward(epoch=0, step=0, index=0, stage=1, attempt=1, view=1)
    tensor = BoundaryTensor(epoch=0, step=0, index=0, stage=1, gradient=False)
    good = floats(2, 8, 16)
    events = hear(
        tmp_path,
        (request, (good, good)),
        (request, (good,)),
        (tensor, (good, good)),
        (tensor, (floats(2, 9, 16),)),
        (tensor, (floats(2, 8, 16, value=float("nan")),)),
    )
    faults = {event.fault for event in events if event.message != Heartbeat(1, 1, 1, True)}  # type: ignore[attr-defined]
    assert len(faults) == 5 and "" not in faults
    assert all(event.blobs == () for event in events)  # type: ignore[attr-defined]


def test_a_machine_with_other_data_than_the_runs_is_refused_by_name(tmp_path: Path) -> None:
    from shoal import build
    from shoal import config as configuration

    text = tmp_path / "text.txt"
    text.write_text("the same words everywhere, " * 40)
    words = ["data.source=text", f"data.path={text}", "data.sequence=16", f"run.dir={tmp_path}", "model.layers=3"]
    config = configuration.load(None, words)
    digest = build.data(config).digest
    build.load(configuration.load(None, [*words, f"data.digest={digest}"])).runner.close()
    text.write_text("other words here, " * 40)
    with pytest.raises(ValueError, match=r"the data here is another than the run's: .* data\.digest = '"):
        build.load(configuration.load(None, [*words, f"data.digest={digest}"]))


def test_nobodys_word_but_the_operators_reaches_the_machine(swarm: Swarm, tmp_path: Path) -> None:
    node = swarm.nodes[0]
    view = View(number=1 << 20, step=0, members=(Member(swarm.names[1], 0),), epoch=1)
    authority = Authority(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    node.signing = Signing(Identity.new(), authority.run)
    before = node.machine.last_now
    for forged in (Override(view=view, term=1 << 20), Authority.new().override(view, 1 << 20)):
        node._on_message(Incoming(peer=swarm.names[1], message=forged))
        assert node.machine.last_now is before and node.machine.relay.newest is None
    node._on_message(Incoming(peer=swarm.names[1], message=authority.override(view, 1 << 20)))
    assert node.machine.last_now is not before
    swarm.close()


STRANGER = "s" * 32 + ".1"


def founder(name: Peer = "a" * 32 + ".1") -> PeerMachine:
    """A machine that leads, in a view with nobody else."""
    machine = PeerMachine(name, settings(TINY), Random(1), True)
    machine.handle(Tick(), 100.0)
    assert machine.view is not None and machine.leading
    return machine


def as_sent(machine: PeerMachine, kind: type) -> list[Message]:
    assert machine.view is not None
    facts = edges.Facts(STRANGER, machine.name, machine.view, machine.register.term)
    return [message for _, message in edges.bases(kind, facts)]


@pytest.mark.parametrize("kind", edges.KINDS, ids=lambda kind: kind.__name__)
def test_what_is_dropped_of_peers_in_no_view_would_have_changed_nothing(kind: type) -> None:
    for number, _ in enumerate(as_sent(founder(), kind)):
        one, other = founder(), founder()
        message = as_sent(one, kind)[number]
        kept = admissible(one, Incoming(STRANGER, message))
        event = Tick() if kept is None else Received(peer=STRANGER, message=kept)
        plain = other.handle(Received(peer=STRANGER, message=message), 100.01)
        assert one.handle(event, 100.01) == plain, message
        assert admissible(one, Incoming(one.name, message)) is message, "a peer of the view is heard"


def test_a_lines_rate_is_reported_when_it_changes_by_a_step_of_19_percent(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, heard = swarm.nodes[0], list[LineMeasured]()

    def hear(line: LineMeasured) -> None:
        node.machine.heartbeat.line = line
        heard.append(line)

    monkeypatch.setattr(node, "handle", hear)
    for up_Bps in (0.0, 2.5e6, 2.6e6, 0.7e6, 0.7e6):
        monkeypatch.setattr(node.transport, "line_Bps", lambda up_Bps=up_Bps: (up_Bps, 0.0))
        node._measure_line()
    assert [(each.up_kBps, each.down_kBps) for each in heard] == [(2435, 0), (724, 0)]


def test_large_messages_of_peers_in_no_view_cost_nothing(swarm: Swarm) -> None:
    books = tuple(Booking(index) for index in range(30_000))
    heartbeat = Heartbeat(1, 1, 1, True, books, closed=books)
    signed = tuple(Signed(STRANGER, bytes(32), bytes(64)) for _ in range(1000))
    lead = Lead(9, 9, 9, "d", Proof(STRANGER, signed), signed)
    node = swarm.nodes[0]
    standing = Standing(1, View(1, 1, ()), (STRANGER,) * 1000)
    assert admissible(node.machine, Incoming(STRANGER, standing)) is standing, "who has no view hears everybody"
    node.machine = founder(node.machine.name)
    before = node.machine.last_now
    for message, blobs in (
        (standing, ()),
        (GatherChunk(0, 0, 1, 0), (floats(100),)),
        (Heartbeat(1, 1, 1, True, rate=float("nan")), (floats(1),)),
    ):
        node._on_message(Incoming(peer=STRANGER, message=message, blobs=blobs))
        assert node.machine.last_now is before and node.runner.held() == 0
    assert admissible(node.machine, Incoming(STRANGER, heartbeat)) == Heartbeat(1, 1, 1, True)
    assert admissible(node.machine, Incoming(STRANGER, lead)) == Lead(9, 9, 9, "d")
    swarm.close()
