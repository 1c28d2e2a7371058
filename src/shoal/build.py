"""The composition root: builds one peer of a run from its configuration, identity and role.

Only this module chooses transport, directory and machine. For launcher/peer.py and cli/join.py, and for tests of whole peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from shoal import trace
from shoal.config import Config, settings
from shoal.core.messages import PROTOCOL, KnownAnswers, Peer, Ping
from shoal.core.peer import PeerMachine
from shoal.model import lent, remote
from shoal.planner.inputs.measured import DEVICE_FILE
from shoal.runtime.checkpoints.catalog import Catalog, url_of
from shoal.runtime.checkpoints.marker import refuse_foreign
from shoal.runtime.entry import Entry
from shoal.runtime.passes import Gate
from shoal.runtime.records.record import Recorder
from shoal.runtime.records.report import Listening, Located
from shoal.runtime.signing import Signing
from shoal.transport import addresses
from shoal.transport.auto import Address, AutoTransport
from shoal.transport.base import Limits
from shoal.transport.daemon import Daemon
from shoal.transport.directory.dht import Dht
from shoal.transport.directory.directory import Directory, Gossip
from shoal.transport.directory.records import MAX_ADDRESSES, RELAY, PeerRecord
from shoal.transport.emulated.faulty import FAULTS, Faulty
from shoal.transport.emulated.shaped import AccessLink, PairLink, Reachable, Shaped
from shoal.transport.hivemind_parts import load as load_libp2p
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Invite, Membership
from shoal.transport.libp2p import Libp2pTransport
from shoal.transport.relay import Relays
from shoal.transport.tls import Place, TlsTransport

if TYPE_CHECKING:  # what imports torch is imported where a peer is built: an operator and an invite need none of it
    from shoal.executor.base import Executor
    from shoal.runtime.alone import Alone
    from shoal.runtime.checkpoints.checkpoint import Store
    from shoal.runtime.data.dataset import Dataset
    from shoal.runtime.node import Node
    from shoal.runtime.tasks.task_runner import TaskRunner

CLOSE_S = 1.0  # for the task that runs when a peer ends: nobody waits for its result, and a hop may last long
GREETED = 8  # peers
UNSPECIFIED = ("0.0.0.0", "::")  # to listen on all interfaces


class PeerRole(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's role in a run."""

    first: bool = False  # it is the run's first peer
    first_step: int = 0  # of a resumed run
    port: int = 0
    trace: Path | None = None
    key: Path | None = None  # kept there; None: a new one


class Loaded(NamedTuple):
    """What a peer needs besides the network."""

    runner: TaskRunner
    answers: KnownAnswers  # executor/answers.py
    checked: Future[None]  # see `check`; the runner builds no stage before


def data(config: Config) -> Dataset:
    from shoal.runtime.data.dataset import open_dataset

    return open_dataset(config, cache=Path(config.run.dir) / ".cache")


def preload(config: Config) -> None:
    """Imports what a peer of this configuration will, and starts no thread: for launcher/fork_server.py, whose peers are copies of
    this process. ValueError: the model cannot be cut as asked, as each of them will find."""
    import torch

    from shoal import executor
    from shoal.executor.answers import known_answers
    from shoal.model import stages
    from shoal.runtime import node
    from shoal.runtime.data import dataset
    from shoal.runtime.tasks import task_runner

    assert node and dataset and task_runner
    load_network(config)
    if config.device.executor == "emulated":
        return
    _store(config, None)
    stages.check(config)
    if (
        torch.version.cuda is None and torch.version.hip is None
    ):  # else a device is looked for, and no fork may use it after that
        torch.set_num_threads(1)
        executor.check(config)
        known_answers(config)


