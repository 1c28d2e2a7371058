"""Decides: pure state machines, handed events and the time, returning commands. Imports values only."""
