"""What a family's own model gets: adapters, layers at cuts, other kernels, losses of large vocabularies and experts."""
