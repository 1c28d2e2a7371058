"""What a peer writes down: its trace, its reports, and the account of every sample."""
