"""Cuts models into stages."""
