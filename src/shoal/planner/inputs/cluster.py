"""Machines and the links between them, as the planner sees them: typed values, read from TOML files and measured matrices.

Units are spelled out in files ("200 Mbit/s", "80 ms", "24 GB", "35 TFLOP/s") and gone inside. A device's own uplink and
downlink bound what it sends and receives in all; a link bounds one pair in one direction. Zero means unknown for memory
and unlimited for a device's own lines.

    [link]                                 what every pair has unless said otherwise
    delay_s = "20 ms"                      one way
    bandwidth_Bps = "200 Mbit/s"

    [[device]]
    name = "gpu"                           with count = 4: gpu-0 ... gpu-3
    count = 4
    flops = "35 TFLOP/s"                   sustained, in the run's dtype
    memory_bytes = "24 GB"
    cards = 2                              of a peer with device.count = 2; flops and memory_bytes are those of one card
    cards_efficiency = 0.8                 the speed of such a peer over the sum of its cards' (0.8 is assumed)
    up_Bps = "100 Mbit/s"                  optional, as are down_Bps, host_memory_bytes, host_Bps, disk_Bps, price_per_h,
                                           egress_price_per_GB, losses_per_h, region
    update_rate = 2e9                      parameters per second that the optimizer steps on the device; also host_update_rate,
                                           where a stage swaps. Without them its seconds are not counted

    [[links]]                              some pairs, by names of devices or regions; both ways unless one_way = true
    from = "ohio"
    to = "tokyo"
    delay_s = "80 ms"
    bandwidth_Bps = "50 Mbit/s"

Instead of [link], `matrices = "measured.npz"` beside the file (delay_ms, bandwidth_gbps, N x N, row sends to column), or two
CSV files, `matrices = ["delay_ms.csv", "bandwidth_gbps.csv"]`: numbers alone. `devices = ["a/device.toml", ...]` takes in what
`shoal probe` wrote on other machines. [link] may be left out when links name every pair.
With `tcp = true`, as `shoal probe --run` writes it, the lines are real ones, and tcp.py says how much of their rates is expected of them.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import units
from shoal.escaping import UNDECODABLE
from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.tcp import carried_part

NETWORKS = Path(__file__).parent / "networks"  # published measurements and emulated networks; sources inside


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One machine that can serve a stage."""

    name: str
    flops: float  # sustained, per second
    memory_bytes: float = 0.0  # of all its cards
    cards: int = 1  # device.count of its peer
    # Of several: their speed together over the sum; assumed, as no machine with several was measured
    cards_efficiency: float = 0.8
    host_memory_bytes: float = 0.0  # beside it, for swapping
    host_Bps: float = 25e9  # between the two, one way: PCIe 4
    up_Bps: float = 0.0
    down_Bps: float = 0.0
    disk_Bps: float = 0.0  # the slower of writing and reading
    # Parameters that the optimizer steps in a second, on the device and, where a stage swaps, on the host; 0: not known, and not counted
    update_rate: float = 0.0
    host_update_rate: float = 0.0
    price_per_h: float = 0.0
    egress_price_per_GB: float = 0.0  # of what it sends
    losses_per_h: float = 0.0  # how often it is taken away: 0.1 is once in ten hours
    region: str = ""
    basis: str = "stated"  # where its figures are from; `shoal probe` writes that they were measured

    def together(self) -> Device:
        """Of all cards of the peer, where these figures are of one."""
        return self._scaled(self.cards * self.cards_efficiency, self.cards)

    def one_card(self) -> Device:
        """Of one card, where these figures are of all."""
        return self._scaled(1 / (self.cards * self.cards_efficiency), 1 / self.cards)

    def _scaled(self, flops: float, memory: float) -> Device:
        if self.cards == 1:
            return self
        update_rate = self.update_rate * memory  # each card has its part of the stage
        together = {"flops": self.flops * flops, "memory_bytes": self.memory_bytes * memory, "update_rate": update_rate}
        return msgspec.structs.replace(self, **together)


