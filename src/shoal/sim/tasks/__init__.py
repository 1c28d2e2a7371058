"""A peer's tasks in symbols: what runtime/tasks does with tensors."""
