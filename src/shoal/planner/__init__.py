"""Searches for the fastest way to run a model on given machines. Pure: it reads clusters and measures nothing."""