class Cluster(msgspec.Struct, frozen=True, eq=False):
    """Devices, and delay and bandwidth from each (row) to each other (column). The diagonals are never used."""

    devices: tuple[Device, ...]
    delay_s: Floats
    bandwidth_Bps: Floats

    def chosen(self, indices: list[int]) -> Cluster:
        """Only these devices."""
        at = np.ix_(indices, indices)
        return Cluster(tuple(self.devices[i] for i in indices), self.delay_s[at], self.bandwidth_Bps[at])

    def scaled(self, *, flops: float = 1.0, bandwidth: float = 1.0, delay: float = 1.0, memory: float = 1.0) -> Cluster:
        """The same machines, so many times as fast, wide, far and large."""
        devices = tuple(
            msgspec.structs.replace(
                device,
                flops=device.flops * flops,
                memory_bytes=device.memory_bytes * memory,
                up_Bps=device.up_Bps * bandwidth,
                down_Bps=device.down_Bps * bandwidth,
            )
            for device in self.devices
        )
        return Cluster(devices, self.delay_s * delay, self.bandwidth_Bps * bandwidth)

    def over_tcp(self) -> Cluster:
        """The same machines, with as much of their lines as TCP connections in bursts carry (tcp.py)."""
        devices = tuple(
            msgspec.structs.replace(device, up_Bps=device.up_Bps * part, down_Bps=device.down_Bps * part)
            for device, part in zip(self.devices, carried_part(self.delay_s).tolist(), strict=True)
        )
        return Cluster(devices, self.delay_s, self.bandwidth_Bps)

    def with_lines(self, *, bandwidth_Bps: float | None = None, delay_s: float | None = None) -> Cluster:
        """The same machines with every line and link so wide, or so far."""
        devices = self.devices
        if bandwidth_Bps is not None:
            devices = tuple(
                msgspec.structs.replace(device, up_Bps=bandwidth_Bps, down_Bps=bandwidth_Bps) for device in devices
            )
        delay = self.delay_s if delay_s is None else np.full_like(self.delay_s, delay_s)
        bandwidth = self.bandwidth_Bps if bandwidth_Bps is None else np.full_like(self.bandwidth_Bps, bandwidth_Bps)
        return Cluster(devices, delay, bandwidth)

    def of_size(self, count: int) -> Cluster:
        """The first `count` devices, or all and then copies of them in turn; a copy is as far from its model as its
        model's nearest other device."""
        have = len(self.devices)
        source = [i % have for i in range(count)]
        grown = self.chosen(source)
        delay, bandwidth = grown.delay_s, grown.bandwidth_Bps
        if count > have:
            own_delay, own_bandwidth = _nearest(self)
            for i in range(count):
                for j in range(count):
                    if i != j and source[i] == source[j]:
                        delay[i, j], bandwidth[i, j] = own_delay[source[i]], own_bandwidth[source[i]]
        devices = tuple(
            device if i < have else msgspec.structs.replace(device, name=f"{device.name}+{i // have}")
            for i, device in enumerate(grown.devices)
        )
        return Cluster(devices, delay, bandwidth)


def from_matrices(
    devices: tuple[Device, ...], delay_s: Floats, bandwidth_Bps: Floats, where: str = "cluster"
) -> Cluster:
    """Checked: square, one row per device, every pair connected."""
    count = len(devices)
    for name, matrix in (("delay", delay_s), ("bandwidth", bandwidth_Bps)):
        if matrix.shape != (count, count):
            raise ValueError(
                f"{where}: the {name} matrix is {_shape(matrix)}, but there are {count} devices; it must be square"
            )
        wrong = [pair for pair in np.argwhere(~(np.isfinite(matrix) & (matrix >= 0))).tolist() if pair[0] != pair[1]]
        if wrong:
            i, j = wrong[0]
            raise ValueError(
                f"{where}: the {name} from {devices[i].name} to {devices[j].name} is {matrix[i, j]}; it must be a number"
                " from 0 up"
            )
    dead = [(i, j) for i, j in np.argwhere(bandwidth_Bps <= 0).tolist() if i != j]
    if dead:
        raise ValueError(f"{where}: {_unconnected(devices, dead)}")
    names = [device.name for device in devices]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < count else set()
    if twice:
        raise ValueError(f"{where}: two devices are called {min(twice)}; names must differ")
    return Cluster(devices, delay_s, bandwidth_Bps)


