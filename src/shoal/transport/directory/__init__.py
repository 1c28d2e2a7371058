"""Where the peers of a run are found: signed records in a plain or distributed directory."""
