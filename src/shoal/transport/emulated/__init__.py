"""Networks for tests: in memory, with a modelled line, with links cut on purpose."""
