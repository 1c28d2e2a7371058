"""The messages that carry a round's chunks, and the one that asks for them. For rounds.py."""

from __future__ import annotations

from shoal.core.messages import GatherChunk, ReduceChunk, Resend, Round


def part_of(of: Round, chunk: int, again: bool = False) -> ReduceChunk:
    return ReduceChunk(of.epoch, of.step, of.round, chunk, again)


def sum_of(of: Round, chunk: int, first: bool, again: bool = False) -> GatherChunk:
    return GatherChunk(of.epoch, of.step, of.round, chunk, first=first, again=again)


def sum_for_joiner(of: Round, chunk: int, urgent: bool) -> GatherChunk:
    return GatherChunk(of.epoch, of.step, of.round, chunk, to_joiner=True, urgent=urgent)


def resend_of(of: Round, chunk: int, sum: bool, vain: bool) -> Resend:
    return Resend(of.epoch, of.step, of.round, chunk, sum, vain)
