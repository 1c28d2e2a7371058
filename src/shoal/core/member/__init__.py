"""This peer as a member: how it enters the run, reports to the leader or leads itself, keeps others up to date, and ends."""
