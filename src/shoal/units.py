"""Quantities as people write them, read once at the edge: "200 Mbit/s", "80 ms", "24 GiB".

Inside the program a number carries its unit in its name, last: `timeout_s`, `bandwidth_Bps`, `limit_bytes`. `parse`
takes that name's ending and the text; a plain number is taken to be in that unit already.
"""

from __future__ import annotations

import re

_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES: dict[str, float] = {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
_RATE: dict[str, float] = {f"{unit}/s": scale for unit, scale in _BYTES.items()}
_RATE |= {f"{prefix}{bit}": scale / 8 for prefix, scale in _DECIMAL.items() for bit in ("bit/s", "b/s", "bps")}

_UNITS: dict[str, dict[str, float]] = {"_s": _TIME, "_Bps": _RATE, "_bytes": _BYTES}
_EXAMPLES = {"_s": '"80 ms" or "2 min"', "_Bps": '"200 Mbit/s" or "25 MB/s"', "_bytes": '"24 GiB" or "500 MB"'}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d].*?)?\s*")


def suffix(name: str) -> str:
    """The ending of a field's name that says its unit: '_s', '_Bps', '_bytes', or '' when it has none."""
    return next((ending for ending in _UNITS if name.endswith(ending)), "")


def parse(text: str, ending: str) -> float:
    """`text` in the unit of `ending`. ValueError says what would do."""
    units = _UNITS[ending]
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity; try {_EXAMPLES[ending]}")
    number, unit = match.groups()
    if unit is None:
        return float(number)
    if unit not in units:
        raise ValueError(f"{text!r} has a unit that does not fit here; try {_EXAMPLES[ending]}")
    return float(number) * units[unit]


def duration(seconds: float) -> str:
    """Seconds for people: '1 h 02 min', '3 min 05 s', '4.2 s', '80 ms'."""
    if round(seconds, 3) < 1:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    """Bytes for people, in binary units: '24.0 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def exact_size(count: int) -> str:
    """Bytes as `parse` reads them back, in the largest unit that says it exactly: '24 GiB', '1000 B'."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count and count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count} B"
