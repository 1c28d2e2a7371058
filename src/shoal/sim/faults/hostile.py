"""Which hostile peers a simulation has, what each does and when: drawn here, carried out by strangers.py."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

Role = Literal["outsider", "joiner", "member", "hole", "leader"]

REPEATED = ("fuzz", "coup", "complain", "culprit", "saved")  # acts that need no machine of their own
# Of results: others leave than were made; they are invented, and believed; a sum is not that of its gradients; nothing is computed
MADE_UP = ("noise", "invent", "poison", "lazy")
LONG = "long"  # its part of a sum is too long, for a run that bounds parts
REPORTS = ("waits", "unable", "nonfinite")  # likewise, and count from a member alone
# Of who leads: it never goes on, says different things to different members, evicts whom it likes, books for itself what others computed,
# owns all microbatches itself, commits what nobody reported, goes back to a checkpoint again and again
LEADS = ("stall", "fork", "purge", "pad", "hoard", "forge", "rewind")
MASKED = (
    "mute", "frozen", "books", "gone", "overflow", "sums", "norm", "digest", "withhold", "busy", "soon", "missing",
    "refuse", "keep", "held", "coming", "idle", "far", "loss", "rate", "wrong", LONG, *MADE_UP,
)  # fmt: skip
ROLES: tuple[Role, ...] = ("outsider", "joiner", "member", "member", "hole")  # drawn from
ACTS: dict[Role, tuple[str, ...]] = {
    "outsider": REPEATED,
    "joiner": (*REPEATED, "hollow", "linger", "frozen", "books", "digest", "withhold", "busy"),
    "member": (*REPEATED, *REPORTS, *MASKED),
    "hole": ("in", "out"),
}


class Hostile(msgspec.Struct, frozen=True):
    """One hostile peer: process `key` does `acts` from `at_s` after training has begun. `stops`: not after healing."""

    key: int
    role: Role
    acts: tuple[str, ...]
    at_s: float
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.role} p{self.key}: {'+'.join(self.acts)}"


def draw(count: tuple[int, int], only: tuple[str, ...], peers: int, rng: Random) -> tuple[Hostile, ...]:
    """Hostile peers for a swarm of `peers`; those in the view stay fewer than half of it.

    `only`: what they may do, as role/act; empty: anything."""
    if not count[1]:
        return ()
    drawn: list[Hostile] = []
    allowed = {role: [act for act in acts if not only or f"{role}/{act}" in only] for role, acts in ACTS.items()}
    roles = [role for role in ROLES if allowed[role]]
    stops = rng.random() < 0.4
    honest_keys = list(range(1, peers))
    for number in range(rng.randint(*count)):
        role = rng.choice(roles)
        if role != "outsider" and 2 * sum(1 for one in drawn if one.role != "outsider") + 4 > peers:
            break
        inside = role in ("member", "hole")
        key = honest_keys.pop(rng.randrange(len(honest_keys))) if inside else peers + number
        drawn.append(Hostile(key, role, _acts(role, allowed[role], rng), rng.uniform(0.0, 10.0), stops))
    return tuple(drawn)


def _acts(role: Role, allowed: list[str], rng: Random) -> tuple[str, ...]:
    one_act = role == "hole" or len(allowed) == 1 or rng.random() < 0.6
    return tuple(rng.sample(allowed, 1 if one_act else 2))
