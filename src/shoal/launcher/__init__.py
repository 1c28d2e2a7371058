"""Local peers as processes: launched, watched, disturbed on purpose, and a run's directory."""
