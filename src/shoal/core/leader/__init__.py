"""The leader: membership, the start of steps and rounds, commits, overlap, recovery, rebalancing, checkpoints, evictions."""
