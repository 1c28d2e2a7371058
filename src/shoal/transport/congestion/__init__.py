"""Decides how fast bulk is sent, so that lines are full and their buffers are not: no clock, no socket. For streams."""