def _unconnected(devices: tuple[Device, ...], dead: list[tuple[int, int]]) -> str:
    """Which pairs lack a link: all between two parts of the cluster, or some."""
    i, j = dead[0]
    none = set(dead)
    cut = {frozenset(pair) for pair in dead if pair[::-1] in none}  # neither way
    part, left = {0}, [0]
    while left:
        here = left.pop()
        near = [k for k in range(len(devices)) if k not in part and frozenset((here, k)) not in cut]
        part.update(near)
        left += near
    apart = [device.name for k, device in enumerate(devices) if k not in part]
    if apart:
        text = f"the cluster is disconnected: no link joins {_some([devices[k].name for k in sorted(part)])} with {_some(apart)}"
    else:
        text = f"no bandwidth from {devices[i].name} to {devices[j].name}"
        text += f", nor for {len(dead) - 1} more pairs" if len(dead) > 1 else ""
    return (
        f"{text}; every pair must be connected, a relay's bandwidth would do: [[links]] from = {devices[i].name!r},"
        f' to = {devices[j].name!r}, bandwidth_Bps = "20 Mbit/s", or its place in the matrix'
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(matrix: Floats) -> str:
    return " x ".join(map(str, matrix.shape))


def read_matrices(path: Path) -> tuple[Floats, Floats, tuple[str, ...]]:
    """delay_s, bandwidth_Bps and region of each row, from an .npz with delay_ms and bandwidth_gbps."""
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in NETWORKS.glob("*.npz")))
        raise ValueError(f"{path} is not a file of matrices; name an .npz, or one that comes along: {known}")
    try:
        return _stored(path)
    except (
        OSError,
        EOFError,
        KeyError,
        AttributeError,
        TypeError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        *UNDECODABLE,
    ) as error:
        raise ValueError(f"{path} is no file of matrices: {error}") from None


def _stored(path: Path) -> tuple[Floats, Floats, tuple[str, ...]]:
    with np.load(path) as stored:
        missing = {"delay_ms", "bandwidth_gbps"} - set(stored.files)
        if missing:
            raise ValueError(f"{path} lacks {min(missing)}; it must hold delay_ms and bandwidth_gbps, N x N")
        delay_s = stored["delay_ms"].astype(float) / 1e3
        bandwidth_Bps = stored["bandwidth_gbps"].astype(float) * 1e9 / 8
        regions = tuple(map(str, stored["regions"])) if "regions" in stored.files else ("",) * len(delay_s)
    if delay_s.ndim != 2 or delay_s.shape[0] != delay_s.shape[1] or bandwidth_Bps.shape != delay_s.shape:
        raise ValueError(
            f"{path}: delay_ms is {_shape(delay_s)} and bandwidth_gbps {_shape(bandwidth_Bps)}; both must be N x N, a row and a"
            " column for each device"
        )
    return delay_s, bandwidth_Bps, regions


def network(name: str) -> Path:
    """A matrices file by path, or by the name of one that comes along."""
    packaged = NETWORKS / f"{name}.npz"
    return packaged if packaged.is_file() else Path(name)


# ------------------------------------------------------------------------------------------------------------- files


