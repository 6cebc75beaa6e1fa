"""Messages between a worker and the coordinator, and their form in bytes."""
