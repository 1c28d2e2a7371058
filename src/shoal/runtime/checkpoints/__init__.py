"""Checkpoints: which there are and what is wrong with each, written stage by stage, read by any cut."""
