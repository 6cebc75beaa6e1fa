"""The version of the distribution, of which coordinator, workers and checkpoints speak."""

__version__ = "0.1.0"
