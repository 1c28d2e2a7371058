"""What `shoal plan` and `shoal run --plan` need beside the planner: a run's problem, a plan's settings, another plan for a run."""
