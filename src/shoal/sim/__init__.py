"""Pretends: whole swarms of machines on virtual seconds, with faults drawn from a seed and checkers that watch from outside."""
