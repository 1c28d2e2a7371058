"""Shoal trains large models on machines nobody would choose for it."""
