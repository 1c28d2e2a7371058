"""What people see of a run: terminal view, plots, the final account. Reads values handed to it, never live objects."""
