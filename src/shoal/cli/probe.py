"""`shoal probe`: what this machine sustains, or what the links between the peers of a run carry, as files for `shoal plan`.

    shoal probe                      FLOP/s, memory, host link and disk of this machine: device.toml
    shoal probe my.toml              the same with that model's own width, sequence, microbatch and dtype
    shoal probe --run INVITE         delay and bandwidth between all peers of a run: cluster.toml

The first is run on each machine, where its peer will be started: the peer tells what device.toml says. The second is run
once, anywhere, by somebody with an invite, while the run waits for peers or trains: the peers measure their own links over the
run's own transport and tell the figures (runtime/measure.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import config as configuration
from shoal import units
from shoal.cli.config import divided
from shoal.config import Config
from shoal.escaping import escaped
from shoal.launcher import devices, reach
from shoal.planner.inputs import measured
from shoal.planner.inputs.cluster import Device

if TYPE_CHECKING:
    from shoal.runtime.measure import Survey
    from shoal.transport.directory.directory import Directory

LOOK_S = 30.0  # for a run's peers to be found
STILL_S = 4.0  # no other peer has been found for so long: these are all
# A block of an 8-billion model on an accelerator, of the demo's kind on a CPU; two of them, and hardly any vocabulary.
LARGE = ("model.hidden_size=4096", "model.heads=32", "model.kv_heads=8", "model.intermediate_size=14336")
SMALL = ("model.hidden_size=512", "model.heads=8", "model.kv_heads=8", "model.intermediate_size=1408")
LARGE_WORK = ("data.sequence=2048", "train.microbatch=2", "train.batch=2", "train.dtype=bfloat16")
SMALL_WORK = ("data.sequence=256", "train.microbatch=4", "train.batch=4")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG | section.field=value",
        help="a TOML file and settings: compute with that model's sizes",
    )
    parser.add_argument(
        "--run",
        metavar="INVITE",
        help="measure the links between the peers of that run instead; @FILE or - (standard input) keeps the invite out of `ps`",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the file to write; default device.toml, or cluster.toml with --run"
    )
    parser.add_argument("--name", help="name of this machine in the file; default its host name")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long to compute (10)")
    parser.add_argument(
        "--most", default="16 MB", metavar="SIZE", help="with --run: most bytes of one transfer (16 MB)"
    )
    parser.add_argument("--peers", type=int, metavar="N", help="with --run: wait for this many peers")


def main(args: argparse.Namespace) -> int:
    if args.run:
        return asyncio.run(_links(args))
    out = Path(args.out or measured.DEVICE_FILE)
    if not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds}: must be above 0; try 10")
    device, notes = _machine(_probed(args.words), args, out.resolve().parent)
    out.write_text(measured.device_text(device, notes), encoding="utf-8")
    print(f"wrote {out}; for `shoal plan`, and for the peers that are started in this directory")
    return 0


# ----------------------------------------------------------------------------------------------------------- machine


def _probed(words: list[str]) -> Config:
    """The configuration to compute with: the model's own sizes, two blocks, one stage."""
    os.environ.update(devices.allocator(os.environ))
    from shoal.executor.base import device_of

    file, given = divided(words)
    fixed = ["run.stages=1", "device.executor=resident"]
    if file:
        tree = configuration.load(file, [*given, *fixed])
        short = ["model.layers=2"] if not tree.model.path else ["model.extra.num_hidden_layers=2"]
        return configuration.load(file, [*given, *fixed, *short])
    large = device_of(configuration.load(None, [word for word in given if word.startswith("device.")])).type in (
        "cuda",
        "xpu",
    )
    sizes, work = (LARGE, LARGE_WORK) if large else (SMALL, SMALL_WORK)
    if any(word.startswith("model.path=") for word in given):
        model: Sequence[str] = ["model.extra.num_hidden_layers=2"]
    else:
        model = ["model.layers=2", "model.vocab_size=256", *sizes]
    return configuration.load(None, [*model, *work, *given, *fixed])


def _machine(config: Config, args: argparse.Namespace, folder: Path) -> tuple[Device, list[str]]:
    import torch

    from shoal.executor import probe
    from shoal.executor.base import check_device, device_of, prepare_thread

    check_device(config)
    prepare_thread(config)
    device, kind = device_of(config), device_of(config).type
    load = os.getloadavg()[0]
    shape = f"{config.train.dtype}, width {config.model.hidden_size}, {config.train.microbatch} x {config.data.sequence} tokens"
    on = probe.device_name(device) + (f", {torch.get_num_threads()} threads" if kind == "cpu" else "")
    print(f"{on}: computing for {args.seconds:g} s ({shape})", flush=True)
    memory = probe.memory_bytes(device)  # before we take some
    rate = probe.compute(config, args.seconds, lambda text: print(f"  {text}", flush=True))
    print(
        f"compute       {_flops(rate.flops)} sustained over {rate.passes} passes, {_flops(rate.slow)} to {_flops(rate.quick)}"
    )
    print(f"memory        {units.size(memory[0])} free on the device, {units.size(memory[1])} in the host")
    print(f"bfloat16      {probe.bf16_words(device)}")
    print(f"threads       {torch.get_num_threads()} of {devices.cores()} cores")
    updates = probe.update_rate(config, device)
    host_updates = updates if kind == "cpu" else probe.update_rate(config, torch.device("cpu"))
    print(
        f"optimizer     {_rate(updates)} on the device"
        + ("" if kind == "cpu" else f", {_rate(host_updates)} on the host")
    )
    link = probe.link_Bps(device)
    what = "host and device" if kind != "cpu" else "memory and memory"
    print(f"host link     {units.size(link)}/s between {what}", flush=True)
    written, read = probe.disk_Bps(folder)
    print(f"disk          {units.size(written)}/s written, {units.size(read)}/s read in {folder}")
    notes = [
        f"Measured by `shoal probe` at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {on}.",
        f"FLOP/s of {shape}: {_flops(rate.slow)} to {_flops(rate.quick)}; disk {units.size(written)}/s written, {units.size(read)}/s read.",
    ]
    if kind == "cpu" and load > 0.5:
        busy = f"load average {load:.1f} before it began: other work ran beside this, so the figures are too low"
        print(f"note          {busy}")
        notes.append(busy)
    measured_device = Device(
        name=args.name or socket.gethostname(),
        flops=rate.flops,
        memory_bytes=memory[0],
        host_memory_bytes=memory[1],
        host_Bps=link,
        disk_Bps=min(written, read),
        update_rate=updates,
        host_update_rate=host_updates,
        cards=config.device.count,
        basis=f"measured: {shape}" + (" on one card" if config.device.count > 1 else ""),
    )
    return measured_device.together(), notes


