"""Machines that are not like the others, and boundary tensors that hold noise. For task_runner.py and strangers.py."""

from __future__ import annotations

import msgspec

from shoal.sim.tasks.storage import Blob, short


class Oddities(msgspec.Struct):
    """In what a peer's machine is not like the others'."""

    unlike: bool = False  # its optimizer has other bits
    rounding: float = 0.0  # of the norm, by which its results differ
    invents: bool = False  # the results of its hops are invented
    poisons: bool = False  # what it adds to its sum is not what its backwards make; all that it sends is
    overweighs: bool = False  # what it adds to its sum counts LONG_TIMES as much
    idles: bool = False  # its backwards do nothing: they add nothing, send zeros, and have always the same loss

    @property
    def adds(self) -> str:
        """What it adds instead of its gradients; '' if those."""
        return NOTHING if self.idles else LONG if self.overweighs else "poison" if self.poisons else ""


def noisy(blob: Blob, noise: str) -> Blob:
    """The boundary tensor with other values, of the same size."""
    return (*blob[:5], noise)


LONG, LONG_TIMES = "long", 100.0  # noise: what was added, so many times
NOTHING = "nothing"  # noise: zeros
LOSS = 2.5  # of who computes none


def made_of(*inputs: Blob) -> Blob:
    """What is made of noise is noise, the same wherever it is made."""
    noise = [blob[5:] for blob in inputs]
    return (short("made of", noise),) if any(noise) else ()