def load(config: Config, first_step: int = 0, run: str | None = None) -> Loaded:
    """What a peer needs to begin: its data, its files, its answers. Without the network, and without the model's classes, whose import
    takes longest: a peer joins and downloads its stage's state meanwhile. Call `check` for them.

    `run`: the id of the key that founded it, whose checkpoints are read and written.
    ValueError: the data is missing or another than the run's, or the checkpoint is foreign."""
    from shoal.executor import create
    from shoal.executor.answers import known_answers
    from shoal.runtime.tasks.task_runner import TaskRunner

    checked = Future[None]()

    def make(config: Config, stage: int) -> Executor:
        checked.result()
        return create(config, stage)

    dataset, store = None, None
    if config.device.executor == "emulated":
        store = _store(config, run)
    elif not config.run.serve:
        dataset, store = _data_and_store(config, first_step, run)
    return Loaded(TaskRunner(config, dataset, store, make), known_answers(config), checked)


def check(config: Config) -> None:
    """Imports the model's classes. ValueError: the model cannot be cut as asked or does not fit this machine. No weights are read or
    allocated."""
    from shoal import executor
    from shoal.model import stages

    stages.check(config)
    executor.check(config)


def trainer_alone(config: Config, first_step: int = 0, run: str | None = None) -> Alone:
    """The whole model on this machine. `run` and ValueErrors as for `load` and `check`."""
    from shoal.runtime.alone import Alone

    check(config)
    return Alone(config, *_data_and_store(config, first_step, run), first_step)


def load_network(config: Config) -> None:
    """Imports what the network needs."""
    if config.network.discovery == "dht" or config.network.transport != "tls":
        load_libp2p()


def _data_and_store(config: Config, first_step: int, run: str | None) -> tuple[Dataset, Store]:
    """Data set and checkpoint store; those of another run are refused."""
    dataset, store = data(config), _store(config, run)
    if not dataset.digest.startswith(config.data.digest):
        raise ValueError(
            f"the data here is another than the run's: {dataset.describe} has digest {dataset.digest[:16]}, "
            f"data.digest = {config.data.digest[:16]!r}; bring the run's files here (data.path), or the same Python for its library"
        )
    if first_step:
        training = store.catalog.inspect(first_step).training  # None: it is downloaded from another machine
        if training is not None:
            refuse_foreign(training, config, dataset.digest)
    return dataset, store


def _store(config: Config, run: str | None) -> Store:
    from shoal.runtime.checkpoints.checkpoint import Store

    return Store(url_of(config), run, config.checkpoint.disk_bytes)


@asynccontextmanager
async def peer(
    config: Config, role: PeerRole, invite: Invite, loading: Future[Loaded], out: IO[bytes] | None
) -> AsyncIterator[Node]:
    """A listening peer, whose addresses are reported; call the node's `run`. It listens and is found before `loading` has ended. Closes
    everything at the end, the task runner too. What `loading` raises is raised here."""
    config = _reachable(config, invite)
    identity = Identity.load(role.key) if role.key is not None else Identity.new()
    membership = invite.membership(identity)
    async with AsyncExitStack() as stack:
        stack.callback(_close, loading)
        record = Recorder(identity.name, out, config.network.fault_injection)
        stack.callback(record.close)
        tell = partial(_tell_network, record)
        daemon = _daemon(config, identity, invite, role.port, tell)
        relays = Relays(identity, membership, tell)
        transport = _transport(config, identity, membership, role.port, daemon, tell, relays)
        await transport.start()
        stack.push_async_callback(transport.close)
        directory = _directory(
            config, (identity, membership), invite.addresses, transport, daemon, _locating(record), role.port
        )
        stack.push_async_callback(directory.close)
        await directory.start()
        record.tell(Listening(peer=identity.name, addresses=directory.addresses))
        remote.report_to(_in_loop(partial(_tell_weights, record)))
        stack.callback(asyncio.create_task(_greet(directory, transport)).cancel)
        loaded = await asyncio.wrap_future(loading)
        runner, answers, _ = loaded
        from shoal.runtime.node import Node
        from shoal.runtime.proofs import Prover

        header = trace.Header(
            protocol=PROTOCOL,
            peer=identity.name,
            settings=msgspec.structs.replace(
                settings(config, role.first_step),
                answers=answers,
                place=runner.place,
                borrows=lent.borrowed(config.model.path),
            ),
            seed=f"{config.run.seed}/{identity.name}/{secrets.token_hex(16)}",  # nobody can foresee whom this peer checks
            found=role.first,
            config=hashlib.sha256(msgspec.json.encode(config)).hexdigest(),
        )
        _trace(record, config, header, role)
        machine = PeerMachine(identity.name, header.settings, Random(header.seed), role.first)
        signing, gate = (
            Signing(identity, membership.run),
            Gate(transport, membership, Entry(directory, invite.addresses)),
        )
        node = Node(machine, runner, transport, directory, record, signing, gate)
        node.meter.facts = _facts()
        node.reporter.prove = Prover(machine, signing, membership).proof_of
        relays.hear(partial(_name_relays, directory, node.contacts.announce_now))
        relays.moved += [partial(_name_hosts, directory, node.contacts.announce_now), lambda hosts: daemon.restart()]
        yield node


