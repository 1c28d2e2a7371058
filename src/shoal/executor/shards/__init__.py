"""One stage over several devices of a machine: sharded.py leads, group.py has the other processes, which run follower.py; member.py is
what each of them does."""
