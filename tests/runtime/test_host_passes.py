"""How often the host goes over the bytes of one hop, from the socket that a boundary tensor comes in by to the one that the next goes out
by. The figures may not grow: docs/design/2026-11-23-host-passes.md says what each pass is."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from tests.contract.transports import TlsNet
from tests.passes import Passes, Watch, watch_buffers, watch_channels, watch_lanes
from tests.runtime.test_task_runner import EMULATED, done

from shoal.config import Device, Network
from shoal.core import messages as m
from shoal.runtime.tasks.outgoing import Outgoing
from shoal.runtime.tasks.task_runner import TaskRunner
from shoal.transport.base import Incoming
from shoal.transport.identity.identity import Identity

VALUES = 1 << 20
WAIT_S = 60.0
WARM, HOPS = 2, 4


async def hop(runner: TaskRunner, peers: Any, step: int) -> None:
    """A boundary tensor comes to the second peer, runs through its stage, and the result goes to the third."""
    sender, served, receiver = peers
    x, y = f"x{step}", f"y{step}"
    async with asyncio.timeout(WAIT_S):
        sent = runner.blob("given")
        sender.send(served.name, m.BoundaryTensor(1, step, 0, 1, False), (sent,))
        incoming = await served.receive()
        assert isinstance(incoming, Incoming)
        assert runner.check(incoming.message, incoming.blobs) == ""
        runner.put(x, incoming.blobs[0])
        await asyncio.to_thread(done, runner, m.RunForward("s/f", 0, step, 1, x, y))
        served.send(receiver.name, m.BoundaryTensor(1, step, 0, 2, False), (runner.blob(y),))
        assert isinstance(await receiver.receive(), Incoming)
    for name in (x, y):
        runner.drop(name)


async def hops(monkeypatch: pytest.MonkeyPatch, passes: Passes, how: str) -> float:
    """Returns the peak of new Python memory in a hop, in units of its tensor's bytes."""
    net = TlsNet()
    peers = [net.make(Identity.new()) for _ in range(3)]
    tls = peers[1]._tls  # type: ignore[attr-defined]
    watch_channels(monkeypatch, passes, (tls._dialling, tls._answering))
    watch_lanes(monkeypatch, passes)
    watch_buffers(monkeypatch, passes)
    for peer in peers:
        await peer.start()
    others = (peers[0]._engines, peers[2]._engines)  # type: ignore[attr-defined]
    passes.others = {engine._thread for engines in others for engine in engines.all}
    for peer in peers:
        for other in peers:
            peer.learn(other.name, other.address)
    runner = TaskRunner(
        msgspec.structs.replace(
            EMULATED,
            device=Device(executor="emulated", emulated_s=0.0, emulated_values=VALUES),
            network=Network(activations=how, gradients=how),
        )
    )
    try:
        done(runner, m.Init("s/i", 1, 0))
        runner.put("x", torch.randn(VALUES))
        done(runner, m.RunForward("s/f", 0, 0, 1, "x", "given"))
        with Watch(passes):
            for step in range(WARM):
                await hop(runner, peers, step)
            passes.clear()
            tracemalloc.start()
            for step in range(HOPS):
                await hop(runner, peers, WARM + step)
        return tracemalloc.get_traced_memory()[1] / (4 * VALUES)
    finally:
        tracemalloc.stop()
        runner.close()
        for peer in peers:
            await peer.close()


DMA = "aten.copy_.default"  # into a pinned buffer: the card's own work


@pytest.mark.parametrize(
    ("how", "staged", "memory", "calls"),
    [("none", False, 2.0, 7.0), ("none", True, 3.0, 8.0), ("int8", False, 3.0, 4.0)],
)
def test_a_hop_goes_over_its_bytes_no_more_often_than_it_did(
    how: str, staged: bool, memory: float, calls: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of the tensor's fp32 bytes. `staged`: as if the result came from a card, through the ring of pinned buffers."""
    monkeypatch.setattr(Outgoing, "staged", lambda self, tensor: staged)
    passes = Passes()
    allocated = asyncio.run(hops(monkeypatch, passes, how))
    figures = [
        {what: round(nbytes / (4 * VALUES * HOPS), 2) for what, nbytes in counter.items() if not staged or what != DMA}
        for counter in (passes.memory, passes.calls)
    ]
    sums = [sum(each.values()) for each in figures]
    assert sums[0] <= memory + 0.4 and sums[1] <= calls + 0.24, figures
    sides = 3  # this process holds the memory of all three peers: what the sender's and the receiver's TLS has read
    assert allocated < sides * (1.0 if how == "none" else 0.25) + 0.3
