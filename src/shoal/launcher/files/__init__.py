"""What a run has on disk, and how its launcher keeps it."""
