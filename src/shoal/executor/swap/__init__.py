"""Runs a stage larger than its device: layers pass through device memory (ATOM)."""
