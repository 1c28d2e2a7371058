"""`shoal doctor`: is this machine fit to take part? finding.py: one line; machine.py: this machine; run.py: its way to a run's peers."""
