"""The training data of a run: samples by number, the same on every peer."""
