"""[network]: how this peer reaches the others, and how tensors travel. transport/ and runtime/tasks/coding.py follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from shoal.config import regions
from shoal.config.section import DAY_S, MOST_BYTES, MOST_Bps, Section, without_effect
from shoal.config.sections.data import Data, boundary_rows, token_rows
from shoal.config.sections.device import Device
from shoal.config.sections.model import Model
from shoal.config.sections.train import Train

DelayS = Annotated[float, Meta(ge=0, le=3600)]
RateBps = Annotated[float, Meta(ge=0, le=MOST_Bps)]
LEAST_Bps = 1000.0  # of a modelled line: less is a unit that was forgotten, and a run that seems to hang


class Network(Section, frozen=True):
    """How this peer reaches the others, and how tensors travel."""

    transport: Annotated[
        Literal["tls", "libp2p", "auto"],
        Meta(
            description="Peers are reached this way; libp2p needs no open port, and auto uses it only where tls fails."
        ),
    ] = "tls"
    discovery: Annotated[
        Literal["dht", "gossip"],
        Meta(description="Peers find one another by a Kademlia table over libp2p (dht), or by telling all they know."),
    ] = "dht"
    host: Annotated[
        str,
        Meta(
            description="This peer listens on this address and announces it; auto is 127.0.0.1 in a run of this machine alone, and else"
            " all interfaces."
        ),
    ] = "auto"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="This peer listens on this port, and on the next one or two for its directory and libp2p; 0 is any free port.",
        ),
    ] = 0
    region: Annotated[
        str,
        Meta(
            max_length=regions.MOST_CHARACTERS,
            description="The page's map shows this machine in this cloud region, such as eu-central-1, or at 'NAME LATITUDE,LONGITUDE';"
            " other machines are told.",
        ),
    ] = ""
    delay_s: Annotated[DelayS, Meta(description="The modelled link adds this delay each way to the real one.")] = 0.0
    bandwidth_Bps: Annotated[
        RateBps, Meta(description="The modelled uplink and downlink each carry this much; 0 models neither.")
    ] = 0.0
    up_Bps: Annotated[
        RateBps, Meta(description="The modelled uplink carries this much; 0 is network.bandwidth_Bps.")
    ] = 0.0
    down_Bps: Annotated[
        RateBps, Meta(description="The modelled downlink carries this much; 0 is network.bandwidth_Bps.")
    ] = 0.0
    links: Annotated[
        dict[str, tuple[DelayS, RateBps]],
        Meta(
            description="The modelled link to the peer at each of these hosts has this delay in s and rate in B/s, 0 for any."
        ),
    ] = {}
    max_tensor_bytes: Annotated[
        int, Meta(ge=1, le=MOST_BYTES, description="A larger tensor than this is not accepted from a peer.")
    ] = 1 << 30
    pass_lifetime_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3650 * DAY_S,
            description="Passes of the peers of `shoal run` last this long, and are renewed after half of it.",
        ),
    ] = 2_592_000.0
    fault_injection: Annotated[
        bool, Meta(description="`shoal chaos` may cut and slow this machine's links, for tests.")
    ] = False
    activations: Annotated[
        Literal["none", "bf16", "int8", "int4"],
        Meta(description="Boundary tensors travel in this code; none sends them as they are."),
    ] = "none"
    gradients: Annotated[
        Literal["none", "bf16", "int8"],
        Meta(description="Gradients of boundary tensors travel in this code; none sends them as they are."),
    ] = "none"
    averaging: Annotated[
        Literal["none", "bf16", "int8"],
        Meta(
            description="Replicas average a stage's gradient in this code, with error feedback; none sends it as it is."
        ),
    ] = "none"
    activation_store_bytes: Annotated[
        int,
        Meta(
            ge=1, le=MOST_BYTES, description="A peer keeps this much of a step's boundary tensors, then answers Busy."
        ),
    ] = 1 << 32
    activation_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_BYTES,
            description="This much of network.activation_store_bytes stays in memory and the oldest rest goes to disk;"
            " 0 keeps all in memory.",
        ),
    ] = 1 << 30


def problems(network: Network, model: Model, train: Train, data: Data, device: Device) -> Iterator[str]:
    if wrong := regions.problem(network.region):
        yield f"network.region = {wrong}"
    if network.links and network.transport != "tls":
        yield f"network.links are by host, which network.transport = {network.transport!r} does not know; try network.transport=tls"
    for name in ("bandwidth_Bps", "up_Bps", "down_Bps"):
        if 0 < getattr(network, name) < LEAST_Bps:
            value = f"{getattr(network, name):g}"
            yield f"network.{name} = {value} is {value} bytes per second; write the unit, such as '{value} Mbit/s'"
    if network.up_Bps and network.down_Bps:
        why = "network.up_Bps and network.down_Bps say it for each direction"
        yield from without_effect(network, "network", ["bandwidth_Bps"], why)
    yield from _size_problems(network, model, train, data, device)


def _size_problems(network: Network, model: Model, train: Train, data: Data, device: Device) -> Iterator[str]:
    """A boundary tensor must pass the limit that every peer sets on what it accepts."""
    if device.executor == "emulated":
        need = 4 * device.emulated_values
    else:
        width = 0 if model.path else model.hidden_size * (4 if train.dtype == "float32" else 2)
        rows = max(boundary_rows(data) * width, token_rows(data) * 8)  # 8: tokens travel as int64
        need = train.microbatch * (data.sequence + 1) * rows
    if network.max_tensor_bytes < need:
        yield f"network.max_tensor_bytes = {network.max_tensor_bytes} refuses boundary tensors of {need} bytes; try {need} or more"