def read(path: str | Path) -> Cluster:
    """A cluster file. Every complaint says where, what was found and what would do."""
    path = Path(path)
    if path.suffix == ".npz" or (not path.suffix and network(str(path)).is_file()):
        raise ValueError(
            f"{path}: matrices say nothing of devices; name them in a TOML file with matrices = {str(path)!r}"
        )
    tree = _toml(path)
    try:
        return from_tree(tree, path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, *UNDECODABLE) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def from_tree(tree: Mapping[str, Any], folder: Path = Path()) -> Cluster:
    _refuse_unknown(tree, {"device", "devices", "link", "links", "matrices", "tcp"}, "the file")
    tables = tree.get("device", []) if isinstance(tree.get("device", []), list) else []
    devices = tuple(device for i, table in enumerate(tables) for device in _devices(table, f"device {i + 1}"))
    devices += tuple(_elsewhere(folder / str(name)) for name in tree.get("devices", []))
    if not devices:
        raise ValueError("no [[device]]; write one for each machine, or one with count for several alike")
    count = len(devices)
    if "matrices" in tree:
        if "link" in tree:
            raise ValueError("both matrices and [link]; the matrices already say what every pair has")
        delay_s, bandwidth_Bps, regions = _matrices(tree["matrices"], folder)
        if len(regions) == count:
            devices = tuple(
                msgspec.structs.replace(device, region=device.region or region)
                for device, region in zip(devices, regions, strict=True)
            )
    else:
        delay_s, bandwidth_Bps = _alike(tree, count)
    for i, table in enumerate(tree.get("links", [])):
        _apply_link(table, f"links {i + 1}", devices, delay_s, bandwidth_Bps)
    cluster = from_matrices(devices, delay_s, bandwidth_Bps, "matrices" if "matrices" in tree else "link")
    if not isinstance(tree.get("tcp", False), bool):
        raise ValueError(f"tcp = {tree['tcp']!r} must be true, where the lines are real ones, or false")
    return cluster.over_tcp() if tree.get("tcp") else cluster


def _alike(tree: Mapping[str, Any], count: int) -> tuple[Floats, Floats]:
    """Delays and bandwidths where [link] says what every pair has."""
    link = _table(tree.get("link", {}), {"delay_s": float, "bandwidth_Bps": float}, "link")
    if "bandwidth_Bps" not in link and count > 1 and ("link" in tree or "links" not in tree):
        raise ValueError('[link] lacks bandwidth_Bps; say what a pair has, such as bandwidth_Bps = "200 Mbit/s"')
    if link.get("bandwidth_Bps") == 0:
        raise ValueError(
            'link.bandwidth_Bps = 0: nothing would ever arrive; it must be above 0, such as "200 Mbit/s", or [link] be left'
            " out where links name every pair"
        )
    delay_s = np.full((count, count), link.get("delay_s", 0.0))
    return delay_s, np.full((count, count), link.get("bandwidth_Bps", 0.0))  # 0: links must name the pair


def device_of(table: object, where: str) -> Device:
    """One machine's table, as in device.toml."""
    devices = _devices(table, where)
    if len(devices) != 1:
        raise ValueError(f"{where}.count = {len(devices)}; one machine is one device")
    return devices[0]


def _elsewhere(path: Path) -> Device:
    tables = _toml(path).get("device")
    if not isinstance(tables, list) or len(tables) != 1:
        raise ValueError(f"{path} must hold one [[device]], as `shoal probe` writes it")
    return device_of(tables[0], str(path))


def _matrices(named: object, folder: Path) -> tuple[Floats, Floats, tuple[str, ...]]:
    if isinstance(named, list):
        if len(named) != 2:
            raise ValueError(f"matrices = {named}; two CSV files: delays in ms, then bandwidths in Gbit/s")
        delay_ms, bandwidth_gbps = (_csv(folder / str(name)) for name in named)
        if delay_ms.shape != bandwidth_gbps.shape or len(delay_ms) != delay_ms.shape[1]:
            raise ValueError(
                f"{named[0]} is {_shape(delay_ms)} and {named[1]} {_shape(bandwidth_gbps)}; both must be N x N, a row and a column"
                " for each device"
            )
        return delay_ms / 1e3, bandwidth_gbps * 1e9 / 8, ()
    name = str(named)
    return read_matrices(network(name) if network(name).is_file() else folder / name)


def _csv(path: Path) -> Floats:
    try:
        matrix = np.loadtxt(path, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} is no matrix of numbers: {error}") from None
    return np.asarray(matrix, dtype=np.float64)


