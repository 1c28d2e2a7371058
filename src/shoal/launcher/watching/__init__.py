"""What the reports of peers add up to."""
