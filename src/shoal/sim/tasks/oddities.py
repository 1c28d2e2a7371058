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
    idles: bool = False  # its backwards do nothing: they add nothing, send zeros, and have always the same loss


def noisy(blob: Blob, noise: str) -> Blob:
    """The boundary tensor with other values, of the same size."""
    return (*blob[:5], noise)


NOTHING = "nothing"  # noise: zeros
LOSS = 2.5  # of who computes none


def made_of(*inputs: Blob) -> Blob:
    """What is made of noise is noise, the same wherever it is made."""
    noise = [blob[5:] for blob in inputs]
    return (short("made of", noise),) if any(noise) else ()
