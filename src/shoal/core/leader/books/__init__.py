"""When a step's books do not grow: stalls.py waits long for anybody, jams.py acts soon where several say for whom they wait."""
