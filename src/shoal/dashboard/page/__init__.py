"""The run as a page in a browser, and as metrics for Prometheus. Fed with values; serves them read-only."""
