"""All-reduce within a stage: who owns which chunk, and the exchange of chunks."""
