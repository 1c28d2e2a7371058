"""Texts through the stages of a swarm: the replica's part (server.py) and the client's (client.py)."""