@asynccontextmanager
async def operator(
    config: Config, invite: Invite, passes: bytes = b"", tell: Callable[[str], None] = print
) -> AsyncIterator[tuple[Reachable, Directory]]:
    """Transport and directory of an operator, who queries and instructs peers without joining. `passes`: the authority's list, if known.
    `tell` receives what the network reports."""
    config = _reachable(config, invite)
    identity = Identity.new()
    membership = invite.membership(identity)
    if passes:
        membership.take_list(passes)
    async with AsyncExitStack() as stack:
        daemon = _daemon(config, identity, invite, 0, tell)
        plain = msgspec.structs.replace(config.network, fault_injection=False, delay_s=0.0, bandwidth_Bps=0.0)
        config = msgspec.structs.replace(config, network=plain)
        relays = Relays(identity, membership)
        transport = _transport(config, identity, membership, 0, daemon, tell, relays)
        await transport.start()
        stack.push_async_callback(transport.close)
        directory = _directory(config, (identity, membership), invite.addresses, transport, daemon, lambda record: None)
        stack.push_async_callback(directory.close)
        relays.hear(partial(_name_relays, directory, lambda: None))
        await directory.start()
        yield transport, directory


def _name_relays(directory: Directory, announce: Callable[[], None], routes: tuple[str, ...]) -> None:
    """In this peer's record, from now on."""
    own = directory.own
    kept = [each for each in own.addresses if not each.startswith(RELAY)]
    directory.own = msgspec.structs.replace(own, addresses=(*routes, *kept)[:MAX_ADDRESSES])
    announce()


def _name_hosts(directory: Directory, announce: Callable[[], None], hosts: tuple[str, ...]) -> None:
    """In this peer's record, from now on."""
    own = directory.own
    kept = (*hosts[1:], *own.relays, *own.multiaddrs)
    directory.own = msgspec.structs.replace(own, host=hosts[0], addresses=kept[:MAX_ADDRESSES])
    announce()


def _reachable(config: Config, invite: Invite) -> Config:
    """With the address to listen on for network.host = 'auto'."""
    host = addresses.listening(config.network.host, addresses.hosts(invite.addresses))
    return msgspec.structs.replace(config, network=msgspec.structs.replace(config.network, host=host))


async def _greet(directory: Directory, transport: Reachable) -> None:
    """Opens connections to peers of the run, and theirs to this one, while this one loads: it will ask them to let it join."""
    others = [record.peer for record in await directory.peers() if record.peer != transport.name]
    for peer in others[:GREETED]:
        transport.send(peer, Ping(0))  # the meter's own are numbered from 1, so that nobody waits for this answer


def _close(loading: Future[Loaded]) -> None:
    if loading.done() and loading.exception() is None:
        loading.result().runner.close(CLOSE_S)


def _trace(record: Recorder, config: Config, header: trace.Header, role: PeerRole) -> None:
    """The trace leaves room for checkpoints on the same disk."""
    if role.trace is not None:
        catalog = Catalog(url_of(config))
        record.trace(header, role.trace, config.run.trace_bytes, partial(catalog.newest_bytes, role.trace.parent))