def _devices(table: object, where: str) -> list[Device]:
    kinds = {field.name: field.type for field in msgspec.structs.fields(Device)} | {"count": int}
    values = _table(table, kinds, where)
    for needed in ("name", "flops"):
        if needed not in values:
            raise ValueError(f'{where} lacks {needed}; such as name = "gpu" and flops = "35 TFLOP/s"')
    count = values.pop("count", 1)
    if count < 1:
        raise ValueError(f"{where}.count = {count} is no number of machines; try 1")
    if values["flops"] <= 0:
        raise ValueError(f"{where}.flops = {values['flops']} must be above 0")
    device = Device(**values)
    if device.cards < 1 or not 0 < device.cards_efficiency <= 1:
        raise ValueError(
            f"{where}: cards = {device.cards} must be 1 or more, cards_efficiency = {device.cards_efficiency} above 0 and at most 1"
        )
    device = device.together()
    return (
        [device] if count == 1 else [msgspec.structs.replace(device, name=f"{device.name}-{k}") for k in range(count)]
    )


def _apply_link(table: object, where: str, devices: tuple[Device, ...], delay_s: Floats, bandwidth_Bps: Floats) -> None:
    kinds = {"from": str, "to": str, "delay_s": float, "bandwidth_Bps": float, "one_way": bool}
    values = _table(table, kinds, where)
    ends = []
    for end in ("from", "to"):
        if end not in values:
            raise ValueError(f"{where} lacks {end!r}; name a device or a region")
        at = [i for i, device in enumerate(devices) if values[end] in (device.name, device.region)]
        if not at:
            names = {device.name for device in devices} | {device.region for device in devices if device.region}
            raise ValueError(f"{where}.{end} = {values[end]!r} is no device or region{_near(values[end], names)}")
        ends.append(at)
    pairs = [(i, j) for i in ends[0] for j in ends[1] if i != j]
    pairs += [] if values.get("one_way") else [(j, i) for i, j in pairs]
    for i, j in pairs:
        delay_s[i, j] = values.get("delay_s", delay_s[i, j])
        bandwidth_Bps[i, j] = values.get("bandwidth_Bps", bandwidth_Bps[i, j])


_FLOPS = re.compile(r"\s*([\d._]+(?:[eE][+-]?\d+)?)\s*([kMGTP]?)FLOP/?s\s*", re.IGNORECASE)
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def flops(text: str) -> float:
    """ "35 TFLOP/s" as a number."""
    match = _FLOPS.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a speed; try "35 TFLOP/s"')
    return float(match[1]) * _SCALE[match[2].upper()]


def _table(table: object, kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table's values, each of its kind, in the unit of its name."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} = {table!r} is a value; it must be a table")
    _refuse_unknown(table, set(kinds), where)
    return {key: _value(kinds[key], key, value, f"{where}.{key}") for key, value in table.items()}


def _value(kind: Any, key: str, value: Any, where: str) -> Any:
    if isinstance(value, str) and kind is not str and kind != "str":
        try:
            value = (
                flops(value)
                if key == "flops"
                else units.parse(value, units.suffix(key))
                if units.suffix(key)
                else value
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    elif key == "flops" or units.suffix(key):
        if value != 0:
            raise ValueError(
                f'{where} = {value!r} has no unit; write it as text, such as "{_EXAMPLE.get(key[-4:], "24 GB")}"'
            )
    try:
        value = msgspec.convert(value, {"float": float, "str": str}.get(kind, kind) if isinstance(kind, str) else kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where} = {value!r}: {error}") from None
    if isinstance(value, float) and (not math.isfinite(value) or value < 0):
        raise ValueError(f"{where} = {value} must be a number from 0 up")
    return value


_EXAMPLE = {"lops": "35 TFLOP/s", "ay_s": "20 ms", "_Bps": "200 Mbit/s"}


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: {key} is not known{_near(key, known)}")


def _near(word: str, known: set[str]) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; try {', '.join(sorted(known))}"


def _nearest(cluster: Cluster) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Per device the delay and bandwidth of its best link; of the line itself when it is alone."""
    count = len(cluster.devices)
    if count == 1:
        return cluster.delay_s.diagonal().copy(), cluster.bandwidth_Bps.diagonal().copy()
    far = cluster.delay_s + np.diag(np.full(count, np.inf))
    narrow = np.where(np.eye(count, dtype=bool), 0.0, cluster.bandwidth_Bps)
    return far.min(axis=1), narrow.max(axis=1)
