"""How much of something others may use: so much a second, and so much at once. For whoever serves strangers.

A budget per name, and one for all names together, because names (addresses, keys) may be free. Decides only: it is told the
time.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable

import msgspec

NAMES = 4096  # remembered; the one that was asked for longest ago is forgotten, and would begin anew
FIRST = 5  # warnings of one kind that are told in full
SUMMARY_S = 10.0  # then one line for all that came in so many seconds
QUIET_S = 60.0  # without any, and the next ones are told in full again


class Allowance(msgspec.Struct, frozen=True):
    per_s: float
    at_once: float


class Budget:
    """A bucket of `at_once` that fills by `per_s`."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._left = allowance.at_once
        self._now: float | None = None

    def left(self, now: float) -> float:
        if self._now is not None:
            gained = max(0.0, now - self._now) * self._allowance.per_s
            self._left = min(self._allowance.at_once, self._left + gained)
        self._now = now
        return self._left

    def has(self, now: float, amount: float = 1.0) -> bool:
        """What is larger than the whole bucket passes when that is full."""
        return self.left(now) >= min(amount, self._allowance.at_once)

    def take(self, now: float, amount: float = 1.0) -> bool:
        if not self.has(now, amount):
            return False
        self._left -= amount
        return True

    def spend(self, now: float, amount: float) -> None:
        """In any case, on credit."""
        self._left = self.left(now) - amount

    def debt_s(self, now: float) -> float:
        """Seconds until what was spent is there again, 0 when it is."""
        return max(0.0, -self.left(now) / self._allowance.per_s)


class Budgets:
    """One for each name, and one for all of them."""

    def __init__(self, each: Allowance, total: Allowance) -> None:
        self._each = each
        self._total = Budget(total)
        self._names: OrderedDict[Hashable, Budget] = OrderedDict()

    def take(self, name: Hashable, now: float, amount: float = 1.0) -> bool:
        one = self._names.get(name)
        if one is None:
            one = self._names[name] = Budget(self._each)
            if len(self._names) > NAMES:
                self._names.popitem(last=False)
        self._names.move_to_end(name)
        if not one.has(now, amount) or not self._total.take(now, amount):
            return False
        return one.take(now, amount)

    def __len__(self) -> int:
        return len(self._names)


def address_group(address: str) -> str:
    """What one person has of addresses: an IPv4 address, an IPv6 network of 64 bits. Other words stay as they are."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))


class Warnings:
    """Warnings that strangers cause: the first few of a kind in full, then one line every few seconds with their number.
    From any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._kinds: dict[str, list[float]] = {}  # by kind: told in full, kept back, since when, the last one's time

    def warn(self, kind: str, text: str, now: float | None = None) -> None:
        """`kind`: one of a few words of ours, never a stranger's."""
        now = time.monotonic() if now is None else now
        with self._lock:
            state = self._kinds.setdefault(kind, [0, 0, now, now])
            if now - state[3] >= QUIET_S:
                state[0] = 0
            state[3] = now
            if state[0] < FIRST:
                state[0] += 1
                state[2] = now
                line = text
            else:
                state[1] += 1
                if now - state[2] < SUMMARY_S:
                    return
                line = f"{kind}: {state[1]:.0f} more in {now - state[2]:.0f} s; the last: {text}"
                state[1], state[2] = 0, now
        self._log.warning("%s", line)
