"""Pretends: whole swarms of machines on virtual seconds, faults drawn from a seed, checkers that watch from outside."""
