"""Scenarios: what is simulated, the built-in ones, and the case that a seed draws."""