def _facts() -> str:
    try:
        return Path(DEVICE_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # `shoal probe` has not run on this machine
        return ""


def _daemon(config: Config, identity: Identity, invite: Invite, port: int, tell: Callable[[str], None]) -> Daemon:
    """The libp2p daemon; transport and directory start it when they need it."""
    network = config.network
    port = addresses.ports(network.transport, network.discovery, port)[network.transport != "libp2p"]
    hidden = network.transport != "tls" and network.discovery == "dht"
    return Daemon(identity, network.host, port, invite.addresses if hidden else (), tell)


def _tell_weights(record: Recorder, text: str) -> None:
    record.note("state", time.monotonic(), text)


def _in_loop(tell: Callable[[str], None]) -> Callable[[str], None]:
    """The same for any thread."""
    loop = asyncio.get_running_loop()

    def call(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this peer's part is over
            loop.call_soon_threadsafe(tell, text)

    return call


def _tell_network(record: Recorder, text: str) -> None:
    record.note("network", time.monotonic(), text)


def _transport(
    config: Config,
    identity: Identity,
    membership: Membership,
    port: int,
    daemon: Daemon,
    tell: Callable[[str], None],
    relays: Relays | None = None,
) -> Reachable:
    """The configured transport; `tell` receives changes of the route to a peer."""
    network = config.network
    limits = Limits(blob_bytes=network.max_tensor_bytes)
    plain: Reachable
    if network.transport == "libp2p":
        plain = Libp2pTransport(identity.name, membership, daemon, limits)
    elif network.transport == "auto":
        plain = AutoTransport(
            identity,
            membership,
            daemon,
            (network.host, port),
            limits,
            report=tell,
            relays=relays,
        )
    else:
        plain = TlsTransport(identity, membership, network.host, port, limits, relays)
    if network.fault_injection:
        plain = Faulty(plain, config.run.directory / FAULTS, limits)
    up_Bps, down_Bps = network.up_Bps or network.bandwidth_Bps, network.down_Bps or network.bandwidth_Bps
    if not network.delay_s and not up_Bps and not down_Bps and not network.links:
        return plain
    pairs = {host: PairLink(*link) for host, link in network.links.items()}
    return Shaped(plain, AccessLink(network.delay_s, up_Bps, down_Bps, pairs))


def _locating(record: Recorder) -> Callable[[PeerRecord], None]:
    """Reports where peers are, each address once."""
    reported: dict[Peer, Located] = {}

    def located(other: PeerRecord) -> None:
        line = Located(peer=other.peer, host=other.host, addresses=other.entries, region=other.region)
        if reported.get(other.peer) != line:
            reported[other.peer] = line
            record.tell(line)

    return located


def _directory(
    config: Config,
    member: tuple[Identity, Membership],
    bootstrap: tuple[str, ...],
    transport: Reachable,
    daemon: Daemon,
    located: Callable[[PeerRecord], None],
    first_port: int = 0,
) -> Directory:
    """The configured directory, whose records hold the transport's address: host and port, libp2p's, or both. `located` receives the
    record of every other peer. `first_port`: of those that this peer listens on; 0: any."""
    identity, membership = member
    network = config.network
    host, port, streams = network.host, 0, ()
    match network.transport:
        case "tls":
            host, port = transport.address
        case "libp2p":
            streams = transport.address
        case "auto":
            (host, port), streams = transport.address.direct, transport.address.streams
    hosts: tuple[str, ...] = (host,)
    if network.host in UNSPECIFIED:
        hosts = addresses.announced(network.host, addresses.hosts(bootstrap))
    ways = (*hosts[1:], *streams)[:MAX_ADDRESSES]
    own = PeerRecord(
        run=membership.run, peer=identity.name, host=hosts[0], port=port, addresses=ways, region=network.region
    )

    def learn(record: PeerRecord) -> None:
        located(record)
        others = record.hosts[1:] + record.relays
        direct: Place = (record.host, record.port, *others)
        match network.transport:
            case "tls":
                transport.learn(record.peer, direct)
            case "libp2p":
                transport.learn(record.peer, record.multiaddrs)
            case "auto":
                transport.learn(record.peer, Address(direct, record.multiaddrs))

    if network.discovery == "dht":
        return Dht(identity, membership, own, bootstrap, learn, daemon)
    listening = addresses.ports(network.transport, network.discovery, first_port)[-1]
    return Gossip(identity, membership, own, bootstrap, learn, network.host, listening)
