"""What a worker and the coordinator say to each other, and how it is written down in bytes."""

__version__ = "0.1.0"
