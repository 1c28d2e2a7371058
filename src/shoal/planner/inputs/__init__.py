"""What the planner reads: machines and links, what a model asks of them, measurements, memory."""
