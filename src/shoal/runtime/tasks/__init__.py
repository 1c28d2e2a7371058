"""Carries out core's tasks with real tensors."""
