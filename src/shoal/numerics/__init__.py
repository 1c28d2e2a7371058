"""Numerics: plain torch functions."""
