"""Predicts the time of a step by playing it, and plans which replica serves which microbatch."""
