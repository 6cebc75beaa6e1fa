"""What a worker and the coordinator say to each other, and how it is written down in bytes."""
