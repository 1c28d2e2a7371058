"""Chooses how to run a model on a cluster, and writes it down as a Plan."""
