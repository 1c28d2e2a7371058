"""Bytes that the machines of a forecast send, by kind: microbatches, averaging, and the state that newcomers download.

Not in it: what deaths make peers send again, and control messages.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shoal.core.messages import Stage
from shoal.forecasting.job import Job
from shoal.forecasting.models.step_time import Composition
from shoal.planner.costs.arrays import Floats
from shoal.planner.prediction.seats import handed_bytes, request_bytes


class Egress:
    """`nbytes` is by kind of machine."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kind_of = np.array(job.machines.kind_of)
        self._rate = 1.0 / job.hop_s
        self._handed, self._asked = np.array(handed_bytes(job.seats)[0]), np.array(request_bytes(job.seats))
        self._averaged = np.array(job.seats.gradient_bytes)
        self.nbytes = np.zeros(len(job.machines.kinds))

    def microbatches(self, serving: Composition, passed: float) -> None:
        """That share of a step's."""
        slots, at = _serving(serving)
        if passed and len(slots):
            self._add(slots, passed * self._handed_on(slots, at))

    def averaging(self, serving: Composition, joining: Iterable[Stage]) -> None:
        """One round, at even shares. Chunk owners send sums to those who join their stage, too."""
        slots, at = _serving(serving)
        self._add(slots, self._exchanged(at, np.array(list(joining), dtype=int)))

    def of_step(self, serving: Composition) -> Floats:
        """What is sent by slot, with nobody joining."""
        nbytes, (slots, at) = np.zeros(len(serving)), _serving(serving)
        if len(slots):
            nbytes[slots] = self._handed_on(slots, at) + self._exchanged(at, np.array([], dtype=int))
        return nbytes

    def _handed_on(self, slots: Composition, at: Composition) -> Floats:
        """Replicas pass as many microbatches as their rates say; owners own as many, and serve some of theirs themselves."""
        job, rates = self._job, self._rate[self._kind_of[slots], at]
        served = rates / np.bincount(at, rates, minlength=job.stages)[at]
        sent = served * self._handed[at]
        if job.stages > 1:  # else every owner serves itself
            sent += (self._asked.sum() - self._asked[at] * served) / len(slots)
        return np.asarray(job.microbatches * sent)

    def _exchanged(self, at: Composition, joining: Composition) -> Floats:
        stages = self._job.stages
        counts = np.maximum(np.bincount(at, minlength=stages), 1)
        joiners = np.bincount(joining, minlength=stages)
        return np.asarray((self._averaged * (2 * (1 - 1 / counts) + joiners / counts))[at])

    def download(self, donors: Iterable[int], nbytes: float) -> None:
        """From slots that share it evenly."""
        slots = np.array(list(donors), dtype=int)
        if len(slots):
            self._add(slots, np.full(len(slots), nbytes / len(slots)))

    def _add(self, slots: Composition, nbytes: Floats) -> None:
        self.nbytes += np.bincount(self._kind_of[slots], nbytes, minlength=len(self.nbytes))


def _serving(serving: Composition) -> tuple[Composition, Composition]:
    """Slots, and the stage of each."""
    slots = np.flatnonzero(serving >= 0)
    return slots, serving[slots]
