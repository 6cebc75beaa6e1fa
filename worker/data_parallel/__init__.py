"""Several devices in one process: replicas of a module, which follow it and share each batch."""
