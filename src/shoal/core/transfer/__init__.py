"""State transfer: downloading a stage's state, offering it to others, and catching up with commits meanwhile."""
