"""What `shoal chaos` does to a run, to whom and when."""
