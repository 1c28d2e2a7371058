"""What evicted peers contributed and no check has passed is undone: by going back to a checkpoint without it."""
