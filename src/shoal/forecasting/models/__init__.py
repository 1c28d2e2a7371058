"""How long a step takes with given machines at given stages: played, or summed."""
