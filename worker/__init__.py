"""The worker's side: the client, its PyTorch integration, and data sharding."""

__version__ = "0.1.0"
