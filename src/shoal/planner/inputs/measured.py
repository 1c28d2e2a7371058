"""What `shoal probe` found, as the files that planner/inputs/cluster.py reads: device.toml for a machine, cluster.toml for a run."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

import msgspec

from shoal.escaping import UNDECODABLE, escaped
from shoal.planner.inputs.cluster import Device, device_of

# `shoal probe` writes it; a peer that is started beside it answers `shoal probe --run` with its text
DEVICE_FILE = "device.toml"
_FIELDS = ("memory_bytes", "host_memory_bytes", "host_Bps", "up_Bps", "down_Bps", "disk_Bps")


class MeasuredLink(msgspec.Struct, frozen=True):
    """One direction between two devices, by name. No bandwidth: it could not be measured, for this `reason`."""

    source: str
    target: str
    delay_s: float
    bandwidth_Bps: float
    reason: str = ""


class Machine(msgspec.Struct, frozen=True):
    """One peer: its device, when its machine was probed; what all its links carried at once."""

    name: str
    device: Device | None
    up_Bps: float = 0.0
    down_Bps: float = 0.0


def device_text(device: Device, notes: Sequence[str] = ()) -> str:
    """device.toml."""
    return "\n".join([*(f"# {note}" for note in notes), *_device(device, device.name)]) + "\n"


def device_from(text: str) -> Device | None:
    """The device of a device.toml's text, as another machine sends it. None: it has none. ValueError: it is no such text."""
    if not text.strip():
        return None
    try:
        tables = tomllib.loads(text).get("device")
    except (tomllib.TOMLDecodeError, *UNDECODABLE) as error:
        raise ValueError(f"not TOML: {error}") from None
    if not isinstance(tables, list) or len(tables) != 1:
        raise ValueError("not one [[device]]")
    return device_of(tables[0], "device")


def named(devices: Sequence[Device | None]) -> list[str]:
    """A name for each peer: its machine's, numbered where several peers share one, or peer-N where it is not known."""
    raw = [_plain(device.name) or "peer" if device is not None else "peer" for device in devices]
    counts = dict.fromkeys(raw, 0)
    names = []
    for name in raw:
        names.append(name if raw.count(name) == 1 and name != "peer" else f"{name}-{counts[name]}")
        counts[name] += 1
    return names


def cluster_text(machines: Sequence[Machine], links: Sequence[MeasuredLink], notes: Sequence[str] = ()) -> str:
    """cluster.toml: every link measured, one way each."""
    lines = [f"# {note}" for note in notes]
    lines += [
        "",
        "tcp = true  # real lines: less is expected of them than their rates, as docs/wan.md has measured it",
        "",
        "links = [",
    ]
    for link in links:
        reason = f"  # not measured: {escaped(' '.join(link.reason.split()))}" if link.reason else ""
        lines.append(
            f'  {{ from = "{link.source}", to = "{link.target}", delay_s = "{link.delay_s * 1e3:.4g} ms",'
            f' bandwidth_Bps = "{_rate(link.bandwidth_Bps)}", one_way = true }},{reason}'
        )
    lines.append("]")
    for machine in machines:
        lines.append("")
        if machine.device is None:
            lines += [
                "# That machine was not probed: run `shoal probe` there before its peer starts, or state its speed here.",
                "[[device]]",
                f'name = "{machine.name}"',
                *_lines(machine),
            ]
            continue
        device = msgspec.structs.replace(machine.device, up_Bps=machine.up_Bps, down_Bps=machine.down_Bps)
        lines += _device(device, machine.name)
    return "\n".join(lines) + "\n"


def _device(device: Device, name: str) -> list[str]:
    device = device.one_card()
    lines = ["[[device]]", f'name = "{name}"', f'flops = "{_scaled(device.flops)}FLOP/s"']
    lines += [f"cards = {device.cards}", f"cards_efficiency = {device.cards_efficiency:g}"] if device.cards > 1 else []
    for field in _FIELDS:
        value = getattr(device, field)
        if value:
            lines.append(f'{field} = "{_rate(value) if field.endswith("_Bps") else _scaled(value) + "B"}"')
    lines += [
        f"{field} = {value:.4g}" for field in ("update_rate", "host_update_rate") if (value := getattr(device, field))
    ]
    lines += [f'{field} = "{_plain(text)}"' for field in ("region", "basis") if (text := getattr(device, field))]
    lines += [f"{field} = {value:g}" for field in ("price_per_h", "losses_per_h") if (value := getattr(device, field))]
    return lines


def _lines(machine: Machine) -> list[str]:
    rates = {"up_Bps": machine.up_Bps, "down_Bps": machine.down_Bps}
    return [f'{field} = "{_rate(value)}"' for field, value in rates.items() if value]


def _rate(value_Bps: float) -> str:
    return f"{_scaled(8 * value_Bps)}bit/s"


def _scaled(value: float) -> str:
    """Four digits: "35.21 G"."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.4g} {letter}"
    return f"{value:.4g} "


def _plain(text: str) -> str:
    return "".join(character for character in text if character.isprintable() and character not in '"\\')
