"""Does what core decides: the driver of one peer, its tensors, data, checkpoints and records."""
