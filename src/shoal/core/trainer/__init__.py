"""The trainer: drives the microbatches that a peer owns through the stages."""
