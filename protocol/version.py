"""The version of the distribution. Coordinator, workers and checkpoints state it."""

__version__ = "0.1.0"
