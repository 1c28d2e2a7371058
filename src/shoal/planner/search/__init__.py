"""Searches for a placement of stages on devices, ours and the published ones."""