def _rate(value: float) -> str:
    return f"{value / 1e6:.3g} million parameters/s"


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


# ------------------------------------------------------------------------------------------------------------- links


async def _links(args: argparse.Namespace) -> int:
    from shoal import build, guest
    from shoal.launcher.invite_text import invite_text
    from shoal.runtime.measure import MOST_BYTES, Meter, survey
    from shoal.transport.base import Incoming
    from shoal.transport.identity.invite import read_invite

    most = round(units.parse(args.most, "_bytes"))
    if not 1 <= most <= MOST_BYTES:
        raise ValueError(
            f"--most {args.most!r}: 1 B to {units.size(MOST_BYTES)}, which a peer answers at most; try '16 MB'"
        )
    invite = read_invite(invite_text([args.run]), 0.0)
    settings = [word for word in args.words if "=" in word]
    config = guest.visitor(invite.config, settings)
    async with build.operator(config, invite) as (transport, directory):
        await directory.announce()  # the peers answer over connections of their own
        meter = Meter(transport)

        async def receive() -> None:
            while True:
                incoming = await transport.receive()
                if isinstance(incoming, Incoming):
                    meter.takes(incoming)  # what peers ask a newcomer is nothing to a visitor

        receiving = asyncio.create_task(receive())
        try:
            peers = await _discover(directory, transport.name, args.peers)
            print(escaped(f"{invite.title}: {len(peers)} peers, at most {units.size(most)} a transfer"), flush=True)
            before = time.monotonic()
            results = await survey(meter, peers, most, lambda text: print(escaped(f"  {text}"), flush=True))
        finally:
            receiving.cancel()
    if len(results.peers) < 2:
        raise ValueError(f"{len(results.peers)} of {len(peers)} peers answered; a link needs two")
    out = Path(args.out or "cluster.toml")
    out.write_text(_cluster(results, invite.title), encoding="utf-8")
    print(_summary(results))
    print(f"wrote {out} after {units.duration(time.monotonic() - before)}; next: shoal plan CONFIG --cluster {out}")
    return 0


async def _discover(directory: Directory, me: str, wanted: int | None) -> list[str]:
    """The run's peers, once no more of them turn up."""
    need = wanted or 2
    names = [record.peer for record in await reach.discovered(directory, {me}, LOOK_S, STILL_S, need)]
    if len(names) < need:
        raise ValueError(
            f"{len(names)} of {need} peers found within {LOOK_S:.0f} s; is the run up (shoal status), and does"
            " network.host name an address of this machine that its peers can reach?"
        )
    return names


def _cluster(results: Survey, title: str) -> str:
    devices: list[Device | None] = []
    for peer in results.peers:
        try:
            devices.append(measured.device_from(results.facts[peer]))
        except ValueError as error:  # another machine's file
            print(escaped(f"  {peer}: its device.toml cannot be read: {error}"))
            devices.append(None)
    names = measured.named(devices)
    name_of = dict(zip(results.peers, names, strict=True))
    machines = [
        measured.Machine(name, device, results.up_Bps.get(peer, 0.0), results.down_Bps.get(peer, 0.0))
        for peer, name, device in zip(results.peers, names, devices, strict=True)
    ]
    links = [
        measured.MeasuredLink(name_of[a], name_of[b], link.delay_s, link.bandwidth_Bps, link.reason)
        for (a, b), link in sorted(results.links.items(), key=lambda item: (name_of[item[0][0]], name_of[item[0][1]]))
    ]
    notes = [
        f"Measured between the peers of {escaped(title)} by `shoal probe --run` at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        "A delay is half of the shortest round trip; bandwidths are of both directions of a pair at once; up_Bps and down_Bps",
        "are what a peer sent to all the others, and got from them, at once.",
    ]
    unknown = sum(device is None for device in devices)
    if unknown:
        print(
            f"note          {unknown} machines were not probed; state their flops in the file, or run `shoal probe` there"
        )
    return measured.cluster_text(machines, links, notes)


def _summary(results: Survey) -> str:
    good = [link for link in results.links.values() if not link.reason]
    if not good:
        return "no link could be measured"
    delays, rates = sorted(link.delay_s for link in good), sorted(link.bandwidth_Bps for link in good)
    loaded = sorted(link.loaded_s for link in good)
    return (
        f"delay         {delays[0] * 1e3:.3g} to {delays[-1] * 1e3:.3g} ms one way; while bytes move up to {loaded[-1] * 1e3:.3g} ms\n"
        f"bandwidth     {8e-6 * rates[0]:.4g} to {8e-6 * rates[-1]:.4g} Mbit/s over {len(good)} of {len(results.links)} links"
    )
