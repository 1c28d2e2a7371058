"""What goes wrong in a simulated swarm: churn, failures at the worst moment, hostile peers."""
